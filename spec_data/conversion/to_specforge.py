"""Write a dataset as SpecForge reads it; see `from_specforge` for the layout."""

import io
from pathlib import Path
from typing import Any

import torch

from spec_data.conversion.from_specforge import NAMES
from spec_data.shards.files import write_atomically
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column

_GROUP = 2000  # files of a folder


class SpecForgeWriter:
    """Writes documents as tables of tensors; see `write_out.DocumentWriter`."""

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int], out: Path) -> None:
        """Prepare to write some layers of a dataset to `out`."""
        self._layers, self._out = layers, out
        self.columns = [*(layer_column(k) for k in layers), FINAL]
        self.states_per_token = len(self.columns)

    def file(self, number: int) -> Path:
        """Return the file of a document."""
        first = number // _GROUP * _GROUP
        return self._out / f"rows_{first}-{first + _GROUP}" / f"data_{number}.ckpt"

    def write(self, number: int, document: dict[str, Any]) -> None:
        """Write a document."""
        states = [document[layer_column(k)].bfloat16() for k in self._layers]
        table = {
            NAMES.ids: document["input_ids"].long(),
            NAMES.mask: document["loss_mask"].long(),
            NAMES.aux: torch.cat(states, -1)[None],  # [1, T, n * H]
            NAMES.last: document[FINAL].bfloat16()[None],  # [1, T, H]
        }
        data = io.BytesIO()
        torch.save(table, data)
        write_atomically(self.file(number), data.getvalue())

    def finish(self, dataset: HiddenStatesDataset, count: int) -> list[str]:
        """Return what to know about the directory."""
        ids = ",".join(map(str, self._layers))
        return [f"the layers are {ids} (outputs of blocks, as SGLang counts)"]
