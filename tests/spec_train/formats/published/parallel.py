"""Small random P-EAGLE drafts in the layouts of other trainers, and an independent forward.

A round drafts K tokens: the row of the last known token drafts the first one. K - 1 rows with the
mask token and the learned states `mask_hidden` follow it at the next positions, and draft the
others. Attention is causal over all rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, MASK, Recorder
from tests.spec_train.formats.published.tiny import VD, H, V, gain

DEPTHS, BLOCKS = 4, 2


def peagle_tensors(
    *,
    qk_norm: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    rows: int = VD,
    bias: bool = False,
) -> dict[str, Tensor]:
    """Return a P-EAGLE under the names of the speculators library, without the embedding."""
    width = len(IDS) * H
    found = tiny.eagle3_tensors("layers.0.", states=len(IDS), size=rows, qk_norm=qk_norm)
    for i in range(1, BLOCKS):
        found |= tiny.layer_tensors(f"layers.{i}.", H, qk_norm)
        found[f"layers.{i}.input_layernorm.weight"] = gain(H)
    found["mask_hidden"] = torch.randn(1, 1, width, dtype=torch.float64)
    if norm_before_fc:
        found["input_norm.weight"] = gain(width)
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": gain(H) for i in range(len(IDS))}
    if bias:
        names = [name for name in found if "_proj" in name]
        found |= {
            name.replace("weight", "bias"): torch.randn(len(found[name]), dtype=torch.float64)
            for name in names
        }
    return found


def read_peagle(folder: Path, facts: TargetFacts | None) -> Any:
    """Read a draft directory for serving, in float64."""
    draft = load_draft(folder, facts).double()
    assert draft.name == "peagle"
    return draft


def compare(
    draft: Any,
    state: Mapping[str, Tensor],
    embedding: Tensor,
    ids: Tensor,
    *,
    lengths: tuple[int, ...] = (6, 3),
    depth: int = DEPTHS,
    **how: Any,
) -> None:
    """Compare two rounds of drafting with the independent forward: tokens and logits.

    `state` has the names of the speculators library, `how` are arguments of `eagle3_logits`.
    """
    drafter = draft.drafter(blocks.head_of(tiny.target()))
    aux = torch.randn(sum(lengths), len(IDS) * H, dtype=torch.float64)
    known = torch.randint(0, V - 1, (sum(lengths),)).tolist()
    unknown = state["mask_hidden"].reshape(1, -1).expand(depth - 1, -1)
    done = 0
    for length in lengths:
        recorder, new = Recorder(), slice(done, done + length)
        with torch.no_grad():
            drafted, _ = drafter.propose(known[new], aux[None, new], depth, recorder)
        done += length
        logits, _ = tiny.eagle3_logits(
            state,
            "layers.0.",
            [*known[:done], *[MASK] * (depth - 1)],
            torch.cat([aux[:done], unknown]),
            embedding,
            layers=BLOCKS,
            **how,
        )
        tiny.assert_same(torch.stack(recorder.logits), logits[-depth:])
        assert drafted.tolist() == ids[logits[-depth:].argmax(-1)].tolist()
