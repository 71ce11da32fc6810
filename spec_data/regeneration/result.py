"""What `regenerate` counts, shows while it runs, returns and prints."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.regeneration.conversations import TRUNCATED, Answer, Conversation, Unanswerable
from spec_data.terminal.command import Result
from spec_data.terminal.progress import Bar

_SHOWN = 5  # failed conversations


class Progress:
    """What becomes of each conversation while answers are generated, and the bar that shows it.

    `failures` has why conversations were given up, by id.
    """

    def __init__(self, bar: Bar) -> None:
        self.failures: dict[str, Unanswerable] = {}
        self._bar = bar
        self._tokens = self._failed = 0
        self._began = time.monotonic()

    def fail(self, conversation: Conversation, error: Unanswerable) -> None:
        """Give a conversation up."""
        self.failures[conversation.id] = error
        self._failed += error.retry
        self._bar.update(1)
        self._show()

    def answered(self, answer: Answer) -> None:
        """Count one answer of this run."""
        self._tokens += answer.tokens
        self._show()

    def complete(self, resumed: bool = False) -> None:
        """Count a conversation with all of its answers; `resumed`: they are of earlier runs."""
        if resumed:
            self._bar.initial += 1  # so that rate and ETA are those of this run
        self._bar.update(1)

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        failed = f", {self._failed:,} failed" if self._failed else ""
        self._bar.set_postfix_str(f"{self._tokens / seconds:,.0f} tok/s{failed}")


@dataclass(kw_only=True)
class Counts:
    """What became of every row of the corpus: written + failed + skipped == read.

    Attributes:
        read: rows read; written: conversations with all of their answers.
        failed: conversations that were given up; the same command tries them again.
        skipped: rows that were left out, by reason.
        answers, tokens, prompt_tokens: of the conversations that were written.
        longest: tokens of the longest prompt with its answer.
        finish_reasons: answers by the reason for which they ended; "length" is the limit of tokens.
        notes: answers about which something is to be said, by what it is.
    """

    read: int = 0
    written: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a conversation that is written."""
        self.written += 1
        self.answers += len(answers)
        for answer in answers:
            self.tokens += answer.tokens
            self.prompt_tokens += answer.prompt_tokens
            self.longest = max(self.longest, answer.tokens + answer.prompt_tokens)
            self.finish_reasons[answer.finish] += 1
            self.notes.update(answer.notes)


@dataclass(kw_only=True)
class RegenerateResult(Counts, Result):
    """The conversations that `regenerate` wrote.

    Attributes:
        path: the file.
        failures: the row ("where"), id and reason of the failed conversations; the first 10,000.
        settings: how the answers were sampled, as the sampling record has it.
    """

    path: Path
    failures: list[dict[str, str]]
    settings: dict[str, Any]
    next_command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.failed:  # the same command tries them again
            self.again, self.exit_code = "retry", 1

    def __str__(self) -> str:
        skipped = sum(self.skipped.values())
        by = self.settings.get("target_name") or self.settings.get("server_model")
        lines = [
            f"rows      {self.read:,} read = {self.written:,} written + {self.failed:,} failed + "
            f"{skipped:,} skipped",
            f"answers   {self.answers:,}, {self.tokens:,} tokens; ended by "
            f"{_listed(self.finish_reasons)}",
            f"by        {by}",
        ]
        lines += [f"skipped   {_listed(self.skipped)}"] if skipped else []
        lines += [f"note      {number:,} {note}" for note, number in self.notes.items()]
        if truncated := self.finish_reasons.get(TRUNCATED, 0):
            lines.append(
                f"note      {truncated:,} answers reached {self.settings['max_new_tokens']:,} "
                "tokens; `generate` does not supervise their end. Raise --max-new-tokens"
            )
        lines += [f"failed    {f['where']}: {f['reason']}" for f in self.failures[:_SHOWN]]
        return "\n".join(lines)


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items()) or "none"
