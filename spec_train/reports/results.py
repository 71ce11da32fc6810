"""What `fit` and `eval` have written, as records: for pages, and to compare two evaluations."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from spec_data.pages.page import Point
from spec_data.shards.errors import ConfigError, MissingError, RunError
from spec_data.shards.file_system import followed
from spec_data.shards.files import cause
from spec_data.shards.json_texts import read_json_text
from spec_train.formats.draft_seal import SECTION
from spec_train.options.data_option import parse_source
from spec_train.training.machine import machine_text
from spec_train.training.result import FitResult, better
from spec_train.training.run_directory import (
    DECODED,
    held_out_file,
    link_of,
    read_machine,
    read_run_json,
)

_MOST = 1 << 30  # bytes of a file of `eval --json`
METRICS, OPTIONS = "metrics.jsonl", "fit.json"

Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")

# -- evaluations -----------------------------------------------------------------------------------
# The part of a file of `eval --json` that a page shows or `compare` reads.


class Context(msgspec.Struct, tag_field="kind", tag="context"):
    """Tokens before a response; `left_out` more before them are not part of the sample."""

    tokens: list[int]
    left_out: int = 0


class First(msgspec.Struct, tag_field="kind", tag="first"):
    """The tokens that a response begins with."""

    tokens: list[int]


class DraftedStep(msgspec.Struct, tag_field="kind", tag="round"):
    """One verification step; see `simulation.samples`."""

    drafted: list[int]
    accepted: Count
    emitted: list[int]
    choice: int | None

    def __post_init__(self) -> None:
        if self.accepted > len(self.drafted):
            raise ValueError("a step accepts more tokens than were drafted")


class PlainResponse(msgspec.Struct):
    """The same prompt, decoded by the target alone: its tokens, and the seconds of both ways."""

    tokens: list[int]
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    draft_seconds: Annotated[float, msgspec.Meta(gt=0)]


class SampleResponse(msgspec.Struct):
    """A response with every drafted token."""

    name: str
    parts: list[Context | First | DraftedStep]
    source: str | None = None
    plain: PlainResponse | None = None


class Acceptance(msgspec.Struct):
    """Acceptance length, with its interval, and acceptance by depth."""

    acceptance_length: float | None
    accept_rate: list[float | None]
    rounds: Count
    interval: tuple[float, float] | None = None


class RangeFigures(msgspec.Struct):
    """Acceptance at verifications behind `start` to `end` - 1 tokens; see `ranges.range_json`."""

    start: Count
    end: Count | None
    rounds: Count
    acceptance_length: float | None
    interval: tuple[float, float] | None = None


class ModeFigures(msgspec.Struct):
    """Acceptance in answers of a mode; see `simulation.modes`."""

    mode: str
    rounds: Count
    acceptance_length: float | None
    interval: tuple[float, float] | None = None


class Simulated(msgspec.Struct):
    """An evaluation on a dataset."""

    path: str
    split: str
    documents: Count
    on_policy: float | None
    simulated: Acceptance
    by_source: list[dict[str, Any]]
    samples: list[SampleResponse]
    texts: dict[str, str]
    by_position: list[RangeFigures] = []  # earlier releases wrote none
    by_context: list[RangeFigures] = []
    by_mode: list[ModeFigures] = []
    step: int | None = None


class PromptFigures(msgspec.Struct):
    """Verifications of a prompt, by a digest of its ids, and the tokens that they emitted."""

    prompt: str
    rounds: int
    emitted: int


class Decoded(Acceptance, kw_only=True):
    """An evaluation by real decoding: the fields of a file of --json beside `data`."""

    target: str
    responses: Count
    by_set: list[dict[str, Any]]
    samples: list[SampleResponse]
    texts: dict[str, str]
    by_position: list[RangeFigures] = []
    by_context: list[RangeFigures] = []
    by_mode: list[ModeFigures] = []
    tree_tokens: int = 0
    identical: int | None = None
    speedup: float | None = None
    draft: str
    per_prompt: list[PromptFigures]
    temperature: float
    dtype: str
    draft_tokens: int
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of a draft, as a page calls it."""

    name: str
    result: Simulated | Decoded
    warnings: tuple[str, ...] = ()

    @property
    def decoded(self) -> Decoded | None:
        """The result of real decoding."""
        return self.result if isinstance(self.result, Decoded) else None

    @property
    def kind(self) -> str:
        """How it was measured; lengths of two kinds cannot be compared."""
        if (one := self.decoded) is None:
            return "simulated"
        trees = f", trees of {one.tree_tokens}" if one.tree_tokens else ""
        sampled = f" at temperature {one.temperature:g}" if one.temperature else ""
        return f"real decoding{sampled}{trees}"

    @property
    def data(self) -> Any:
        """What it was measured on; lengths on other data cannot be compared."""
        if (one := self.decoded) is None:
            simulated: Any = self.result
            return simulated.path, simulated.split, simulated.documents
        return one.target, sorted(figures.prompt for figures in one.per_prompt)

    @property
    def acceptance(self) -> Acceptance:
        """What was measured."""
        return self.result if isinstance(self.result, Decoded) else self.result.simulated


def evaluations(raw: Any, where: str, name: str) -> list[Evaluation]:
    """Return the evaluations in the figures of `eval`; `where` names them in errors.

    Raises:
        ConfigError: they are no figures of `eval`, or are damaged.
    """
    report = convert(raw, dict[str, Any], where)
    warnings = tuple(convert(report.get("warnings"), list[str], where))
    measured: list[Evaluation] = []
    if "target" in report:
        result = convert(report, Decoded, where)
        measured.append(Evaluation(name=name, result=result, warnings=warnings))
        name, warnings = f"{name}, dataset", ()
    if "data" in report:
        data = convert(report["data"], Simulated, where)
        measured.append(Evaluation(name=name, result=data, warnings=warnings))
    if not measured:
        raise ConfigError(f"{where}: holds no evaluation; pass RUN directories and files of --json")
    return measured


def read_json(file: Path) -> Any:
    """Read a file of --json.

    Raises:
        MissingError: it does not exist. ConfigError: it is not JSON.
    """
    try:
        return read_json_text(file, _MOST)
    except FileNotFoundError:
        raise MissingError(f"{file}: no such file or run directory; check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({cause(error)})") from None


def convert(raw: Any, kind: type[T], where: str) -> T:
    """Return plain values of `eval` as a record.

    Raises:
        ConfigError: they do not fit.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: not a file of `spec-train eval --json`, or damaged ({error})"
        ) from None


# -- runs ------------------------------------------------------------------------------------------


class Run:
    """A run directory, which may still be training.

    Attributes:
        name: as the page calls it. draft: the kind of draft. steps: all steps of the run.
        options: fit.json. data: where its datasets are. fingerprints: theirs, in some order.
        machine: on what it trained; None: unknown.
        origin: what the best draft records of its target and its prompts.
        training, validation: lines of metrics.jsonl, in order.
        best: the validation that `fit` chooses; empty: there is none yet.
        held_out: simulated decoding of the best draft on the held-out documents, if there is one.
        decoded: the last real decoding with the best draft, if there is one.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Read a run directory.

        Raises:
            RunError: one of its files is damaged.
        """
        self.path, self.name = path, name
        result = FitResult(path, 0, finished=False)
        self.training, self.validation = result.training, result.validation
        run = read_run_json(path) if (path / "run.json").is_file() else {}
        self.options = _object(path / OPTIONS)
        data = self.options.get("data") or ()
        given = map(parse_source, [data] if isinstance(data, str) else data)
        self.data = sorted(source.location for source in given)
        self.draft = run.get("identity", {}).get("draft", "draft")
        found = run.get("identity", {}).get("dataset") or ()
        self.machine = machine_text(read_machine(path))
        self.fingerprints = [found] if isinstance(found, str) else list(found)
        self.steps: int | None = run.get("total_steps") or self.options.get("steps")
        section = _object(followed(path / "best") / "config.json").get(SECTION) or {}
        self.origin: dict[str, Any] = section.get("origin") or {}
        self.best: dict[str, Any] = {}
        for line in self.validation:
            if line.get("step") == 0 or number(line, "loss") is None:  # step 0: nothing is trained
                continue
            if not self.best or better(line, self.best):
                self.best = line
        self.held_out: Evaluation | None = None
        if (file := held_out_file(path)) is not None and (figures := _object(file)):
            try:
                simulated = msgspec.convert(figures, Simulated)
            except msgspec.ValidationError as error:
                raise RunError(f"{file}: damaged ({error}); remove it") from None
            held_out = f"{name}, step {simulated.step:,}"
            self.held_out = Evaluation(name=held_out, result=simulated)
        self.decoded: Evaluation | None = None
        file = path / DECODED
        if (raw := _object(file)) and raw.get("draft") == link_of(path).resolve().name:
            self.decoded = evaluations(raw, str(file), f"{name}, decoded")[0]

    def curve(self, name: str, held_out: bool = False) -> list[Point]:
        """Return (trained tokens, metric) of every line that has both."""
        return [
            (line["tokens"], number(line, name))
            for line in (self.validation if held_out else self.training)
            if name in line and "tokens" in line
        ]

    def last(self, name: str) -> int:
        """Return the largest value of a count, such as "step", over all lines."""
        return max((line.get(name, 0) for line in (*self.training, *self.validation)), default=0)


def number(line: dict[str, Any], name: str) -> float | None:
    """Return a number of a line; None if it has none, or one that is not finite."""
    value = line.get(name)
    return value if value is not None and math.isfinite(value) else None


def is_run(folder: Path) -> bool:
    """Return whether a directory is a run of `fit`."""
    return (folder / OPTIONS).is_file() or (folder / METRICS).is_file()


def _object(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file of a run; empty if there is no file."""
    try:
        return dict(read_json_text(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{file}: damaged ({cause(error)}); restore it") from None
