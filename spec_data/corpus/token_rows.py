"""Rows of token ids: which tokens are learned, which are padding, and which documents are packed.

A token is learned if every mask of the row says so; `labels` are read where there is no
`loss_mask`. Trainers pack several documents into a row and say so in one of many ways: positions
that begin again, lengths, bounds, the number of each token's document. Several ways must name the
same documents. A list with one value per token whose meaning is not known makes the row bad: it may
say what is learned.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.facts import columns, filled, meaning_of


def token_facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a row, without padding, its mask, and the lengths of packed documents.

    The keys are those of `Record`: `input_ids`, `loss_mask` if any column decides it, and `lengths`
    if there are several documents.

    Raises:
        BadRow: a column is broken, not understood, or contradicts another one.
    """
    ids = integers(row, "input_ids")
    kept, segments = _padding(row, len(ids))
    lengths = _lengths(row, kept, segments)
    mask = _learned(row, ids, kept)
    _refuse_unknown(row, len(ids), sum(kept))
    facts: dict[str, Any] = {"input_ids": _only(ids, kept)}
    if mask is not None:
        facts["loss_mask"] = _only(mask, kept)
    if len(lengths) > 1:
        facts["lengths"] = tuple(lengths)
    return facts


def integers(row: dict[str, Any], column: str) -> list[int]:
    """Return a column of integers; the renderer checks ranges."""
    values = row[column]
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise BadRow(f"{column} is not a list of integers")
    if not values:
        raise BadRow(f"{column} is empty")
    return values


def _only(values: Sequence[int], kept: Sequence[bool]) -> list[int]:
    return [value for value, keep in zip(values, kept, strict=True) if keep]


def _given(row: dict[str, Any], *meanings: str) -> Iterable[tuple[str, Any]]:
    """Yield the columns of some meanings that a row has, with their values."""
    return ((name, row[name]) for name in columns(*meanings) if filled(row.get(name)))


def _masks(row: dict[str, Any], *meanings: str) -> Iterable[tuple[str, list[Any]]]:
    """Yield the masks of a row; an empty one is no missing one."""
    return ((n, row[n]) for n in columns(*meanings) if isinstance(row.get(n), list))


# -- padding ---------------------------------------------------------------------------------------


def _padding(row: dict[str, Any], count: int) -> tuple[list[bool], list[int] | None]:
    """Return which tokens are no padding, and the document of each if `attention_mask` has it."""
    for name, values in _given(row, "padding"):
        if not isinstance(values, list) or not all(type(v) in (int, bool) for v in values):
            raise BadRow(f"{name} is not a list of integers")
        if len(values) != count:
            raise BadRow(f"input_ids has {count} values, {name} {len(values)}")
        kept = [v > 0 for v in values]
        if not any(kept):
            raise BadRow(f"{name} is all zero")
        return kept, list(map(int, values)) if set(values) - {0, 1} else None
    return [True] * count, None


# -- what is learned -------------------------------------------------------------------------------


def _learned(row: dict[str, Any], ids: list[int], kept: list[bool]) -> list[int] | None:
    """Return 1 for each token that every mask of the row learns; None: it has no mask."""
    masks = []
    for name, values in _masks(row, "learned", "token-mask"):
        masks.append(_flags(name, values, len(ids)))
    for name, values in _masks(row, "masked", "prompt-mask"):
        masks.append([1 - flag for flag in _flags(name, values, len(ids))])
    for name, length in _given(row, "prompt-length"):
        if type(length) is not int or not 0 <= length <= len(ids):
            raise BadRow(f"{name} is {length!r}, no number of the {len(ids)} tokens of input_ids")
        if not kept[0]:
            raise BadRow(f"{name} does not say whether it counts the padding before the prompt")
        masks.append([0] * length + [1] * (len(ids) - length))
    for name, labels in _masks(row, "labels"):  # a number is of a classifier
        if row.get("loss_mask") is None:
            masks.append(_of_labels(name, labels, ids, kept))
    return [int(all(flags)) for flags in zip(*masks, strict=True)] if masks else None


def _flags(name: str, values: list[Any], count: int) -> list[int]:
    if len(values) != count:
        raise BadRow(f"{name} has {len(values)} values, input_ids {count}")
    for at, value in enumerate(values):
        if type(value) not in (int, bool, float) or value not in (0, 1):
            raise BadRow(
                f"{name}[{at}] is {value!r}: a token is learned or not, there are no weights; "
                "write 0 or 1"
            )
    return list(map(int, values))


def _of_labels(name: str, labels: list[Any], ids: list[int], kept: list[bool]) -> list[int]:
    """Return the mask of `labels`, which are -100 where nothing is learned; padding has any."""
    if len(labels) == len(ids) and all(
        not keep or (type(label) is int and label in (-100, token))
        for label, token, keep in zip(labels, ids, kept, strict=True)
    ):
        return [int(label != -100) for label in labels]
    raise BadRow(f"{name} are neither -100 nor the tokens of input_ids; write a loss_mask")


# -- packs -----------------------------------------------------------------------------------------


def _lengths(row: dict[str, Any], kept: list[bool], numbered: list[int] | None) -> list[int]:
    """Return the lengths of the documents of a row, without padding; [] if it is one document.

    Tokens that a number of their document marks as padding stop being `kept`.
    """
    found: dict[str, list[int]] = {}
    for name, values in _given(row, "segments"):
        if isinstance(values, list) and len(values) == len(kept):
            found[name] = _numbers(name, values)
            _drop(kept, found[name])
    if numbered is not None:
        found["attention_mask"] = numbered
    starts = {
        name: _starts_of_segments(name, _only(values, kept)) for name, values in found.items()
    }
    for name, values in _given(row, "positions"):
        if isinstance(values, list):
            starts[name] = _starts_of_positions(name, _numbers(name, values, len(kept)), kept)
    for meaning, bounds in (("lengths", False), ("bounds", True)):
        for name, values in _given(row, meaning):
            if isinstance(values, list):
                starts[name] = _starts_of_lengths(name, _numbers(name, values), kept, bounds)
    named = iter(starts.items())
    first, marks = next(named, ("", [0]))
    for other, theirs in named:
        if theirs != marks:
            raise BadRow(f"{first} and {other} do not name the same documents of a pack")
    ends = [*marks[1:], sum(kept)]
    return [end - start for start, end in zip(marks, ends, strict=True)]


def _numbers(name: str, values: list[Any], count: int | None = None) -> list[int]:
    if not all(type(v) is int for v in values):
        raise BadRow(f"{name} is not a list of integers")
    if count is not None and len(values) != count:
        raise BadRow(f"{name} has {len(values)} values, input_ids {count}")
    return values


def _drop(kept: list[bool], numbers: list[int]) -> None:
    """Take the tokens of no document out of `kept`: below 0, and 0 where numbers begin at 1."""
    filler = 0 if numbers[0] == 1 else -1
    for at, number in enumerate(numbers):
        kept[at] = kept[at] and number > filler
    if not any(kept):
        raise BadRow("no token of the pack belongs to a document")


def _starts_of_segments(name: str, numbers: list[int]) -> list[int]:
    starts = [at for at, n in enumerate(numbers) if at == 0 or n != numbers[at - 1]]
    if len({numbers[at] for at in starts}) < len(starts):
        raise BadRow(f"{name} comes back to a document that another one interrupted")
    return starts


def _starts_of_positions(name: str, positions: list[int], kept: list[bool]) -> list[int]:
    positions = _only(positions, kept)
    starts = [at for at, p in enumerate(positions) if p == 0]
    for at, position in enumerate(positions):
        if position and (at == 0 or position != positions[at - 1] + 1):
            before = "nothing" if at == 0 else str(positions[at - 1])
            raise BadRow(f"{name} has {position} after {before}; a document counts from 0")
    return starts


def _starts_of_lengths(name: str, values: list[int], kept: list[bool], bounds: bool) -> list[int]:
    """Return where documents start, among the tokens that are kept."""
    total, real = len(kept), sum(kept)
    ends = list(values)
    if bounds:
        while ends and ends[-1] < 0:  # as NeMo fills rows of different counts
            ends.pop()
        if name.startswith("seq_") and ends and ends[-1] < real:  # starts alone
            ends.append(total)
        if not ends or ends[0] != 0:
            raise BadRow(f"{name} does not begin with 0")
        ends = ends[1:]
    else:
        ends = [sum(values[: i + 1]) for i in range(len(values))]
    steps = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if not ends or ends[-1] not in (total, real) or min(steps) < 0:
        last = ends[-1] if ends else 0
        raise BadRow(f"{name} ends at token {last}, input_ids has {total}")
    marks = dict.fromkeys([0, *ends[:-1]])  # a length of 0 is no document
    if ends[-1] == total:  # padding counts
        marks = dict.fromkeys(sum(kept[:mark]) for mark in marks)
    return [mark for mark in marks if mark < real]


# -- what is not understood ------------------------------------------------------------------------

_TEXT = ("messages", "text", "question", "answer", "calls", "context", "history", "turns", "tools")


def _refuse_unknown(row: dict[str, Any], count: int, real: int) -> None:
    """Refuse a column of one value per token that may say what is learned, and one that may say
    where documents of a pack begin; `real` tokens are no padding."""
    known = {"ids", "learned", "masked", "token-mask", "prompt-mask", "labels", "padding"}
    known |= {"positions", "segments", "lengths", "bounds", "about-tokens", *_TEXT}
    for name, values in row.items():
        meaning = meaning_of(name)
        if not isinstance(values, list) or meaning in known - {"about-tokens"}:
            continue
        if _divides(values, (count, real)):
            raise BadRow(
                f"{name} ends at the last token of input_ids, and is not understood; lengths of "
                "packed documents are called seq_lengths, a mask of learned tokens loss_mask"
            )
        if len(values) != count or meaning in known:
            continue
        numeric = all(isinstance(v, (int, float)) for v in values)
        if meaning is None or numeric:
            raise BadRow(
                f"{name} has a value for each token of input_ids, and is not understood; if it is "
                f"a mask of learned tokens, call it loss_mask (--columns loss_mask={name})"
            )


def _divides(values: list[Any], ends: tuple[int, int]) -> bool:
    """Return whether numbers may be the lengths or the bounds of parts of a row."""
    if len(values) < 2 or not all(type(v) is int and v >= 0 for v in values):
        return False
    ascending = all(a < b for a, b in pairwise(values))
    return (sum(values) in ends and min(values) > 0) or (ascending and values[-1] in ends)
