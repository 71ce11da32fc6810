"""`spec-data add-layers`: capture further layers of a dataset, and write them beside its shards.

    DIR/.view/view.json                what is being written; anything else is refused
    DIR/.view/layers.json              what was proven: mask form, sameness, codec errors
    DIR/.view/codec.safetensors        the tables of all columns, if a new one is lossy
    DIR/.view/unit-00000-side1.json    a finished file: its record
    DIR/shards/unit-00000-side1.arrow

At the end the small files are replaced, as `append` does it. With --out, everything is written
there instead, and the files that do not change are hard links.
"""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.added_layers.layer_capture import capture_side, open_target, prove
from spec_data.added_layers.stored_plan import stored_plan
from spec_data.added_layers.wider import Wider, plan_wider, wider_draft
from spec_data.capture.tensor_parallel import leading
from spec_data.generation.explained_failures import explained_failures
from spec_data.generation.plan import Plan
from spec_data.generation.running import running_facts
from spec_data.models.devices import check_devices
from spec_data.options.layer_options import AddLayersConfig
from spec_data.shards.codec_tables import TABLES, load_tables
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import dump_json, sha256_json, write_atomically, write_once
from spec_data.shards.reader import INDEX, MANIFEST, VIEW_WORK, checked_file
from spec_data.shards.schema import Manifest, ShardRecord
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.sides import side_file, stored_records
from spec_data.shards.writer import write_shard
from spec_data.terminal.config import differing_fields
from spec_data.terminal.paths import check_directory_to_write
from spec_data.terminal.progress import progress, size
from spec_data.views.appending import finish_append, stage
from spec_data.views.stored_documents import StoredDocuments
from spec_data.views.write_view import (
    check_out,
    claim,
    copy_target,
    finished_record,
    link_or_copy,
    save_finished,
    view_lock,
)

logger = logging.getLogger(__name__)

_PROVEN = "layers.json"  # in VIEW_WORK


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What `add-layers` writes, in bytes.

    Attributes:
        layers: those that are added; documents, tokens: of the dataset.
        files: the files that are written; bytes: theirs.
        kept: the files with documents that stay as they are; kept_bytes: theirs.
    """

    layers: tuple[int, ...]
    documents: int
    tokens: int
    files: int
    bytes: int
    kept: int
    kept_bytes: int

    def __str__(self) -> str:
        """Return the lines that --dry-run prints."""
        return (
            f"layers         {', '.join(map(str, self.layers))}\n"
            f"documents      {self.documents:,}\n"
            f"tokens         {self.tokens:,}\n"
            f"written        {self.files:,} files, {self.bytes:,} bytes ({size(self.bytes)})\n"
            f"unchanged      {self.kept:,} files, {self.kept_bytes:,} bytes"
        )


def layer_sizes(config: AddLayersConfig) -> LayerSizes:
    """Return what `add_layers` would write; no weights are loaded, and nothing is written.

    Raises:
        As `add_layers`, but for what only the weights tell.
    """
    wider = plan_wider(config)
    if config.out:
        check_out(Path(config.out), [wider.stored])
    plan = stored_plan(wider.stored)
    kept = stored_records(wider.manifest)
    return LayerSizes(
        layers=wider.layers,
        documents=len(wider.stored),
        tokens=plan.tokens,
        files=len(plan.units),
        bytes=sum(plan.unit_bytes(unit, wider.columns) for unit in range(len(plan.units))),
        kept=len(kept),
        kept_bytes=sum(record.bytes for record in kept),
    )


def add_layers(config: AddLayersConfig) -> Manifest:
    """Add layers to a dataset, or resume a run that was interrupted; return the new manifest.

    Raises:
        ConfigError: the dataset has the layers already, or --out holds other data.
        DatasetError: damage; or the target is not that of the dataset, by its files or by its
            states.
        MissingError, TargetError: the target cannot be loaded, or has no such layers.
        RunError: a failed proof, a full disk, or another process that writes there.
    """
    with leading(config.spread):
        return _add_layers(config)


def _add_layers(config: AddLayersConfig) -> Manifest:
    check_devices(config.device, config.spread.device_map)
    out = Path(config.out or config.data)
    if config.out is None:
        check_directory_to_write("add-layers", out)
        finished = finish_append(out)
        if finished is not None and finished.raw.get("view", {}).get("command") == "add-layers":
            return finished
    wider = plan_wider(config)
    if config.out is not None:
        check_out(out, [wider.stored])
        if complete := _complete(out, wider):
            return complete
    (out / VIEW_WORK).mkdir(parents=True, exist_ok=True)
    with view_lock(out / VIEW_WORK), explained_failures(out):
        if config.out is not None and (complete := _complete(out, wider)):
            return complete
        units = [[record.file, record.sha256] for record in wider.manifest.shards]
        claim(out, {"view": wider.view, "units": sha256_json(units)})
        if config.out is not None:
            _link_files(out, wider.stored)
        plan = stored_plan(wider.stored, out / VIEW_WORK)
        _check_space(out, wider, plan)
        proven, records = _write_side(config, out, wider, plan)
        manifest = _sealed(config, out, wider, proven, records)
    if manifest is None:
        return finish_append(out) or Manifest.read(out / MANIFEST)
    shutil.rmtree(out / VIEW_WORK, ignore_errors=True)
    return manifest


def _complete(out: Path, wider: Wider) -> Manifest | None:
    """Return the manifest of a finished --out, None if there is none.

    Raises:
        ConfigError: it holds another dataset.
    """
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.read(out / MANIFEST)
    if manifest.raw.get("view") != wider.view:
        raise ConfigError(
            f"--out {out}: it holds another dataset, or one with other layers; choose another "
            "directory, or delete this one"
        )
    shutil.rmtree(out / VIEW_WORK, ignore_errors=True)
    return manifest


def _link_files(out: Path, stored: StoredDocuments) -> None:
    """Give the files that do not change a second name in --out, or copy them."""
    (out / "shards").mkdir(exist_ok=True)
    for record in stored_records(stored.manifest):
        path = out / record.file
        link_or_copy(stored.dataset.path / record.file, path)
        if path.stat().st_nlink == 1:  # a copy, which may have gone wrong
            check_shard(out, record)
    copy_target(out, stored)
    for name in _beside(stored.manifest):
        source = checked_file(stored.dataset.path, name, stored.manifest)
        write_atomically(out / name, source.read_bytes())


def _beside(manifest: Manifest) -> list[str]:
    """Return the names of the small files that are neither the seal's nor in target/."""
    return [n for n in manifest.raw["files"] if n != INDEX and not n.startswith("target/")]


def _name(wider: Wider, unit: int) -> str:
    """Return the path of the new file of a shard, relative to the dataset."""
    return side_file(Path(wider.manifest.shards[unit].file).stem, wider.side)


def _check_space(out: Path, wider: Wider, plan: Plan) -> None:
    """Check that the files that are still to be written fit on the disk.

    Raises:
        RunError: they do not.
    """
    missing = [
        unit
        for unit in range(len(plan.units))
        if finished_record(out, Path(_name(wider, unit)).stem) is None
    ]
    needed = sum(plan.unit_bytes(unit, wider.columns) for unit in missing)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise RunError(
            f"{out}: {needed:,} bytes are still to be written, but only {free:,} are free; free "
            "some space and run the same command again"
        )


def _write_side(
    config: AddLayersConfig, out: Path, wider: Wider, plan: Plan
) -> tuple[dict[str, Any], list[ShardRecord]]:
    """Write the files that are missing; return what was proven, and the records of all files."""
    names = [_name(wider, unit) for unit in range(len(plan.units))]
    found = [finished_record(out, Path(name).stem) for name in names]
    for record in found:
        if record is not None:
            check_shard(out, record)
    file = out / VIEW_WORK / _PROVEN
    if file.is_file() and all(found):
        return json.loads(file.read_text(encoding="utf-8")), [r for r in found if r]
    records = []
    with open_target(config, wider, plan) as target:
        if not file.is_file():
            made, tables = prove(config, wider, plan, target)
            if tables is not None:
                write_atomically(out / VIEW_WORK / TABLES, tables)
            write_once(file, dump_json(made))
        proven = json.loads(file.read_text(encoding="utf-8"))
        _check_running(out, proven, running_facts(target, proven["batch_tokens"]))
        lossy = [c for c in wider.columns if c.lossy]
        sha256 = proven["codec"].get("sha256")
        made_tables = load_tables(out / VIEW_WORK / TABLES, lossy, sha256) if lossy else {}
        with progress(total=plan.tokens, desc="capture", unit="tok") as bar:
            for unit, (name, record) in enumerate(zip(names, found, strict=True)):
                if record is None:
                    data = capture_side(wider, plan, unit, target, proven, made_tables)
                    record = write_shard(out / name, data, wider.columns)
                    save_finished(out, Path(name).stem, record)
                records.append(record)
                bar.update(record.tokens)
    return proven, records


def _check_running(out: Path, proven: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuse to resume with another device or release: the states would differ by rounding.

    Raises:
        ConfigError: see above.
    """
    changed = differing_fields(proven["captured_with"], mine)
    if changed:
        raise ConfigError(
            f"{out}: add-layers was begun here with other settings:\n  "
            + "\n  ".join(changed)
            + f"\nUse those, or delete {out / VIEW_WORK} and begin again"
        )


def _sealed(
    config: AddLayersConfig,
    out: Path,
    wider: Wider,
    proven: dict[str, Any],
    records: list[ShardRecord],
) -> Manifest | None:
    """Seal --out, and return its manifest; or stage the new small files of the dataset itself."""
    old = wider.manifest.raw["files"]
    names = [n for n in old if n.startswith("target/")] + _beside(wider.manifest)
    draft = wider_draft(wider, file_records(out, sorted(names)), records, proven)
    file = out / VIEW_WORK / TABLES
    tables = file.read_bytes() if proven["codec"] else None
    if config.out is None:
        stage(out, draft, wider.manifest.shards, tables)
        return None
    if draft["codec"]:
        stored = wider.stored.dataset
        _ = stored.tables  # reading them compares their hash with the manifest
        write_atomically(out / TABLES, tables or (stored.path / TABLES).read_bytes())
    return seal(out, draft, wider.manifest.shards)
