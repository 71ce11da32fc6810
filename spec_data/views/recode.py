"""`spec-data recode`: the same documents with smaller states, encoded from bf16.

As in `generate`, documents spread evenly over the dataset are the sample that makes the tables and
measures the error; a column that cannot keep its quality stays in bf16, with a warning.

Shapes: N tokens of the sample, H channels.
"""

import logging
from collections.abc import Sequence

import torch
from msgspec import structs
from torch import Tensor

from spec_data.generation.calibrate import Head, fit_columns, sample_budget
from spec_data.generation.options import column_qualities, parse_codecs
from spec_data.shards.blobs import PACKED
from spec_data.shards.codecs import Tables, save_tables
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.files import sha256_json
from spec_data.shards.packing import sample_documents
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, Column, Manifest, predicts_supervised
from spec_data.terminal.progress import progress
from spec_data.views.copy import Copy
from spec_data.views.derive import derived

logger = logging.getLogger(__name__)


def recoded_copy(dataset: HiddenStatesDataset, codec: str, dry_run: bool) -> Copy:
    """Return the copy that a `recode` writes; of a dry run, without tables.

    Raises:
        ConfigError: an unknown codec, or nothing would change.
        DatasetError: a column is lossy already, or its documents have different tables.
    """
    columns = recoded_columns(dataset.manifest, codec)
    stored = {c.layout for c in dataset.manifest.columns}
    encoded = [c for c in columns if c.layout not in stored]
    if not encoded:
        raise ConfigError(f"{dataset.location}: nothing would change; it has --codec {codec}")
    if several := dataset.columns_of_several_tables():
        raise DatasetError(
            f"{dataset.location}: {', '.join(several)}: the documents come from datasets that "
            "encode them differently, and a copy has one table of a column; recode those datasets "
            "one by one, and merge the copies"
        )
    tables: dict[str, Tables] = {}
    sample: dict[str, int] = {}
    if not dry_run:
        columns, tables, sample = _fitted(dataset, columns, {c.name for c in encoded})
    columns = tuple(structs.replace(c, exact=False) if c.name in tables else c for c in columns)
    digest = sha256_json(save_tables(tables).hex()) if tables else None
    draft = derived("recode", {"codec": codec, "tables": digest}, [dataset.manifest], columns, {})
    return Copy(
        dataset=dataset,
        columns=columns,
        draft=draft,
        encoders=tables,
        tables={**dataset.tables, **tables},
        sample=sample,
    )


def recoded_columns(manifest: Manifest, codec: str) -> tuple[Column, ...]:
    """Return the columns of a dataset with other codecs, as --codec of `generate` names them.

    Of several columns, what is not named stays as it is.

    Raises:
        ConfigError: an unknown codec or column.
        DatasetError: a column is lossy, and another codec is asked for.
    """
    asked = parse_codecs(codec, manifest.supervision)
    qualities = column_qualities(asked, manifest.layers)
    named = {part.strip().rpartition("=")[0].removeprefix("hidden.") for part in codec.split(",")}
    columns = []
    for column in manifest.columns:
        short = column.name.removeprefix("hidden.")
        kind = "final" if column.name == FINAL else "aux"
        if column.name not in qualities or not named & {"", kind, short}:
            columns.append(column)
            continue
        quality = qualities[column.name]
        if quality == column.quality:  # also of an older codec of this quality
            columns.append(column)
            continue
        if column.lossy or column.error:
            raise DatasetError(
                f"{manifest.where}: column {column.name} was encoded before and has lost what "
                "another codec would keep; recode the bf16 dataset that it comes from, or generate "
                "again"
            )
        columns.append(structs.replace(column, codec=PACKED, quality=quality))
    return tuple(columns)


def _fitted(
    dataset: HiddenStatesDataset, columns: tuple[Column, ...], names: set[str]
) -> tuple[tuple[Column, ...], dict[str, Tables], dict[str, int]]:
    """Return the columns as they will be stored, the tables of `names`, and what made them."""
    encoded = [column for column in columns if column.name in names]
    per_token = 2 * sum(column.width or 1 for column in encoded)
    budget = sample_budget(int(dataset.lengths.sum()), per_token)
    documents = sample_documents(dataset.lengths, budget)
    states = _sampled(dataset, encoded, documents)
    head = Head(torch.device("cpu"), dataset.manifest.head, load_head_tensors(dataset))
    return fit_columns(columns, dataset.lengths, documents, states, head)


def _sampled(
    dataset: HiddenStatesDataset, columns: Sequence[Column], documents: Sequence[int]
) -> dict[str, Tensor]:
    """Read the states of some documents, bfloat16 [N, H] by column; nan where none is stored."""
    names = [column.name for column in columns]
    reader = HiddenStatesDataset(dataset.location, ["loss_mask", *names])
    states: dict[str, list[Tensor]] = {name: [] for name in names}
    for document in progress(documents, desc="sample", unit="docs", leave=False):
        row = reader[document]
        absent = torch.from_numpy(~predicts_supervised(row["loss_mask"].numpy()))
        for column in columns:
            if column.sparse:
                row[column.name][absent] = torch.nan
            states[column.name].append(row[column.name])
    return {name: torch.cat(parts) for name, parts in states.items()}
