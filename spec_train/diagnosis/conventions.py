"""The neighbouring conventions of a draft: what its trainer may have done instead.

Each one changes how the states are read, or what the draft computes. None trains anything.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import SpecDataError
from spec_data.shards.schema import FINAL, layer_column
from spec_train.diagnosis.sample import Reading, Sample
from spec_train.drafts import Draft

# -- altered draft ---------------------------------------------------------------------------------
# A copy of a draft with another configuration, other tensors or another vocabulary map.


Tensors = dict[str, Tensor]


def altered(
    draft: Draft,
    changes: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
    ids: Tensor | None = None,
) -> Draft:
    """Return a draft of the same class that computes something else; `draft` stays as it is.

    A norm that the changed configuration adds has a weight of ones, because no file holds another;
    one that it no longer has is left out.

    Args:
        draft: the draft, whose tensors are shared where they do not change.
        changes: fields of its configuration.
        tensors: changes a copy of the dict of its tensors.
        ids: target ids of the draft vocabulary, int64 [Vd], in the order of the head's rows; None:
            as they are.

    Raises:
        DraftError, ValueError, RuntimeError: such a draft cannot exist.
    """
    source: Any = draft
    state: Tensors = dict(source.state_dict())
    if tensors is not None:
        state = tensors(state)
    if ids is not None:
        ids, order = ids.sort()
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in state:
                state[name] = state[name][order.to(state[name].device)]
    config = dataclasses.replace(draft.config, **(changes or {}))
    other = type(source)(config, draft.options)
    weight = source.fc.weight
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


# -- conventions -----------------------------------------------------------------------------------


_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Of Llama 2, Llama 3 and Qwen3: the defaults of many configs."""

FIXES = {
    "layer-ids": "write the layer ids that fit into the draft's config (docs/export-and-serving.md "
    "says which key counts outputs and which inputs of blocks), or train again with the declared "
    "ones",
    "layer-order": "sort the parts of fc by ascending layer id: a config that lists the layers in "
    "the order of fc is exported so by `spec-train export`",
    "state-shift": "the trainer paired each token with the states of a neighbour, which serving "
    "does not do. Correct the shift in the trainer, and train again",
    "final-norm": "serve and train with the same state: capture the one that the draft was "
    "trained with, or train again",
    "carried-norm": "set the flag in the draft's config to the value that fits, or train again",
    "rope": "write the rope settings that fit into the draft's config, or train again",
    "slot-layout": "set sample_from_anchor in the draft's config to the value that fits",
    "mask-token": "set the mask token in the draft's config (mask_token_id, and ptd_token_id, "
    "pard_token or dspark_noise_token_id where it has them) to the id that its trainer masked "
    "with. Of the usual ids, this one fits best",
    "vocabulary-map": "replace d2t by the map that fits (offsets: token = row + d2t[row])",
    "embedding": "export the draft with the target's embedding: `spec-train export --target`",
    "head": "replace the draft's lm_head by the one that it was trained with; the target's fits "
    "better than the file's",
    "input-order": "exchange the two halves of the input weights: the files concatenate token and "
    "state in the other order",
}
"""What to do about a draft that fits another convention, by the name of the check."""


@dataclass(frozen=True)
class Neighbour:
    """A convention beside the one that is declared.

    Attributes:
        check: the name of the check that it belongs to.
        text: what it is.
        reading: how states are read under it.
        make: makes the draft that computes it; None: the draft as it is.
        depth: tokens that it drafts per round; None: as many as the draft.
    """

    check: str
    text: str
    reading: Reading
    make: Callable[[], Draft] | None = None
    depth: int | None = None

    def missing(self, sample: Sample) -> list[str]:
        """Return the columns of states that it needs and the sample does not have."""
        return sorted(set(self.reading.columns) - sample.columns)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A draft, how it reads states, and what is known of its target."""

    draft: Draft
    reading: Reading
    sample: Sample
    target_config: dict[str, Any]
    chosen: Tensor | None = None
    """The draft vocabulary that `fit` would choose on the dataset, int64 [Vd] ascending."""
    mask_tokens: dict[int, str] = field(default_factory=dict)
    """Ids that may be the mask token, and why (see `mask_tokens`)."""


def neighbours_of(setting: Setting) -> list[Neighbour]:
    """Return every neighbouring convention of a draft."""
    parts = (
        *(_layer_ids, _layer_order, _shifts, _final_norm, _carried_norm, _rope),
        *(_slot_layout, _mask_token, _vocabulary_map, _target_weights, _input_order),
    )
    return [neighbour for part in parts for neighbour in part(setting)]


# -- how states are read ------------------------------------------------------------------------


def _layer_of(column: str) -> int | None:
    """Return the layer id of a column; None of the final hidden states."""
    return None if column == FINAL else int(column.removeprefix("hidden.L"))


def _layer_ids(setting: Setting) -> Iterator[Neighbour]:
    layers = [_layer_of(column) for column in setting.reading.columns]
    if not layers or None in layers:
        return
    ids = [k for k in layers if k is not None]
    for step, words in ((1, "one block later"), (-1, "one block earlier")):
        moved = [k + step for k in ids]
        blocks = setting.sample.blocks
        if min(moved) < -1 or (blocks is not None and max(moved) >= blocks):
            continue
        yield Neighbour(
            "layer-ids",
            f"layers {_listed(moved)}: each {words}",
            dataclasses.replace(setting.reading, columns=tuple(map(layer_column, moved))),
        )
    captured = sorted(
        k for column in setting.sample.columns if (k := _layer_of(column)) is not None
    )
    known = [[k + step for k in sorted(ids)] for step in (-1, 0, 1)]
    if len(captured) == len(ids) and captured not in known:
        yield Neighbour(
            "layer-ids",
            f"layers {_listed(captured)}: those of the dataset",
            dataclasses.replace(setting.reading, columns=tuple(map(layer_column, captured))),
        )


def _layer_order(setting: Setting) -> Iterator[Neighbour]:
    columns = setting.reading.columns
    count = len(columns)
    if count < 2:
        return
    if count <= 3:
        orders = list(itertools.permutations(range(count)))[1:]
    else:
        orders = [tuple(range(count))[::-1]]
        orders += [tuple((i + k) % count for i in range(count)) for k in (1, count - 1)]
    for order in orders:
        moved = [columns[i] for i in order]
        yield Neighbour(
            "layer-order",
            f"states in the order {_listed([_layer_of(c) for c in moved])}",
            dataclasses.replace(setting.reading, columns=tuple(moved)),
        )


def _shifts(setting: Setting) -> Iterator[Neighbour]:
    for step, words in ((1, "next"), (-1, "previous")):
        yield Neighbour(
            "state-shift",
            f"each token with the states of the {words} one",
            dataclasses.replace(setting.reading, shift=setting.reading.shift + step),
        )


def _final_norm(setting: Setting) -> Iterator[Neighbour]:
    blocks, columns = setting.sample.blocks, setting.reading.columns
    if blocks is None:
        return
    before = layer_column(blocks - 1)
    for name, other, words in (
        (FINAL, before, "the final state before the norm"),
        (before, FINAL, "the last layer after the final norm"),
    ):
        if name in columns:
            moved = tuple(other if column == name else column for column in columns)
            yield Neighbour(
                "final-norm", words, dataclasses.replace(setting.reading, columns=moved)
            )


# -- what the draft computes ----------------------------------------------------------------------

_SWITCHES = {
    "norm_output": "the carried state",
    "norm_before_residual": "the residual of the first layer",
    "norm_before_fc": "the joined states before fc",
    "fc_norm": "each state before fc",
    "use_last_layernorm": "the prediction",
    "use_input_layernorm_in_first_layer": "the first layer's input",
}


def _carried_norm(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    names = {f.name for f in dataclasses.fields(draft.config)}
    for name, what in _SWITCHES.items():
        if name not in names or (name == "norm_output" and draft.name == "peagle"):
            continue  # a P-EAGLE feeds nothing back
        value = not getattr(draft.config, name)
        yield Neighbour(
            "carried-norm",
            f"{name} = {str(value).lower()}: {what} {'normed' if value else 'not normed'}",
            setting.reading,
            _changed(draft, {name: value}),
        )


def _rope(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    own = dict(draft.config.rope_parameters)
    found: dict[str, dict[str, Any]] = {}
    with suppress(SpecDataError, KeyError, TypeError):  # its settings cannot be a draft's
        targets = rope_parameters(setting.target_config)
        values = ", ".join(f"{name} = {value}" for name, value in targets.items())
        found[f"the rope of the target, {values}"] = targets
        theta = targets["rope_theta"]
        found[f"rope_theta = {theta:,.0f}, the target's"] = own | {"rope_theta": theta}
    for theta in _THETAS:
        found[f"rope_theta = {theta:,.0f}"] = own | {"rope_theta": theta}
    if own.get("partial_rotary_factor", 1.0) != 1.0:
        whole = {k: v for k, v in own.items() if k != "partial_rotary_factor"}
        found["no partial_rotary_factor"] = whole
    else:
        found["partial_rotary_factor = 0.5"] = own | {"partial_rotary_factor": 0.5}
    if own["rope_type"] != "default":
        kept = ("rope_theta", "partial_rotary_factor")
        plain = {k: v for k, v in own.items() if k in kept}
        found["no rope scaling"] = plain | {"rope_type": "default"}
    seen = [_plain_rope(own)]
    for text, rope in found.items():
        if _plain_rope(rope) not in seen:
            seen.append(_plain_rope(rope))
            changes = {"rope_parameters": rope, "positions": {}}
            yield Neighbour("rope", text, setting.reading, _changed(draft, changes))


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rope.items() if (k, v) != ("partial_rotary_factor", 1.0)}


def _slot_layout(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    if not hasattr(draft.config, "sample_from_anchor"):
        return
    anchor = not draft.config.sample_from_anchor
    depth = draft.config.block_size - (0 if anchor else 1)
    if depth < 1:
        return
    words = "the anchor's slot drafts first" if anchor else "the slot after the anchor drafts first"
    yield Neighbour(
        "slot-layout",
        f"sample_from_anchor = {str(anchor).lower()}: {words}",
        setting.reading,
        _changed(draft, {"sample_from_anchor": anchor}),
        depth,
    )


def _mask_token(setting: Setting) -> Iterator[Neighbour]:
    for token, why in setting.mask_tokens.items():
        declared = setting.draft.config.mask_token_id
        if token != declared:  # it was taken over in an earlier round
            yield Neighbour(
                "mask-token",
                f"mask_token_id = {token} instead of {declared}: {why}",
                setting.reading,
                _changed(setting.draft, {"mask_token_id": token}),
            )


def _vocabulary_map(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    if draft.full_vocabulary:
        return
    own, vocab = draft.draft_ids.cpu(), draft.config.vocab_size
    rows = torch.arange(len(own))
    found = {
        "the first tokens of the vocabulary": rows,
        "d2t taken for token ids": own - rows,
        "token ids taken for offsets": own + rows,
    }
    if setting.chosen is not None:
        found["the most frequent tokens of the dataset"] = setting.chosen
    if (similar := _similar_rows(setting)) is not None:
        found["for each row of the head, the token of the target's most similar row"] = similar
    for text, ids in found.items():
        inside = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
        if inside and not torch.equal(ids, own):
            yield Neighbour("vocabulary-map", text, setting.reading, _changed(draft, {}, ids=ids))


_MOST_PRODUCTS = 10**12
"""Multiplications for which rows of two heads are compared; on a CPU, less than a minute."""


def _similar_rows(setting: Setting) -> Tensor | None:
    """Return the target id whose head row is most similar to each of the draft's, int64 [Vd].

    None: the draft has no head of the target's width, or it would take too long.
    """
    rows = dict(setting.draft.state_dict()).get("lm_head.weight")
    other = setting.sample.head.head_weight
    if rows is None or rows.shape[1] != other.shape[1]:
        return None
    if len(rows) * other.numel() > _MOST_PRODUCTS:
        return None
    own, theirs = (F.normalize(x.float(), dim=-1) for x in (rows, other.to(rows.device)))
    parts = [(part @ theirs.T).argmax(-1) for part in own.split(1024)]
    return torch.cat(parts).cpu()


def _target_weights(setting: Setting) -> Iterator[Neighbour]:
    draft, head = setting.draft, setting.sample.head
    own = draft.embed_tokens.weight
    if own.shape == head.embed_weight.shape and not torch.equal(own, head.embed_weight.to(own)):
        yield Neighbour(
            "embedding",
            "the target's embedding",
            setting.reading,
            _changed(draft, {}, _with({"embed_tokens.weight": head.embed_weight})),
        )
    name, state = "lm_head.weight", dict(draft.state_dict())
    if name in state:
        rows = head.head_weight
        if not draft.full_vocabulary:
            rows = rows[draft.draft_ids.to(rows.device)]
        if rows.shape == state[name].shape and not torch.equal(state[name], rows.to(state[name])):
            yield Neighbour(
                "head",
                "the target's LM head",
                setting.reading,
                _changed(draft, {}, _with({name: rows})),
            )


_JOINED = {
    "eagle": ("fc.weight",),
    "eagle3": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
}
"""Weights of inputs [token ; state] of equal width."""


def _input_order(setting: Setting) -> Iterator[Neighbour]:
    draft = setting.draft
    endings = _JOINED.get("eagle3" if draft.name == "peagle" else draft.name)
    if endings is None:
        return
    wide = 2 * draft.config.hidden_size

    def exchanged(tensors: Tensors) -> Tensors:
        first = ("midlayer.", "layers.0.", "fc.")
        return {
            name: value.roll(wide // 2, dims=-1)
            if name.startswith(first) and name.endswith(endings) and value.shape[-1] == wide
            else value
            for name, value in tensors.items()
        }

    yield Neighbour(
        "input-order",
        "states before tokens in the joined input",
        setting.reading,
        _changed(draft, {}, exchanged),
    )


def _with(values: Tensors) -> Callable[[Tensors], Tensors]:
    """Return a change of tensors that replaces some of them."""
    return lambda tensors: tensors | {k: v.to(tensors[k]) for k, v in values.items()}


def _changed(
    draft: Draft,
    changes: dict[str, Any],
    tensors: Callable[[Tensors], Tensors] | None = None,
    ids: Tensor | None = None,
) -> Callable[[], Draft]:
    return lambda: altered(draft, changes, tensors, ids)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join("final" if value is None else str(value) for value in values)
