"""Named sets of prompts, and which set each prompt counts to.

`--prompts` takes files, directories and datasets, several with commas between them, and these
names. A named set is read from the Hugging Face Hub (or from a local file or directory of that
name), and its question column becomes the prompt. Nothing is added to a question: no instruction,
no examples.

The set of a prompt is the name given for it, followed by its part if there are parts: the parts of
the named set, or the `category` of the row (MT-bench, Spec-Bench and SPEED-Bench files have one).
Every part has figures of its own.

Rows, as the publishers describe them or read them: `RedHatAI/speculator_benchmarks` has one file
per part with a string `prompt` (speculators' scripts/evaluate/evaluate.py), taken from Spec-Bench
and HumanEval (its dataset card). Spec-Bench's sixth part is MT-bench with both turns (its
evaluation/speed.py), so it is read from MT-bench itself. `nvidia/SPEED-Bench` has a list of user
messages in `turns`, and a `category` (its dataset card).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.corpus.prompt_rows import parse_prompt
from spec_data.corpus.records import Record
from spec_data.shards.errors import ConfigError


@dataclass(frozen=True)
class PromptSet:
    """A part of a set on the Hub.

    Attributes:
        source: as `spec-data generate --corpus` takes it.
        column: the column that holds the question or the user's turns.
        turns: the column is a list of messages of the user, sent one after the other.
        categories: the `category` of a row is its part of the set; --limit counts each category.
    """

    source: str
    column: str
    turns: bool = False
    categories: bool = False

    def row(self, row: Any) -> Any:
        """Return the row in a format of prompts; what has no such column stays as it is."""
        if not isinstance(row, Mapping) or row.get(self.column) is None:
            return row
        return {"turns" if self.turns else "prompt": row[self.column]}


def _files(*parts: str) -> dict[str, PromptSet]:
    place = "RedHatAI/speculator_benchmarks"
    return {part: PromptSet(f"{place}:{part}.jsonl", "prompt") for part in parts}


_MT_BENCH = PromptSet("HuggingFaceH4/mt_bench_prompts@train", "prompt", turns=True)
_OF_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")

SETS: Mapping[str, Mapping[str, PromptSet]] = {
    "mt-bench": {"": _MT_BENCH},
    "gsm8k": {"": PromptSet("openai/gsm8k:main@test", "question")},
    "humaneval": {"": PromptSet("openai/openai_humaneval@test", "prompt")},
    "math-500": {"": PromptSet("HuggingFaceH4/MATH-500@test", "problem")},
    "mbpp": {"": PromptSet("google-research-datasets/mbpp:full@test", "text")},
    "spec-bench": {"mt_bench": _MT_BENCH, **_files(*_OF_SPEC_BENCH)},
    "speculators": _files("HumanEval", *_OF_SPEC_BENCH, "question", "tool_call", "writing"),
    "speed-bench": {
        "": PromptSet("nvidia/SPEED-Bench:qualitative@test", "turns", turns=True, categories=True)
    },
}
"""The parts of each named set by their names; "" names the set as a whole."""

Parse = Callable[..., tuple[str, Record]]


@dataclass(frozen=True)
class PromptSource:
    """One part of --prompts: the name it counts to, where it is read, and how."""

    name: str
    place: str
    known: PromptSet | None = None

    @property
    def columns(self) -> list[str]:
        """Columns that are read beside those of a corpus."""
        return ["category", *([self.known.column] if self.known else [])]

    @property
    def limit_per_set(self) -> bool:
        """Whether --limit counts the prompts of each category."""
        return self.known is not None and self.known.categories

    def parser(self, groups: dict[str, str]) -> Parse:
        """Return what parses a row; it puts the set of the row's place into `groups`."""
        by_category = self.known is None or self.known.categories

        def parse(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
            category = row.get("category") if isinstance(row, Mapping) else None
            part = category if isinstance(category, str) and by_category else None
            groups[where] = f"{self.name}: {part}" if part else self.name
            row = self.known.row(row) if self.known else row
            return parse_prompt(row, source=source, where=where, arrow=arrow)

        return parse


def prompt_sources(text: str) -> list[PromptSource]:
    """Return the parts of --prompts. A path that exists is one part, whatever its name.

    Raises:
        ConfigError: a part is empty, or two parts have the same prompts.
    """
    parts = [text] if Path(text).exists() else [part.strip() for part in text.split(",")]
    found: dict[str, str] = {}
    sources = []
    for part in parts:
        if not part:
            raise ConfigError(f"--prompts {text}: a name between two commas is missing")
        for source in _sources(part):
            if source.place in found:
                first = found[source.place]
                both = f"{part} is there twice" if first == part else f"{first} and {part}"
                shared = "" if first == part else f" both have the prompts of {source.place}"
                raise ConfigError(f"--prompts {text}: {both}{shared}")
            found[source.place] = part
            sources.append(source)
    return sources


def _sources(part: str) -> list[PromptSource]:
    known = {} if Path(part).exists() else SETS.get(part, {})
    if not known:
        return [PromptSource(Path(part).name or part, part)]
    return [
        PromptSource(f"{part}: {name}" if name else part, one.source, one)
        for name, one in known.items()
    ]
