"""The tables of a codec for states that are stored, and the measured error: as `generate` does it.

Documents spread evenly over the dataset are the sample. Three of four make the tables; every fourth
is held out and measures the error, which must keep the bound of the codec.

Shapes: N tokens of the sample, H channels.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.calibrate import (
    check_bounds,
    measure,
    sample_budget,
)
from spec_data.shards.codec_tables import TABLES, error_text, make_tables, save_tables
from spec_data.shards.even_sample import sample_documents
from spec_data.shards.lossy import Tables
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import CodecError, CodecTables, Column, HeadSpec, predicts_supervised
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)
_LOGITS = 8 << 20  # bytes of the float32 logits that are computed together


@dataclass(frozen=True, kw_only=True)
class MadeTables:
    """Tables and what they lose.

    Attributes:
        tables: of all lossy columns of the result, by name.
        data: the bytes of codec.safetensors.
        about: the manifest's `codec`.
        errors: the manifest's `error` of each column that is encoded.
    """

    tables: dict[str, Tables]
    data: bytes
    about: CodecTables
    errors: dict[str, CodecError]


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
    data = save_tables(dataset.tables | tables)
    about = CodecTables(
        file=TABLES,
        sha256=hashlib.sha256(data).hexdigest(),
        documents=len(documents),
        tokens=len(numbers),
        held_out_tokens=int(held_out.sum()),
    )
    return MadeTables(tables=tables, data=data, about=about, errors=errors)


def _sampled(
    dataset: HiddenStatesDataset, columns: Sequence[Column], documents: Sequence[int]
) -> dict[str, Tensor]:
    """Read the states of some documents, bfloat16 [N, H] by column; nan where none is stored."""
    names = [column.name for column in columns]
    reader = HiddenStatesDataset(dataset.path, ["loss_mask", *names])
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for document in progress(documents, desc="sample", unit="docs", leave=False):
        row = reader[document]
        mask = row["loss_mask"].numpy()
        absent = torch.from_numpy(~predicts_supervised(mask, np.array([0, len(mask)])))
        for column in columns:
            if column.sparse:
                row[column.name][absent] = torch.nan
            found[column.name].append(row[column.name])
    return {name: torch.cat(parts) for name, parts in found.items()}
