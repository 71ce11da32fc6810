"""`spec-train compare`: is one draft accepted longer than another, on the same prompts?

In: two files of `spec-train eval --json`, made by real decoding. Out: both acceptance lengths with
their intervals, and the difference with its interval and p-value.
"""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.command import Result
from spec_train.reports.results import Decoded, convert, read_json
from spec_train.simulation.intervals import LEVEL, Comparison, compare

log = logging.getLogger(__name__)

_SETTINGS = ("target", "temperature", "dtype", "tree_tokens", "draft_tokens")


@dataclass(frozen=True)
class ComparedDrafts(Comparison, Result):
    """Two drafts on the same prompts: figures of `Comparison`, and which drafts they are of."""

    files: tuple[str, str]
    drafts: tuple[str, str]

    def facts(self) -> dict[str, Any]:
        """Return every figure, for --json."""
        figures = {field.name: getattr(self, field.name) for field in fields(Comparison)}
        return {"a": self.files[0], "b": self.files[1], "level": LEVEL, **figures}

    def __str__(self) -> str:
        """Return the comparison as lines for people."""
        return comparison_table(self, *self.drafts)


def compare_files(first: str, second: str, seed: int) -> ComparedDrafts:
    """Compare two files of evaluations.

    Raises:
        MissingError: a file does not exist. ConfigError: a file is no evaluation with a target, or
            the two have fewer than two prompts in common.
    """
    a, b = _read(first), _read(second)
    for line in differing_settings(a, b):
        log.warning("warning: %s", line)
    counts_a, counts_b = _by_prompt(a), _by_prompt(b)
    common = [prompt for prompt in counts_a if prompt in counts_b]
    alone = len(counts_a) + len(counts_b) - 2 * len(common)
    if alone:
        log.warning("warning: %d prompts are in one file only, and are left out", alone)
    try:
        figures = compare(
            np.array([counts_a[prompt] for prompt in common], dtype=np.int64).reshape(-1, 2),
            np.array([counts_b[prompt] for prompt in common], dtype=np.int64).reshape(-1, 2),
            seed,
        )
    except ValueError as error:
        raise ConfigError(f"{first} and {second}: {error}") from None
    if len(common) > figures.prompts:
        log.warning(
            "warning: %d prompts have no verification with one of the drafts, and are left out",
            len(common) - figures.prompts,
        )
    return ComparedDrafts(**vars(figures), files=(first, second), drafts=(a.draft, b.draft))


def differing_settings(a: Decoded, b: Decoded) -> list[str]:
    """Return a line for each setting in which two evaluations differ."""
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in _SETTINGS]
    name = "max_new_tokens"
    pairs.append((name, a.options.get(name), b.options.get(name)))
    return [f"{name} differs: {x!r} and {y!r}" for name, x, y in pairs if x != y]


def comparison_table(found: Comparison, a: str, b: str) -> str:
    """Return the comparison as lines for people."""
    level = f"{LEVEL:.0%} interval"
    lines = [
        f"{name}  {length:.3f}  {level} {low:.3f} to {high:.3f}  {draft}"
        for name, length, (low, high), draft in zip(
            "AB", found.lengths, found.intervals, (a, b), strict=True
        )
    ]
    low, high = found.interval
    clear = "" if low <= 0 <= high else ", which excludes 0"
    lines.append(f"B - A  {found.difference:+.3f}  {level} {low:+.3f} to {high:+.3f}{clear}")
    lines.append(
        f"p = {found.p_value:.2g}, permutation test over {found.prompts:,} prompts that both have"
    )
    return "\n".join(lines)


def _read(name: str | Path) -> Decoded:
    path = Path(name)
    if not path.is_file():
        raise MissingError(f"{path}: no such file; `spec-train eval --json FILE` writes one")
    return convert(read_json(path), Decoded, str(path))


def _by_prompt(report: Decoded) -> dict[str, tuple[int, int]]:
    """Return verifications and tokens by prompt; a prompt that is there twice is added up."""
    counts: dict[str, tuple[int, int]] = {}
    for line in report.per_prompt:
        rounds, emitted = counts.get(line.prompt, (0, 0))
        counts[line.prompt] = rounds + line.rounds, emitted + line.emitted
    return counts
