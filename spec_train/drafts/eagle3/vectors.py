"""The conformance vectors of EAGLE-3."""

from collections.abc import Iterator
from typing import Any

import torch

from spec_train.drafts.eagle3 import reference as slow
from spec_train.drafts.kind_vectors import Drafted, KindVectors, Recipe, SlowDraft, Twin
from spec_train.drafts.slow_layer import Document


def _recipe(
    name: str, what: str, options: dict[str, Any], vocabulary: int = 0, target: str = "llama"
) -> Recipe:
    options = {"intermediate_size": 256} | options
    return Recipe(name, "eagle3", what, target, ("vllm", "speculators"), options, vocabulary)


def _reference(draft: SlowDraft) -> slow.Config:
    given = draft.config
    return slow.Config(
        **draft.sizes,
        norm_before_residual=given.norm_before_residual,
        norm_output=given.norm_output,
        steps=draft.depth,
    )


def _drafted(
    draft: SlowDraft, config: slow.Config, document: Document, at: int, known: bool, ids: list[int]
) -> Drafted:
    form = "known" if known else "own"
    found = slow.unrolled(draft.state, config, document.x, document.aux, form, ids)
    logits = [found[at - 1, s][0] for s in range(draft.depth)]
    return Drafted([ids[int(z.argmax())] for z in logits], torch.stack(logits))


def residual_norm(config: Any) -> Iterator[Twin]:
    """Yield the mistake in what the first layer of EAGLE-3 and P-EAGLE adds to."""
    flip = {"norm_before_residual": not config.norm_before_residual}
    yield Twin("carried-norm-residual", "norm_before_residual read as its opposite", config=flip)


def _mistakes(config: Any) -> Iterator[Twin]:
    yield from residual_norm(config)
    meaning = "norm_output read as its opposite: what is fed back is normed, or is not"
    yield Twin("carried-norm-output", meaning, config={"norm_output": not config.norm_output})


VECTORS = KindVectors(
    recipes=(
        _recipe(
            *("eagle3", "EAGLE-3, reduced vocabulary"),
            {"ttt_steps": 4, "norm_before_fc": False},
            vocabulary=96,
        ),
        _recipe(
            *("eagle3-full", "EAGLE-3, all tokens, norms before fc and residual"),
            {"ttt_steps": 4, "norm_before_residual": True},
            target="qwen3",
        ),
        _recipe(
            *("eagle31", "EAGLE-3.1 (norms of each layer, and of what is fed back)"),
            {"ttt_steps": 4, "fc_norm": True, "norm_output": True},
            vocabulary=96,
        ),
    ),
    reference=_reference,
    drafted=_drafted,
    carried=_mistakes,
    passes=3,
    own_head=True,
)
