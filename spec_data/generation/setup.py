"""Resolve the options to a `Setup`. No weights are loaded.

`set_up` identifies target and tokenizer. `settings`
is the table of everything that decides the bytes of the dataset: two runs with equal tables may
share a directory; otherwise every field that differs is named in the error.
"""

import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import spec_data
from spec_data.capture.vllm_engine import vllm_version
from spec_data.corpus.record_reader import CorpusReader, SourceReport
from spec_data.corpus.sampling_record import read_record
from spec_data.corpus.sources import Source, corpus_directory, resolve
from spec_data.corpus.template import Template
from spec_data.generation.plan import (
    AUTO,
    BATCH_TOKENS,
    Plan,
    RowSettings,
    cut_into_units,
    end_token_ids,
    find_plan,
    render_corpus,
    unit_tokens,
)
from spec_data.models.devices import check_devices, device_type
from spec_data.models.identify import identify, target_table, tokenizer_table
from spec_data.models.quantisation import check_quantisation
from spec_data.models.reading import load_config, load_tokenizer, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.rope_factors import check_choice
from spec_data.options.generate_options import GenerateConfig
from spec_data.options.option_values import parse_size
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import sha256_file
from spec_data.shards.layer_ids import choose_layers
from spec_data.shards.reader import MANIFEST
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import FORMAT_VERSION, Column, token_columns
from spec_data.terminal.paths import check_directory_to_write
from spec_data.terminal.progress import progress

# -- recorded sampling -----------------------------------------------------------------------------
# What the sampling record of a corpus means for `generate --on-policy`.
#
# A corpus that `regenerate` wrote says which model sampled its answers, and how
# (`corpus/sampling_record.py`). `--on-policy` is checked against it before the corpus is read, and
# takes its temperature from it. The measurement of every token follows all the same.


logger = logging.getLogger(__name__)

_FACTS = {  # of the identity of a target, by where a record has them
    "weights": (("target", "weights_hash"), "weights_hash"),
    "tokenizer": (("tokenizer", "hash"), "tokenizer_hash"),
    "chat template": (("tokenizer", "chat_template_hash"), "chat_template_hash"),
    "chat template kwargs": (("tokenizer", "chat_template_kwargs"), "chat_template_kwargs"),
}


def with_recorded_sampling(config: GenerateConfig, identity: Mapping[str, Any]) -> GenerateConfig:
    """Return the config with the --sampling-temperature that the records of its corpora have.

    Without --on-policy nothing is changed; a corpus that could have it is named.

    Args:
        config: the options of `generate`.
        identity: the target's, as `identify` makes it; facts that are None are not compared.

    Raises:
        ConfigError: --on-policy, and a record has another target, template or temperature.
        CorpusError: a record is damaged.
    """
    records = _records(config.corpus)
    if not records:
        return config
    if not config.on_policy:
        _name_the_flag(records, identity)
        return config
    for corpus, record in records.items():
        _check(corpus, record, identity, config)
    if config.sampling_temperature is None and len(records) == len(config.corpus):
        found = {float(r["settings"]["temperature"]) for r in records.values()}
        if len(found) == 1:
            logger.info("--sampling-temperature %g, from the records of the corpus", min(found))
            return replace(config, sampling_temperature=min(found))
    return config


def _records(corpora: Iterable[str]) -> dict[Path, dict[str, Any]]:
    """Return the sampling records of the corpora that are files and have one."""
    found = {}
    for name in corpora:
        path = Path(name)
        record = read_record(path) if path.is_file() else None
        if record is not None:
            found[path] = record
    return found


def _name_the_flag(records: Mapping[Path, Mapping[str, Any]], identity: Mapping[str, Any]) -> None:
    for corpus, record in records.items():
        if not _differing(record, identity):
            logger.info(
                "%s: this target wrote its answers (%s.sampling); --on-policy states and measures "
                "it",
                *(corpus, corpus.name),
            )


def _differing(record: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return, in words, the facts of the target that differ from a record, where both have them."""
    lines = []
    for words, ((table, name), fact) in _FACTS.items():
        recorded = (record["settings"].get(table) or {}).get(name)
        found = identity.get(fact)
        if recorded is not None and found is not None and recorded != found:
            lines.append(f"{words}: {recorded} there, {found} here")
    return lines


def _check(
    corpus: Path, record: Mapping[str, Any], identity: Mapping[str, Any], config: GenerateConfig
) -> None:
    """Refuse --on-policy where a record contradicts it; warn if the corpus was changed since."""
    lines = _differing(record, identity)
    if lines:
        raise ConfigError(
            f"--on-policy: {corpus} was not written by this target with this template "
            f"({corpus.name}.sampling):\n  " + "\n  ".join(lines) + "\nPass the target, and the "
            "--chat-template-kwargs, that `spec-data regenerate` had, or leave --on-policy out"
        )
    temperature, stated = record["settings"]["temperature"], config.sampling_temperature
    if stated is not None and stated != temperature:
        raise ConfigError(
            f"--sampling-temperature {stated:g}: the answers of {corpus} were sampled at "
            f"{temperature:g} ({corpus.name}.sampling); leave the option out"
        )
    if sha256_file(corpus) != record["sha256"]:
        logger.warning(
            "warning: %s was changed after `regenerate` wrote it; its sampling record may not hold "
            "for every answer",
            corpus,
        )


# -- setup -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredStates:
    """What stands for corpus and target where another tool stored the states (`convert`).

    Attributes:
        find: returns the stored samples as sources of a corpus, as `corpus.sources.resolve` does.
        load: returns the backend that reads their states, of a setup and a plan.
        settings: how they are read.
    """

    find: Callable[..., list[Source]]
    load: Callable[..., Any]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The target and tokenizer on disk, and the columns of the dataset.

    Attributes:
        config: the options, with --max-length limited to the context of the target.
        target, tokenizer_id: the manifest's `target` and `tokenizer`.
        identity: the manifest's `identity`, without what is known after rendering and loading.
        layers: layer ids, ascending.
        draft_layers: those that each draft of --for reads.
        stored: the states that are read instead of captured; None: none.
    """

    config: GenerateConfig
    model_dir: Path
    model_config: Any
    tokenizer: PreTrainedTokenizerBase
    target: dict[str, Any]
    tokenizer_id: dict[str, Any]
    identity: dict[str, Any]
    layers: tuple[int, ...]
    draft_layers: dict[str, tuple[int, ...]]
    columns: tuple[Column, ...]
    vocab_size: int
    stored: StoredStates | None = None

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of a stored token."""
        return sum(c.bytes_per_token for c in self.columns)

    def columns_for(self, layers: Sequence[int]) -> tuple[Column, ...]:
        """Return the columns of a capture of other layers with the same options."""
        return _columns(self.config, layers, self.target["hidden_size"], self.vocab_size)


def set_up(config: GenerateConfig, weights: bool = True) -> Setup:
    """Resolve a target and tokenizer without loading any weights.

    Without `weights` (for `estimate`) they need not be there: they are neither downloaded nor
    hashed, and nothing can be captured with the result.

    Raises:
        ConfigError: --out cannot be written or lies in the corpus, or --supervision asks for more
            logits than the vocabulary has.
        MissingError, TargetError: the model does not exist, or does not have these layers.
    """
    _check_out(config)
    if config.backend == "vllm" and weights:
        vllm_version()  # it is missing: say so before anything is read
    model_dir, commit = resolve_model(config.target, config.revision, weights)
    model_config = load_config(model_dir, config.trust_remote_code)
    if weights:
        check_quantisation(config.target, model_config)  # before the corpus is read
    blocks = text_config(model_config).num_hidden_layers
    layers, draft_layers = choose_layers(config.layers, config.drafts, blocks)
    tokenizer = load_tokenizer(model_dir, config.trust_remote_code)
    identity = identify(
        model_dir,
        config=model_config,
        tokenizer=tokenizer,
        template_kwargs=config.template_kwargs,
        weights=weights,
    )
    target = target_table(config.target, model_dir, commit, model_config, identity)
    vocab_size = text_config(model_config).vocab_size
    _check_supervision(config.supervision, vocab_size)
    check_choice(config.rope_factors, model_config)
    config = with_recorded_sampling(within_context(config, model_config), identity)
    columns = _columns(config, layers, target["hidden_size"], vocab_size)
    return Setup(
        config=config,
        model_dir=model_dir,
        model_config=model_config,
        tokenizer=tokenizer,
        target=target,
        tokenizer_id=tokenizer_table(tokenizer, identity),
        identity=identity,
        layers=layers,
        draft_layers=draft_layers,
        columns=columns,
        vocab_size=vocab_size,
    )


def _columns(
    config: GenerateConfig, layers: Sequence[int], hidden_size: int, vocab_size: int
) -> tuple[Column, ...]:
    return token_columns(
        tuple(layers),
        hidden_size,
        config.supervision,
        vocab_size,
        aux_codec=config.codecs["aux"],
        final_codec=config.codecs["final"],
        final_tokens=config.final,
        teacher_tokens=config.teacher,
    )


def _check_out(config: GenerateConfig) -> None:
    """Check that --out can be written, and lies outside the corpus, which would include its files.

    Raises:
        ConfigError: it cannot, or it is inside the corpus.
    """
    if not _complete(Path(config.out)):  # a complete dataset is only read, and may be read-only
        check_directory_to_write("--out", config.out)
    for directory in filter(None, map(corpus_directory, config.corpus)):
        if Path(config.out).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"--out {config.out} lies in the corpus directory {directory}, so its files would "
                "be read as corpus; choose an --out outside it"
            )


def _complete(out: Path) -> bool:
    try:
        return (out / MANIFEST).is_file()
    except OSError:  # a path that cannot exist
        return False


def _check_supervision(supervision: str, vocab_size: int) -> None:
    count = supervision.partition(":")[2]
    if count and int(count) > vocab_size:
        raise ConfigError(
            f"--supervision {supervision}: the target has {vocab_size} logits per token; ask for "
            "fewer"
        )


def within_context(config: GenerateConfig, model_config: Any) -> GenerateConfig:
    """Return the config with --max-length lowered to the context of the target, if that is shorter.

    Serving never uses positions beyond the context, so states there are of no use. `model_config`
    is the transformers configuration.
    """
    context = context_length(text_config(model_config))
    if not 2 <= context < config.max_length:
        return config
    logger.info(
        "documents are cut to %d tokens, not %d (--max-length), because the context of the target "
        "ends there (max_position_embeddings)",
        context,
        config.max_length,
    )
    return replace(config, max_length=context)


def context_length(text: Any) -> int:
    """Return the number of positions of a decoder, 0 if its config has none.

    With scaled RoPE, `max_position_embeddings` is usually the scaled context. In configs to which
    YaRN was added later, the scaled context is the original length times the factor.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(getattr(text, "max_position_embeddings", None) or 0, int(scaled))


def make_plan(setup: Setup, scratch: Path | None = None) -> Plan:
    """Read, render and cut the corpus, and return the plan.

    Its documents are in a temporary file, which is removed with the plan, in the directory
    `scratch`, or where the system puts temporary files; `save_plan` keeps them.

    Raises:
        CorpusError: the corpus cannot be read, or no document is left.
        RunError: a process that rendered documents ended.
    """
    config, reader = setup.config, corpus_reader(setup.config, setup.stored)
    Template(setup.tokenizer, config.template_kwargs).warn_of_the_date()
    rendered = render_corpus(reader, row_settings(setup), config.num_proc, scratch)
    return cut_into_units(rendered, settings(setup, reader.reports), partial(unit_limit, setup))


def find_or_make_plan(setup: Setup, out: Path) -> Plan:
    """Return the plan of `out`, see `find_plan`."""
    config = setup.config
    if config.engine != "ray":  # its driver needs no GPU
        check_devices(config.device, config.spread.device_map)  # before the corpus is read
    changes = partial(changed_settings, setup)
    return find_plan(out, changes, partial(make_plan, setup), refuse_changes)


def row_settings(setup: Setup) -> RowSettings:
    """Return how the rows of the corpus of `setup` become documents."""
    config = setup.config
    return RowSettings(
        tokenizer=setup.tokenizer,
        mask=config.mask,
        template_kwargs=config.template_kwargs,
        eot_token_ids=tuple(end_token_ids(setup.model_dir)),
        vocab_size=setup.vocab_size,
        max_length=config.max_length,
    )


def unit_limit(setup: Setup, tokens: int) -> int:
    """Return the most tokens of a unit of a plan with so many tokens, see `unit_tokens`."""
    batch_tokens = setup.config.forward_tokens or BATCH_TOKENS
    return unit_tokens(setup.config.max_shard_size, setup.bytes_per_token, tokens, batch_tokens)


def corpus_reader(config: GenerateConfig, stored: StoredStates | None = None) -> CorpusReader:
    """Return the reader of the sources of a config, or of the samples that were stored."""
    return CorpusReader(
        config.corpus,
        limit=config.limit or None,
        max_bad_rows=config.bad_row_limit,
        max_row_bytes=parse_size(config.max_row_bytes),
        find=stored.find if stored else resolve,
    )


def settings(setup: Setup, reports: Iterable[SourceReport]) -> dict[str, Any]:
    """Return everything that decides the bytes of a dataset, flat enough to name differences."""
    config = setup.config
    found: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": {k: v for k, v in setup.target.items() if k != "name"},
        "target_name": setup.target["name"],
        "tokenizer": setup.tokenizer_id,
        "corpus": [{"source": r.source, "sha256": r.sha256} for r in reports],
        "layers": list(setup.layers),
        "supervision": config.supervision,
        "codec": config.codecs,
        "final": config.final,
        "teacher": config.teacher,
        "mask": config.mask,
        "max_length": config.max_length,
        "batch_tokens": config.forward_tokens or "auto",
        "packing": config.packing,
        "limit": config.limit,
        "max_row_bytes": parse_size(config.max_row_bytes),
        "dtype": config.dtype,
        "attn": config.attn,
        "device": device_type(config.device),
        "max_shard_size": config.max_shard_size,
        "on_policy": config.on_policy,
        "draft_layers": {d: list(layers) for d, layers in setup.draft_layers.items()},
        "sampling_temperature": config.sampling_temperature,
        "rope_factors": config.rope_factors,
        "backend": config.backend,
        "vllm": vllm_version() if config.backend == "vllm" else None,
        "tensor_parallel": config.vllm_tensor_parallel,
        "device_map": config.device_map,
        "tp_plan": config.tp_plan,
        **({"converted": setup.stored.settings} if setup.stored else {}),
        "versions": {
            "spec_data": spec_data.__version__,
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "machine": platform.machine(),
        },
    }
    return {name: value for name, value in found.items() if value is not None}


def changed_settings(setup: Setup, saved: dict[str, Any]) -> list[str]:
    """Return one line per field in which a setup differs from saved settings.

    The files of the corpus are hashed, but not parsed. With --limit, those that the plan read.
    """
    reader = corpus_reader(setup.config, setup.stored)
    sources = reader.sources[: len(saved["corpus"]) if reader.limit else None]
    reports = [
        SourceReport(source=s.name, path=s.path, kind=s.kind, sha256=s.digest())
        for s in progress(sources, desc="compare the corpus", unit="files", leave=False)
    ]
    new = settings(setup, reports)
    if [s["sha256"] for s in saved["corpus"]] == [s["sha256"] for s in new["corpus"]]:
        new["corpus"] = saved["corpus"]  # the same bytes under other names
    if new["max_shard_size"] == AUTO:  # the user asks for no size: the units stay as planned
        new["max_shard_size"] = saved["max_shard_size"]
    return differing_settings(data_settings(saved), data_settings(new))


# What changes states by rounding at most. A run with others is compared with the one that proved
# the target, see `generation.running`.
_OF_RUNNING = ("device", "device_map", "tp_plan", "tensor_parallel", "batch_tokens")


def data_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the data; of releases of libraries, all but the patch."""
    versions = {
        name: ".".join(version.split(".")[:2]) if name in ("torch", "transformers") else version
        for name, version in saved["versions"].items()
        if name != "machine"
    }
    kept = {name: value for name, value in saved.items() if name not in _OF_RUNNING}
    return kept | {"versions": versions}


def refuse_changes(changed: list[str], where: Path | str) -> None:
    """Refuse to resume, or to mix with, data made with other settings.

    Raises:
        ConfigError: `changed` is not empty; it names every field that differs.
    """
    if changed:
        raise ConfigError(
            f"{where} holds data made with other settings, which must not be mixed:\n  "
            + "\n  ".join(changed)
            + "\nUse the old settings, another --out, or delete the directory."
        )
