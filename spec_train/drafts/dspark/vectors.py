"""The conformance vectors of DSpark."""

from spec_train.drafts.block import reference as slow
from spec_train.drafts.block.vectors import block_recipe, block_reference, block_vectors
from spec_train.drafts.kind_vectors import Recipe, SlowDraft


def _markov(head: str) -> Recipe:
    name, what = f"dspark-{head}", f"DSpark, {head} Markov head"
    options = {"block_size": 4, "markov_rank": 8, "markov_head_type": head}
    return block_recipe(name, "dspark", what, "sglang speculators deepspec", options)


def _reference(draft: SlowDraft) -> slow.Config:
    given = draft.config
    return block_reference(
        draft,
        kind=given.markov_head_type if given.markov_rank else "none",
        confidence_reads_markov=given.confidence_head_with_markov,
    )


VECTORS = block_vectors(
    block_recipe(
        *("dspark", "dspark", "DSpark of two layers, anchor layout, vanilla Markov head"),
        "vllm speculators deepspec",
        {"num_layers": 2, "block_size": 4, "markov_rank": 8},
    ),
    block_recipe(
        *("dspark-mask", "dspark", "DSpark, mask layout, reduced vocabulary", "vllm speculators"),
        {"block_size": 5, "markov_rank": 8, "layout": "mask"},
        vocabulary=96,
    ),
    _markov("gated"),
    _markov("rnn"),
    reference=_reference,
)
