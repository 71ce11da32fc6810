"""`spec-data drop-columns`: the same documents with fewer layers, or fewer tokens of a column."""

from pathlib import Path

import numpy as np
from msgspec import structs

from spec_data.options.view_options import DropColumnsConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.layer_ids import chosen_layers
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, SUPERVISED, TEACHERS, Column, Manifest, layer_column
from spec_data.views.stored_documents import Change, StoredDocuments
from spec_data.views.view_manifest import derived_draft, view_record
from spec_data.views.view_units import Part, view_units
from spec_data.views.write_view import View, check_out


def plan_drop_columns(config: DropColumnsConfig) -> View:
    """Return the view that a `drop-columns` writes.

    Raises:
        ConfigError: an option names what the dataset does not have, or nothing would change.
    """
    stored = StoredDocuments(HiddenStatesDataset(config.data))
    check_out(Path(config.out), [stored])
    manifest = stored.manifest
    columns = reduced(
        manifest,
        kept_layers(config, manifest),
        final=config.final == SUPERVISED,
        teacher=config.teacher == SUPERVISED,
    )
    if columns == manifest.columns:
        raise ConfigError(
            f"{config.data}: nothing would change; name fewer --layers, or --final supervised or "
            "--teacher supervised where all tokens are stored"
        )
    change = Change(columns=columns)
    layers = [k for k in manifest.layers if any(c.name == layer_column(k) for c in columns)]
    options = {"layers": layers, "final": config.final, "teacher": config.teacher}
    record = view_record("drop-columns", options, [manifest])
    part = Part(stored=stored, keep=np.ones(len(stored), bool), change=change)
    return View(
        parts=(part,),
        units=view_units([part]),
        draft=derived_draft(manifest, columns, record, {}),
    )


def kept_layers(config: DropColumnsConfig, manifest: Manifest) -> tuple[int, ...]:
    """Return the layers that --layers or --for keeps of a dataset; all without them.

    Raises:
        ConfigError: --for names a draft that the dataset does not record.
        DraftError: --layers names others than it has.
    """
    if config.for_draft is None:
        return chosen_layers(config.layers, manifest.layers) if config.layers else manifest.layers
    recorded = manifest.draft_layers
    if config.for_draft not in recorded:
        known = ", ".join(recorded) or "none"
        raise ConfigError(
            f"--for {config.for_draft}: the dataset records no layers of this draft (recorded: "
            f"{known}); name --layers"
        )
    return recorded[config.for_draft]


def reduced(
    manifest: Manifest, layers: tuple[int, ...], *, final: bool, teacher: bool
) -> tuple[Column, ...]:
    """Return the token columns of a dataset with only these layers.

    `final` and `teacher`: `hidden.final`, and the columns made from logits, become sparse.

    Raises:
        ConfigError: `final` where the dataset has no `hidden.final`.
    """
    dropped = {layer_column(k) for k in manifest.layers if k not in layers}
    sparse = {FINAL} if final else set()
    sparse |= set(TEACHERS) if teacher else set()
    if final and manifest.supervision != "final-hidden":
        raise ConfigError(f"--final: {manifest.where} stores no hidden.final; leave the option out")
    return tuple(
        structs.replace(column, tokens=SUPERVISED) if column.name in sparse else column
        for column in manifest.columns
        if column.name not in dropped
    )
