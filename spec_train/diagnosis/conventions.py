"""The neighbouring conventions of a draft: what its trainer may have done instead.

Each one changes how the states are read, or what the draft computes. None trains anything.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.models.families import text_table
from spec_data.models.rope_settings import rope_parameters
from spec_data.models.streams import MEAN, streams_of
from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column
from spec_train.data.mixture import count_dataset
from spec_train.diagnosis.sample import Reading, Sample
from spec_train.drafts import Draft
from spec_train.drafts.config import special_ids
from spec_train.drafts.draft import AuxDraft
from spec_train.drafts.mask_token import usual_mask_tokens
from spec_train.drafts.unroll import AutoregressiveDraft, FinalStatesDraft
from spec_train.drafts.vocabulary import choose_draft_vocabulary
from spec_train.options.draft_options import DraftOptions, TargetShape
from spec_train.options.kinds import DRAFT_OPTIONS

Tensors = dict[str, Tensor]

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Of Llama 2, Llama 3 and Qwen3: the defaults of many configs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A draft, how it reads states, and the data of its target."""

    draft: Draft
    reading: Reading
    sample: Sample
    dataset: HiddenStatesDataset

    @cached_property
    def token_counts(self) -> Tensor:
        """Supervised tokens of the dataset by id, int64 [V]."""
        return torch.from_numpy(count_dataset(self.dataset))


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A convention beside the one that is declared: what changes.

    Attributes:
        text: what it is.
        columns, shift, factor: of the states that are read, see `Reading`; None: as declared.
        config: fields of the draft's configuration.
        tensors: tensors of the draft, by name.
        ids: target ids of the draft vocabulary, int64 [Vd], in the order of the head's rows; None:
            as they are.
        depth: tokens that the draft proposes at once; None: as many as before.
        leaks: its states name the token to be drafted, so any draft that passes them on gains.
        check: the kind of convention, a key of `KINDS`.
    """

    text: str
    columns: Sequence[str] | None = None
    shift: int | None = None
    factor: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Tensor | None = None
    depth: int | None = None
    leaks: bool = False
    check: str = ""

    def missing(self, sample: Sample) -> list[str]:
        """Return the columns of states that it needs and the sample does not have."""
        return sorted(set(self.columns or ()) - sample.columns)

    def applied(self, setting: Setting) -> Setting:
        """Return a setting under this convention.

        Raises:
            DraftError, ValueError, RuntimeError: such a draft cannot exist.
        """
        reading = Reading(
            tuple(self.columns or setting.reading.columns),
            setting.reading.shift if self.shift is None else self.shift,
            setting.reading.factor if self.factor is None else self.factor,
        )
        draft = setting.draft
        if self.config or self.tensors or self.ids is not None:
            draft = self._altered(draft)
        return dataclasses.replace(setting, draft=draft, reading=reading)

    def _altered(self, draft: Draft) -> Draft:
        """Return a draft of the same class that computes something else; `draft` stays as it is.

        Tensors that do not change are shared. A norm that the changed configuration adds has a
        weight of ones, because no file holds another; one that it no longer has is left out.
        """
        state: Tensors = dict(draft.state_dict())
        state |= {name: value.to(state[name]) for name, value in self.tensors.items()}
        ids = self.ids
        if ids is not None:
            ids, order = ids.sort()
            for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
                if name in state:
                    state[name] = state[name][order.to(state[name].device)]
        kind: Any = type(draft)
        other = kind(dataclasses.replace(draft.config, **self.config), draft.options)
        weight = draft.embed_tokens.weight
        other.to(weight.device, weight.dtype)
        fresh = other.state_dict()
        added = [name for name in fresh if name not in state and "norm" not in name]
        if added:
            raise ValueError(f"the draft has no {', '.join(added)}")
        other.load_state_dict({name: state.get(name, value) for name, value in fresh.items()})
        if not other.full_vocabulary:
            other.set_vocabulary(draft.draft_ids if ids is None else ids)
        result: Draft = other.eval()
        return result


def neighbours_of(setting: Setting) -> list[Neighbour]:
    """Return every neighbouring convention of a draft."""
    return [
        dataclasses.replace(neighbour, check=check)
        for check, find in KINDS.items()
        for neighbour in find(setting)
    ]


# -- how states are read ---------------------------------------------------------------------------


def _layer_of(column: str) -> int | None:
    """Return the layer id of a column; None of the final hidden states."""
    return None if column == FINAL else int(column.removeprefix("hidden.L"))


def _listed(layers: Sequence[int | None]) -> str:
    return ", ".join("final" if layer is None else str(layer) for layer in layers)


def _layer_ids(setting: Setting) -> Iterator[Neighbour]:
    layers = [_layer_of(column) for column in setting.reading.columns]
    ids = [k for k in layers if k is not None]
    if not ids or len(ids) < len(layers):
        return
    blocks = setting.sample.blocks
    captured = sorted(k for c in setting.sample.columns if (k := _layer_of(c)) is not None)
    others = [
        ([k + 1 for k in ids], "each one block later"),
        ([k - 1 for k in ids], "each one block earlier"),
    ]
    if len(captured) == len(ids) and captured not in (sorted(ids), *(sorted(x) for x, _ in others)):
        others.append((captured, "those of the dataset"))
    for other, words in others:
        if min(other) >= -1 and (blocks is None or max(other) < blocks):
            columns = list(map(layer_column, other))
            yield Neighbour(text=f"layers {_listed(other)}: {words}", columns=columns)


def _layer_order(setting: Setting) -> Iterator[Neighbour]:
    columns = setting.reading.columns
    count = len(columns)
    every = tuple(range(count))
    orders = [every[::-1], every[1:] + every[:1], every[-1:] + every[:-1]]  # of many layers
    if count <= 3:
        orders = list(itertools.permutations(every))[1:]
    for order in orders:
        moved = [columns[i] for i in order]
        text = f"states in the order {_listed([_layer_of(c) for c in moved])}"
        yield Neighbour(text=text, columns=moved)


def _state_shift(setting: Setting) -> Iterator[Neighbour]:
    for step, words in ((1, "next"), (-1, "previous")):
        text = f"each token with the states of the {words} one"
        leaks = step > 0 and FINAL in setting.reading.columns
        yield Neighbour(text=text, shift=setting.reading.shift + step, leaks=leaks)


def _streams(setting: Setting) -> Iterator[Neighbour]:
    """Yield the sum of several residual streams for their mean: other contractions need the target.

    A draft that only norms the joined states computes the same with both.
    """
    streams = streams_of(SimpleNamespace(**text_table(setting.dataset.target_config())))
    if streams.contraction == MEAN:
        yield Neighbour(text="the sum of the streams, not the mean", factor=float(streams.count))


def _final_norm(setting: Setting) -> Iterator[Neighbour]:
    blocks, columns = setting.sample.blocks, setting.reading.columns
    if blocks is None:
        return
    before = layer_column(blocks - 1)
    for name, other, text in (
        (FINAL, before, "the final state before the norm"),
        (before, FINAL, "the last layer after the final norm"),
    ):
        if name in columns:
            moved = [other if column == name else column for column in columns]
            yield Neighbour(text=text, columns=moved)


# -- what the draft computes -----------------------------------------------------------------------

_SWITCHES = {
    "norm_output": "the carried state",
    "norm_before_residual": "the residual of the first layer",
    "norm_before_fc": "the joined states before fc",
    "fc_norm": "each state before fc",
    "use_last_layernorm": "the prediction",
    "use_input_layernorm_in_first_layer": "the first layer's input",
    "qk_norm": "queries and keys of each head",
}


def _carried_norm(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    names = {f.name for f in dataclasses.fields(draft.config)}
    for name, what in _SWITCHES.items():
        feeds_back = isinstance(draft, AutoregressiveDraft)
        if name not in names or (name == "norm_output" and not feeds_back):
            continue
        value = not getattr(draft.config, name)
        text = f"{name} = {str(value).lower()}: {what} {'normed' if value else 'not normed'}"
        yield Neighbour(text=text, config={name: value})


def _rope(setting: Setting) -> Iterator[Neighbour]:
    declared = dict(setting.draft.config.rope_parameters)
    others: dict[str, dict[str, Any]] = {}
    with suppress(SpecDataError, KeyError, TypeError):  # its settings cannot be a draft's
        targets = rope_parameters(text_table(setting.dataset.target_config()))
        values = ", ".join(f"{name} = {value}" for name, value in targets.items())
        others[f"the rope of the target, {values}"] = targets
        theta = targets["rope_theta"]
        others[f"rope_theta = {theta:,.0f}, the target's"] = declared | {"rope_theta": theta}
    for theta in _THETAS:
        others[f"rope_theta = {theta:,.0f}"] = declared | {"rope_theta": theta}
    # a layer of the target's rotates as many channels as its family does
    of_target = issubclass(DRAFT_OPTIONS.get(setting.draft.name, DraftOptions), TargetShape)
    for factor in () if of_target else (1.0, 0.5):
        changed = declared | {"partial_rotary_factor": factor}
        others[f"partial_rotary_factor = {factor:g}"] = changed
    unscaled = {k: declared[k] for k in ("rope_theta", "partial_rotary_factor") if k in declared}
    others["no rope scaling"] = unscaled | {"rope_type": "default"}
    tried = [_plain_rope(declared)]
    for text, rope in others.items():
        if (plain := _plain_rope(rope)) not in tried:
            tried.append(plain)
            yield Neighbour(text=text, config={"rope_parameters": plain, "positions": {}})


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rope.items() if (k, v) != ("partial_rotary_factor", 1.0)}


def _window(setting: Setting) -> Iterator[Neighbour]:
    config = setting.draft.config
    if not config.layer_types:
        return
    full = {"layer_types": (), "sliding_window": None}
    yield Neighbour(text="no window: every layer sees the whole context", config=full)
    if hasattr(config, "sliding_window_non_causal"):
        value = not config.sliding_window_non_causal
        seen = "every slot" if value else "the earlier slots"
        text = f"sliding_window_non_causal = {str(value).lower()}: a slot sees {seen} of its block"
        yield Neighbour(text=text, config={"sliding_window_non_causal": value})


def _slot_layout(setting: Setting) -> Iterator[Neighbour]:
    config = setting.draft.config
    if not hasattr(config, "sample_from_anchor"):
        return
    anchor = not config.sample_from_anchor
    depth = config.block_size - (0 if anchor else 1)
    if depth < 1:
        return
    words = "the anchor's slot" if anchor else "the slot after the anchor"
    text = f"sample_from_anchor = {str(anchor).lower()}: {words} drafts first"
    yield Neighbour(text=text, config={"sample_from_anchor": anchor}, depth=depth)


def _mask_token(setting: Setting) -> Iterator[Neighbour]:
    """Yield other mask tokens, likeliest first; nothing for a draft that reads none.

    A mask token is the id of an embedding row, and nothing else marks it: the row is the target's
    and frozen, or the draft's and trained. So the id decides what the draft computes in both cases,
    and ids with equal rows are alike. The learned states of a P-EAGLE draft, `mask_hidden`, stand
    beside that row and do not replace it.
    """
    draft, config, dataset = setting.draft, setting.draft.config, setting.dataset
    declared = getattr(config, "mask_token_id", None)
    slots = getattr(config, "block_size", draft.depth)
    if declared is None or slots <= 1:  # of one depth, or a block of one slot
        return
    raw, counts = dataset.target_config(), setting.token_counts
    targets = setting.sample.head.embed_weight  # [V, H]
    usual = usual_mask_tokens(dataset.target_dir, {**text_table(raw), **raw}, targets, counts)
    rows = draft.embed_tokens.weight.detach()  # [V, H]
    if config.train_embeddings and rows.shape == targets.shape:
        moved = (rows.float() - targets.to(rows.device).float()).norm(dim=-1)  # [V]
        moved[counts.to(moved.device) > 0] = 0
        furthest = "of the tokens that no answer contains, the one that training changed most"
        usual = {int(moved.argmax()): furthest} | usual
    different = [rows[declared]]
    for token, why in usual.items():
        if not any(torch.equal(rows[token], row) for row in different):
            different.append(rows[token])
            text = f"mask_token_id = {token} instead of {declared}: {why}"
            yield Neighbour(text=text, config={"mask_token_id": token})


def _vocabulary_map(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    if draft.full_vocabulary:
        return
    declared, vocab = draft.draft_ids.cpu(), draft.config.vocab_size
    rows = torch.arange(len(declared))
    others = {
        "the first tokens of the vocabulary": rows,
        "d2t taken for token ids": declared - rows,
        "token ids taken for offsets": declared + rows,
    }
    special = special_ids(setting.dataset.target_config())
    frequent = choose_draft_vocabulary(setting.token_counts, len(declared), special)
    others["the most frequent tokens of the dataset"] = frequent
    for text, ids in others.items():
        inside = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
        if inside and not torch.equal(ids, declared):
            yield Neighbour(text=text, ids=ids)


def _embedding(setting: Setting) -> Iterator[Neighbour]:
    rows = setting.sample.head.embed_weight
    return _weights(setting, "embed_tokens.weight", rows, "the target's embedding")


def _head(setting: Setting) -> Iterator[Neighbour]:
    draft, rows = setting.draft, setting.sample.head.head_weight
    if not draft.full_vocabulary:
        rows = rows[draft.draft_ids.to(rows.device)]
    return _weights(setting, "lm_head.weight", rows, "the target's LM head")


def _weights(setting: Setting, name: str, value: Tensor, text: str) -> Iterator[Neighbour]:
    """Yield the draft with a tensor of the target, if it has one of this shape that differs."""
    declared = dict(setting.draft.state_dict()).get(name)
    if declared is None or declared.shape != value.shape:
        return
    if not torch.equal(declared, value.to(declared)):
        yield Neighbour(text=text, tensors={name: value})


def _input_order(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    if isinstance(draft, FinalStatesDraft):  # weights of inputs [token ; state] of equal width
        endings: tuple[str, ...] = ("fc.weight",)
    elif isinstance(draft, AuxDraft):
        endings = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    else:
        return
    width = draft.config.hidden_size
    exchanged = {
        name: value.roll(width, dims=-1)
        for name, value in draft.state_dict().items()
        if name.startswith(("midlayer.", "layers.0.", "fc."))
        and name.endswith(endings)
        and value.shape[-1] == 2 * width
    }
    if not exchanged:
        return
    parts = ["tokens", "states"] if getattr(draft.config, "states_first", False) else []
    first, second = parts or ["states", "tokens"]
    yield Neighbour(text=f"{first} before {second} in the joined input", tensors=exchanged)


KINDS: dict[str, Callable[[Setting], Iterator[Neighbour]]] = {
    "layer-ids": _layer_ids,
    "layer-order": _layer_order,
    "state-shift": _state_shift,
    "streams": _streams,
    "final-norm": _final_norm,
    "carried-norm": _carried_norm,
    "rope": _rope,
    "window": _window,
    "slot-layout": _slot_layout,
    "mask-token": _mask_token,
    "vocabulary-map": _vocabulary_map,
    "head": _head,
    "input-order": _input_order,
    "embedding": _embedding,
}
"""The kinds of conventions, each a check of `checks.CHECKS`, and what finds its neighbours."""
