"""A dataset under another mask policy than the one that it was generated with (`--mask`).

The masks are computed from the stored turns (see `spec_data.shards.turn_masks`). All that depends
on them follows: how many tokens of a document are supervised, the first one, and every mask that is
read. States are read as they are stored, so a mask is refused if it needs states that were not.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.checking import FIRST
from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import SUPERVISED, Manifest
from spec_data.shards.shard import CodedRows
from spec_data.shards.turn_masks import (
    LAST_TURN,
    Turn,
    check_policy,
    needs_whole_conversations,
    roles_of,
    supervised_spans,
)
from spec_data.terminal.progress import progress

log = logging.getLogger(__name__)

_MASK = "loss_mask"


def open_with_mask(
    path: str | Path,
    policy: str | None,
    columns: Sequence[str] | None = None,
    check: str = FIRST,
) -> HiddenStatesDataset:
    """Open a dataset with the masks of a policy; None, or its own policy: as it is stored.

    Raises:
        MissingError, DatasetError: it cannot be read, or the masks cannot be derived from it.
        ConfigError: an unknown policy.
    """
    stored = HiddenStatesDataset(path, columns, check)
    if policy is None or policy == stored.manifest.mask:
        return stored
    return PolicyDataset(path, policy, columns, check)


class PolicyDataset(HiddenStatesDataset):
    """A sealed dataset whose masks are those of `policy`.

    Attributes:
        policy: see `spec_data.shards.turn_masks`.
    """

    def __init__(
        self,
        path: str | Path,
        policy: str,
        columns: Sequence[str] | None = None,
        check: str = FIRST,
    ) -> None:
        """Open `path`; `columns` and `check` are as for HiddenStatesDataset.

        Raises:
            As `open_with_mask`.
        """
        super().__init__(path, columns, check)
        self.policy = check_policy(policy)
        _require_conversations(self.manifest, policy)
        self._spans  # noqa: B018 (what cannot be derived is refused here)

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return self._spans[1]

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return self._spans[2]

    def mask_of(self, index: int) -> np.ndarray:
        """Return the mask of a document, bool [T]."""
        index = range(len(self))[index]
        mask = np.zeros(int(self.lengths[index]), dtype=bool)
        for start, end in self._spans_of(index):
            mask[start:end] = True
        return mask

    def _spans_of(self, index: int) -> list[list[int]]:
        offsets, spans = self._spans[0], self._spans[3]
        return spans[offsets[index] : offsets[index + 1]].tolist()

    def _document(self, index: int) -> dict[str, Any]:
        """Return a document as HiddenStatesDataset does, with the mask of the policy."""
        row = super()._document(index)
        if _MASK in row:
            row[_MASK] = torch.from_numpy(self.mask_of(index)).to(row[_MASK].dtype)
        return row

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
    ) -> int:
        """Copy a document as HiddenStatesDataset does, with the mask of the policy."""
        count = super().read_into(index, out, start, length)
        mask = out.get(_MASK)
        if mask is not None and not isinstance(mask, CodedRows):
            part = mask[start : start + count]
            part[:] = 0
            for first, last in self._spans_of(range(len(self))[index]):
                part[first:last] = 1
        return count

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Read the turns of all documents once.

        Returns:
            Where a document's spans begin, int64 [N + 1]; its supervised tokens and the first one,
            int64 [N] each; and the spans [start, end) of all documents, int64 [S, 2].

        Raises:
            DatasetError: the masks cannot be derived.
        """
        offsets = np.zeros(len(self) + 1, np.int64)
        supervised, first = np.zeros(len(self), np.int64), self.lengths.copy()
        spans: list[tuple[int, int]] = []
        roles: set[str] = set()
        own = self.manifest.mask
        stored_at = {"hidden.final": self.final, "target_argmax": self.teacher}
        sparse = [name for name, tokens in stored_at.items() if tokens == SUPERVISED]
        for row in progress(range(len(self)), desc="masks", unit="documents", leave=False):
            turns, stored = self._turns_and_mask(row)
            roles |= {role for role, _, _ in turns}
            if own is not None and not np.array_equal(_mask(stored.size, turns, own)[0], stored):
                raise DatasetError(
                    f"{self.path}: document {row}: its stored mask is not that of its turns under "
                    f"--mask {own}, with which the dataset was generated, so --mask {self.policy} "
                    "cannot be derived; generate the dataset again, or leave --mask out"
                )
            mask, found = _mask(stored.size, turns, self.policy)
            if sparse and (mask & ~stored)[1:].any():
                raise DatasetError(
                    f"{self.path}: --mask {self.policy} supervises tokens of document {row} that "
                    f"have no {' and '.join(sparse)}: the dataset holds them only where the mask "
                    f"of generation{f' ({own})' if own else ''} supervises the next token. Use a "
                    "mask within that one, or generate with --final all --teacher all"
                )
            spans += found
            offsets[row + 1] = len(spans)
            supervised[row] = mask.sum()
            if mask.any():
                first[row] = mask.argmax()
        absent = [role for role in roles_of(self.policy) if role not in roles]
        if absent:
            raise DatasetError(
                f"{self.path}: --mask {self.policy}: no document has a turn of role "
                f"{', '.join(absent)}; stored are turns of {', '.join(sorted(roles)) or 'none'}. "
                "Turns of other roles are not stored: generate from rows of input_ids with the "
                "loss_mask that you want"
            )
        return offsets, supervised, first, np.array(spans, np.int64).reshape(-1, 2)

    def _turns_and_mask(self, row: int) -> tuple[list[Turn], np.ndarray]:
        """Return the stored turns of a document and its stored mask, bool [T]."""
        shard, number = self._locate(row)
        place = shard.place(number)
        turns = [(t["role"], t["start"], t["end"]) for t in shard.texts(place)["turns"]]
        length = shard.length(number)
        if any(not 0 <= start < end <= length for _, start, end in turns):
            raise DatasetError(
                f"{shard.where(number)}: turns outside its {length} tokens; copy this shard again"
            )
        return turns, shard.mask(place)


def _mask(
    length: int, turns: Sequence[Turn], policy: str
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the mask of a document, bool [T], and its spans."""
    spans = supervised_spans(length, turns, policy)
    mask = np.zeros(length, dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return mask, spans


def _require_conversations(manifest: Manifest, policy: str) -> None:
    """Refuse a policy that counts turns where turns of one conversation are several documents.

    Raises:
        DatasetError: conversations were rendered turn by turn.
    """
    counts = manifest.documents
    single = counts.rendering.get("turn by turn", 0)
    if single and needs_whole_conversations(policy):
        advice = "generate with --mask last-turn" if policy == LAST_TURN else "use --mask assistant"
        raise DatasetError(
            f"{Path(manifest.where).parent}: --mask {policy} cannot be derived: {single:,} "
            "conversations were rendered turn by turn (the chat template rewrites history), each "
            f"turn as a document that does not say which turn it is; {advice}"
        )
    if policy == LAST_TURN and counts.cut:
        log.warning(
            "warning: %s: %s documents were cut at --max-length; in those whose last turn is gone, "
            "--mask last-turn supervises the last turn that is left. To leave them out, generate "
            "with --mask last-turn",
            *(Path(manifest.where).parent, f"{counts.cut:,}"),
        )
