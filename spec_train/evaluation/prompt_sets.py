"""Named sets of prompts, and which set each prompt counts to.

`--prompts` takes files, directories and datasets, several with commas between them, and these
names. A named set is read from the Hugging Face Hub (or a local directory of that name), and its
question column becomes the prompt. Nothing is added to a question: no instruction, no examples.

The set of a prompt is the name given for it, or the `category` of its row if it has one (MT-bench
and Spec-Bench files have), so that a file with several parts has figures for each of them.
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
    """A set on the Hub: its source, and the column that holds the question or the user's turns."""

    source: str
    column: str
    turns: bool = False  # the column is a list of messages of the user, sent one after the other

    def row(self, row: Any) -> Any:
        """Return the row in a format of prompts; what has no such column stays as it is."""
        if not isinstance(row, Mapping) or row.get(self.column) is None:
            return row
        return {"turns" if self.turns else "prompt": row[self.column]}


SETS: Mapping[str, PromptSet] = {
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts@train", "prompt", turns=True),
    "gsm8k": PromptSet("openai/gsm8k:main@test", "question"),
    "humaneval": PromptSet("openai/openai_humaneval@test", "prompt"),
    "math-500": PromptSet("HuggingFaceH4/MATH-500@test", "problem"),
}

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

    def parser(self, groups: dict[str, str]) -> Parse:
        """Return what parses a row; it puts the set of the row's place into `groups`."""

        def parse(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
            category = row.get("category") if isinstance(row, Mapping) else None
            part = category if isinstance(category, str) and self.known is None else None
            groups[where] = f"{self.name}: {part}" if part else self.name
            row = self.known.row(row) if self.known else row
            return parse_prompt(row, source=source, where=where, arrow=arrow)

        return parse


def prompt_sources(text: str) -> list[PromptSource]:
    """Return the parts of --prompts. A path that exists is one part, whatever its name.

    Raises:
        ConfigError: a part is empty or there twice.
    """
    parts = [text] if Path(text).exists() else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part:
            raise ConfigError(f"--prompts {text}: a name between two commas is missing")
        if parts.count(part) > 1:
            raise ConfigError(f"--prompts {text}: {part} is there twice")
    return [_source(part) for part in parts]


def _source(part: str) -> PromptSource:
    known = None if Path(part).exists() else SETS.get(part)
    if known is not None:
        return PromptSource(part, known.source, known)
    return PromptSource(Path(part).name or part, part)
