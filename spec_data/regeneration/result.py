"""What `regenerate` returns, and what it prints: the counts, and what needs attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.terminal.command import Result

_SHOWN = 5  # failed conversations


@dataclass(frozen=True, kw_only=True)
class RegenerateResult(Result):
    """The conversations that `regenerate` wrote: written + failed + skipped == read.

    Attributes:
        path: the file.
        read: corpus rows that were read; written: conversations.
        failed: conversations that were given up; the same call tries them again.
        skipped: rows that were left out, by reason.
        failures: the row ("where"), id and reason of the failed conversations; the first 10,000.
        answers, tokens: how many answers, and the tokens of all of them.
        longest: tokens of the longest prompt with its answer.
        finish_reasons: answers by the reason for which they ended; "length" is the limit of tokens.
        notes: answers about which something is to be said, by what it is.
        settings: how the answers were sampled, as the sampling record has it.
        again: conversations failed, and the same call tries them again.
    """

    path: Path
    read: int
    written: int
    failed: int
    skipped: dict[str, int]
    failures: tuple[dict[str, str], ...]
    answers: int
    tokens: int
    longest: int
    finish_reasons: dict[str, int]
    notes: dict[str, int]
    settings: dict[str, Any]
    again: Sequence[str] | None = None
    next_label: str = "next"
    exit_code: int = 0
    next_command: Sequence[str] = ()

    @classmethod
    def of(cls, path: Path, record: Mapping[str, Any]) -> "RegenerateResult":
        """Return the result that a sampling record describes."""
        counts = {name: n for name, n in record["counts"].items() if name != "prompt_tokens"}
        failures, settings = tuple(record["failed"]), record["settings"]
        failed = bool(counts["failed"])
        return cls(
            **counts,
            path=path,
            failures=failures,
            settings=settings,
            again=() if failed else None,
            next_label="retry" if failed else "next",
            exit_code=int(failed),
        )

    def __str__(self) -> str:
        skipped = sum(self.skipped.values())
        by = self.settings.get("target_name") or self.settings.get("server_model")
        lines = [
            f"rows      {self.read:,} read = {self.written:,} written + {self.failed:,} failed + "
            f"{skipped:,} skipped",
            f"answers   {self.answers:,}, {self.tokens:,} tokens; ended by "
            f"{_listed(self.finish_reasons)}",
            f"sampling  {_sampling(self.settings)}",
            f"by        {by}",
        ]
        lines += [f"skipped   {_listed(self.skipped)}"] if skipped else []
        lines += [f"note      {number:,} {note}" for note, number in self.notes.items()]
        if truncated := self.finish_reasons.get("length", 0):
            lines.append(
                f"note      {truncated:,} answers reached {self.settings['max_new_tokens']:,} "
                "tokens; `generate` does not supervise their end. Raise --max-new-tokens"
            )
        lines += [f"failed    {f['where']}: {f['reason']}" for f in self.failures[:_SHOWN]]
        return "\n".join(lines)


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items()) or "none"


def _sampling(settings: Mapping[str, Any]) -> str:
    if settings["temperature"] == 0:
        return "greedy"
    parts = [f"temperature {settings['temperature']:g}", f"top-p {settings['top_p']:g}"]
    parts += [f"top-k {settings['top_k']}"] if settings["top_k"] else []
    return ", ".join([*parts, f"seed {settings['seed']}"])
