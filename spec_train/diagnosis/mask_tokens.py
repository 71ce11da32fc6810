"""Which mask tokens are worth trying with a draft.

A mask token is the id of an embedding row, and nothing else marks it: the row is the target's and
frozen, or the draft's own and trained. So the id decides what the draft computes in both cases. The
learned states of a P-EAGLE draft, `mask_hidden`, stand beside that row and do not replace it.

V target vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from spec_data.models.shapes import text_table
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import Draft
from spec_train.drafts.mask_token import usual_mask_tokens
from spec_train.head import TargetHead


def reads_mask_token(draft: Draft) -> bool:
    """Return whether a draft computes anything from its mask token.

    Only a P-EAGLE draft of one depth and a block of one slot do not; other kinds have none.
    """
    if getattr(draft.config, "mask_token_id", None) is None:
        return False
    return (draft.depth if draft.name == "peagle" else draft.config.block_size) > 1


def mask_tokens_to_try(
    draft: Draft, dataset: HiddenStatesDataset, head: TargetHead, counts: Tensor
) -> dict[int, str]:
    """Return ids that may be the mask token of a draft's training, and why; likeliest first.

    Empty for a draft that reads no mask token. Ids with the embedding of the declared one, or of an
    id before them, are left out: the draft computes the same with them.

    Args:
        draft: the draft.
        dataset: a dataset of its target, for the tokenizer.
        head: the target's embedding.
        counts: supervised tokens by id, int64 [V].
    """
    if not reads_mask_token(draft):
        return {}
    raw, config = dataset.target_config(), draft.config
    tables: dict[str, Any] = {**text_table(raw), **raw}
    theirs = head.embed_weight  # [V, H]
    usual = usual_mask_tokens(dataset.path / "target", tables, theirs, counts)
    own = draft.embed_tokens.weight.detach()  # [V, H]
    if config.train_embeddings and own.shape == theirs.shape:
        moved = (own.float() - theirs.to(own.device).float()).norm(dim=-1)  # [V]
        moved[counts.to(moved.device) > 0] = 0
        furthest = "of the tokens that no answer contains, the one that training changed most"
        usual = {int(moved.argmax()): furthest} | usual
    rows, found = [own[config.mask_token_id]], {}
    for token, why in usual.items():
        if not any(torch.equal(own[token], row) for row in rows):
            rows.append(own[token])
            found[token] = why
    return found
