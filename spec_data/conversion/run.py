"""`spec-data convert`: prove what the stored states are, plan, read, seal.

    out/.generate/evidence.json     what was proven about the states, before anything else
    out/.generate/samples.json      the sample of each planned document

All else is as `generate` leaves it: a plan, finished units, and a sealed dataset. A run that was
interrupted goes on with the unit that was not finished.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.conversion.layouts import opened, to_generate
from spec_data.conversion.proof import prove_samples
from spec_data.conversion.sample_plan import (
    listing_hash,
    make_sample_plan,
    read_samples,
    save_samples,
)
from spec_data.conversion.stored_backend import Head, StoredBackend
from spec_data.conversion.stored_samples import Layout
from spec_data.corpus.record_reader import SourceReport
from spec_data.generation.explained_failures import explained_failures
from spec_data.generation.fitting import announce_drafts
from spec_data.generation.plan import (
    Plan,
    load_plan,
    read_plan_record,
    refuse_other_files,
    save_plan,
)
from spec_data.generation.run import check_free_space, clear_leftovers, run_units
from spec_data.generation.sealing import finished_unit, seal_directory
from spec_data.generation.setup import (
    Setup,
    data_settings,
    refuse_changes,
    set_up,
    settings,
)
from spec_data.generation.target_files import other_files
from spec_data.generation.worker_locks import worker_lock
from spec_data.models.devices import check_devices, usable_device
from spec_data.options.conversion_options import ConvertConfig
from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST, check_whole
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import Manifest
from spec_data.terminal.paths import make_directory
from spec_data.terminal.progress import size
from spec_data.verification.findings import Findings
from spec_data.verification.run import examine

logger = logging.getLogger(__name__)

_EVIDENCE = "evidence.json"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The outcome of `convert`.

    Attributes:
        manifest: of the sealed dataset.
        findings: of --verify-target; None without it.
    """

    manifest: Manifest
    findings: Findings | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedConversion:
    """What `convert` would write: documents, tokens, shards and bytes, and the evidence."""

    documents: int
    tokens: int
    shards: int
    bytes: int
    evidence: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens: {self.shards} shards, "
            f"{size(self.bytes)} with all other files. Nothing was written"
        )


def plan_conversion(config: ConvertConfig) -> PlannedConversion:
    """Prove the states and plan the dataset; write nothing.

    Raises:
        As `convert`.
    """
    layout, blocks = opened(config)
    setup = set_up(to_generate(config, layout))
    announce_drafts(setup, captures=False)
    evidence = prove_samples(config, layout, setup, blocks)
    plan, _ = make_sample_plan(layout, setup, config.data, config.mask_frame)
    shards = sum(plan.unit_bytes(u, setup.columns) for u in range(len(plan.units)))
    return PlannedConversion(
        documents=len(plan.documents),
        tokens=plan.tokens,
        shards=len(plan.units),
        bytes=shards + sum(other_files(setup, plan).values()),
        evidence=evidence,
    )


def convert(config: ConvertConfig) -> Conversion:
    """Convert what another tool stored to a dataset, or resume a run that was interrupted.

    Raises:
        ConfigError: the directory holds data made with other settings, or the masks are shifted.
        MissingError, DatasetError: the source is not what the tool writes; or the dataset was
            finished before, and is damaged now.
        CorpusError: too many samples are malformed.
        TargetError: the target cannot be loaded, or has not these layers.
        RunError: the states are not what the declared convention says, or the disk is full.
    """
    check_devices(config.device, None)
    layout, blocks = opened(config)
    setup = set_up(to_generate(config, layout))
    out = Path(config.out)
    if (out / MANIFEST).is_file():
        manifest = Manifest.read(out / MANIFEST)
        refuse_changes(_changes(config, layout, setup, manifest.raw["settings"]), out)
        check_whole(out)
        logger.info("%s is complete already: nothing to do", out)
    else:
        announce_drafts(setup, captures=False)
        manifest = _convert(config, layout, setup, blocks)
    return Conversion(manifest=manifest, findings=_verified(config))


def _convert(config: ConvertConfig, layout: Layout, setup: Setup, blocks: int) -> Manifest:
    out, work = Path(config.out), Path(config.out) / WORK
    saved = read_plan_record(work)
    if saved is None:
        evidence = _begin(config, layout, setup, blocks)
    else:
        refuse_changes(_changes(config, layout, setup, saved.settings), out)
        evidence = json.loads((work / _EVIDENCE).read_text(encoding="utf-8"))
    plan = load_plan(work)
    samples = read_samples(work, len(plan.documents))
    units = list(range(len(plan.units)))
    todo = [u for u in units if finished_unit(out, u) is None]
    needed = sum(plan.unit_bytes(u, setup.columns) for u in todo)
    check_free_space(out, needed + (sum(other_files(setup, plan).values()) if todo else 0))

    def load(_setup: Setup, planned: Plan) -> StoredBackend:
        return StoredBackend(layout, planned, samples, open_head(config, setup), evidence)

    if todo:
        with worker_lock(out, "0/1", len(units)), explained_failures(out):
            clear_leftovers(out, units)
            run_units(setup, plan, out, units, todo, load)
    return seal_directory(out, checked=set(todo))


def open_head(config: ConvertConfig, setup: Setup) -> Head:
    """Load the head of the target of a conversion."""
    return Head(
        setup.model_dir,
        setup.layers,
        dtype=config.dtype,
        device=usable_device(config.device),
        trust=config.trust_remote_code,
    )


def _begin(config: ConvertConfig, layout: Layout, setup: Setup, blocks: int) -> dict[str, Any]:
    """Prove the states, then write plan, samples and evidence; return the evidence."""
    out, work = Path(config.out), Path(config.out) / WORK
    refuse_other_files(out)
    evidence = prove_samples(config, layout, setup, blocks)
    make_directory("--out", work)
    plan, samples = make_sample_plan(layout, setup, config.data, config.mask_frame, work)
    plan.settings |= {"converted": _stored_as(config, layout)}
    write_atomically(work / _EVIDENCE, dump_json(evidence))
    save_samples(work, samples)
    save_plan(work, plan)  # last: the plan is complete if it exists
    return evidence


def _stored_as(config: ConvertConfig, layout: Layout) -> dict[str, Any]:
    """Return the settings that decide how the source is read."""
    return {
        "from": config.from_tool,
        "stored_layers": list(layout.conventions.stored_layers),
        "final_norm": layout.conventions.final_norm,
        "mask_frame": config.mask_frame,
    }


def _changes(
    config: ConvertConfig, layout: Layout, setup: Setup, saved: dict[str, Any]
) -> list[str]:
    """Return one line per setting that differs from those of a run that began before."""
    source = Path(config.data)
    report = SourceReport(
        source=source.resolve().name,
        path=config.data,
        kind="",
        sha256=listing_hash(layout, source),
    )
    new = settings(setup, [report]) | {"converted": _stored_as(config, layout)}
    if [s["sha256"] for s in saved["corpus"]] == [s["sha256"] for s in new["corpus"]]:
        new["corpus"] = saved["corpus"]  # the same files in another place
    if new["max_shard_size"] == "auto":
        new["max_shard_size"] = saved["max_shard_size"]
    return differing_settings(data_settings(saved), data_settings(new))


def _verified(config: ConvertConfig) -> Findings | None:
    """Run the target on some documents of the dataset, if --verify-target asks for it."""
    if not config.verify_target:
        return None
    return examine(
        VerifyConfig(
            data=config.out,
            target=config.target,
            samples=config.verify_target,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
    )
