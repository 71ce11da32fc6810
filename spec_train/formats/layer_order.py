"""The order in which a draft concatenates the states of its target's layers."""

import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError

log = logging.getLogger(__name__)

_STATE_COLUMNS = ("fc.weight", "input_norm.weight", "mask_hidden")
"""Tensors whose last dimension is the concatenated states."""
_ONE_NORM = re.compile(r"fc_norm\.(\d+)\.weight")


def sort_states(
    tensors: dict[str, Tensor], layers: Sequence[int], where: str, *, collected: bool = False
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return the layer ids of a file in ascending order, and its tensors sorted with them.

    Our drafts concatenate states by ascending layer id. A draft with another order computes the
    same as one whose parts of `fc`, `fc_norm`, `input_norm` and `mask_hidden` are sorted with them.
    If the trainer has `collected` the states during one forward pass of its target, they are in
    ascending order, also if the ids are not. `where` is the path of config.json, for messages.

    Raises:
        DraftError: an id repeats, or `fc` has no equal part for each layer.
    """
    if len(set(layers)) != len(layers):
        raise DraftError(f"{where}: layers {list(layers)} repeat an id; each layer is read once")
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    ascending = tuple(layers[i] for i in order)
    if ascending == tuple(layers) or collected:
        return ascending, tensors
    log.warning(
        "warning: %s: layers %s are not ascending. The parts of fc are taken to have the order of "
        "the file, as llama.cpp does, and were sorted; vLLM and SGLang would pass ascending states "
        "to the unsorted parts. An export is read alike by all engines",
        *(where, list(layers)),
    )
    result = dict(tensors)
    for name in _STATE_COLUMNS:
        if name not in tensors:
            continue
        if tensors[name].shape[-1] % len(order):
            raise DraftError(
                f"{where}: {name} has {tensors[name].shape[-1]} columns, which are not equal parts "
                f"for {len(order)} layers"
            )
        parts = tensors[name].chunk(len(order), dim=-1)
        result[name] = torch.cat([parts[i] for i in order], dim=-1).contiguous()
    norms = {int(m[1]): n for n in tensors if (m := _ONE_NORM.fullmatch(n))}
    for number, source in enumerate(order):
        if source in norms:
            result[f"fc_norm.{number}.weight"] = tensors[norms[source]]
    return ascending, result
