"""The options that choose the vocabulary of a new draft. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from cyclopts import Parameter

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.terminal.types import more

CHOICES = ("draft_vocab_size", "draft_vocab", "draft_vocab_coverage")
"""Options that exclude each other: each of them alone decides the size of the vocabulary."""

DRAFT = more("the draft")

PATHS = ("draft_vocab",)
"""Options that are paths of this machine; a draft's config.json does not repeat them."""


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Which tokens a new draft can propose."""

    draft_vocab_size: int = 32000
    """The draft can propose this many tokens, the most frequent supervised ones; 0 = all. Fewer are
    faster; raise it for many languages."""
    draft_vocab: Annotated[str | None, DRAFT, Parameter(metavar="FILE")] = None
    """The tokens that the draft can propose, instead of a size: a JSON list of ids, a safetensors
    file of ids or of d2t/t2d, or any draft (its directory, run or weights file)."""
    draft_vocab_coverage: Annotated[float | None, DRAFT, Parameter(metavar="SHARE")] = None
    """The smallest vocabulary that holds this share of the supervised tokens, such as 0.99, instead
    of a size."""

    def __post_init__(self) -> None:
        """Reject options that contradict each other, and values outside their range."""
        if self.draft_vocab_size < 0:
            raise DraftError(f"draft_vocab_size = {self.draft_vocab_size}: 0 (all) or more")
        default = next(f.default for f in fields(self) if f.name == "draft_vocab_size")
        sized = None if self.draft_vocab_size == default else self.draft_vocab_size
        check_choice(
            {
                "draft_vocab_size": sized,
                "draft_vocab": self.draft_vocab,
                "draft_vocab_coverage": self.draft_vocab_coverage,
            }
        )


def check_choice(given: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other, and a share outside its range; None: not given.

    Raises:
        ConfigError: see above.
    """
    chosen = [name for name in CHOICES if given.get(name) is not None]
    if len(chosen) > 1:
        flags = " and ".join(f"{_flag(name)} {given[name]}" for name in chosen)
        raise ConfigError(f"{flags}: each of them chooses the draft vocabulary; give one")
    share = given.get("draft_vocab_coverage")
    if isinstance(share, (int, float)) and not 0 < share <= 1:
        raise ConfigError(f"--draft-vocab-coverage {share}: above 0 and at most 1")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
