"""Drafts, documents and layouts for comparing the EAGLE-1/2 loss with its slow reference.

Only plain loops: the code that lays out documents for the fast function must not share its shifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_data.shards.schema import HeadSpec
from spec_train.drafts.eagle.draft import EagleConfig, EagleDraft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import EagleOptions
from tests.spec_train.drafts import shared
from tests.spec_train.drafts.eagle.reference import Document, ReferenceConfig, predict
from tests.spec_train.drafts.shared import (
    noise_of,
    randomize,
    reference_sizes,
    reference_state,
    small_target,
    windows_of,
)
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss
from tests.spec_train.drafts.slow_layer import Shape

HIDDEN, VOCAB = 12, 14
SPEC = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "tied": False}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting of the draft, the target's head and the loss."""

    layers: int = 1
    kv_heads: int = 2
    window: int = 0
    types: str = "auto"
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    noise: bool = False
    regression_weight: float = 1.0
    ce_weight: float = 0.1
    loss: SlotLoss = CROSS_ENTROPY
    rope: tuple[tuple[str, object], ...] = (("rope_type", "default"), ("rope_theta", 100.0))
    shape: Shape = ()

    def options(self) -> EagleOptions:
        shape: dict[str, Any] = dict(self.shape)
        return EagleOptions(
            **shape,
            num_layers=self.layers,
            loss=self.loss.name,
            loss_target="hard" if self.loss.hard else "soft",
            depth=3,
            sliding_window=self.window,
            layer_types=self.types,
        )

    def target_config(self) -> dict[str, object]:
        return small_target(HIDDEN, 4, self.kv_heads, dict(self.rope))


def make_draft(case: Case, seed: int = 0) -> EagleDraft:
    """Return a random float64 draft with weights so large that every term matters."""
    options = case.options()
    config = EagleConfig.from_target(case.target_config(), vocab_size=VOCAB, options=options)
    draft = EagleDraft(config, options).double()
    randomize(draft, seed)
    return draft


def make_head(case: Case, seed: int = 1) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64) if case.bias else None
    spec = HeadSpec(**SPEC, has_bias=case.bias, scale=case.scale, softcap=case.softcap)
    return TargetHead(spec, torch.zeros_like(weight), weight, bias)


def reference_config(case: Case, head: TargetHead) -> ReferenceConfig:
    """Return the setting for the reference; frequencies come from the target's rotary code."""
    sizes = reference_sizes(case.target_config(), case.shape, 4, case.kv_heads)
    return ReferenceConfig(
        **sizes,
        rope_factor=LlamaRotaryEmbedding(LlamaConfig(**case.target_config())).attention_scaling,
        layers=case.layers,
        windows=windows_of(case.types, case.window, case.layers),
        head_weight=head.head_weight,
        head_bias=head.head_bias,
        head_scale=case.scale,
        head_softcap=case.softcap,
        regression_weight=case.regression_weight,
        ce_weight=case.ce_weight,
        loss=case.loss,
    )


def make_documents(case: Case, masks: Sequence[Sequence[int]], seed: int = 0) -> list[Document]:
    """Return random documents with these loss masks; their states are half the draft's predictions.

    So the draft is sometimes right, and the distances reach both branches of smooth L1.
    """
    generator = torch.Generator().manual_seed(seed)
    config = reference_config(case, make_head(case))
    state = reference_state(make_draft(case))

    def draw(length: int, scale: float) -> Tensor:
        return torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64) * scale

    documents = []
    for mask in masks:
        x = torch.randint(VOCAB, (len(mask),), generator=generator).tolist()
        f, noise = draw(len(mask), 0.5), draw(len(mask), 0.1) if case.noise else None
        for t in range(len(mask) - 1):
            with torch.no_grad():
                f[t + 1] += 0.7 * predict(state, config, [(x[j + 1], f[j]) for j in range(t + 1)])
        documents.append(Document(x=x, m=mask, f=f, noise=noise))
    return documents


def lay_out(documents: Sequence[Document], rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Arguments of `eagle_loss` for rows of the given documents; padding holds garbage."""

    def padding(shape: tuple[int, int]) -> dict[str, Tensor]:
        return {
            "final_hidden": noise_of(*shape, HIDDEN),
            "noise": noise_of(*shape, HIDDEN),
            "input_ids": noise_of(*shape).long().abs(),
            "loss_mask": torch.ones(shape, dtype=torch.bool),
        }

    def slot(document: Document, t: int) -> dict[str, Any]:
        return {
            "final_hidden": document.f[t],
            "noise": 0 if document.noise is None else document.noise[t],
            "input_ids": document.x[t],
            "loss_mask": bool(document.m[t]),
        }

    return shared.lay_out(documents, rows, padding, slot)
