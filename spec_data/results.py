"""What the public functions of spec_data return: frozen values.

`print` shows them as the commands do.
"""

import operator
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.generation.probe import Probe
from spec_data.pages.page import Page, notebook_html
from spec_data.pages.report import dataset_text, refused_label
from spec_data.shards.likelihood import LEAST_TOKENS, Agreement
from spec_data.shards.schema import Manifest
from spec_data.shards.serving import prompt_lines
from spec_data.shards.storage import scheme_of
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_data.terminal.progress import duration, size
from spec_data.terminal.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class EstimateResult(Result):
    """What `generate` would write. Sizes are in bytes, and exact with --codec bf16."""

    target: str
    layers: tuple[int, ...]
    fitting: dict[str, str | None]
    """By draft, why it cannot be fitted on the dataset; None if it can."""
    own_layers: tuple[str, ...]
    """Drafts that can be fitted and whose recipe reads captured layers only."""
    draft_layers: dict[str, tuple[int, ...]]
    """The layers that each draft of --for reads."""
    bytes_by_draft: dict[str, int]
    """About the bytes of all shards, if they were captured with --for one draft alone."""
    documents: int
    tokens: int
    supervised_tokens: int
    shards: int
    bytes: int
    """Of all shards: usually at most, or with a probe as measured, where a codec is lossy."""
    bytes_least: int
    bytes_bf16: int
    """Of all shards, if no column can keep its error: such a column is stored in bf16."""
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
    process_bytes: int | None
    """About the memory of each process of --context-parallel, masks excepted; None without it."""
    text: str = field(repr=False)
    page: Page | None = field(default=None, repr=False)
    next_command: Sequence[str] = field(default=(), repr=False)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 where the disk is too small."""
        return int(not self.fits)

    def _repr_html_(self) -> str:
        """Return the page of the plan, below what is printed."""
        page = self.page
        return super()._repr_html_() + (notebook_html(lambda: page, "") if page else "")

    def details(self) -> str:
        """Return the counts, the columns and all sizes as tables."""
        return self.text

    def __str__(self) -> str:
        needed, free = self.bytes_needed, self.bytes_free
        known = self.probe is not None or self.bytes == self.bytes_least
        least = "" if known else f", at least {size(needed - self.bytes + self.bytes_least)}"
        possible = [draft for draft, problem in self.fitting.items() if problem is None]
        others = [draft for draft in possible if draft not in self.own_layers]
        fits = "".join(
            f"; {why} {', '.join(drafts)}"
            for why, drafts in (("for", self.own_layers), ("possible, not their recipe:", others))
            if drafts
        )
        in_bf16 = f"{self.bytes_bf16 / self.tokens:,.1f}"
        rows = _rows(self, fits) | {
            "bytes": (size(needed), f"of all files{least}; the disk has {size(free)} free"),
            "bytes per token": (
                f"{self.bytes / self.tokens:,.1f}",
                "" if known else f"usually at most, in bf16 {in_bf16}; --probe measures it",
            ),
        }
        if len(self.draft_layers) > 1:
            alone = [
                f"{d} {size(self.bytes_by_draft[d])}"
                for d in self.draft_layers
                if d in self.bytes_by_draft
            ]
            rows["for one draft"] = ("", f"of all shards, about: {', '.join(alone)}")
        if self.process_bytes:
            rows["memory, each process"] = (size(self.process_bytes), "about, and masks")
        if self.probe:
            rows["time"] = (duration(self.probe.seconds), "of one worker")
            rows["memory"] = (size(self.probe.memory_bytes), f"on {self.probe.device}, at its peak")
        text = text_table([(name, *cells) for name, cells in rows.items()], "<><")
        if self.fits:
            return text
        return f"{text}\n\n" + textwrap.fill(
            f"the dataset does not fit: it needs {size(needed)}, and the disk has {size(free)} "
            f"free: {size(needed - free)} too little. Free some space, lower --limit or "
            "--max-length, or capture fewer --layers"
        )


def _rows(of: "EstimateResult | WrittenDataset", fits: str = "") -> dict[str, tuple[str, str]]:
    """Return what is in a dataset and what is not, by name: a figure and a remark."""
    left_out = Counter(of.skipped_rows) + Counter(of.dropped)  # a reason may be in both
    reasons = [f"{count:,} {reason}" for reason, count in left_out.most_common()]
    shown, more = reasons[:_REASONS], len(reasons) - _REASONS
    shown += [f"{more} more reason{'s' * (more > 1)} (--verbose)"] if more > 0 else []
    layers = "s" * (len(of.layers) != 1) + " " + (", ".join(map(str, of.layers)) or "none")
    return {
        "documents": (f"{of.documents:,}", f"left out: {', '.join(shown) or 'none'}"),
        "tokens": (f"{of.tokens:,}", f"{of.supervised_tokens:,} supervised"),
        "layers": (str(len(of.layers)), f"outputs of block{layers}{fits}"),
    }


_REASONS = 4  # for which documents are left out; more are counted


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

    path: Path | str
    """A string where it is the URL of remote storage."""
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
    said: frozenset[str] = field(repr=False, compare=False, default=frozenset())
    """Sources of `warnings` that the command has named before."""
    prompts: dict[str, str] = field(default_factory=dict)
    """What prompts hold beyond the target's files: template kwargs, system messages, tools, with
    their shares of documents and supervised tokens."""
    text: str = field(
        repr=False,
        default="not sealed: other processes of this dataset still work, or have not begun",
    )
    next_command: Sequence[str] = field(default=(), repr=False)
    again: str = field(default="", repr=False)

    @classmethod
    def of(
        cls,
        out: str | Path,
        manifest: Manifest | None,
        target: str | None = None,
        said: Collection[str] = (),
    ) -> "WrittenDataset":
        """Return what a manifest says; None: it is not finished. `target` can be verified.

        What is suspicious about the sources `said` is in `warnings`, and not printed again.
        """
        path = str(out) if scheme_of(out) else Path(out)
        if manifest is None:
            command = () if scheme_of(out) else ("spec-data", "status", str(out))
            return cls(path=path, sealed=False, next_command=command)
        totals = manifest.totals
        return cls(
            path=path,
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
            said=frozenset(said),
            prompts=dict(prompt_lines(manifest.identity)),
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

    def details(self) -> str:
        """Return what `inspect` prints."""
        return self.text if self.sealed else ""

    def __str__(self) -> str:
        if not self.sealed:
            return self.text
        rows = _rows(self)
        if self.bytes:
            rows["bytes"] = size(self.bytes), f"in {self.shards:,} shard{'s' * (self.shards > 1)}"
            rows["bytes per token"] = f"{self.bytes / max(self.tokens, 1):,.1f}", ""
        else:
            rows["bytes"] = "0", "a view of other datasets, which must stay where they are"
        if self.agreement:
            of = [agreement.tokens for agreement in self.agreement.values()]
            shares = [agreement.share for agreement in self.agreement.values()]
            share = sum(map(operator.mul, shares, of)) / max(sum(of), 1)
            few = ", too few tokens to judge" if sum(of) < LEAST_TOKENS else ""
            rows["top-1 agreement"] = (
                f"{share:.1%}",
                f"with the target, at supervised tokens: {self.policy}{few}",
            )
        text = text_table([(name, *cells) for name, cells in rows.items()], "<><")
        served = [wrapped(f"{name}: {prompts}") for name, prompts in self.prompts.items()]
        said = tuple(f"{name}: " for name in self.said)
        new = [warning for warning in self.warnings if not warning.startswith(said)]
        lines = [wrapped(f"warning[answers]: {warning}") for warning in new]
        return "\n".join(filter(None, (text, *served, *lines, self.refused_policy)))
