"""The conformance vectors of MTP blocks; their form is the target itself."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spec_train.drafts.eagle.vectors import by_chain
from spec_train.drafts.kind_vectors import KindVectors, Reads, Recipe, SlowDraft, Twin, of_this_size
from spec_train.drafts.mtp import reference as slow


def _recipe(target: str, what: str) -> Recipe:
    """The block of a target, trained for three steps."""
    options = {"depth": 3, "norm_output": True}
    return Recipe(f"mtp-{target}", "mtp", f"MTP block of {what}", target, ("target",), options)


def _reference(draft: SlowDraft) -> slow.Config:
    given, sizes = draft.config, {**draft.sizes, **vars(draft.target)}
    return slow.Config(
        **sizes,
        head_weight=draft.head,
        norm_output=given.norm_output,
        states_first=given.states_first,
    )


def _swap_sides(draft: Any) -> None:
    draft.fc.weight.copy_(draft.fc.weight.roll(len(draft.fc.weight), 1))


def _swap_norms(draft: Any) -> None:
    draft.enorm, draft.hnorm = draft.hnorm, draft.enorm


def _stale_norm(draft: Any) -> None:
    draft.norm.weight.copy_(draft.hnorm.weight)


def _mistakes(config: Any) -> Iterator[Twin]:
    yield Twin(
        "carried-norm-output",
        "the state that is fed back: before the block's norm instead of after it",
        Reads(fields=(("norm_output", not config.norm_output),)),
    )
    swapped = "fc's two inputs, state and embedding, swapped"
    yield Twin("mtp-sides", swapped, edit=_swap_sides)
    yield Twin("mtp-norms", "the norms of state and embedding swapped", edit=_swap_norms)
    another = "another norm before the head than the block's own"
    yield Twin("mtp-norm", another, edit=_stale_norm)


def _wanted(draft: SlowDraft, last: Tensor, normed: Tensor) -> Tensor:
    """Of this state, the block's norm is the target's normed one."""
    return of_this_size(normed / draft.state["norm.weight"])


VECTORS = KindVectors(
    recipes=(
        _recipe("mimo", "MiMo: fc reads [state ; embedding]"),
        _recipe("qwen3_5", "Qwen3.5 and Qwen3-Next: norms of 1 + weight, gated attention"),
        _recipe("glm4_moe", "GLM-4.5, a dense layer"),
        _recipe("deepseek_v3", "DeepSeek-V3, latent attention and a dense layer"),
    ),
    reference=_reference,
    drafted=lambda draft, config, document, anchor, known, ids: by_chain(
        slow.chain, draft, config, document, anchor, known
    ),
    carried=_mistakes,
    wanted=_wanted,
    passes=3,
    own_norm=True,
)
