"""The conformance vectors of P-EAGLE."""

import torch

from spec_train.drafts.eagle3.vectors import residual_norm
from spec_train.drafts.kind_vectors import Drafted, KindVectors, Recipe, SlowDraft
from spec_train.drafts.peagle import reference as slow
from spec_train.drafts.slow_layer import Document


def _reference(draft: SlowDraft) -> slow.Config:
    given = draft.config
    return slow.Config(
        **draft.sizes,
        norm_before_residual=given.norm_before_residual,
        mask_token_id=given.mask_token_id,
        depths=draft.depth,
    )


def _drafted(
    draft: SlowDraft, config: slow.Config, document: Document, at: int, known: bool, ids: list[int]
) -> Drafted:
    known_only = Document(x=document.x[: at + 1], aux=document.aux)
    made = slow.reference_logits(draft.state, config, known_only, [at], draft.depth)
    logits = [made[at, d] for d in range(draft.depth)]
    return Drafted([ids[int(z.argmax())] for z in logits], torch.stack(logits))


VECTORS = KindVectors(
    recipes=(
        Recipe(
            *("peagle", "peagle", "P-EAGLE of two layers, reduced vocabulary", "llama"),
            *(("vllm", "speculators"), {"intermediate_size": 256, "depths": 4, "num_layers": 2}),
            vocabulary=96,
        ),
    ),
    reference=_reference,
    drafted=_drafted,
    carried=residual_norm,
    own_head=True,
)
