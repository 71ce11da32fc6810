"""Read what a run directory and a file of `eval --json` hold, for a page about them.

A run may still be training: what is absent stays None.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, MissingError, RunError
from spec_train.training.stored import HELD_OUT, read_run_json

METRICS, OPTIONS = "metrics.jsonl", "fit.json"
ON_DATASET = ", dataset"
"""Ends the name of the simulated figures of an evaluation that has real ones too."""

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One evaluation of a draft, on a dataset or by real decoding.

    Attributes:
        name: as the page calls it. where: the dataset or the target. real: with the target.
        figures: as in the file of --json: under "data", or at the top for real decoding.
        texts: the text of every token id of the samples.
    """

    name: str
    where: str
    real: bool
    figures: dict[str, Any]
    texts: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def length(self) -> float | None:
        """Tokens per verification."""
        return self._walk.get("acceptance_length")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the length: over prompts, or over documents."""
        low, high = self._walk.get("interval") or (None, None)
        return None if low is None or high is None else (float(low), float(high))

    @property
    def rates(self) -> list[float | None]:
        """Acceptance by depth, given that all earlier depths were accepted."""
        return list(self._walk.get("accept_rate") or ())

    @property
    def rounds(self) -> int:
        """Verifications."""
        return int(self._walk.get("rounds") or 0)

    @property
    def bins(self) -> list[list[float | None]]:
        """What forecasts were worth (see `metrics.reliability`); empty without forecasts."""
        forced = None if self.real else self.figures.get("teacher_forced")
        return list((forced or {}).get("confidence_bins") or ())

    @property
    def _walk(self) -> dict[str, Any]:
        return self.figures if self.real else dict(self.figures.get("walk") or {})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory.

    Attributes:
        name: as the page calls it. draft: the kind of draft. steps: all steps of the run.
        options: fit.json. training, validation: lines of metrics.jsonl, in order.
        damaged: lines that could not be read.
        held_out: the walk of the best draft over the held-out documents, if there is one.
    """

    name: str
    path: Path
    draft: str
    steps: int | None
    options: dict[str, Any]
    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    damaged: int = 0
    held_out: Measured | None = None

    def curve(self, figure: str, held_out: bool = False) -> list[Point]:
        """Return (trained tokens, figure) of every line that has both."""
        found = []
        for line in self.validation if held_out else self.training:
            tokens, value = number(line, "tokens"), number(line, figure)
            if tokens is not None and figure in line:
                found.append((tokens, value))
        return found

    @property
    def depths(self) -> int:
        """The largest depth that a validation measured."""
        lines = self.validation or self.training
        return max((_depths(line) for line in lines), default=0)

    @property
    def best(self) -> dict[str, Any] | None:
        """The validation with the longest product-limit length, the later of equals by loss."""
        lines = [line for line in self.validation if number(line, "loss") is not None]
        return max(lines, key=_rank, default=None)


def _rank(line: Mapping[str, Any]) -> tuple[float, float]:
    """Order validations as `fit` does when it chooses the best draft."""
    name = "product_limit_length" if "product_limit_length" in line else "acceptance_length"
    length = number(line, name)
    return (1.0 if length is None else length), -(number(line, "loss") or 0.0)


def _depths(line: Mapping[str, Any]) -> int:
    prefix = "accept_rate/"
    return max((int(n[len(prefix) :]) for n in line if n.startswith(prefix)), default=0)


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a line; None if it has none, or one that is not finite."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def is_run(place: Path) -> bool:
    """Return whether a directory is a run of `fit`."""
    return (place / OPTIONS).is_file() or (place / METRICS).is_file()


def read_run(place: Path, name: str) -> Run:
    """Read a run directory, also while it trains.

    Raises:
        RunError: fit.json or run.json is damaged.
    """
    lines, damaged = _metrics(place / METRICS)
    identity: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    if (place / "run.json").is_file():
        run = read_run_json(place)
        identity, notes = run["identity"], run["notes"]
    options = _json(place / OPTIONS) if (place / OPTIONS).is_file() else {}
    steps = notes.get("total_steps") or options.get("steps")
    return Run(
        name=name,
        path=place,
        draft=str(identity.get("draft") or "draft"),
        steps=steps if isinstance(steps, int) else None,
        options=options,
        training=[line for line in lines if line.get("split") == "train"],
        validation=[line for line in lines if line.get("split") == "validation"],
        damaged=damaged,
        held_out=_held_out(place / HELD_OUT, name),
    )


def _held_out(file: Path, name: str) -> Measured | None:
    """Return what a run kept of its best validation; None: nothing was held out, or recorded."""
    if not file.is_file():
        return None
    raw = _json(file)
    try:
        return _on_data(raw, f"{name}, step {raw['step']:,}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file}: damaged ({type(error).__name__}: {error}); remove it") from None


def _metrics(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of metrics.jsonl that can be read, and how many cannot.

    The last line of a run that trains may be incomplete; it does not count.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found, damaged = [], 0
    for line in text.splitlines(keepends=True):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            damaged += line.endswith("\n")
    return found, damaged


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{file}: damaged ({error}); restore it") from None


def _on_data(figures: dict[str, Any], name: str, warnings: tuple[str, ...] = ()) -> Measured:
    found = Measured(
        name=name,
        where=f"{figures['path']}, {figures['split']}: {figures['documents']:,} documents",
        real=False,
        figures=figures,
        texts={str(k): str(v) for k, v in (figures.get("texts") or {}).items()},
        warnings=warnings,
    )
    return _sound(found)


def read_evaluation(file: Path, name: str) -> list[Measured]:
    """Read a file of `spec-train eval --json`: real decoding, a dataset, or both.

    Raises:
        MissingError: it does not exist. ConfigError: it is no such file, or is damaged.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{file}: no such file or run directory; check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from None
    return evaluation_of(raw, str(file), name)


def evaluation_of(raw: Any, place: str, name: str) -> list[Measured]:
    """Return the evaluations in the figures of `eval`; `place` names them in errors.

    Raises:
        ConfigError: they are no figures of `eval`, or are damaged.
    """
    found: list[Measured] = []
    try:
        warnings = tuple(map(str, raw["warnings"]))
        if "target" in raw:
            real = Measured(
                name=name,
                where=f"{raw['target']}: {raw['responses']:,} responses",
                real=True,
                figures=raw,
                texts={str(k): str(v) for k, v in (raw.get("texts") or {}).items()},
                warnings=warnings,
            )
            found.append(_sound(real))
        if "data" in raw:
            both = f"{name}{ON_DATASET}" if found else name
            found.append(_on_data(raw["data"], both, () if found else warnings))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{place}: not a file of `spec-train eval --json`, or damaged "
            f"({type(error).__name__}: {error}); pass RUN directories and such files"
        ) from None
    if not found:
        raise ConfigError(f"{place}: holds no evaluation; pass RUN directories and files of --json")
    return found


def _sound(found: Measured) -> Measured:
    """Touch everything that a page reads, so that damage is found here.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is damaged.
    """
    checks: dict[str, Callable[[Any], Any]] = {
        "by_source": lambda line: (str(line["source"]), line["rounds"] + 0, line["documents"] + 0),
        "by_position": lambda line: (line["start"] + 0, line["rounds"] + 0),
        "by_context": lambda line: (line["start"] + 0, line["rounds"] + 0),
        "by_set": lambda line: (str(line["set"]), line["rounds"] + 0),
        "sweep": lambda line: (line["draft_tokens"] + 0, line["modelled"].get("speedup")),
        "samples": lambda sample: (str(sample["name"]), all(map(_is_part, sample["parts"]))),
    }
    for name, check in checks.items():
        for line in found.figures.get(name) or ():
            check(line)
    dict((found.figures.get("speed") or {}).get("shares") or {})
    for value in (found.length, *(found.interval or ()), *found.rates):
        if value is not None:
            float(value)
    for bin_ in found.bins:
        weight, _, _ = bin_
        float(weight or 0)
    return found


def _is_part(part: Mapping[str, Any]) -> bool:
    """Return True for a part of a sample; raise for anything else."""
    ids = (part["drafted"], part["emitted"]) if part["kind"] == "round" else (part["tokens"],)
    for token in (token for row in ids for token in row):
        int(token)
    if part["kind"] == "round" and not 0 <= part["accepted"] <= len(part["drafted"]):
        raise ValueError("a round accepts more tokens than were drafted")
    return True
