"""Drafts, documents and samples for comparing the P-EAGLE loss with its slow reference."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec_train.drafts.peagle.draft import PeagleConfig, PeagleDraft
from spec_train.options.draft_options import PeagleOptions
from tests.spec_train.drafts.eagle3.cases import DRAFT_IDS, LAYERS, VOCAB, WIDTH, lay_out
from tests.spec_train.drafts.eagle3.reference import Document
from tests.spec_train.drafts.peagle.reference import (
    Element,
    Reference,
    ReferenceConfig,
    reference_cod,
    reference_logits,
    reference_loss,
    slot_counts,
)
from tests.spec_train.drafts.shared import (
    randomize,
    reference_sizes,
    reference_state,
    small_target,
    windows_of,
)
from tests.spec_train.drafts.slot_loss import KL, SlotLoss
from tests.spec_train.drafts.slow_layer import Shape

DEPTHS, MASK_TOKEN = 4, 11

MASKS = [
    [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],  # a chat of two turns
    [1],
    [0, 1],
    [1, 1],
    [1, 1, 1],
    [0, 1, 1],
    [0, 0, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0],  # gaps inside an answer
    [0, 0, 0, 0, 0],  # nothing supervised
    [1] * 12,
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of the draft and its loss."""

    reduced: bool = True
    fc_norm: bool = False
    heads: int = 4
    kv_heads: int = 2
    depths: int = DEPTHS
    layers: int = 3
    ratio: float = 0.9
    floor: float = 0.2
    loss: SlotLoss = KL
    window: int = 0
    types: str = "auto"
    shape: Shape = ()

    def target_config(self) -> dict[str, object]:
        return small_target(12, self.heads, self.kv_heads)


def make_draft(case: Case, **options: object) -> PeagleDraft:
    """Return a random float64 draft with weights so large that every term matters."""
    chosen = PeagleOptions(
        depths=case.depths,
        num_layers=case.layers,
        cod_ratio=case.ratio,
        fc_norm=case.fc_norm,
        loss=case.loss.name,
        loss_target="hard" if case.loss.hard else "soft",
        position_weights=",".join(map(str, case.loss.weights)) or "auto",
        sliding_window=case.window,
        layer_types=case.types,
        **(dict(case.shape) | options),
    )
    config = PeagleConfig.from_target(
        case.target_config(),
        layers=(1, 3, 4),
        vocab_size=VOCAB,
        draft_vocab_size=len(DRAFT_IDS) if case.reduced else VOCAB,
        options=chosen,
        mask_token_id=MASK_TOKEN,
    )
    draft = PeagleDraft(replace(config, target_hidden_size=WIDTH), chosen).double()
    if case.reduced:
        draft.set_vocabulary(torch.tensor(DRAFT_IDS))
    randomize(draft)
    return draft


def reference_config(case: Case) -> ReferenceConfig:
    """Return the setting for the reference; frequencies come from the target's rotary code."""
    shape = dict(case.shape)
    sizes = reference_sizes(case.target_config(), case.shape, case.heads, case.kv_heads)
    return ReferenceConfig(
        **sizes,
        norm_before_residual=shape.get("norm_before_residual", False),
        layers=case.layers,
        windows=windows_of(case.types, case.window, case.layers),
        mask_token_id=MASK_TOKEN,
        depths=case.depths,
        loss=case.loss,
    )


def make_samples(case: Case, masks: Sequence[Sequence[int]], seed: int = 0) -> list[list[Element]]:
    """Return samples for documents with these loss masks, drawn by plain loops."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for mask in masks:
        supervised = [slot_counts(mask, t) for t in range(len(mask))]
        u = torch.rand(case.depths - 1, len(mask), generator=generator).tolist()
        samples.append(reference_cod(supervised, u, case.ratio, case.floor))
    return samples


def make_documents(
    case: Case, draft: PeagleDraft, masks: Sequence[Sequence[int]], seed: int = 0
) -> list[Document]:
    """Return random documents with these loss masks; the teacher often agrees with the draft."""
    generator = torch.Generator().manual_seed(seed)
    config, state = reference_config(case), reference_state(draft)
    documents = []
    for mask in masks:
        length = len(mask)
        document = Document(
            x=torch.randint(VOCAB, (length,), generator=generator).tolist(),
            m=mask,
            aux=torch.randn(length, LAYERS * WIDTH, generator=generator, dtype=torch.float64),
            z=torch.randn(length, VOCAB, generator=generator, dtype=torch.float64),
        )
        every = [(t, d) for d in range(case.depths) for t in range(length - 1 - d)]
        with torch.no_grad():
            for (t, d), logits in reference_logits(state, config, document, every).items():
                if (t + d) % case.depths == d:  # each teacher agrees with one depth
                    document.z[t + 1 + d, draft.draft_ids] += 5.0 * logits
            if case.reduced:
                document.z[3::5, 1] += 9.0  # a choice outside the draft vocabulary
        documents.append(document)
    return documents


def lay_out_all(
    documents: Sequence[Document],
    samples: Sequence[Sequence[Element]],
    rows: Sequence[Sequence[int]],
    depths: int,
) -> dict[str, Tensor]:
    """Arguments of `peagle_loss` for rows of the given documents; padding holds garbage."""
    out = lay_out(documents, rows)
    sample = torch.zeros(len(rows), depths, out["input_ids"].shape[1], dtype=torch.bool)
    for b, row in enumerate(rows):
        start = 0
        for i in row:
            for t, d in samples[i]:
                sample[b, d, start + t] = True
            start += len(documents[i].x)
    return out | {"sample": sample}


@functools.cache
def expectation(
    case: Case,
) -> tuple[list[Document], list[list[Element]], dict[str, Tensor], Reference]:
    """Return the documents of `MASKS`, samples, the reference's weights and gradients, its sums."""
    draft = make_draft(case)
    documents, samples = make_documents(case, draft, MASKS), make_samples(case, MASKS)
    state = reference_state(draft)
    expected = reference_loss(state, reference_config(case), documents, samples)
    expected.loss.backward()
    expected.loss = expected.loss.detach()  # kept for the session: without its graph
    return documents, samples, state, expected
