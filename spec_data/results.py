"""What the public functions of spec_data return: frozen values.

`print` shows them as the commands do.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.generation.probe import Probe
from spec_data.shards.likelihood import Agreement


@dataclass(frozen=True, kw_only=True)
class EstimateResult:
    """What `generate` would write. Sizes are in bytes and exact but for tokens that escape."""

    target: str
    fitting: dict[str, str | None]
    """By draft, why it cannot be fitted on the dataset; None if it can."""
    layers: tuple[int, ...]
    drafts: dict[str, dict[str, Any]]
    """What each draft of `for_drafts` reads: "layers", "bytes_per_token" and "bytes" of payload."""
    documents: int
    tokens: int
    supervised_tokens: int
    longest_document: int
    pack_length: int
    packing_utilisation: float
    shards: int
    bytes: int
    bytes_per_token: float
    bytes_needed: int
    """Bytes of all files, to within 1 % and 64 KB."""
    other_bytes: dict[str, int]
    """Bytes of the files beside the shards: the target's "head", its other files, index, rest."""
    bytes_free: int
    fits: bool
    """Whether the disk of `out` has `bytes_needed` left."""
    dropped: dict[str, int]
    """Documents that are left out, by reason."""
    skipped_rows: dict[str, int]
    """Corpus rows that are left out, by reason; "bad" are those that cannot be read."""
    probe: Probe | None
    """Tokens per second, time and memory, where a probe was asked for."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """A dataset directory after `generate`.

    It is not `sealed` where other workers, or a trainer that deletes what it has used, share it;
    its counts are 0 then.
    """

    path: Path
    sealed: bool
    layers: tuple[int, ...] = ()
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    shards: int = 0
    bytes: int = 0
    """Bytes of all shards."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents that were left out, by reason."""
    skipped_rows: dict[str, int] = field(default_factory=dict)
    """Corpus rows that were left out, by reason; "bad" are those that cannot be read."""
    fingerprint: str = ""
    policy: str = ""
    """Either "on-policy" or "off-policy", as far as the measurement allows."""
    agreement: dict[str, Agreement] = field(default_factory=dict)
    """Per source: how often supervised tokens are the target's first choice, and their NLL."""
    warnings: tuple[str, ...] = ()
    """What is suspicious about the answers or the target, in words."""
    text: str = field(
        repr=False, default="not sealed: units of other processes are not done, or used"
    )

    def __str__(self) -> str:
        return self.text
