"""Which tokens a new draft can propose. V / Vd target / draft vocabulary."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.formats.vocabulary_maps import read_vocabulary
from spec_train.options.draft_options import VocabularyOptions, WholeVocabulary

log = logging.getLogger(__name__)


def choose_vocabulary(
    options: VocabularyOptions | WholeVocabulary,
    vocab: int,
    counts: Tensor | None,
    special: Sequence[int] = (),
) -> Tensor | None:
    """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all V tokens.

    `counts` are how often each token is a supervised token, int64 [V]; a file needs none. A chosen
    vocabulary has all `special` tokens.

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
                "warning[vocabulary]: --draft-vocab %s lacks the special tokens %s: the draft "
                "can never propose them, so it never drafts the end of a turn if it is among them",
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


def _ranked(counts: Tensor, special: Sequence[int]) -> tuple[Tensor, int]:
    """Return all ids, special ones first, then by falling count, and the number of special ones.

    Ties go to the lower id; special ids outside 0..V-1 are ignored.
    """
    first = sorted({i for i in special if 0 <= i < counts.numel()})
    rank = counts.detach().to("cpu", torch.int64).clone()
    rank[first] = torch.iinfo(torch.int64).max
    return torch.argsort(rank, descending=True, stable=True), len(first)


def choose_draft_vocabulary(counts: Tensor, size: int, special_ids: Sequence[int] = ()) -> Tensor:
    """Choose the target ids of a draft vocabulary: int64 [size], ascending.

    Args:
        counts: how often each target token is a supervised token, int64 [V].
        size: Vd, 1..V.
        special_ids: ids that are always chosen; the others are the most frequent ones.

    Raises:
        DraftError: `size` is not in 1..V, or too small for the special tokens.
    """
    vocab = counts.numel()
    if not 0 < size <= vocab:
        raise DraftError(f"draft vocabulary of {size}: the target's vocabulary has {vocab} tokens")
    ranked, special = _ranked(counts, special_ids)
    if size < special:
        raise DraftError(
            f"draft vocabulary of {size} cannot hold the {special} special tokens; raise it"
        )
    return ranked[:size].sort().values


def smallest_vocabulary(counts: Tensor, share: float, special_ids: Sequence[int] = ()) -> Tensor:
    """Choose the smallest draft vocabulary that holds a share of the supervised tokens.

    The arguments and the result are those of `choose_draft_vocabulary`; `share` is above 0 and at
    most 1.

    Raises:
        DraftError: there is no supervised token.
    """
    total = int(counts.sum())
    if not total:
        raise DraftError("there is no supervised token, so no draft vocabulary can cover any")
    ranked, special = _ranked(counts, special_ids)
    # the least count that is at least the share; a product in floats may be above a whole number
    needed = min(math.ceil(share * total - 1e-9 * total), total)
    covered = counts.detach().cpu()[ranked].cumsum(0)  # [V], by 1, 2, ... tokens
    size = max(int((covered < needed).sum()) + 1, special)
    return ranked[:size].sort().values


def vocabulary_coverage(
    counts: Tensor, chosen: Tensor, special_ids: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the share of supervised tokens inside a draft vocabulary, and the best such share.

    The second is that of the vocabulary of the same size which `choose_draft_vocabulary` chooses
    for these counts. Both are 1 if there is no supervised token. `chosen` is int64 [Vd].
    """
    total = int(counts.sum())
    if not total:
        return 1.0, 1.0
    # a vocabulary of a file may be too small for the special tokens
    fitting = special_ids if len(chosen) >= len(set(special_ids)) else ()
    best = choose_draft_vocabulary(counts, len(chosen), fitting)
    return int(counts[chosen.cpu()].sum()) / total, int(counts[best].sum()) / total
