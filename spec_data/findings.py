"""What verify found, in words."""

from collections.abc import Callable
from dataclasses import dataclass, field

from spec_data.shards.errors import SpecDataError


@dataclass
class Findings:
    """What was checked and what failed. A check with failures has no fact to tell."""

    failures: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    _failures_before: int = 0

    def check(self, check: Callable[[], None]) -> None:
        """Run a check; data it cannot read is a failure in words, not the end of verify."""
        self._failures_before = len(self.failures)
        try:
            check()
        except SpecDataError as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """Note a failure."""
        self.failures.append(message)

    def passed(self, fact: str) -> None:
        """Note what the running check has proven, unless it failed."""
        if len(self.failures) == self._failures_before:
            self.facts.append(fact)
