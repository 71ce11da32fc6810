"""The loss masks that a policy gives the documents of a dataset, from the stored turns.

All that depends on them follows: how many tokens of a document are supervised, and the first one.
Hidden states are read as they are stored, so a mask that needs states that were not is refused.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from spec_data.shards.errors import DatasetError
from spec_data.shards.index import LossMasks
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import SUPERVISED, Manifest
from spec_data.shards.turn_masks import (
    FIRST,
    LAST_TURN,
    WITHOUT_REASONING,
    Turn,
    check_policy,
    is_policy,
    roles_of,
    supervised_spans,
)

logger = logging.getLogger(__name__)


def masks_under(
    dataset: HiddenStatesDataset, policy: str, bar: Callable[[range], Iterable[int]] = iter
) -> LossMasks:
    """Return the loss masks of all documents under a policy; their turns are read once.

    `bar` shows how far it is while it yields the numbers of documents.

    Raises:
        ConfigError: an unknown policy.
        DatasetError: the masks cannot be derived from what is stored.
    """
    check_policy(policy)
    _require_conversations(dataset, policy)
    manifest, wanted = dataset.manifest, f"{dataset.location}: --mask {policy}"
    stored_at = {"hidden.final": manifest.final, "target_argmax": manifest.teacher}
    sparse = [name for name, tokens in stored_at.items() if tokens == SUPERVISED]
    masks: list[np.ndarray] = []
    manifests = [manifest, *(source.manifest for source in dataset.sources)]
    longest = cut_lengths(manifests) if policy == LAST_TURN else []
    cut = 0
    roles: set[str] = set()
    lacking: list[int] = []
    for row in bar(range(len(dataset))):
        turns, stored = dataset.turns_of(row), dataset.mask_of(row)
        if any(not 0 <= start < end <= len(stored) for _, start, end in turns):
            shard, number = dataset.locate(row)
            raise DatasetError(
                f"{shard.where(number)}: turns outside its {len(stored)} tokens; copy "
                "this shard again"
            )
        roles |= {role for role, _, _ in turns}
        if is_policy(recorded := manifest.mask) and not np.array_equal(
            _mask(len(stored), turns, recorded), stored
        ):
            raise DatasetError(
                f"{dataset.location}: document {row}: its stored mask is not that of its turns "
                f"under --mask {recorded}, so --mask {policy} cannot be derived; generate the "
                "dataset again, or leave --mask out"
            )
        masks.append(_mask(len(stored), turns, policy))
        if manifest.documents.cut and len(stored) in longest:  # its last turn is cut, or gone
            masks[-1][:] = False
            cut += 1
        if sparse and (masks[-1] & ~stored)[1:].any():
            lacking.append(row)
    if policy == LAST_TURN and manifest.mask != LAST_TURN and manifest.documents.cut:
        _warn_of_cut(dataset, cut)
    if lacking:
        raise DatasetError(
            f"{wanted} supervises tokens of {len(lacking):,} documents (first: document "
            f"{lacking[0]}) that have no {' and '.join(sparse)}: they are stored only where the "
            f"mask of generation ({manifest.mask}) supervises the next token. Use a mask within "
            "that one, or generate with --final all --teacher all"
        )
    if absent := [role for role in roles_of(policy) if role not in roles]:
        raise DatasetError(
            f"{wanted}: no document has a turn of role {', '.join(absent)}; stored are turns of "
            f"{', '.join(sorted(roles)) or 'none'}. Turns of other roles are not stored: generate "
            "from rows of input_ids with the loss_mask that you want"
        )
    return LossMasks.of(masks)


def cut_lengths(manifests: Sequence[Manifest]) -> list[int]:
    """Return every --max-length at which documents of these datasets were cut, ascending."""
    settings = [m.settings for m in manifests]
    found = [s.get("max_lengths") or [s.get("max_length")] for s in settings]
    return sorted({length for lengths in found for length in lengths if length is not None})


def _warn_of_cut(dataset: HiddenStatesDataset, cut: int) -> None:
    """Say what --mask last-turn makes of documents that were cut, `cut` of which it leaves out."""
    others = dataset.manifest.documents.cut - cut
    logger.warning(
        "warning[last-turn]: %s: %s documents that were cut at --max-length are left out: their "
        "last turn is not complete%s",
        dataset.location,
        f"{cut:,}",
        f". Up to {others:,} others were cut before their last turn: there the last turn that is "
        "left is supervised"
        if others > 0
        else "",
    )


def _mask(length: int, turns: list[Turn], policy: str) -> np.ndarray:
    """Return the mask of a document of `length` tokens, bool [T]."""
    mask = np.zeros(length, bool)
    for start, end in supervised_spans(length, turns, policy):
        mask[start:end] = True
    return mask


def _require_conversations(dataset: HiddenStatesDataset, policy: str) -> None:
    """Refuse a policy that needs what the stored turns do not tell: where reasoning ends, or which
    turn of a conversation one is that was rendered turn by turn.
    """
    if policy == WITHOUT_REASONING != dataset.manifest.mask:
        raise DatasetError(
            f"{dataset.location}: --mask {policy} cannot be derived: its turns hold the reasoning "
            f"with the answer (generated with --mask {dataset.manifest.mask}); generate with "
            f"--mask {policy}"
        )
    if policy != LAST_TURN and not policy.startswith(FIRST):
        return
    counts = dataset.manifest.documents
    if single := counts.rendering.get("turn by turn", 0):
        advice = "generate with --mask last-turn" if policy == LAST_TURN else "use --mask assistant"
        raise DatasetError(
            f"{dataset.location}: --mask {policy} cannot be derived: {single:,} conversations were "
            "rendered turn by turn (the chat template rewrites history), each turn as a document "
            f"that does not say which turn it is; {advice}"
        )
