"""A slow P-EAGLE: one document, element, layer and head at a time (see `layer`).

Element (t, d): anchor t, depth d. It is at position t + d and drafts token t + 2 + d; its teacher
is the target's logits of token t + 1 + d. Depth 0 knows token t + 1 and the target's
states of token t; deeper elements hold the mask token and `mask_hidden`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.slow_layer import Document, State

Element = tuple[int, int]  # (anchor, depth)


@dataclass(frozen=True, kw_only=True)
class Config(slow.Sizes):
    """Settings from the checkpoint's config.json."""

    windows: tuple[int | None, ...]  # per layer: positions that an element sees; None: all
    mask_token_id: int
    depths: int
    norm_before_residual: bool = False


def reference_logits(
    state: State, config: Config, document: Document, anchors: Iterable[int], depth: int
) -> dict[Element, Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    depths = range(min(depth, config.depths))
    elements = [(a - 1, d) for a in anchors for d in depths]
    found = element_logits(state, config, document, elements)
    return {(t + 1, d): found[t, d] for t, d in elements}


def element_logits(
    state: State, config: Config, document: Document, sample: Collection[Element]
) -> dict[Element, Tensor]:
    """Return the draft logits [Vd] of the sampled elements and of every slot at depth 0."""
    slots = len(document.x) - 1  # the last token's slot has no known token
    elements = [(t, 0) for t in range(slots)]
    elements += sorted((t, d) for t, d in set(sample) if d > 0)
    hidden, first = {}, {}
    for t, d in elements:
        token = document.x[t + 1] if d == 0 else config.mask_token_id
        aux = document.aux[t] if d == 0 else state["mask_hidden"].flatten()
        embedding = state["embed_tokens.weight"][token]
        hidden[t, d] = slow.project(state, aux, config.rms_norm_eps)
        normed = config.norm(hidden[t, d], state["layers.0.hidden_norm.weight"])
        norm = state["layers.0.input_layernorm.weight"]
        first[t, d] = torch.cat([config.norm(embedding, norm), normed])
        hidden[t, d] = normed if config.norm_before_residual else hidden[t, d]
    for number in range(len(config.windows)):
        name, window, inputs = f"layers.{number}", config.windows[number], first
        if number:
            norm = state[f"{name}.input_layernorm.weight"]
            inputs = {e: config.norm(hidden[e], norm) for e in elements}
        rows = {e: slow.keys_values(state, name, inputs[e], sum(e), config) for e in elements}
        for t, d in elements:
            seen = [(j, 0) for j in range(t + 1)] + [(t, e) for e in range(1, d + 1)]
            assert all(e in inputs for e in seen), "an anchor's depths have no gaps"
            if window is not None:  # an element is at position anchor + depth
                seen = [e for e in seen if t + d - window < sum(e)]
            keys = [rows[e] for e in seen]
            heads = slow.attend(state, name, inputs[t, d], t + d, keys, config)
            hidden[t, d] = slow.finish(state, name, hidden[t, d], heads, config)
    head, norm = state["lm_head.weight"], state["norm.weight"]
    return {e: head @ config.norm(hidden[e], norm) for e in elements}
