"""`spec-data estimate`: what `generate` would write and, with a probe, how long it would take."""

import logging
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spec_data.capture.tensor_parallel import leading
from spec_data.generation.fitting import Fitting, announce_drafts
from spec_data.generation.plan import Plan
from spec_data.generation.probe import Probe, run_probe
from spec_data.generation.setup import Setup, make_plan, set_up
from spec_data.generation.target_files import other_files
from spec_data.models.devices import check_devices
from spec_data.options.generate_options import EstimateConfig
from spec_data.options.placement_options import Spread
from spec_data.pages.dataset_page import plan_page
from spec_data.pages.page import write_page
from spec_data.report import column_rows, counts_text, draft_facts, draft_rows
from spec_data.shards.errors import ConfigError
from spec_data.shards.schema import Column
from spec_data.shards.urls import scheme_of
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.progress import size
from spec_data.terminal.text_table import text_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Estimate:
    """A plan, and what was found out about it.

    Attributes:
        setup, plan: what would be captured.
        fitting: which drafts can be fitted on it.
        probe: what a probe measured; None without one.
    """

    setup: Setup
    plan: Plan
    fitting: Fitting
    probe: Probe | None = None

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of all shards; exact but for tokens that escape a lossy codec."""
        return sum(self.plan.unit_bytes(u, self.setup.columns) for u in range(len(self.plan.units)))

    @cached_property
    def other_bytes(self) -> dict[str, int]:
        """Bytes of all other files by kind, see `other_files`."""
        return other_files(self.setup, self.plan)

    @cached_property
    def drafts(self) -> dict[str, dict[str, Any]]:
        """Layers and payload bytes of each draft of --for, see `draft_facts`."""
        setup, plan = self.setup, self.plan
        return draft_facts(
            setup.draft_layers, setup.columns, plan.tokens, plan.documents.predicting
        )

    @property
    def needed(self) -> int:
        """Bytes of all files."""
        return self.shard_bytes + sum(self.other_bytes.values())

    @cached_property
    def free(self) -> int:
        """Free bytes of the disk of --out."""
        out = Path(self.setup.config.out)
        existing = next(p for p in [out, *out.absolute().parents] if p.exists())
        return shutil.disk_usage(existing).free

    def facts(self) -> dict[str, Any]:
        """Return the estimate as plain values, sizes in bytes (--json)."""
        setup, plan = self.setup, self.plan
        return {
            "target": setup.target["name"],
            "blocks": setup.target["num_layers"],
            "fitting": self.fitting.problems,
            "layers": list(setup.layers),
            "drafts": self.drafts,
            "documents": len(plan.lengths),
            "tokens": plan.tokens,
            "supervised_tokens": plan.documents.supervised,
            "longest_document": int(plan.lengths.max()),
            "pack_length": plan.pack_length,
            "packing_utilisation": plan.utilisation(),
            "shards": len(plan.units),
            "bytes": self.shard_bytes,
            "bytes_per_token": self.shard_bytes / plan.tokens,
            "other_bytes": self.other_bytes,
            "bytes_needed": self.needed,
            "bytes_free": self.free,
            "fits": self.needed <= self.free,
            "columns": [_column_facts(c) for c in setup.columns],
            "corpus": plan.corpus,
            "counts": vars(plan.counts),
            "probe": asdict(self.probe) if self.probe else None,
        }


def estimate_size(config: EstimateConfig) -> Estimate:
    """Make the plan and, with `--probe`, run the target on a few batches.

    Raises:
        SpecDataError: bad input, as for `generate`; with a probe also what loading the target and
            proving its mask form raise.
    """
    if scheme_of(config.out):
        raise ConfigError(
            f"--out {config.out}: estimate says whether a disk has room; give a local --out, the "
            "sizes are the same"
        )
    with leading(config.spread if config.probe else Spread()):
        return _estimate_size(config)


def _estimate_size(config: EstimateConfig) -> Estimate:
    """Make the plan and probe in this process; see `estimate_size`."""
    if config.probe:
        # before the corpus is read, which may take long
        check_devices(config.device, config.spread.device_map)
    if config.page is not None:
        check_file_to_write("--page", config.page)
    setup = set_up(config, weights=config.probe)
    announced = announce_drafts(setup)
    plan = make_plan(setup)
    if config.page is not None:
        logger.info("page: %s", write_page(config.page, plan_page(setup, plan)).path)
    return Estimate(setup, plan, announced, run_probe(setup, plan) if config.probe else None)


def estimate_text(found: Estimate) -> str:
    """Return what generate would write, in words."""
    setup, plan, total = found.setup, found.plan, found.shard_bytes
    other = found.other_bytes
    lines = [
        ("target", f"{setup.target['name']} ({setup.target['num_layers']} blocks)"),
        ("layers (output of block k, from 0)", ", ".join(map(str, setup.layers)) or "none"),
        ("documents", f"{len(plan.lengths):,}"),
        ("tokens", f"{plan.tokens:,}"),
        ("supervised tokens", f"{plan.documents.supervised:,}"),
        ("longest document", f"{int(plan.lengths.max()):,}"),
        ("pack length", f"{plan.pack_length:,}"),
        ("packing utilisation", f"{plan.utilisation():.1%}"),
        ("shards", f"{len(plan.units):,}"),
        ("bytes per token", f"{total / plan.tokens:,.1f}"),
        ("bytes of all shards", f"{total:,} ({size(total)}){_escape_note(setup)}"),
        ("bytes of the target's embedding and head", f"{other['head']:,} ({size(other['head'])})"),
        ("bytes of all other files", size(sum(other.values()) - other["head"])),
        ("bytes of the whole directory", f"{size(found.needed)} (to within 1 % and 64 KB)"),
        ("free on this disk", size(found.free) + _enough(found)),
        *_probe_lines(found.probe),
    ]
    sources = "\n".join(f"  {_source_text(s)}" for s in plan.corpus)
    return "\n\n".join(
        [
            "drafts that can be fitted\n  " + "\n  ".join(found.fitting.lines),
            "corpus\n" + sources,
            counts_text(vars(plan.counts), plan.tokens),
            column_rows(setup.columns, plan.tokens, plan.documents.predicting),
            *([draft_rows(found.drafts)] if found.drafts else []),
            text_table(lines, "<"),
        ]
    )


def _probe_lines(probe: Probe | None) -> list[tuple[str, str]]:
    if probe is None:
        return []
    minutes = probe.seconds / 60
    lasts = f"{minutes / 60:,.1f} hours" if minutes >= 120 else f"{minutes:,.1f} minutes"
    memory = "of the process" if probe.device == "cpu" else f"of {probe.device}"
    return [
        ("probe", f"{probe.tokens:,} tokens on {probe.device}, {probe.form}"),
        ("tokens per forward", f"{probe.batch_tokens:,}"),
        ("tokens per second", f"{probe.tokens_per_second:,.0f} (one worker)"),
        ("time to capture", f"about {lasts}"),
        (f"memory {memory}", f"{size(probe.memory_bytes)} at its peak"),
    ]


def _enough(found: Estimate) -> str:
    return "" if found.needed <= found.free else "  NOT ENOUGH"


def _column_facts(column: Column) -> dict[str, Any]:
    return {"name": column.name, "codec": column.codec, "bytes_per_token": column.bytes_per_token}


def _escape_note(setup: Setup) -> str:
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return ""
    return f", and {2 * (lossy[0].width or 1) + 4:,} per massive token and lossy column"


def _source_text(source: dict[str, Any]) -> str:
    return (
        f"{source['source']}: {source['kind']}, {source['format']}, {source['rows']:,} rows, "
        f"{source['bad']:,} bad, {source.get('unrendered', 0):,} that cannot be rendered"
    )
