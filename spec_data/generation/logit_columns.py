"""What a draft learns from, out of final states or logits: argmax, logsumexp, top-k, and figures.

The head is the widest matrix of a target, so it runs only on the tokens that are asked for, some at
a time: no logits [N, V] exist unless the target returned them.

Shapes: n tokens, m of them with a supervised next token, H hidden size, V vocabulary size.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from spec_data.devices import sent
from spec_data.generation.measure import log_sum_exp, token_figures
from spec_data.shards.schema import Column
from spec_data.target.backend import TargetBackend


def logit_columns(
    target: TargetBackend,
    final: Tensor,
    logits: Tensor | None,
    names: Mapping[str, Column],
    following: np.ndarray,
    temperature: float,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return argmax, logsumexp and, if `names` has them, top-k or full logits; and the figures.

    Args:
        target: has the head.
        final: final states [n, H].
        logits: the target's own logits [n, V]; None: computed from `final`, in blocks of tokens.
        names: the columns of the dataset, by name.
        following: the next token of each token, -1 where it is not supervised, int64 [n]. It is on
            the host, so that nothing waits for the device.
        temperature: see `token_figures`.

    Returns:
        The columns [n] or [n, W], and float32 [m, 4].
    """
    parts: list[dict[str, Tensor]] = []
    figures = [torch.zeros(0, 4, device=final.device)]
    for part in target.logit_chunks(len(final)):
        block = logits[part] if logits is not None else target.logits_of(final[part])  # [k, V]
        wide = block.float()
        argmax = block.argmax(-1)
        logsumexp, own = log_sum_exp(wide, argmax)
        found = {"target_argmax": argmax, "target_logsumexp": logsumexp}
        if "topk_ids" in names:
            top = wide.topk(names["topk_ids"].width or 1, dim=-1)
            found |= {"topk_ids": top.indices, "topk_logits": top.values}
        parts.append(found)
        asked = np.flatnonzero(following[part] >= 0)
        if len(asked) == 0:
            continue
        chosen = sent(torch.from_numpy(following[part][asked]), final.device)
        if len(asked) < len(wide):
            rows = sent(torch.from_numpy(asked), final.device)
            wide, own, logsumexp, argmax = wide[rows], own[rows], logsumexp[rows], argmax[rows]
        figures.append(token_figures(wide, own, logsumexp, argmax, chosen, temperature))
    out = {name: torch.cat([part[name] for part in parts]) for name in (parts or [{}])[0]}
    if not parts:
        out = _nothing(names, final)
    if logits is not None:
        out["logits"] = logits
    return out, torch.cat(figures)


def _nothing(names: Mapping[str, Column], final: Tensor) -> dict[str, Tensor]:
    """Return the columns of no token."""
    ids, values = final.new_zeros(0, dtype=torch.long), final.new_zeros(0, dtype=torch.float32)
    out = {"target_argmax": ids, "target_logsumexp": values}
    if "topk_ids" in names:
        width = names["topk_ids"].width or 1
        out |= {"topk_ids": ids.view(0, width), "topk_logits": values.view(0, width)}
    return out
