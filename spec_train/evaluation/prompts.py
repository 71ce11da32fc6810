"""Prompts for decoding: from the rows of a file to the token ids that serving would send.

Rows are read and rendered by the code that reads and renders a corpus (`spec_data.corpus`), so a
prompt equals the beginning of the document that `spec-data generate` makes of the same row, token
for token. A bad row is left out, counted and named; the metrics have the number, so a benchmark
cannot shrink unnoticed, and too many bad rows are an error.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.documents import RenderError
from spec_data.corpus.facts import PLAIN, Layout
from spec_data.corpus.in_order import in_time
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import CATEGORY, Record, parse_prompt
from spec_data.corpus.template import Chat, Template, render_error, text_ids
from spec_data.corpus.template_keys import layout_of
from spec_data.shards.errors import ConfigError, CorpusError, MissingError
from spec_data.shards.serving import TOKENS_OF, PromptCounts, prompt_facts
from spec_data.terminal.console import did_you_mean

# -- sets of prompts -------------------------------------------------------------------------------
# `--prompts` takes files, directories and datasets, several with commas between them, and the names
# of SETS. A named set is read from the Hugging Face Hub (or from a local file or directory of that
# name), and its question column becomes the prompt. Nothing is added to a question.
#
# The set of a prompt is the name given for it, followed by its part if there are parts: the parts
# of the named set, or the `category` of the row. Every part has figures of its own.
#
# Rows, as the publishers describe them or read them: `RedHatAI/speculator_benchmarks` has one file
# per part with a string `prompt` (speculators' scripts/evaluate/evaluate.py), taken from Spec-
# Bench and HumanEval (its dataset card). Spec-Bench's sixth part is MT-bench with both turns (its
# evaluation/speed.py), so it is read from MT-bench itself. `nvidia/SPEED-Bench` has a list of user
# messages in `turns`, and a `category` (its dataset card).


@dataclass(frozen=True)
class PromptSource:
    """One set of prompts, or one part of a set.

    Attributes:
        source: as `spec-data generate --corpus` takes it.
        column: of a named set: holds the question, or the user's messages one after the other.
        turns: the column is a list of messages.
        categories: the `category` of a row is its part of the set. --limit counts each category of
            a named set.
        name: what its prompts are counted to.
    """

    source: str
    column: str = ""
    turns: bool = False
    categories: bool = False
    name: str = ""

    def parser(self, groups: dict[str, str]) -> Callable[..., Record]:
        """Return what parses a row; it notes the set of the row in `groups`."""

        def parse(row: Any, *, source: str, where: str, layout: Layout = PLAIN) -> Record:
            groups[where] = self.name
            if isinstance(row, Mapping):
                part = row.get(CATEGORY)
                if self.categories and isinstance(part, str):
                    groups[where] = f"{self.name}: {part}"
                if self.column and row.get(self.column) is not None:
                    row = {"turns" if self.turns else "prompt": row[self.column]}
            return parse_prompt(row, source=source, where=where, layout=layout)

        return parse


def _files(*parts: str) -> dict[str, PromptSource]:
    repository = "RedHatAI/speculator_benchmarks"
    return {part: PromptSource(f"{repository}:{part}.jsonl", "prompt") for part in parts}


_MT_BENCH = PromptSource("HuggingFaceH4/mt_bench_prompts@train", "prompt", turns=True)
_SPEED_BENCH = PromptSource("nvidia/SPEED-Bench:qualitative@test", "turns", True, categories=True)
_OF_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")

SETS: Mapping[str, Mapping[str, PromptSource]] = {
    "mt-bench": {"": _MT_BENCH},
    "gsm8k": {"": PromptSource("openai/gsm8k:main@test", "question")},
    "humaneval": {"": PromptSource("openai/openai_humaneval@test", "prompt")},
    "math-500": {"": PromptSource("HuggingFaceH4/MATH-500@test", "problem")},
    "mbpp": {"": PromptSource("google-research-datasets/mbpp:full@test", "text")},
    "spec-bench": {"mt_bench": _MT_BENCH, **_files(*_OF_SPEC_BENCH)},
    "speculators": _files("HumanEval", *_OF_SPEC_BENCH, "question", "tool_call", "writing"),
    "speed-bench": {"": _SPEED_BENCH},
}
"""The parts of each named set by their names; "" names the set as a whole."""


def prompt_sources(text: str) -> list[PromptSource]:
    """Return the parts of --prompts. A path that exists is one part, whatever its name.

    Raises:
        ConfigError: a part is empty or nearly the name of a set, or two have the same prompts.
    """
    given = [text] if Path(text).exists() else [part.strip() for part in text.split(",")]
    short = {part: Path(part).name or part for part in given}
    repeated = Counter(short.values())  # sets of one name would be measured as one
    names = {part: name if repeated[name] == 1 else part for part, name in short.items()}
    sources: dict[str, PromptSource] = {}
    parts: dict[str, str] = {}  # by source
    for part in given:
        if not part:
            raise ConfigError(f"--prompts {text}: a name between two commas is missing")
        named = {} if Path(part).exists() else SETS.get(part, {})
        # no file, and no name of the hub with its owner
        plain = not re.search(r"[./:@]", part) and not Path(part).exists()
        if plain and not named and (nearest := did_you_mean(part, list(SETS))):
            raise ConfigError(
                f"--prompts {part}: no such file or set{nearest} The sets are {', '.join(SETS)}"
            )
        of_part = [
            replace(one, name=f"{part}: {name}" if name else part) for name, one in named.items()
        ] or [PromptSource(part, categories=True, name=names[part])]
        for one in of_part:
            if (first := parts.get(one.source)) is not None:
                both = f"{first} and {part} both have the prompts of {one.source}"
                problem = f"{part} is there twice" if first == part else both
                raise ConfigError(f"--prompts {text}: {problem}")
            parts[one.source], sources[one.source] = part, one
    return list(sources.values())


# -- prompts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: its row, and the token ids of its first turn."""

    record: Record
    ids: list[int]

    @property
    def where(self) -> str:
        """The row: file:line."""
        return self.record.where


@dataclass(kw_only=True)
class Prompts:
    """The prompts of one or several sets.

    `left_out` counts the rows that are no prompt; `examples` are messages about the first few.
    `groups` has the set of each row.
    """

    template: Template | None
    prompts: list[Prompt] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    examples: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def facts(self, kwargs: Mapping[str, Any] | None = None) -> dict[str, dict[str, int]]:
        """Return what renders the chats, the kwargs of rows included; see `shards.serving`.

        `kwargs` are those of all rows, where a server renders them without a template here.
        """
        counts = PromptCounts()
        here = self.template and self.template.tokenizer.chat_template
        for record in (prompt.record for prompt in self.prompts):
            if record.messages and (here or (self.template is None and kwargs is not None)):
                given = dict(kwargs or {}) | record.template_kwargs
                kwargs_here = self.template.kwargs_of(record) if self.template else given
                counts.add(prompt_facts(kwargs_here, record.messages, record.tools), 0)
            elif record.rendered_with is not None:
                given, messages = record.template_kwargs, record.rendered_with
                counts.add(prompt_facts(given, messages, record.tools), 0)
        return {name: found for name, found in counts.facts().items() if name in TOKENS_OF}

    def add(self, reader: CorpusReader, limit: int = 0) -> None:
        """Render the rows of a source; `limit` prompts of each category at most, 0: all.

        Raises:
            CorpusError: it has too many bad rows, or no prompt.
        """
        before = len(self.prompts)
        taken: Counter[str] = Counter()
        for record in reader:
            taken[self.groups[record.where]] += 1
            if 0 < limit < taken[self.groups[record.where]]:
                continue
            try:
                ids = []
                if self.template:
                    ids = in_time(record.where, prompt_ids, record, self.template)
                self.prompts.append(Prompt(record=record, ids=ids))
            except RenderError as error:
                reader.refuse(error)
        self.left_out += sum(r.bad for r in reader.reports) + sum(reader.refused.values())
        examples = [line for report in reader.reports for line in report.bad_examples]
        examples += [line for lines in reader.refused_examples.values() for line in lines]
        self.examples += (examples := list(dict.fromkeys(examples)))
        if len(self.prompts) == before:
            reasons = "\n  ".join(["no row is a usable prompt", *examples])
            raise CorpusError(f"{reader.reports[0].path}: {reasons}")

    def continued(self, prompt: Prompt, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt with other messages: the next turn of its chat.

        Raises:
            RenderError: the template rejects them.
        """
        assert self.template is not None
        chat = Chat(self.template, prompt.record, messages)
        return in_time(prompt.where, chat.prompt, len(messages))


def read_prompts(
    source: str,
    template: Template | None,
    limit: int = 0,
    max_bad_rows: str = "auto",
    columns: str | Mapping[str, str] = "",
) -> Prompts:
    """Read and render prompts of files, directories or datasets, as `Prompts`.

    Args:
        source: paths or Hub names, as `spec-data generate --corpus` takes them, or names of `SETS`,
            with commas between them. The split is "test" unless one has an `@split`.
        template: renders the prompts; None: they have no ids, a server renders them.
        limit: the first so many prompts of each source, or of each category of a named set that has
            them; 0: all.
        max_bad_rows: how many rows may be left out: "auto", a count or a share.
        columns: their columns under other names, as --columns gives them; not of named sets.

    Raises:
        MissingError: a source does not exist. ConfigError: `source` names one twice.
        CorpusError: it cannot be read, has too many bad rows, or no prompt.
    """
    bad = replace(parse_limit(max_bad_rows), option=False)
    prompts = Prompts(template=template)
    layout = layout_of(template.tokenizer if template else None, columns)
    for part in prompt_sources(source):
        by_category = bool(part.column) and part.categories
        try:
            reader = CorpusReader(
                [part.source],
                limit=None if by_category else limit or None,
                split="test",
                max_bad_rows=bad,
                parse=part.parser(prompts.groups),
                more_columns=[CATEGORY, *([part.column] if part.column else [])],
                layout=replace(layout, columns={}) if part.column else layout,
            )
            reader.whole_rows = not part.column
            prompts.add(reader, limit if by_category else 0)
        except (MissingError, CorpusError) as error:
            raise type(error)(f"--prompts {str(error).removeprefix('corpus ')}") from error
    return prompts


def prompt_ids(record: Record, template: Template) -> list[int]:
    """Return the token ids with which serving asks the target.

    A chat is rendered with its generation prompt. Text is continued as it is. A question as a
    string is one user message if the tokenizer has a chat template, otherwise text to continue.

    Raises:
        RenderError: the template or the tokenizer rejects the record, or it has no tokens.
    """
    tokenizer, messages = template.tokenizer, record.messages
    if record.input_ids is not None:
        return record.input_ids
    plain = record.kind == "prompt" and not tokenizer.chat_template
    if messages is None or (plain and len(messages) == 1):
        text = record.text if messages is None else messages[0]["content"]
        return text_ids(tokenizer, record, text or "")
    ids = Chat(template, record, messages).prompt(len(messages))
    if not ids:
        raise render_error(record, "empty", "renders to no tokens")
    return ids
