"""Does a log of an engine have the numbers of the vectors, and if not, those of which mistake?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.shards.files import read_object
from spec_data.terminal.command import Result
from spec_data.terminal.text_table import text_table
from spec_train.conformance.write import EXPECTED

PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"


@dataclass(frozen=True)
class Verdict:
    """What a log says of one vector."""

    vector: str
    state: str  # PASS, FAIL or NOT_RUN
    text: str
    mistakes: tuple[str, ...] = ()  # those with the log's numbers; of PASS, not told apart by it


@dataclass(frozen=True)
class CheckedLog(Result):
    """The verdicts of all vectors."""

    verdicts: list[Verdict]
    exit_code: int = 0

    def of(self, vector: str) -> Verdict:
        """Return the verdict of a vector."""
        return next(one for one in self.verdicts if one.vector == vector)

    def __str__(self) -> str:
        rows = [(v.vector, v.state, v.text) for v in self.verdicts if v.state != NOT_RUN]
        missing = [v.vector for v in self.verdicts if v.state == NOT_RUN]
        left = f"\nnot in the log: {', '.join(missing)}" if missing else ""
        return text_table(rows) + left


class _Entry(msgspec.Struct):
    """A line of a log."""

    vector: str
    prompt: int
    output: list[int] | None = None
    drafted: list[list[int]] | None = None
    accepted: list[Annotated[int, msgspec.Meta(ge=0)]] | int | None = None


def check_log(log: Path, folder: Path) -> CheckedLog:
    """Compare a log, one JSON object per line and prompt, with the vectors of a directory.

    Raises:
        MissingError: `folder` has no vectors.
        ConfigError: a line is no such object, or a second one of a prompt; nothing to compare.
    """
    paths = sorted(folder.glob(f"*/{EXPECTED}"))
    if not paths:
        raise MissingError(
            f"{folder}: has no vectors (NAME/{EXPECTED}); pass --out with the directory that "
            "`spec-train vectors --out` wrote"
        )
    vectors = {path.parent.name: read_object(path) for path in paths}
    runs: dict[str, dict[int, _Entry]] = {name: {} for name in vectors}
    for number, line in enumerate(log.read_bytes().splitlines(), 1):
        if line.strip():
            where = f"{log}, line {number}"
            entry = _entry(line, vectors, where)
            if runs[entry.vector].setdefault(entry.prompt, entry) is not entry:
                raise ConfigError(
                    f"{where}: {entry.vector} has prompt {entry.prompt} twice; write a log for "
                    "each run of the engine, and of each form of a draft"
                )
    if not any(runs.values()):
        raise ConfigError(f"{log}: is empty; write one line per vector and prompt")
    verdicts = [_verdict(vector, runs[name]) for name, vector in vectors.items()]
    return CheckedLog(verdicts, int(any(one.state == FAIL for one in verdicts)))


def _entry(line: bytes, vectors: Mapping[str, Any], where: str) -> _Entry:
    try:
        entry = msgspec.json.decode(line, type=_Entry)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error}; expected such as "
            '{"vector": "NAME", "prompt": 0, "output": [5, 7], "accepted": [1]}'
        ) from None
    if entry.vector not in vectors:
        raise ConfigError(f"{where}: no vector {entry.vector!r}; there are {', '.join(vectors)}")
    if entry.prompt not in range(len(vectors[entry.vector]["prompts"])):
        raise ConfigError(f"{where}: {entry.vector} has no prompt {entry.prompt}")
    if entry.output is None and entry.drafted is None and entry.accepted is None:
        raise ConfigError(f"{where}: has none of output, drafted and accepted: nothing to compare")
    return entry


def _verdict(vector: Mapping[str, Any], run: Mapping[int, _Entry]) -> Verdict:
    name, prompts = vector["vector"], vector["prompts"]
    if not run:
        return Verdict(name, NOT_RUN, "")
    differing = {i: _difference(entry, prompts[i]) for i, entry in run.items()}
    differing = {i: text for i, text in differing.items() if text}
    equal = {
        twin: sum(not _difference(entry, wrong["prompts"][i]) for i, entry in run.items())
        for twin, wrong in vector["wrong"].items()
    }
    if not differing:
        missing = len(prompts) - len(run)
        notes = [f"{missing} prompts not in the log"] if missing else []
        if alike := [twin for twin, count in equal.items() if count == len(run)]:
            notes.append(
                f"a draft with {' or '.join(alike)} has the same numbers: log drafted, or accepted "
                "of each step, for every prompt"
            )
        return Verdict(name, PASS, "; ".join(notes), tuple(alike))
    first = min(differing)
    if differing[first].startswith("output"):
        text = f"prompt {first}: {differing[first]}: the target or its verification is wrong"
        return Verdict(name, FAIL, text)
    most = max(equal.values(), default=0)
    if most > len(run) - len(differing):
        named = tuple(twin for twin, count in equal.items() if count == most)
        text = "; or ".join(f"{twin}: {vector['wrong'][twin]['meaning']}" for twin in named)
        return Verdict(name, FAIL, f"{text} ({most} of {len(run)} prompts have its numbers)", named)
    return Verdict(name, FAIL, f"prompt {first}: {differing[first]}; no mistake that is known here")


def _difference(entry: _Entry, expected: Mapping[str, Any]) -> str:
    """Return the first difference between a prompt's log and expected numbers; "": none."""
    output = expected.get("output")  # not of mistakes: they change drafts alone
    if entry.output is not None and output is not None and entry.output != output:
        pairs = zip(entry.output, output, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return f"output differs at token {at}" if at is not None else "output has another length"
    right, accepted = expected["accepted"], entry.accepted
    if entry.drafted is not None:
        at = _first_other(entry.drafted, expected["drafted"])
        if at is not None:
            return f"drafted differs at step {at}"
    if isinstance(accepted, int):  # the last step may have been cut
        if not sum(right[:-1]) <= accepted <= sum(right):
            return f"{accepted} drafts accepted instead of {sum(right)}"
    elif accepted is not None:
        at = _first_other([[True] * n for n in accepted], [[True] * n for n in right])
        if at is not None:
            return f"accepted differs at step {at}"
    return ""


def _first_other(steps: Sequence[Sequence[Any]], right: Sequence[Sequence[Any]]) -> int | None:
    """Return the first step that differs; the last one may be shorter, or missing."""
    for at, one in enumerate(right):
        last = at == len(right) - 1
        if at >= len(steps):
            return None if last else at
        if list(steps[at]) != list(one[: len(steps[at])] if last else one):
            return at
    return len(right) if len(steps) > len(right) else None
