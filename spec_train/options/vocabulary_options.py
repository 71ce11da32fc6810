"""The options that choose a draft's vocabulary, of `fit` and of `export`. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.terminal.config import option

CHOICES = ("draft_vocab_size", "draft_vocab", "draft_vocab_coverage")
"""Options that exclude each other: each of them alone decides the size of the vocabulary."""

PATHS = ("draft_vocab", "draft_vocab_from")
"""Options that are paths of this machine; a draft's config.json does not repeat them."""


class VocabularyChoice(Protocol):
    """What decides a draft vocabulary; see the options of these names."""

    @property
    def draft_vocab_size(self) -> int | None: ...
    @property
    def draft_vocab(self) -> str | None: ...
    @property
    def draft_vocab_coverage(self) -> float | None: ...


def file_option(group: str = "") -> Any:
    """Return the option that reads a vocabulary from a file."""
    return option(
        None,
        help="the tokens that the draft can propose, instead of a size: a JSON list of ids, a "
        "safetensors file of ids or of d2t/t2d, or any draft (its directory, run or weights file)",
        group=group,
        metavar="FILE",
    )


def coverage_option(group: str = "") -> Any:
    """Return the option that sizes a vocabulary by what it covers."""
    return option(
        None,
        help="the smallest vocabulary that holds this share of the supervised tokens, such as "
        "0.99, instead of a size",
        group=group,
        metavar="SHARE",
    )


def source_option(default: str, group: str = "") -> Any:
    """Return the option that says in which data tokens are counted; `default`: without it."""
    return option(
        None,
        help="count tokens in this dataset, or take the counts of a JSON object {token id: count}; "
        f"not given: {default}. A corpus must be captured first",
        group=group,
        metavar="DATA",
    )


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Which tokens a new draft can propose."""

    draft_vocab_size: int = option(
        32000,
        help="the draft can propose this many tokens, the most frequent supervised ones; 0 = all. "
        "Fewer are faster; raise it for many languages",
    )
    draft_vocab: str | None = file_option()
    draft_vocab_coverage: float | None = coverage_option()
    draft_vocab_from: str | None = source_option("in the training documents")

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
                "draft_vocab_from": self.draft_vocab_from,
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
    if given.get("draft_vocab") is not None and given.get("draft_vocab_from") is not None:
        raise ConfigError(
            f"--draft-vocab {given['draft_vocab']} and --draft-vocab-from "
            f"{given['draft_vocab_from']}: a file names the tokens, so none are counted; give one"
        )
    share = given.get("draft_vocab_coverage")
    if isinstance(share, (int, float)) and not 0 < share <= 1:
        raise ConfigError(f"--draft-vocab-coverage {share}: above 0 and at most 1")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
