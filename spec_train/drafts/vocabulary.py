"""Which tokens a draft can propose: chosen for a new draft, or fewer for a trained one.

V / Vd target / draft vocabulary, H hidden size.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.formats.vocabulary_maps import ROWS, read_vocabulary
from spec_train.losses.head import choose_draft_vocabulary, smallest_vocabulary
from spec_train.options.vocabulary_options import VocabularyChoice

log = logging.getLogger(__name__)

_HEAD = ROWS[0]


def choose_vocabulary(
    options: VocabularyChoice, vocab: int, counts: Tensor | None, special: Sequence[int] = ()
) -> Tensor | None:
    """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all V tokens.

    Args:
        options: see `vocabulary_options`.
        vocab: V.
        counts: how often each token is a supervised token, int64 [V]; a file needs none.
        special: ids of special tokens; a chosen vocabulary has them all.

    Raises:
        DraftError: counts are needed and missing, the size is too small, or the file is not of this
            target.
    """
    size = options.draft_vocab_size or 0
    if options.draft_vocab is not None:
        chosen = read_vocabulary(options.draft_vocab, vocab)
        missing = sorted({i for i in special if 0 <= i < vocab} - set(chosen.tolist()))
        if missing:
            log.warning(
                "warning: --draft-vocab %s lacks the special tokens %s: the draft can never "
                "propose them, so it never drafts the end of a turn if it is among them",
                *(options.draft_vocab, missing),
            )
    elif options.draft_vocab_coverage is None and not 0 < size < vocab:
        return None
    elif counts is None:
        raise DraftError("a draft vocabulary smaller than the target's needs token_counts")
    elif options.draft_vocab_coverage is not None:
        chosen = smallest_vocabulary(counts, options.draft_vocab_coverage, special)
    else:
        chosen = choose_draft_vocabulary(counts, size, special)
    return None if len(chosen) == vocab else chosen


def require_vocabulary(draft: Any) -> None:
    """Refuse a draft that has no vocabulary of its own.

    Raises:
        DraftError: it is an EAGLE-1/2 draft.
    """
    if not hasattr(draft, "draft_index"):
        raise DraftError(
            f"{draft.name} drafts use the target's head and propose every token; they have no "
            "vocabulary to prune"
        )


@torch.no_grad()
def prune(draft: Any, ids: Tensor, head: Tensor | None = None) -> Any:
    """Return a copy of a draft that can propose only the tokens `ids`.

    Its logits are those of the draft at these tokens, bit for bit: the rows of its head, of the
    Markov head and of the map are selected, and nothing else changes.

    Args:
        draft: a draft with a vocabulary: every kind but EAGLE-1/2.
        ids: target ids, int64 [Vd], ascending.
        head: the target's LM head [V, H], for drafts that use it as their own (DSpark and DFlash
            with the full vocabulary).

    Raises:
        DraftError: the draft cannot propose all of `ids`, it has no head of its own, or `head` is
            missing.
    """
    require_vocabulary(draft)
    rows = draft.draft_index[ids.to(draft.draft_index.device)]
    unknown = int((rows < 0).sum())
    if unknown:
        raise DraftError(
            f"{unknown} of the {len(ids)} tokens are not among the {draft.config.draft_vocab_size} "
            "that the draft can propose; a trained draft can only lose tokens"
        )
    config = dataclasses.replace(draft.config, draft_vocab_size=len(ids))
    options = dataclasses.replace(draft.options, draft_vocab_size=len(ids), **_UNSET)
    smaller = type(draft)(config, options)
    tensors = dict(draft.state_dict())
    if _HEAD not in tensors and _HEAD in smaller.state_dict():
        if head is None:
            raise DraftError(
                f"this {draft.name} draft uses the target's LM head, of which the pruned one keeps "
                "rows; pass --data or --target, which have it"
            )
        tensors[_HEAD] = head.to(draft.fc.weight.dtype)
    for name in ROWS:
        if name in tensors:
            tensors[name] = tensors[name][rows.to(tensors[name].device)]
    smaller.to(draft.fc.weight.device, draft.fc.weight.dtype)
    smaller.load_state_dict(tensors)
    if not smaller.full_vocabulary:
        smaller.set_vocabulary(ids)
    return smaller.train(draft.training)


_UNSET = dict.fromkeys(("draft_vocab", "draft_vocab_coverage", "draft_vocab_from"))
