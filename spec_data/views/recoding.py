"""`spec-data recode`: the same documents with smaller states, encoded from bf16."""

from pathlib import Path

import numpy as np

from spec_data.options.option_values import parse_codecs
from spec_data.options.view_options import RecodeConfig
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, Column, Manifest, layer_column, token_columns
from spec_data.views.stored_documents import Change, StoredDocuments
from spec_data.views.table_sample import MadeTables, make_and_measure
from spec_data.views.view_manifest import derived_draft, view_record
from spec_data.views.view_units import Part, view_units
from spec_data.views.write_view import View, check_out


def plan_recode(config: RecodeConfig) -> View:
    """Return the view that a `recode` writes; of a dry run, without tables.

    Raises:
        ConfigError: an unknown codec, or nothing would change.
        DatasetError: a column is lossy already.
        RunError: the error is above the bound of the codec.
    """
    stored = StoredDocuments(HiddenStatesDataset(config.data))
    check_out(Path(config.out), [stored])
    manifest = stored.manifest
    columns = recoded(manifest, config.codec)
    stored_as = {c.layout for c in manifest.columns}
    encoded = [c for c in columns if c.layout not in stored_as]
    if not encoded:
        raise ConfigError(f"{config.data}: nothing would change; it has --codec {config.codec}")
    made = None if config.dry_run else make_and_measure(stored.dataset, encoded)
    options = {"codec": config.codec, "tables": made and made.about.sha256}
    record = view_record("recode", options, [manifest])
    draft = derived_draft(manifest, columns, record, {})
    change = Change(columns=columns, tables=made.tables if made else {})
    part = Part(stored=stored, keep=np.ones(len(stored), bool), change=change)
    if made:
        _declare(draft["columns"], encoded, made)
        draft["codec"] = made.about
    return View(
        parts=(part,), units=view_units([part]), draft=draft, tables=made.data if made else None
    )


def recoded(manifest: Manifest, codec: str) -> tuple[Column, ...]:
    """Return the columns of a dataset with other codecs: a name, or aux=NAME,final=NAME.

    What is not named stays as it is.

    Raises:
        ConfigError: an unknown codec, or one that cannot pack the hidden size.
        DatasetError: a column is lossy, and another codec is asked for.
    """
    parsed = parse_codecs(codec, manifest.supervision)
    named = {part.partition("=")[0] for part in codec.split(",")} if "=" in codec else set(parsed)
    own = {c.name: c for c in manifest.columns}
    wanted = {}
    for kind, names in (("aux", [layer_column(k) for k in manifest.layers]), ("final", [FINAL])):
        current = [own[name].codec for name in names if name in own]
        wanted[kind] = parsed[kind] if kind in named else (current[0] if current else "bf16")
        for name in names:
            if name in own and own[name].lossy and own[name].codec != wanted[kind]:
                raise DatasetError(
                    f"{manifest.where}: column {name} is stored with {own[name].codec}, which has "
                    f"lost what {wanted[kind]} would keep or lose in another way; recode the "
                    "bf16 dataset that it comes from, or generate again"
                )
    return token_columns(
        manifest.layers,
        manifest.hidden_size,
        manifest.supervision,
        manifest.vocab_size,
        aux_codec=wanted["aux"],
        final_codec=wanted["final"],
        final_tokens=manifest.final,
        teacher_tokens=manifest.teacher,
    )


def _declare(entries: list[dict], encoded: list[Column], made: MadeTables) -> None:
    """Set size and error of the encoded columns in their entries of the manifest, in place."""
    named = {column.name: column for column in encoded}
    for entry in entries:
        column = named.get(entry["name"])
        if column is not None:
            entry |= {"exact": False, "error": made.errors[column.name]}
