"""How many bad rows a run accepts (`--max-bad-rows`), and what is stored and logged of each.

The default, "auto", allows 1 % of the rows, and in sources below 1,000 rows up to 10, if they are
not more than 10 %.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction

from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.terminal.printable import printable

EXAMPLES = 5  # bad rows that are logged and stored, per file or reason
_AUTO_SHARE = Fraction(1, 100)
_AUTO_ROWS, _AUTO_SMALL = 10, Fraction(1, 10)
_EARLY = 100  # with more bad rows than this, the run stops as soon as most rows are bad
_LONGEST = 400  # characters of a message about a row; rows can hold text of any length


class BadRow(ValueError):
    """A row cannot be used. The message has the reason; the reader adds the file and line."""


def too_long(size: int, limit: int) -> BadRow:
    """Return the bad row that stands for one of `size` bytes, above the limit."""
    return BadRow(f"{size:,} bytes, more than the {limit:,} of --max-row-bytes")


@dataclass(frozen=True)
class BadRowLimit:
    """The value of --max-bad-rows: a share of the rows, a count, or (neither) auto.

    `option` is False for a command that has no such option: errors do not advise it.
    """

    text: str
    share: Fraction | None = None
    count: int | None = None
    option: bool = True

    def allowed(self, rows: int) -> int:
        """Return how many of `rows` rows may be bad."""
        if self.count is not None:
            return self.count
        if self.share is not None:
            return int(self.share * rows)
        return max(int(_AUTO_SHARE * rows), min(_AUTO_ROWS, int(_AUTO_SMALL * rows)))


AUTO = BadRowLimit("auto")


def parse_limit(text: str) -> BadRowLimit:
    """Return the limit that a text means: auto, a count (5), or a share (1% or 0.01).

    Raises:
        ConfigError: the text is none of these, or a share above 1.
    """
    plain = text.strip().lower().replace(" ", "")
    if plain == "auto":
        return AUTO
    if re.fullmatch(r"\d{1,18}", plain):
        return BadRowLimit(plain, count=int(plain))
    number = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-\d{1,2})?(%?)", plain)
    share = Fraction(number[1] + (number[2] or "")) / (100 if number[3] else 1) if number else 2
    if share > 1:
        raise ConfigError(
            f"--max-bad-rows {text!r}: expected a count of rows such as 5, a share such as 1% or "
            "0.01, or auto"
        )
    return BadRowLimit(plain, share=Fraction(share))


@dataclass
class BadRows:
    """The bad rows of one corpus source as the user named it, such as a directory as a whole.

    `read` rows so far, good and bad, are counted by the caller. `examples` are the first few
    messages of different reasons. `what` is "rows", or the "turns" of good rows.
    """

    source: str
    limit: BadRowLimit = AUTO
    what: str = "rows"
    read: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Count one bad row; `message` has its place and the reason.

        Raises:
            CorpusError: none may be bad, or most rows are and more than the limit allows.
        """
        if self.limit.count == 0:
            raise CorpusError(
                f"{shortened(message)}\nfix the row, or skip bad {self.what} with "
                "--max-bad-rows auto"
            )
        self.bad += 1
        add_example(self.examples, message)
        if self.bad > _EARLY and self.bad * 2 > self.read:
            self.check("100%", " so far, and reading stops here")

    def check(self, enough: str = "", moment: str = "") -> None:
        """Check the limit; `enough` is a value of it that accepts what comes after `moment`.

        Raises:
            CorpusError: more rows are bad than the limit allows.
        """
        allowed = self.limit.allowed(self.read)
        if self.bad <= allowed:
            return
        bound, more = f"at most {allowed} may be", ""
        if self.limit.option:
            bound = f"--max-bad-rows {self.limit.text} allows {allowed}"
            if self.bad < self.read:
                more = f"add --max-bad-rows {enough or self.bad} to go on without them, or "
        raise CorpusError(
            f"{self.source}: {self.bad} of {self.read} {self.what} are bad{moment}; "
            f"{bound}:"
            + "".join(f"\n  {example}" for example in self.examples)
            + f"\n{more}fix the rows, convert the file to a known format, or use a chat template "
            "that accepts them"
        )


def add_example(examples: list[str], message: str) -> bool:
    """Add a message `place: reason` to a few of different reasons; return whether it was added."""
    message = stored(message)
    reasons = [example.partition(": ")[2] for example in examples]
    if len(examples) == EXAMPLES or message.partition(": ")[2] in reasons:
        return False
    examples.append(message)
    return True


def shortened(message: str) -> str:
    """Return a message without the middle of a long one: it can quote any text of a row."""
    if len(message) <= _LONGEST:
        return message
    half = _LONGEST // 2
    return f"{message[:half]} ... {message[-half:]}"


def stored(message: str) -> str:
    """Return a message of bounded length that UTF-8 and a manifest can hold."""
    return printable(shortened(message))
