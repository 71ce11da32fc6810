"""What becomes of each conversation while answers are generated, and the bar that shows it."""

import time
from dataclasses import dataclass

from spec_data.regeneration.conversations import Answer, Conversation
from spec_data.terminal.progress import Bar


class Unanswerable(Exception):
    """A turn has no answer.

    Attributes:
        kind: a short slug under which its conversation is counted.
        retry: it may have one when the command is run again.
    """

    def __init__(self, kind: str, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.retry = kind, retry


@dataclass(frozen=True)
class Failure:
    """A conversation without all of its answers; see `Unanswerable`. `where` is its corpus row."""

    where: str
    kind: str
    reason: str
    retry: bool


class Progress:
    """Counts for the bar, and the failures.

    Attributes:
        failures: conversations that were given up, by id.
    """

    def __init__(self, bar: Bar) -> None:
        self.failures: dict[str, Failure] = {}
        self._bar = bar
        self._tokens = self._failed = 0
        self._began = time.monotonic()

    def fail(self, conversation: Conversation, error: Unanswerable) -> None:
        """Give a conversation up."""
        where = conversation.record.where
        self.failures[conversation.id] = Failure(where, error.kind, str(error), error.retry)
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
