"""The draft that a run starts with: a new one, or that of --init-from, which brings its shape."""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from spec_data.models.families import block_count
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import UNKNOWN, Positions, load_positions
from spec_data.shards.resumable import differing_settings, read_record
from spec_data.terminal.config import options_text, to_dict
from spec_data.terminal.given import decided
from spec_train.data.mixture import Documents, parts_of
from spec_train.data.order import SPLIT_BY_TOKENS, SPLIT_RULE
from spec_train.data.splits import HeldOut
from spec_train.drafts import Draft, DraftConfig, load_draft
from spec_train.drafts.kinds import kind_of_options
from spec_train.formats.kind_files import every_kind
from spec_train.formats.target_facts import dataset_target
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import VOCABULARY_CHOICES, DraftOptions
from spec_train.options.training import Training
from spec_train.training.run_directory import RUN, chosen_draft_dir

log = logging.getLogger(__name__)

_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE = (
    *_SIZES,
    *("num_layers", "layers", "hidden_act", "qk_norm"),
    *("sliding_window", "layer_types", "sliding_window_non_causal", "train_embeddings"),
    "attention_sink_bias",
    *("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"),
    *("block_size", "layout", "mask_token_id", "markov_rank", "markov_head_type"),
    *("confidence_head_with_markov", "draft_vocab_size"),
)
"""Options that decide a draft's shape. Biases are not here: "auto" keeps those of the draft."""


def _shape_of(options: DraftOptions) -> set[str]:
    """Return the options that decide a draft's shape: also the fields of its own configuration."""
    config = kind_of_options(options).draft_class().config_class
    own = {field.name for field in dataclasses.fields(config)}
    own |= {key for one in every_kind().values() for key in one.keys}
    return set(_SHAPE) | own - {field.name for field in dataclasses.fields(DraftConfig)}


def load_start(
    kind: type[Draft], config: Training, dataset: Documents
) -> tuple[Draft, HeldOut | None]:
    """Read the draft of --init-from; return it, and what its run held out.

    All other documents may have trained the draft. None: it is of no run, or of one that splits
    otherwise; a warning where this data trained it.

    Raises:
        MissingError, DraftError: it cannot be read, or is of another kind.
    """
    folder = chosen_draft_dir(str(config.init_from))
    facts = dataset_target(parts_of(dataset)[0])
    start = load_draft(folder, facts, accept_edited=config.accept_edited)
    if start.name != kind.name:
        raise DraftError(
            f"--init-from {folder}: holds a draft of the kind {start.name}; fit it with "
            f"`spec-train fit {start.name}`"
        )
    identity = (read_record(folder.parent / RUN) or {}).get("identity", {})
    known = identity.get("split_rule") in (SPLIT_RULE, SPLIT_BY_TOKENS)
    if known and identity.get("split_seed") == config.split_seed:
        return start, HeldOut.of(identity)
    manifests = [part.manifest for part in parts_of(dataset)]
    own = {m.fingerprint for m in manifests}.union(*(m.ancestors() for m in manifests))
    if (start.config.origin or {}).get("dataset_fingerprint") in own:
        log.warning(
            "warning[init-from]: the draft was trained on this data, and which documents it held "
            "out is not known, or by another split: it may know what is measured, and lengths are "
            "too good. Name the run itself, with its split_seed"
        )
    return start, None


def with_shape(
    options: DraftOptions, start: Draft | None = None, started: dict[str, Any] | None = None
) -> DraftOptions:
    """Return the options of a draft with the shape of `start`, the draft of --init-from.

    What was given stays; `new_draft` refuses it where it contradicts that draft. A run that resumes
    (`started` is its identity) has the shape that it began with.
    """
    shape: dict[str, Any] = {}
    names = _shape_of(options)
    if start is not None:
        shape = to_dict(start.options) | {key: getattr(start.config, key) for key in _SIZES}
        if not start.full_vocabulary:  # its size may have been chosen by coverage or by a file
            shape["draft_vocab_size"] = start.config.draft_vocab_size
        if start.config.layers:
            shape["layers"] = ",".join(map(str, start.config.layers))
    elif started is not None and started.get("init_from") is not None:
        shape = started
    if shape.get("confidence_weight") == 0:  # the draft has no such head; else it is only a weight
        names.add("confidence_weight")
    if _vocabulary_options(options):
        names.discard("draft_vocab_size")
    return decided(options, **{n: v for n, v in shape.items() if n in names and v is not None})


def with_sizes(options: DraftOptions, dataset: Documents) -> DraftOptions:
    """Return the options of a draft with the sizes that follow from the target's."""
    blocks = block_count(dataset.target_config()) or 0
    return options.sized(dataset.manifest.hidden_size, blocks)


def recorded_positions(dataset: Documents) -> Positions:
    """Return the positions of the target that the first dataset records which has some."""
    recorded = [load_positions(part) for part in parts_of(dataset)]
    return next((p for p in recorded if p.kind != UNKNOWN), recorded[0])


def _vocabulary_options(options: DraftOptions) -> list[str]:
    """Return the names of the options by which the user chose the tokens of the vocabulary."""
    return [n for n in VOCABULARY_CHOICES if getattr(options, n, None) is not None]


def new_draft(
    kind: type[Draft],
    config: Training,
    options: DraftOptions,
    dataset: Documents,
    head: TargetHead,
    counts: Tensor,
    start: Draft | None,
) -> Draft:
    """Return a draft that `config.seed` initialises, or `start`, connected to the target.

    `counts` are the supervised tokens of the training documents, int64 [V].

    Raises:
        DraftError: `start` is of another shape or target, or has another vocabulary than options
            ask for.
    """
    torch.manual_seed(config.seed)
    fresh = kind.build(
        options,
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
        target_dir=dataset.target_dir,
        positions=recorded_positions(dataset),
    )
    if start is None:
        fresh.adopt_target(parts_of(dataset)[0])
        return fresh
    where = f"--init-from {config.init_from}"
    start.update_config(**_unlearned(start.config, fresh.config))
    ignored: dict[str, Any] = {"dtype": "", "origin": {}}  # of the file; `join` checks the target
    ignored |= dict.fromkeys(type(start.config).of_files)
    # "auto" follows the target in a new draft; a draft that exists keeps the biases that it has
    ignored |= dict.fromkeys(options.biases_of_target, "")
    old, new = to_dict(start.config), to_dict(fresh.config)
    if differing := differing_settings(old | ignored, new | ignored):
        given = {n: v for n, v in options.given_values().items() if n in _shape_of(options)}
        out = f"Leave {options_text(given)} out" if given else "Use the options of that draft"
        raise DraftError(
            f"{where}: the draft has another shape or target than this run:\n  "
            + "\n  ".join(differing)
            + f"\n{out}, or leave --init-from out"
        )
    for warning in start.join(head, dataset.manifest, where, moves=True):
        log.warning("warning[init-from]: %s", warning)
    asked = _vocabulary_options(options)
    if asked and not torch.equal(start.draft_ids.cpu(), fresh.draft_ids.cpu()):
        raise DraftError(
            f"{where}: the draft has a vocabulary of its own, with other tokens than "
            f"--{asked[0].replace('_', '-')} chooses; leave that out"
        )
    start.use_options(options)
    return start


def _unlearned(loaded: Any, fresh: Any) -> dict[str, Any]:
    """Return fields that do not affect the draft's output and that published files may lack."""
    fields = {"token_ids": fresh.token_ids}
    if loaded.rope_parameters["rope_type"] in ("default", "linear", "llama3"):
        fields["max_position_embeddings"] = fresh.max_position_embeddings
    if not loaded.positions and set(fresh.positions) <= {"factors"}:
        fields["positions"] = fresh.positions  # other tools do not record the factors of longrope
    return fields
