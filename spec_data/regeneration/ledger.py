"""What becomes of each conversation while answers are generated, and the bar that shows it."""

import time
from dataclasses import dataclass
from typing import Any

from spec_data.regeneration.conversations import Answer, Conversation
from spec_data.terminal.progress import Bar


@dataclass(frozen=True)
class Loss:
    """A conversation without all of its answers.

    `kind` is a short slug under which it is counted. A `failed` one may succeed when the command is
    run again; the others are left out for good.
    """

    where: str
    kind: str
    reason: str
    failed: bool


class Ledger:
    """Losses by the id of the conversation, and the counts of this run.

    Attributes:
        losses: conversations that were given up.
        answers, tokens: those that were generated in this run.
    """

    def __init__(self, bar: Bar) -> None:
        self.losses: dict[str, Loss] = {}
        self.answers = self.tokens = 0
        self._bar = bar
        self._began = time.monotonic()

    def skip(self, conversation: Conversation, kind: str, reason: str) -> None:
        """Leave a conversation out: it cannot be answered."""
        self._lose(conversation, Loss(conversation.record.where, kind, reason, failed=False))

    def fail(self, conversation: Conversation, kind: str, reason: str) -> None:
        """Give a conversation up in this run."""
        self._lose(conversation, Loss(conversation.record.where, kind, reason, failed=True))

    def _lose(self, conversation: Conversation, loss: Loss) -> None:
        self.losses[conversation.id] = loss
        self._bar.update(1)
        self._show()

    def lost(self, conversation: Conversation) -> bool:
        """Return whether a conversation was given up."""
        return conversation.id in self.losses

    def answered(self, answer: Answer) -> None:
        """Count one answer of this run."""
        self.answers += 1
        self.tokens += answer.tokens
        self._show()

    def complete(self, fresh: bool = True) -> None:
        """Count a conversation with all of its answers; those of earlier runs are not `fresh`."""
        if not fresh:
            self._bar.initial += 1  # so that rate and ETA are those of this run
        self._bar.update(1)

    def restart(self) -> None:
        """Forget what was counted: the corpus is read again from its first row."""
        self.losses.clear()
        self._bar.reset()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        failed = sum(loss.failed for loss in self.losses.values()) if self.losses else 0
        parts = [f"{self.tokens / seconds:,.0f} tok/s"]
        self._bar.set_postfix_str(", ".join([*parts, *([f"{failed:,} failed"] if failed else [])]))

    def failures(self) -> list[dict[str, Any]]:
        """Return the failed conversations, in the order in which they failed."""
        return [
            {"where": loss.where, "id": identity, "reason": f"{loss.kind}: {loss.reason}"}
            for identity, loss in self.losses.items()
            if loss.failed
        ]
