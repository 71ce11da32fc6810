"""Drafts, documents and layouts for comparing the DSpark loss with its slow reference.

Only plain loops: the code that lays out documents for the fast function must not share its code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_data.shards.schema import HeadSpec
from spec_train.drafts.dspark.draft import DFlashDraft, DSparkDraft
from spec_train.drafts.dspark.model import DSparkConfig
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DFlashOptions, DSparkOptions
from tests.spec_train.drafts.dspark.reference import Document, ReferenceConfig, block_logits
from tests.spec_train.drafts.shared import reference_state, small_target, windows_of
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import Shape

HIDDEN, WIDTH, LAYERS, VOCAB, MASK = 12, 10, 3, 14, 13
DRAFT_IDS = [0, 2, 3, 5, 6, 7, 9, 10, 12]
TARGET = small_target(HIDDEN, 4, 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting of the draft and its loss."""

    kind: str = "vanilla"  # none, vanilla, gated, rnn
    confidence: bool = True
    confidence_reads_markov: bool = True
    layout: str = "anchor"
    reduced: bool = False
    block_size: int = 4
    draft_layers: int = 2
    loss: SlotLoss | None = None
    against: str = "auto"
    weights: tuple[float, ...] = ()
    dflash: bool = False
    window: int = 0
    types: str = "auto"
    non_causal: bool = False
    shape: Shape = ()

    def options(self) -> Any:
        common: dict[str, Any] = {
            **dict(self.shape),
            "num_layers": self.draft_layers,
            "block_size": self.block_size,
            "layout": self.layout,
            "loss_target": self.against,
            "mask_token_id": MASK,
            "sliding_window": self.window,
            "layer_types": self.types,
            "sliding_window_non_causal": self.non_causal,
        }
        if self.loss is not None:
            common["loss"] = self.loss.name
        if self.weights:
            common["position_weights"] = ",".join(map(str, self.weights))
        if self.dflash:
            return DFlashOptions(**common)
        return DSparkOptions(
            **common,
            markov_rank=0 if self.kind == "none" else 5,
            markov_head_type="vanilla" if self.kind == "none" else self.kind,
            confidence_weight=1.0 if self.confidence else 0.0,
            confidence_head_with_markov=self.confidence_reads_markov,
        )


def make_draft(case: Case, seed: int = 0, rope: dict[str, Any] | None = None) -> DSparkDraft:
    """Return a random draft with weights so large that every term matters."""
    options = case.options()
    config = DSparkConfig.from_target(
        TARGET if rope is None else TARGET | {"rope_parameters": rope},
        layers=(1, 3, 4),
        vocab_size=VOCAB,
        draft_vocab_size=len(DRAFT_IDS) if case.reduced else VOCAB,
        mask_token_id=MASK,
        options=options,
        dtype="float32",
    )
    config = replace(config, target_hidden_size=WIDTH)
    draft = (DFlashDraft if case.dflash else DSparkDraft)(config, options)
    if case.reduced:
        draft.set_vocabulary(torch.tensor(DRAFT_IDS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * scale + ("norm" in name))
    draft.double().adopt(make_head())
    return draft


def make_head() -> TargetHead:
    """Return the target's embedding and head; every call returns the same."""
    generator = torch.Generator().manual_seed(7)
    embed, head = torch.randn(2, VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False)
    return TargetHead(spec, embed, 0.5 * head)


def reference_config(case: Case) -> ReferenceConfig:
    """Return the setting for the reference; frequencies come from the target's rotary code."""
    shape = dict(case.shape)
    fields = TARGET | {k: v for k, v in shape.items() if k == "head_dim"}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**fields))
    options = case.options()
    return ReferenceConfig(
        heads=shape.get("num_attention_heads", 4),
        kv_heads=shape.get("num_key_value_heads", 2),
        head_dim=shape.get("head_dim", 6),
        act=shape.get("hidden_act", "silu"),
        rms_norm_eps=1e-5,
        rope_inv_freq=rotary.inv_freq,
        block_size=case.block_size,
        mask_token_id=MASK,
        sample_from_anchor=case.layout == "anchor",
        windows=windows_of(case.types, case.window, case.draft_layers),
        non_causal=case.non_causal,
        kind="none" if case.dflash else case.kind,
        confidence=case.confidence and not case.dflash,
        confidence_reads_markov=case.confidence_reads_markov,
        gamma=options.loss_decay_gamma,
        ce_weight=options.ce_weight,
        l1_weight=options.l1_weight,
        confidence_weight=options.confidence_weight,
        ce_target="teacher" if options.compared_with == "soft" else "tokens",
        loss=case.loss,
        against=options.compared_with,
        weights=case.weights,
    )


def make_documents(
    case: Case, draft: DSparkDraft, masks: Sequence[Sequence[int]], seed: int = 0
) -> list[Document]:
    """Return random documents with these loss masks; the teacher often agrees with the draft."""
    generator = torch.Generator().manual_seed(seed)
    config, state, head = reference_config(case), reference_state(draft), make_head()
    ids = draft.draft_ids
    documents = []
    for mask in masks:
        length = len(mask)
        x = torch.randint(VOCAB - 1, (length,), generator=generator).tolist()
        aux = torch.randn(length, LAYERS * WIDTH, generator=generator, dtype=torch.float64)
        z = torch.randn(length, VOCAB, generator=generator, dtype=torch.float64)
        document = Document(x=x, m=mask, aux=aux, z=z)
        with torch.no_grad():
            for anchor in range(1, length, 3):
                logits, _ = block_logits(state, head.head_weight, config, document, anchor)
                for d, values in enumerate(logits):
                    z[anchor + d, ids] += 2.0 * values / (d + 1)
        if case.reduced:
            z[3::5, 1] += 9.0  # a choice outside the draft vocabulary
        documents.append(document)
    return documents


def lay_out(
    documents: Sequence[Document],
    rows: Sequence[Sequence[int]],
    anchors: Sequence[Sequence[int]],
) -> dict[str, Tensor]:
    """Arguments of `dspark_loss` for rows of the given documents; padding holds garbage.

    `anchors[d]` are the anchors of document d, as positions of that document.
    """
    width = max(sum(len(documents[d].x) for d in row) for row in rows) + 2
    shape = (len(rows), width)
    generator = torch.Generator().manual_seed(99)
    out = {
        "aux_hidden_states": torch.randn(
            *shape, LAYERS * WIDTH, generator=generator, dtype=torch.float64
        ),
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.ones(shape, dtype=torch.bool),
        "logits": torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64),
        "document_ids": torch.full(shape, -1),
        "position_ids": torch.zeros(shape, dtype=torch.long),
    }
    places: list[list[int]] = []
    for b, row in enumerate(rows):
        start = 0
        places.append([])
        for number, d in enumerate(row):
            document = documents[d]
            places[b] += [start + a for a in anchors[d]]
            for t in range(len(document.x)):
                slot = start + t
                out["aux_hidden_states"][b, slot] = document.aux[t]
                out["document_ids"][b, slot] = number
                out["position_ids"][b, slot] = t
                out["input_ids"][b, slot] = document.x[t]
                out["loss_mask"][b, slot] = bool(document.m[t])
                out["logits"][b, slot] = document.z[t]
            start += len(document.x)
    most = max(map(len, places)) + 1  # one more block than any row needs
    out["anchors"] = torch.tensor([p + [0] * (most - len(p)) for p in places])
    out["kept"] = torch.tensor([[n < len(p) for n in range(most)] for p in places])
    return out
