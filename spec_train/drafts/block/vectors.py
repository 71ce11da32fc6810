"""What conformance vectors of all block drafts share: reference, drafting, mistakes of slots."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.block import reference as blocks
from spec_train.drafts.kind_vectors import Drafted, KindVectors, Reads, Recipe, SlowDraft, Twin
from spec_train.drafts.slow_layer import Document

DEEP = {"num_layers": 2, "block_size": 5}


def block_recipe(
    name: str, kind: str, what: str, forms: str, options: dict[str, Any], vocabulary: int = 0
) -> Recipe:
    """Return a recipe of a block draft, of one layer if its options name no other number."""
    options = {"intermediate_size": 256, "num_layers": 1} | options
    return Recipe(name, kind, what, "qwen3", tuple(forms.split()), options, vocabulary)


def block_vectors(*recipes: Recipe, **own: Any) -> KindVectors:
    """Return the vectors of a kind of block draft, which says what it has of its `own`."""
    shared = {"reference": block_reference, "drafted": by_block, "slots": slot_mistakes}
    return KindVectors(recipes=recipes, **shared | own)


def block_reference(draft: SlowDraft, **own: Any) -> blocks.Config:
    """Return the configuration of the slow reference, with fields of a stage of its `own`."""
    given = draft.config
    ids = slow.draft_ids(draft.state, given.draft_vocab_size)
    return blocks.Config(
        **draft.sizes,
        mask_token_id=given.mask_token_id,
        head_rows=draft.state.get("lm_head.weight", draft.head[ids]),
        block_size=given.block_size,
        sample_from_anchor=given.sample_from_anchor,
        non_causal=given.sliding_window_non_causal,
        **own,
    )


def by_block(
    draft: SlowDraft,
    config: blocks.Config,
    document: Document,
    anchor: int,
    known: bool,
    ids: list[int],
) -> Drafted:
    """Draft with a block whose slots choose from their logits."""
    here = (draft.state, config, document, anchor)
    logits = blocks.block_logits(*here, own=not known, ids=ids)[0][: draft.depth]
    return Drafted([ids[int(z.argmax())] for z in logits], torch.stack(logits))


def by_stage(
    stage: Any, draft: SlowDraft, config: blocks.Config, document: Document, at: int, known: bool
) -> Drafted:
    """Draft with a second stage that chooses among the candidates of every slot."""
    states = blocks.block_states(draft.state, config, document, at)
    unary, _ = blocks.block_logits(draft.state, config, document, at, own=not known, states=states)
    x = list(document.x) if known else list(document.x)[: at + 1]
    block = stage(draft.state, config, dataclasses.replace(document, x=x), at, states)
    tokens, logits = [], []
    for d, z in enumerate(unary[: draft.depth]):
        candidates = block.candidates(z)
        scores = block.scores(d, z, candidates)
        tokens.append(candidates[int(scores.argmax())])
        logits.append(torch.full_like(z, -1e4).index_put((torch.tensor(candidates),), scores))
        if not known:
            x.append(tokens[-1])
    return Drafted(tokens, torch.stack(logits))


def slot_mistakes(config: Any) -> Iterator[Twin]:
    """Yield the mistakes in the slots of a block: where drafts are taken from, what slots see."""
    anchor = config.sample_from_anchor
    where = "after: the anchor's drafts nothing" if anchor else "before: the anchor's drafts"
    other = (("sample_from_anchor", not anchor), ("block_size", config.block_size + anchor))
    yield Twin("slot-layout", f"drafts taken from the slot {where}", Reads(fields=other))
    yield from window_mistakes(config)


def window_mistakes(config: Any) -> Iterator[Twin]:
    """Yield them of a stage that has tables of as many slots as its block, none for one more."""
    causal = "slots see only earlier slots of their block"
    if not config.layer_types:
        endless = (("windows", (config.vocab_size,) * config.num_hidden_layers),)
        yield Twin("window-causal", causal, Reads(fields=endless))
        return
    meaning = "the window counted from the position before: its own is not counted"
    yield Twin("window+1", meaning, config={"sliding_window": config.sliding_window + 1})
    flip = {"sliding_window_non_causal": not config.sliding_window_non_causal}
    yield Twin("window-causal", f"{causal}, in layers with a window", config=flip)
