"""What the public functions of spec_data return: frozen values.

`print` shows them as the commands do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.generation.probe import Probe
from spec_data.pages.page import notebook_html
from spec_data.pages.report import dataset_text, refused_label
from spec_data.shards.likelihood import Agreement
from spec_data.shards.schema import Manifest
from spec_data.shards.storage import scheme_of
from spec_data.terminal.command import Result
from spec_data.terminal.progress import size


@dataclass(frozen=True, kw_only=True)
class EstimateResult(Result):
    """What `generate` would write. Sizes are in bytes, and exact with --codec bf16."""

    target: str
    layers: tuple[int, ...]
    fitting: dict[str, str | None]
    """By draft, why it cannot be fitted on the dataset; None if it can."""
    documents: int
    tokens: int
    supervised_tokens: int
    shards: int
    bytes: int
    """Of all shards: at most, or with a probe as measured, where a lossy codec stores states."""
    bytes_least: int
    other_bytes: dict[str, int]
    """Bytes of the files beside the shards: the target's "head", its other files, index, rest."""
    bytes_needed: int
    """`bytes` and those of the other files, to within 1 % and 64 KB."""
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
    next_command: Sequence[str] = field(default=(), repr=False)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 where the disk is too small."""
        return int(not self.fits)

    def __str__(self) -> str:
        if self.fits:
            return self.text
        needed, free = self.bytes_needed, self.bytes_free
        return (
            f"{self.text}\n\nthe dataset does not fit: it needs {size(needed)}, and the disk has "
            f"{size(free)} free: {size(needed - free)} too little. Free some space, lower --limit "
            "or --max-length, or capture fewer --layers"
        )


def skipped_rows(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the corpus rows that are left out, by reason, from the counts of a manifest."""
    bad = counts.get("bad_rows", 0)
    return ({"bad": bad} if bad else {}) | counts.get("unrendered", {})


@dataclass(frozen=True, kw_only=True)
class WrittenDataset(Result):
    """A dataset after a command that writes one.

    It is not `sealed` where other workers, or a trainer that deletes what it has used, share it,
    and after --dry-run; what is not known is 0 then.
    """

    path: Path
    sealed: bool
    layers: tuple[int, ...] = ()
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    shards: int = 0
    bytes: int = 0
    """Bytes of all shards; a view has none."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents that were left out, by reason."""
    skipped_rows: dict[str, int] = field(default_factory=dict)
    """Corpus rows that were left out, by reason; "bad" are those that cannot be read."""
    fingerprint: str = ""
    policy: str = ""
    """Either "on-policy" or "off-policy", as far as the measurement allows."""
    refused_policy: str = field(repr=False, default="")
    """Why the label `on_policy` was not accepted; empty if it was."""
    agreement: dict[str, Agreement] = field(default_factory=dict)
    """Per source: how often supervised tokens are the target's first choice, and their NLL."""
    warnings: tuple[str, ...] = ()
    """What is suspicious about the answers or the target, in words."""
    text: str = field(
        repr=False, default="not sealed: units of other processes are not done, or used"
    )
    next_command: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, out: str | Path, manifest: Manifest | None, target: str | None = None
    ) -> "WrittenDataset":
        """Return what a manifest says; None: it is not finished. `target` can be verified."""
        if manifest is None:
            command = () if scheme_of(out) else ("spec-data", "status", str(out))
            return cls(path=Path(out), sealed=False, next_command=command)
        totals = manifest.totals
        return cls(
            path=Path(out),
            sealed=True,
            layers=manifest.layers,
            documents=totals.documents,
            tokens=totals.tokens,
            supervised_tokens=totals.supervised,
            shards=len(manifest.shards),
            bytes=totals.bytes,
            dropped=manifest.documents.dropped,
            skipped_rows=skipped_rows(structs.asdict(manifest.documents)),
            fingerprint=manifest.fingerprint,
            policy=manifest.policy,
            refused_policy=refused_label(manifest) if target else "",
            agreement=manifest.agreement.sources if manifest.agreement else {},
            warnings=tuple(manifest.suspicions),
            text=dataset_text(manifest),
            next_command=(
                *("spec-data", "verify", str(out)),
                *(("--target", target) if target else ()),
            ),
        )

    def _repr_html_(self) -> str:
        """Return the page of the dataset, without its tokens."""
        from spec_data.pages.dataset_page import dataset_page

        if not self.sealed:
            return super()._repr_html_()
        return notebook_html(lambda: dataset_page(self.path, 0), str(self))

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 where the data contradict the label --on-policy."""
        return int(bool(self.refused_policy))

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.text, self.refused_policy)))
