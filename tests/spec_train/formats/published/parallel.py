"""Small random P-EAGLE drafts in the layouts of other trainers, compared with the reference."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from tests.spec_train.drafts.peagle.reference import ReferenceConfig, reference_logits
from tests.spec_train.drafts.slow_layer import Document
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
    window: int | None = None,
    **norms: bool,
) -> None:
    """Compare two rounds of drafting with the slow reference: tokens and logits.

    `state` has the names of the speculators library; `norms`: `norm_before_residual`.
    """
    drafter = draft.drafter(blocks.head_of(tiny.target()))
    aux = torch.randn(sum(lengths), len(IDS) * H, dtype=torch.float64)
    known = torch.randint(0, V - 1, (sum(lengths),)).tolist()
    state, fields = {**state, "embed_tokens.weight": embedding}, {"windows": (window,) * BLOCKS}
    fields |= {"mask_token_id": MASK, "depths": DEPTHS, **norms}
    config, done = ReferenceConfig(**tiny.LAYER | fields), 0
    for length in lengths:
        recorder, new = Recorder(), slice(done, done + length)
        with torch.no_grad():
            drafted, _ = drafter.propose(known[new], aux[None, new], DEPTHS, recorder)
        done += length
        document = Document(x=[0, *known[:done]], m=[], aux=aux)
        found = reference_logits(state, config, document, [done], DEPTHS)
        logits = torch.stack([found[done, d] for d in range(DEPTHS)])
        tiny.assert_same(torch.stack(recorder.logits), logits)
        assert drafted.tolist() == ids[logits.argmax(-1)].tolist()
