"""`spec-data recode`: the same documents with smaller states, encoded from bf16.

As in `generate`, documents spread evenly over the dataset are the sample. Three of four make the
tables; every fourth is held out and measures the error, which must keep the bound of the codec.

Shapes: N tokens of the sample, H channels.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from spec_data.generation.calibrate import check_bounds, measure, sample_budget, sample_documents
from spec_data.shards.codec_tables import error_text, make_tables, save_tables
from spec_data.shards.codecs import Tables
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.files import sha256_json
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import (
    FINAL,
    CodecError,
    Column,
    HeadSpec,
    Manifest,
    layer_column,
    predicts_supervised,
    token_columns,
)
from spec_data.terminal.option_values import parse_codecs
from spec_data.terminal.progress import progress
from spec_data.views.copy import Copy
from spec_data.views.derive import derived

logger = logging.getLogger(__name__)
_LOGITS = 8 << 20  # bytes of the float32 logits that are computed together


def recoded_copy(dataset: HiddenStatesDataset, codec: str, dry_run: bool) -> Copy:
    """Return the copy that a `recode` writes; of a dry run, without tables.

    Raises:
        ConfigError: an unknown codec, or nothing would change.
        DatasetError: a column is lossy already.
        RunError: the error is above the bound of the codec.
    """
    columns = recoded_columns(dataset.manifest, codec)
    stored = {c.layout for c in dataset.manifest.columns}
    encoded = [c for c in columns if c.layout not in stored]
    if not encoded:
        raise ConfigError(f"{dataset.place}: nothing would change; it has --codec {codec}")
    made = None if dry_run else make_and_measure(dataset, encoded)
    options = {"codec": codec, "tables": made and made.digest}
    draft = derived("recode", options, [dataset.manifest], columns, {})
    if made is None:
        return Copy(dataset=dataset, columns=columns, draft=draft)
    declared = tuple(
        structs.replace(c, exact=False, error=made.errors[c.name]) if c.name in made.errors else c
        for c in draft.columns
    )
    return Copy(
        dataset=dataset,
        columns=columns,
        draft=draft.changed(columns=declared),
        encoders=made.tables,
        tables={**dataset.tables, **made.tables},
        sample=made.sample,
    )


def recoded_columns(manifest: Manifest, codec: str) -> tuple[Column, ...]:
    """Return the columns of a dataset with other codecs: a name, or aux=NAME,final=NAME.

    What is not named stays as it is.

    Raises:
        ConfigError: an unknown codec, or one that cannot pack the hidden size.
        DatasetError: a column is lossy, and another codec is asked for.
    """
    parsed = parse_codecs(codec, manifest.supervision)
    named = {part.partition("=")[0] for part in codec.split(",")} if "=" in codec else set(parsed)
    lossy = {c.name for c in manifest.columns if c.error}
    present = {c.name: c.codec for c in manifest.columns}
    wanted = {}
    for kind, names in (("aux", [layer_column(k) for k in manifest.layers]), ("final", [FINAL])):
        current = [present[name] for name in names if name in present]
        wanted[kind] = parsed[kind] if kind in named else (current[0] if current else "bf16")
        for name in lossy & set(names):
            if wanted[kind] != present[name]:
                raise DatasetError(
                    f"{manifest.where}: column {name} was encoded before and has lost what "
                    f"{wanted[kind]} would keep or lose in another way; recode the bf16 dataset "
                    "that it comes from, or generate again"
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


@dataclass(frozen=True, kw_only=True)
class MadeTables:
    """Tables of the columns that are encoded, by name, and what they lose.

    Attributes:
        tables: see above.
        errors: the manifest's `error` of each column.
        sample: documents, tokens and held_out_tokens that they were made from.
    """

    tables: dict[str, Tables]
    errors: dict[str, CodecError]
    sample: dict[str, int]

    @property
    def digest(self) -> str:
        """A hash of the tables."""
        return sha256_json(save_tables(self.tables).hex())


class StoredHead:
    """The head of a dataset, for `head_errors`."""

    device = torch.device("cpu")

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        self._dataset = dataset

    @property
    def head(self) -> HeadSpec:
        """The head as data."""
        return self._dataset.manifest.head

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return load_head_tensors(self._dataset.path, self._dataset.manifest)

    def head_tensors(self) -> dict[str, Tensor]:
        """Return embedding and head, [V, H] each, and `lm_head_bias` [V] if there is one."""
        return self._tensors

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices of an axis of `tokens` tokens whose float32 logits fit in memory."""
        step = max(128, _LOGITS // (4 * self.head.vocab_size))
        return [slice(a, min(a + step, tokens)) for a in range(0, tokens, step)]


def make_and_measure(dataset: HiddenStatesDataset, columns: Sequence[Column]) -> MadeTables:
    """Make the tables of `columns` from a sample of their states, and measure their error.

    Raises:
        RunError: the error of a column is above the bound of its codec.
        DatasetError: damage.
    """
    per_token = 2 * sum(column.width or 1 for column in columns)
    budget = sample_budget(int(dataset.lengths.sum()), per_token)
    documents = sample_documents(dataset.lengths, budget)
    numbers = np.repeat(np.arange(len(documents)), dataset.lengths[documents])
    few = len(documents) <= 3
    held_out = np.ones(len(numbers), bool) if few else numbers % 4 == 3
    states = _sampled(dataset, columns, documents)
    tables: dict[str, Tables] = {}
    errors = {}
    for column in columns:
        value = states[column.name]
        usable = torch.isfinite(value[:, 0]).numpy()  # nan: a sparse column does not store it
        used = usable if few else usable & ~held_out
        tables[column.name] = make_tables(value[torch.from_numpy(used)], column.codec)
        error = measure(column, value, held_out & usable, tables, StoredHead(dataset))
        logger.info("codec: %s %s", column.name, error_text(column.codec, error))
        errors[column.name] = error
    check_bounds(columns, errors)
    sample = {
        "documents": len(documents),
        "tokens": len(numbers),
        "held_out_tokens": int(held_out.sum()),
    }
    return MadeTables(tables=tables, errors=errors, sample=sample)


def _sampled(
    dataset: HiddenStatesDataset, columns: Sequence[Column], documents: Sequence[int]
) -> dict[str, Tensor]:
    """Read the states of some documents, bfloat16 [N, H] by column; nan where none is stored."""
    names = [column.name for column in columns]
    reader = HiddenStatesDataset(dataset.place, ["loss_mask", *names])
    states: dict[str, list[Tensor]] = {name: [] for name in names}
    for document in progress(documents, desc="sample", unit="docs", leave=False):
        row = reader[document]
        mask = row["loss_mask"].numpy()
        absent = torch.from_numpy(~predicts_supervised(mask, np.array([0, len(mask)])))
        for column in columns:
            if column.sparse:
                row[column.name][absent] = torch.nan
            states[column.name].append(row[column.name])
    return {name: torch.cat(parts) for name, parts in states.items()}
