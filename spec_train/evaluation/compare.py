"""`spec-train compare`: is one draft accepted longer than another, on the same prompts?"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from spec_data.pages.page import notebook_html
from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_train.reports.results import Decoded, convert, read_json
from spec_train.reports.run_page import page_of
from spec_train.simulation.intervals import LEVEL, Comparison, compare

log = logging.getLogger(__name__)

_SETTINGS = ("target", "temperature", "dtype", "tree_tokens", "draft_tokens")


@dataclass(frozen=True)
class ComparedDrafts(Comparison, Result):
    """Two drafts on the same prompts: figures of `Comparison`, and which drafts they are of."""

    files: tuple[str, str]
    drafts: tuple[str, str]

    @property
    def next_command(self) -> Sequence[str]:  # type: ignore[override]
        """The page of both."""
        return ("spec-train", "report", *self.files, "--out", "compared.html")

    def facts(self) -> dict[str, Any]:
        """Return every figure, for --json."""
        figures = asdict(self)
        del figures["drafts"]
        a, b = figures.pop("files")
        return {"a": a, "b": b, "level": LEVEL, **figures}

    def _repr_html_(self) -> str:
        """Return the page of both evaluations, below the lines of the comparison."""
        return super()._repr_html_() + notebook_html(
            lambda: page_of(list(map(Path, self.files))), ""
        )

    def __str__(self) -> str:
        """Return the comparison as lines for people."""
        level = f"{LEVEL:.0%} interval"
        lines = [
            wrapped(f"{name}  {length:.3f}  {level} {low:.3f} to {high:.3f}  {draft}")
            for name, length, (low, high), draft in zip(
                "AB", self.lengths, self.intervals, self.drafts, strict=True
            )
        ]
        low, high = self.interval
        clear = "" if low <= 0 <= high or self.p_value > 1 - LEVEL else ", which excludes 0"
        lines.append(f"B - A  {self.difference:+.3f}  {level} {low:+.3f} to {high:+.3f}{clear}")
        over = f"over {self.prompts:,} prompts that both have"
        lines.append(f"p = {self.p_value:.2g}, permutation test {over}")
        return "\n".join(lines)


def compare_files(first: str, second: str, seed: int) -> ComparedDrafts:
    """Compare two files of evaluations.

    Raises:
        MissingError: a file does not exist. ConfigError: a file is no evaluation with a target, or
            the two have fewer than two prompts in common.
    """
    a, b = _read(first), _read(second)
    settings = {name: (getattr(a, name), getattr(b, name)) for name in _SETTINGS}
    for name in ("max_new_tokens", "confidence_threshold"):
        settings[name] = a.options.get(name), b.options.get(name)
    for name, (x, y) in settings.items():
        if x != y:
            log.warning("warning[compare]: %s differs: %r and %r", name, x, y)
    counts = [prompt_counts(to_builtins(report.per_prompt)) for report in (a, b)]
    common = [prompt for prompt in counts[0] if prompt in counts[1]]
    if alone := sum(map(len, counts)) - 2 * len(common):
        log.warning("warning[compare]: %d prompts are in one file only, and are left out", alone)
    one, other = (np.array([c[p] for p in common], dtype=np.int64).reshape(-1, 2) for c in counts)
    try:
        figures = compare(one, other, seed)
    except ValueError as error:
        raise ConfigError(f"{first} and {second}: {error}") from None
    if len(common) > figures.prompts:
        log.warning(
            "warning[compare]: %d prompts have no verification with one of the drafts, and are "
            "left out",
            len(common) - figures.prompts,
        )
    return ComparedDrafts(**vars(figures), files=(first, second), drafts=(a.draft, b.draft))


def prompt_counts(per_prompt: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return verifications, and their tokens, of each prompt of an evaluation by its digest."""
    return {line["prompt"]: (line["rounds"], line["emitted"]) for line in per_prompt}


def _read(name: str) -> Decoded:
    path = Path(name)
    if not path.is_file():
        raise MissingError(f"{path}: no such file; `spec-train eval --json FILE` writes one")
    raw = read_json(path)
    if isinstance(raw, dict) and not raw.get("target") and ("data" in raw or "server" in raw):
        raise ConfigError(
            f"{path}: has no real decoding; `compare` takes files of `spec-train eval --target "
            "MODEL --prompts FILE --json FILE`"
        )
    return convert(raw, Decoded, str(path))
