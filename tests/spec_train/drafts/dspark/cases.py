"""Drafts, documents and layouts for comparing the DSpark loss with its slow reference.

Only plain loops: the code that lays out documents for the fast function must not share its code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import HeadSpec
from spec_train.drafts.dspark.draft import DFlashDraft, DSparkDraft
from spec_train.drafts.dspark.model import DSparkConfig
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DFlashOptions, DSparkOptions
from tests.spec_train.drafts import shared
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.drafts.dspark.reference import Document, ReferenceConfig, block_logits
from tests.spec_train.drafts.shared import (
    noise_of,
    randomize,
    reference_sizes,
    reference_state,
    small_target,
    windows_of,
)
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


def build(dataset: HiddenStatesDataset, head: TargetHead, name: str, **changes: Any) -> Any:
    """Return a fresh block draft for a dataset."""
    small = {"block_size": 4, "mask_token_id": 3} | ({"markov_rank": 8} if name == "dspark" else {})
    return build_draft(name, dataset, head, **small | changes)


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
    randomize(draft.double(), seed)
    draft.adopt(make_head())
    return draft


def make_head() -> TargetHead:
    """Return the target's embedding and head; every call returns the same."""
    generator = torch.Generator().manual_seed(7)
    embed, head = torch.randn(2, VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False)
    return TargetHead(spec, embed, 0.5 * head)


def reference_config(case: Case) -> ReferenceConfig:
    """Return the setting for the reference."""
    options = case.options()
    return ReferenceConfig(
        **reference_sizes(TARGET, case.shape, 4, 2),
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

    def padding(shape: tuple[int, int]) -> dict[str, Tensor]:
        return {
            "aux_hidden_states": noise_of(*shape, LAYERS * WIDTH),
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "loss_mask": torch.ones(shape, dtype=torch.bool),
            "logits": noise_of(*shape, VOCAB),
        }

    def slot(document: Document, t: int) -> dict[str, Any]:
        values = {"input_ids": document.x[t], "loss_mask": bool(document.m[t])}
        return values | {"aux_hidden_states": document.aux[t], "logits": document.z[t]}

    out = shared.lay_out(documents, rows, padding, slot)
    slots: list[list[int]] = []
    for row in rows:
        start = 0
        slots.append([])
        for d in row:
            slots[-1] += [start + a for a in anchors[d]]
            start += len(documents[d].x)
    most = max(map(len, slots)) + 1  # one more block than any row needs
    out["anchors"] = torch.tensor([p + [0] * (most - len(p)) for p in slots])
    out["kept"] = torch.tensor([[n < len(p) for n in range(most)] for p in slots])
    return out
