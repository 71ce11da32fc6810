"""Write a dataset as the speculators library reads it; see `from_speculators` for the layout."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save

from spec_data.conversion.from_speculators import FOLDER, IDS, STATES
from spec_data.conversion.unnormed import Unnormed
from spec_data.shards.errors import DatasetError
from spec_data.shards.files import write_atomically, writing
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column

_ROWS = 1024  # of a part of the token dataset


class SpeculatorsWriter:
    """Writes documents as rows and files of states; see `write_out.DocumentWriter`."""

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int], out: Path) -> None:
        """Prepare to write some layers of a dataset to `out`.

        Raises:
            DatasetError: the state before the final norm is neither stored nor to be made.
        """
        manifest = dataset.manifest
        blocks = manifest.target.get("num_layers")
        raw = blocks - 1 if blocks and blocks - 1 in manifest.layers else None
        self._last = layer_column(raw) if raw is not None else FINAL
        self._unnormed = None if raw is not None else Unnormed(dataset)
        self._layers = [k for k in layers if k != raw]
        if not self._layers:
            raise DatasetError(f"{dataset.path}: no layer but the last block would be written")
        self._out, self._errors = out, list[float]()
        self.columns = [*(layer_column(k) for k in self._layers), self._last]
        self.states_per_token = len(self.columns)

    def file(self, number: int) -> Path:
        """Return the file of a document."""
        return self._out / FOLDER / f"hs_{number}.safetensors"

    def write(self, number: int, document: dict[str, Any]) -> None:
        """Write the states of a document."""
        last = document[self._last]
        if self._unnormed is not None:
            last, error = self._unnormed(last)
            self._errors.append(error)
        states = [*(document[layer_column(k)] for k in self._layers), last]
        stacked = torch.stack([s.bfloat16() for s in states], 1).contiguous()  # [T, n + 1, H]
        write_atomically(self.file(number), save({STATES: stacked, IDS: document["input_ids"]}))

    def finish(self, dataset: HiddenStatesDataset, count: int) -> list[str]:
        """Write the token dataset, which completes the directory; return what to know about it."""
        parts = [
            _rows(dataset, range(first, min(first + _ROWS, count)))
            for first in range(0, count, _ROWS)
        ]
        rows = datasets.Dataset(pa.concat_tables(parts))
        with writing(self._out):
            rows.with_format("torch").save_to_disk(str(self._out))  # the library expects tensors
        ids = " ".join(map(str, as_block_inputs(self._layers)))
        lines = [f"train with --target-layer-ids {ids} (inputs of blocks, as vLLM counts)"]
        if self._unnormed is not None:
            lines.append(
                "the last state has the direction of the output of the last block, not its length"
            )
        if self._errors:
            lines[-1] += (
                "; after the final norm, those of the documents written now differ from "
                f"hidden.final by {max(self._errors):.1e} at most"
            )
        return lines


def _rows(dataset: HiddenStatesDataset, numbers: range) -> pa.Table:
    """Return rows of the token dataset."""
    lengths = dataset.lengths[numbers.start : numbers.stop]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    documents = [dataset[number] for number in numbers]
    columns = {}
    for name in ("input_ids", "loss_mask"):
        values = torch.cat([document[name].long() for document in documents]).numpy()
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return pa.table(columns | {"seq_len": pa.array(lengths)})
