"""Released engines and trainers: what they do with which draft, and which targets they serve.

Two tables. `engines.toml` is written by hand: each engine with its release and the day on which it
was read, the kinds of drafts that it serves, how it is started, and one row per fact about drafts.
`engine_targets.json` lists the engine's own classes of targets; `scripts/engine_targets.py` reads
them from the released packages. A draft reads hidden states of its target, and an engine hands them
over in some of its classes only. A target that the list does not name is unknown to that release,
which is never a yes.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

TABLE = Path(__file__).with_name("engines.toml")
CLASSES = TABLE.with_name("engine_targets.json")
COLUMNS = ("vllm", "sglang", "llama.cpp")
"""The engines of docs/targets.md."""


class Engine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One release; the head of `engines.toml` says what the fields mean."""

    release: str
    read: datetime.date
    drafts: dict[str, list[str]]
    package: str = ""
    lacks: dict[str, str] = {}
    forms: list[str] = []
    serves: list[str] = []
    template_kwargs: str = ""
    sampling_off: str = ""
    aux_layers: str = ""
    revision: str = ""
    trust_code: str = ""
    max_length: str = ""


class Start(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How one engine is started with some kinds of drafts, as lines of `language`."""

    engine: str
    drafts: str
    lines: list[str]
    language: str = "sh"
    method: dict[str, str] = {}
    json: dict[str, Any] = {}


class Fact(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What engines do with drafts of some kinds for which a condition holds."""

    engines: str
    drafts: str
    condition: str
    verdict: str
    text: str
    source: str

    def concerns(self, engine: str, draft: str) -> bool:
        """Return whether the row is about an engine and a kind of draft."""
        pairs = ((engine, self.engines), (draft, self.drafts))
        return all(names == "*" or name in names.split() for name, names in pairs)


class _Rows(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    rows: list[Fact]


class EngineTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole of `engines.toml`."""

    engine: dict[str, Engine]
    start: list[Start]
    facts: _Rows


@cache
def engines() -> EngineTable:
    """Return the table of engines; a mistake in it is an error that names the row."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=EngineTable)


class Classes(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole of `engine_targets.json`: names of classes of targets, separated by spaces.

    By engine, `known` are all of them, and the other lists those that have something.
    """

    read: datetime.date
    engines: dict[str, dict[str, str]]


@cache
def target_classes() -> Classes:
    """Return the lists of the engines' classes of targets."""
    return msgspec.json.decode(CLASSES.read_bytes(), type=Classes)


@dataclass(frozen=True)
class Served:
    """Whether an engine can serve a target with a draft; None: unknown.

    `name` is the architecture that counts, and `reason` why the answer is not yes.
    """

    answer: bool | None
    name: str = ""
    reason: str = ""

    def text(self, drafts: Sequence[str]) -> str:
        """Say it of some kinds of drafts; nothing if the engine serves them."""
        if self.answer:
            return ""
        if not self.name:
            return (
                "the target's architecture is unknown, so it was not checked that this release "
                "serves it; pass --target DIR"
            )
        start = "cannot serve" if self.answer is False else "it is unknown whether it serves"
        return f"{start} {self.name} with {', '.join(drafts)} drafts: {self.reason}"


def served(engine: str, draft: str, architectures: Sequence[str]) -> Served:
    """Return whether an engine's class of a target has what a kind of draft needs.

    An engine without a list, or a kind of draft that it does not serve, needs nothing of the
    target's class. Of several names, the first one that the engine knows counts, as in the engines.
    """
    lists, row = target_classes().engines.get(engine, {}), engines().engine[engine]
    if not lists or draft not in row.drafts:
        return Served(True)
    classes = {kind: names.split() for kind, names in lists.items()}
    name = next((name for name in architectures if name in classes["known"]), None)
    if name is None:
        return Served(None, ", ".join(architectures), "its release has no model class of that name")
    lacks = [need for need in row.drafts[draft] if name not in classes[need]]
    return Served(False, name, row.lacks[lacks[0]]) if lacks else Served(True, name)


def engine_warnings(drafts: Sequence[str], architectures: Sequence[str]) -> list[str]:
    """Return a line per release that cannot or may not serve a target with some of the drafts."""
    lines = []
    for engine in COLUMNS:
        by_answer: dict[Served, list[str]] = {}
        for draft in drafts:
            by_answer.setdefault(served(engine, draft, architectures), []).append(draft)
        release = engines().engine[engine].release
        texts = [answer.text(names) for answer, names in by_answer.items()]
        lines += [f"{release}: {text}" for text in texts if text]
    return lines
