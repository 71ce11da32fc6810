"""Drafts, documents and layouts for comparing the EAGLE-3 loss with its slow reference.

Only plain loops: the code that lays out documents for the fast function must not share its shifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_train.drafts.eagle3.draft import Eagle3Config, Eagle3Draft, Eagle3Options
from tests.spec_train.drafts import shared
from tests.spec_train.drafts.eagle3.reference import Document, ReferenceConfig, reference_logits
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

HIDDEN, WIDTH, LAYERS, VOCAB, STEPS = 12, 10, 3, 14, 4
DRAFT_IDS = [0, 2, 3, 5, 6, 7, 9, 10, 12]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting of the draft and its loss."""

    loss: SlotLoss = CROSS_ENTROPY
    reduced: bool = True
    fc_norm: bool = False
    norm_output: bool = False
    window: int = 0
    heads: int = 4
    kv_heads: int = 2
    steps: int = STEPS
    decay: float = 0.8
    rope: tuple[tuple[str, object], ...] = (("rope_type", "default"), ("rope_theta", 100.0))
    shape: Shape = ()

    def options(self) -> Eagle3Options:
        shape: dict[str, Any] = dict(self.shape)
        return Eagle3Options(
            **shape,
            ttt_steps=self.steps,
            step_decay=0.8 if self.loss.weights else self.decay,
            loss=self.loss.name,
            loss_target="hard" if self.loss.hard else "soft",
            position_weights=",".join(map(str, self.loss.weights)) or "auto",
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            sliding_window=self.window,
        )

    def target_config(self) -> dict[str, object]:
        return small_target(HIDDEN, self.heads, self.kv_heads, dict(self.rope))


def make_draft(case: Case, seed: int = 0) -> Eagle3Draft:
    """Return a random float64 draft with weights so large that every term matters."""
    options = case.options()
    config = Eagle3Config.from_target(
        case.target_config(),
        layers=(1, 3, 4),
        vocab_size=VOCAB,
        draft_vocab_size=len(DRAFT_IDS) if case.reduced else VOCAB,
        options=options,
    )
    config = replace(config, target_hidden_size=WIDTH)
    draft = Eagle3Draft(config, options).double()
    if case.reduced:
        draft.set_vocabulary(torch.tensor(DRAFT_IDS))
    randomize(draft, seed)
    return draft


def reference_config(case: Case, draft: Eagle3Draft) -> ReferenceConfig:
    """Return the setting for the reference; frequencies come from the target's rotary code."""
    shape = dict(case.shape)
    sizes = reference_sizes(case.target_config(), case.shape, case.heads, case.kv_heads)
    return ReferenceConfig(
        **sizes,
        norm_before_residual=shape.get("norm_before_residual", False),
        rope_factor=LlamaRotaryEmbedding(LlamaConfig(**case.target_config())).attention_scaling,
        norm_output=case.norm_output,
        windows=windows_of(
            shape.get("layer_types", "auto"), case.window, shape.get("num_layers", 1)
        ),
        steps=case.steps,
        decay=case.decay,
        loss=case.loss,
    )


def make_documents(
    case: Case, draft: Eagle3Draft, masks: Sequence[Sequence[int]], seed: int = 0
) -> list[Document]:
    """Return random documents with these loss masks; the teacher often agrees with the draft."""
    generator = torch.Generator().manual_seed(seed)
    config, state = reference_config(case, draft), reference_state(draft)
    documents = []
    for mask in masks:
        length = len(mask)
        x = torch.randint(VOCAB, (length,), generator=generator).tolist()
        aux = torch.randn(length, LAYERS * WIDTH, generator=generator, dtype=torch.float64)
        z = torch.randn(length, VOCAB, generator=generator, dtype=torch.float64)
        ids = draft.draft_ids
        with torch.no_grad():
            for (t, s), logits in reference_logits(state, config, x, aux).items():
                z[t + 1 + s, ids] += 3.0 * logits / (s + 1)
            if case.reduced:
                z[3::5, 1] += 9.0  # a choice outside the draft vocabulary
        documents.append(Document(x=x, m=mask, aux=aux, z=z))
    return documents


def lay_out(documents: Sequence[Document], rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Arguments of `eagle3_loss` for rows of the given documents; padding holds garbage."""

    def padding(shape: tuple[int, int]) -> dict[str, Tensor]:
        return {
            "aux_hidden_states": noise_of(*shape, LAYERS * WIDTH),
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "loss_mask": torch.zeros(shape, dtype=torch.bool),
            "logits": noise_of(*shape, VOCAB),
        }

    def slot(document: Document, t: int) -> dict[str, Any]:
        if t + 1 == len(document.x):
            return {"aux_hidden_states": document.aux[t], "logits": 0.0}
        values = {"input_ids": document.x[t + 1], "loss_mask": bool(document.m[t + 1])}
        return values | {"aux_hidden_states": document.aux[t], "logits": document.z[t + 1]}

    return shared.lay_out(documents, rows, padding, slot)
