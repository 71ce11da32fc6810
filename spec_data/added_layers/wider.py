"""What a dataset becomes when layers are added: its columns, and its manifest."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import local_directory, resolve_model
from spec_data.options.layer_options import AddLayersConfig
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.layer_ids import choose_layers
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import (
    FINAL,
    WITH_SIDES,
    Column,
    Manifest,
    ShardRecord,
    layer_column,
    token_columns,
)
from spec_data.verification.findings import Findings
from spec_data.verification.fresh import check_identity
from spec_data.views.joining import lineage
from spec_data.views.stored_documents import StoredDocuments
from spec_data.views.view_manifest import view_record

logger = logging.getLogger(__name__)

_OF_THE_SEAL = ("shards", "totals", "fingerprint", "card", "files", "view", "ancestors")


@dataclass(frozen=True, kw_only=True)
class Wider:
    """A dataset and the layers that it gets.

    Attributes:
        stored: the dataset.
        model_dir, model_config: the target on disk, proven to be the dataset's by its files.
        layers: those that are added, ascending; columns: their columns.
        draft_layers: those that each draft of --for reads.
        view: the manifest's `view`.
    """

    stored: StoredDocuments
    model_dir: Path
    model_config: Any = field(repr=False)
    layers: tuple[int, ...]
    columns: tuple[Column, ...]
    draft_layers: dict[str, tuple[int, ...]]
    view: dict[str, Any]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the dataset as it is."""
        return self.stored.manifest

    @property
    def side(self) -> int:
        """The number of the side that is written, from 1."""
        return 1 + len(self.manifest.raw.get("sides", []))

    @property
    def compared(self) -> tuple[Column, ...]:
        """The stored columns of states, with which the capture is compared."""
        names = {FINAL, *(layer_column(k) for k in self.manifest.layers)}
        return tuple(column for column in self.manifest.columns if column.name in names)


def plan_wider(config: AddLayersConfig) -> Wider:
    """Compare dataset and target, and return which layers are added; nothing is written.

    Raises:
        ConfigError: the dataset has the layers already.
        DatasetError: damage, format 1.0, or another target.
        MissingError, TargetError: there is no such model, or it has no such layers.
    """
    stored = StoredDocuments(HiddenStatesDataset(config.data))
    manifest = stored.manifest
    if not manifest.has_checksums:
        raise DatasetError(
            f"{config.data}: layers cannot be added to format 1.0; `spec-data select` writes the "
            "dataset in the present format"
        )
    local = local_directory(config.target) is not None
    revision = None if local else manifest.target.get("revision")
    model_dir, _ = resolve_model(config.target, revision)
    check_target_files(config, manifest, model_dir)
    model_config = load_config(model_dir, config.trust_remote_code)
    layers, drafts = _added(config, manifest, text_config(model_config).num_hidden_layers)
    everything = sorted({*manifest.layers, *layers})
    names = {layer_column(k) for k in layers}
    columns = tuple(c for c in all_columns(manifest, everything) if c.name in names)
    options = {"layers": layers, "for": sorted(drafts)}
    wider = Wider(
        stored=stored,
        model_dir=model_dir,
        model_config=model_config,
        layers=layers,
        columns=columns,
        draft_layers=drafts,
        view=view_record("add-layers", options, [manifest]),
    )
    if not wider.compared:
        raise DatasetError(
            f"{config.data}: it stores no states, so nothing proves that new ones belong to it"
        )
    return wider


def check_target_files(config: AddLayersConfig, manifest: Manifest, model_dir: Path) -> None:
    """Compare a model on disk with the target of a dataset, as `verify --target` does.

    Raises:
        DatasetError: it is another one; the message lists how they differ.
    """
    findings = Findings()
    findings.check(lambda: check_identity(manifest, model_dir, config.trust_remote_code, findings))
    refuse_findings(config.data, findings, "this is not the target of the dataset")
    for warning in findings.warnings:
        logger.warning("warning: %s (stored token ids are used, so the states do not)", warning)


def refuse_findings(where: str | Path, findings: Findings, problem: str) -> None:
    """Refuse what failed a check.

    Raises:
        DatasetError: `findings` has failures; the message lists the first ones.
    """
    if findings.failures:
        more = len(findings.failures) - 3
        lines = findings.failures[:3] + ([f"and {more} more"] if more > 0 else [])
        raise DatasetError(f"{where}: {problem}, so no layer was added:\n  " + "\n  ".join(lines))


def _added(
    config: AddLayersConfig, manifest: Manifest, blocks: int
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return the layers that are added, ascending, and those that each draft of --for reads."""
    asked, drafts = choose_layers(config.layers or "auto", config.drafts, blocks)
    there = [k for k in asked if k in manifest.layers]
    if there and not drafts:
        raise ConfigError(
            f"--layers {config.layers}: {config.data} has layer {', '.join(map(str, there))} "
            f"already (its layers: {', '.join(map(str, manifest.layers))}); name only others"
        )
    new = tuple(k for k in asked if k not in manifest.layers)
    if not new:
        raise ConfigError(
            f"--for {config.for_drafts}: {config.data} has all layers that these drafts read "
            "already; nothing is to be added"
        )
    return new, drafts


def all_columns(manifest: Manifest, layers: Sequence[int]) -> tuple[Column, ...]:
    """Return the columns of a dataset that has `layers`; new ones have the codec of the others.

    Where no layer is stored, they have that of `hidden.final`.
    """
    codecs = {column.name: column.codec for column in manifest.columns}
    final = codecs.get(FINAL, "bf16")
    stored = [codecs[layer_column(k)] for k in manifest.layers]
    return token_columns(
        tuple(layers),
        manifest.hidden_size,
        manifest.supervision,
        manifest.vocab_size,
        aux_codec=stored[0] if stored else final,
        final_codec=final,
        final_tokens=manifest.final,
        teacher_tokens=manifest.teacher,
    )


def wider_draft(
    wider: Wider,
    files: Mapping[str, Any],
    records: Sequence[ShardRecord],
    proven: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest of the dataset with its new layers, for `seal`.

    Args:
        wider: the dataset and the layers.
        files: the records of the files that are not the seal's.
        records: of the new side.
        proven: how the layers were captured, as `layer_capture.prove` returns it.
    """
    manifest = wider.manifest
    raw = {k: copy.deepcopy(v) for k, v in manifest.raw.items() if k not in _OF_THE_SEAL}
    known = {entry["name"]: entry for entry in raw["columns"]} | proven["columns"]
    layers = sorted({*manifest.layers, *wider.layers})
    drafts = raw.get("draft_layers", {}) | {d: list(k) for d, k in wider.draft_layers.items()}
    side = {
        "columns": [column.name for column in wider.columns],
        "shards": [vars(record) for record in records],
        **{name: proven[name] for name in ("packing", "captured_with", "evidence")},
    }
    return raw | {
        "format_version": WITH_SIDES,
        "layers": layers,
        **({"draft_layers": drafts} if drafts else {}),
        "columns": [known[column.name] for column in all_columns(manifest, layers)],
        "codec": proven["codec"] or raw.get("codec", {}),
        "sides": [*raw.get("sides", []), side],
        "files": dict(files),
        "view": wider.view,
        "ancestors": lineage(manifest),
    }
