"""The conformance vectors of EAGLE-1/2."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_train.drafts.eagle import reference as slow
from spec_train.drafts.kind_vectors import Drafted, KindVectors, Recipe, SlowDraft
from spec_train.drafts.slow_layer import Document


class Chain(Protocol):
    """`chain` of the slow reference of drafts that predict states."""

    def __call__(
        self,
        state: Any,
        config: Any,
        document: Document,
        t: int,
        known: Sequence[int] | None,
        steps: int,
    ) -> list[Tensor]: ...


def by_chain(
    chain: Chain, draft: SlowDraft, config: slow.Config, document: Document, at: int, known: bool
) -> Drafted:
    """Draft greedily after the anchor `at` with a chain of predicted states."""
    after = document.x[at + 1 :] if known else None
    states = chain(draft.state, config, document, at - 1, after, draft.depth)
    logits = [slow.head(config, x) for x in states]
    return Drafted([int(z.argmax()) for z in logits], torch.stack(logits), states)


VECTORS = KindVectors(
    recipes=(
        Recipe(
            *("eagle", "eagle", "EAGLE-1/2", "llama", ("vllm", "sglang")),
            {"intermediate_size": 256, "depth": 3},
        ),
    ),
    reference=lambda draft: slow.Config(**draft.sizes, head_weight=draft.head),
    drafted=lambda draft, config, document, anchor, known, ids: by_chain(
        slow.chain, draft, config, document, anchor, known
    ),
    wanted=lambda draft, last, normed: normed,
    passes=3,
)
