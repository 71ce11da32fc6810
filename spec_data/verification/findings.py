"""Collect what verify found, and read what a dataset declares about its columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_data.pages.page import Page, Section, Table, notebook_html
from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import predicts_supervised
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped

_SHOWN = 20


@dataclass(kw_only=True)
class VerifyReport(Result):
    """What `verify` proved and found. Damage inside a dataset is no error: it is in `failures`."""

    data: str
    fingerprint: str
    proven: list[str] = field(default_factory=list)
    """What was proven, in words: one line per check without a failure."""
    failures: list[str] = field(default_factory=list)
    """What is wrong: shard, row, document and column, in words."""
    warnings: list[str] = field(default_factory=list)
    """What needs attention although the dataset is sound: answers that are not the target's,
    another tokenizer of the target, a file that does not belong to the dataset."""
    repair: list[str] = field(default_factory=list)
    """Of each dataset with lost or damaged files, the command that brings them back, in words."""
    next_command: Sequence[str] = ()
    _failures_before: int = field(default=0, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 with failures, else 0."""
        return int(not self.ok)

    def check(self, check: Callable[[], None]) -> None:
        """Run a check. If it cannot read the data, that is a failure, and verify continues."""
        self._failures_before = len(self.failures)
        try:
            check()
        except SpecDataError as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """Add a failure."""
        self.failures.append(message)

    def warn(self, message: str) -> None:
        """Add what needs attention, although the dataset is sound."""
        self.warnings.append(message)

    def passed(self, fact: str) -> None:
        """Add what the current check has proven, unless it has a failure."""
        if len(self.failures) == self._failures_before:
            self.proven.append(fact)

    def details(self) -> str:
        """Return everything that was proven."""
        return "\n".join(wrapped(f"ok    {fact}") for fact in self.proven)

    def __str__(self) -> str:
        lines = [f"ok    {len(self.proven)} checks (--verbose names them)"] if self.proven else []
        for word, messages in (("warn", self.warnings), ("FAIL", self.failures)):
            lines += [wrapped(f"{word}  {message}") for message in messages[:_SHOWN]]
            if len(messages) > _SHOWN:
                lines.append(f"{word}  and {len(messages) - _SHOWN} more")
        verdict = f"verified, fingerprint {self.fingerprint[:16]}"
        if self.failures:
            verdict = f"{len(self.failures)} failures"
        return "\n".join([*lines, f"{self.data}: {verdict}", *self.repair])

    def _repr_html_(self) -> str:
        """Return a table of everything that was proven and found, as a part of a notebook."""
        return notebook_html(self._page, str(self))

    def _page(self) -> Page:
        found = {"FAIL": self.failures, "warn": self.warnings, "ok": self.proven}
        rows = [[word, text] for word, texts in found.items() for text in texts]
        checks = Table(title="", columns=[("", "text"), ("check", "text")], rows=rows)
        return Page(
            title=self.data,
            kind="Verification",
            lead=f"{'Verified' if self.ok else 'Not sound'}, fingerprint {self.fingerprint[:16]}.",
            figures=[
                ("failures", len(self.failures), "count"),
                ("warnings", len(self.warnings), "count"),
                ("proven", len(self.proven), "count"),
            ],
            sections=[Section(title="Checks", parts=[checks])],
        )

    def facts(self) -> dict[str, Any]:
        """Return plain values: verdict, what was proven, warnings and failures."""
        names = ("data", "fingerprint", "proven", "warnings", "failures", "repair")
        return {"verified": self.ok} | {name: getattr(self, name) for name in names}


def stored_tokens(dataset: HiddenStatesDataset, name: str, row: dict[str, Any]) -> Tensor:
    """Return which tokens of a document have a stored value in column `name`, bool [T].

    `row` is the document as `HiddenStatesDataset` returns it.
    """
    mask, column = row["loss_mask"].numpy(), dataset.declared.get(name)
    if column is not None and column.sparse:
        return torch.from_numpy(predicts_supervised(mask))
    return torch.ones(len(mask), dtype=torch.bool)


def declared_error(dataset: HiddenStatesDataset, name: str, figure: str) -> float:
    """Return a figure of the error that generation measured of a column; 0 if it is exact."""
    return getattr(dataset.declared[name].error, figure, None) or 0.0
