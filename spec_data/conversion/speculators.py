"""Write a dataset as the speculators library reads it; see `from_speculators` for the layout."""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from spec_data.conversion.stored_samples import (
    BEFORE,
    INPUTS,
    Conventions,
    SampleStates,
    SampleTokens,
    TargetSizes,
    chosen_layers,
    sample_tokens,
)
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import DatasetError, MissingError, RunError
from spec_data.shards.files import write_atomically, writing
from spec_data.shards.layer_ids import as_block_inputs, eagle3_layers
from spec_data.shards.position_data import load_positions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, layer_column

# -- from speculators ------------------------------------------------------------------------------
# speculators: a token dataset of `datasets`, and `hidden_states/hs_I.safetensors` per row I.
#
# A file has `token_ids` [T] and `hidden_states` [T, n + 1, H]: the n layers, then the last state.
# Layer ids are those of vLLM: inputs of blocks. The last one, L, is the state before the final
# norm. They are not stored; without the option they are 2, L/2 and L-3. With `hidden_states_scales`
# [T, 1, 1] the states are 8-bit floats to be multiplied. Rows without a file are no samples. The
# `data_I.pt` files of older releases are refused: what their last state is changed between them.


logger = logging.getLogger(__name__)

FOLDER, STATES, IDS, SCALES = "hidden_states", "hidden_states", "token_ids", "hidden_states_scales"
_FILE = re.compile(r"hs_(\d+)\.safetensors")


class SpeculatorsFiles:
    """A directory of the speculators library; see `stored_samples.Layout`."""

    tool = "speculators"

    def __init__(self, root: Path, given: Sequence[int] | None, sizes: TargetSizes) -> None:
        """Open a directory.

        Raises:
            MissingError: there is no token dataset, or no file of states.
            DatasetError: it is damaged, or one of an older release.
        """
        self.root, self._sizes = root, sizes
        _refuse_old(root)
        numbers = sorted(
            int(found[1]) for p in root.glob(f"{FOLDER}/*") if (found := _FILE.fullmatch(p.name))
        )
        if not (root / "state.json").is_file() or not numbers:
            raise MissingError(
                f"{root}: expected a token dataset (state.json) and {FOLDER}/hs_0.safetensors, ... "
                "as speculators stores them"
            )
        try:
            self._rows = datasets.load_from_disk(str(root)).with_format(None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{root}: the token dataset cannot be read: {error!r}") from None
        beyond = [i for i in numbers if i >= len(self._rows)]
        if beyond:
            raise DatasetError(
                f"{root}: {FOLDER}/hs_{beyond[0]}.safetensors has no row: the token dataset has "
                f"{len(self._rows)}; these states belong to another one"
            )
        self._numbers = numbers
        if len(numbers) < len(self._rows):
            logger.warning(
                "warning: %s: %d of %d rows have no file of states, and are left out",
                *(root, len(self._rows) - len(numbers), len(self._rows)),
            )
        usual = as_block_inputs(eagle3_layers(sizes.blocks))
        layers = chosen_layers(given, usual, sizes.blocks, INPUTS, self.tool)
        if given is not None and layers[-1] == sizes.blocks:  # the last state, as vLLM is told it
            layers = layers[:-1]
        self.conventions = Conventions(counting=INPUTS, stored_layers=layers, final_norm=BEFORE)

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, number: int) -> str:
        """Return the file of a sample, below the directory."""
        return f"{FOLDER}/hs_{self._numbers[number]}.safetensors"

    def files(self) -> Iterator[Path]:
        """Yield the files of the token dataset, then those of states."""
        yield from sorted(self.root.glob("*.arrow"))
        for number in range(len(self)):
            yield self.root / self.where(number)

    def tokens(self, number: int) -> SampleTokens:
        """Read ids and mask of a row; its file must have the states of these ids."""
        row = self._rows[self._numbers[number]]
        ids, mask = row.get("input_ids"), row.get("loss_mask")
        found = sample_tokens(_listed(ids, "input_ids"), mask and _listed(mask, "loss_mask"))
        try:
            with safe_open(self.root / self.where(number), "pt") as file:
                own = file.get_tensor(IDS)
                states = file.get_slice(STATES)
                scaled = SCALES in file.keys()  # noqa: SIM118 - no dict
                scales = file.get_slice(SCALES).get_shape() if scaled else None
        except (SafetensorError, OSError) as error:
            raise BadRow(str(error)) from None
        shape = tuple(states.get_shape())
        if not torch.equal(own.flatten().long(), found.ids):
            raise BadRow("the file has the states of other tokens than its row")
        expected = (len(found.ids), len(self.conventions.layers) + 1, self._sizes.hidden_size)
        if shape != expected:
            raise BadRow(
                f"hidden_states has shape {list(shape)}, expected {list(expected)}: "
                f"{expected[1] - 1} layers and the last state; name the layers with --stored-layers"
            )
        if "F" not in states.get_dtype():
            raise BadRow(f"hidden_states has dtype {states.get_dtype()}, expected floating point")
        if scales not in (None, [len(found.ids), 1, 1]):
            raise BadRow(f"hidden_states_scales has shape {scales}, expected [T, 1, 1]")
        return found

    def states(self, number: int) -> SampleStates:
        """Read the states of a sample."""
        try:
            with safe_open(self.root / self.where(number), "pt") as file:
                states = file.get_tensor(STATES)
                if SCALES in file.keys():  # noqa: SIM118 - no dict
                    states = states.float() * file.get_tensor(SCALES).float()
        except (SafetensorError, OSError) as error:
            raise BadRow(str(error)) from None
        return SampleStates(aux=states[:, :-1], last=states[:, -1])


def _listed(values: object, name: str) -> torch.Tensor:
    """Return a value of a row as a tensor.

    Raises:
        BadRow: it is no list of numbers.
    """
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRow(f"{name} of the row is no list of integers: {error}") from None


def _refuse_old(root: Path) -> None:
    if next(root.glob("data_*.pt"), None) is not None:
        raise DatasetError(
            f"{root}: data_*.pt of an older release of speculators. Its releases disagree on what "
            "the last state is, so these files are not read; make them again with a release that "
            "writes hidden_states/hs_*.safetensors"
        )


# -- unnormed --------------------------------------------------------------------------------------
# A state before the final norm, from the state after it: what the speculators library stores.
#
# An RMSNorm forgets the length of its input, so the raw output of the last block cannot be found
# again. Any vector of the same direction has the same state after the norm, and so the same logits:
# this one has length sqrt(H). It is measured that the norm returns the stored state.
#
# Shapes: T tokens, H hidden size.


_ALLOWED = 1e-2  # mean relative difference after the norm; rounding to bf16 is 2e-3


class Unnormed:
    """Makes states before the final norm of a dataset's target."""

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        """Read the final norm of the target.

        Raises:
            DatasetError: the dataset does not record an RMSNorm, so it cannot be undone.
        """
        positions = load_positions(dataset.path, dataset.manifest)
        norm = positions.norm if positions else {}
        weight = load_head_tensors(dataset.path, dataset.manifest).get("norm")
        if norm.get("kind") != "rms" or weight is None:
            blocks = dataset.manifest.target.get("num_layers")
            raise DatasetError(
                f"{dataset.path}: speculators needs the state before the final norm. The dataset "
                "records no RMSNorm that could be undone; capture the last block as well "
                f"(--layers with {blocks - 1 if blocks else 'L-1'})"
            )
        self._weight = weight.float() + float(norm["offset"])
        self._eps = float(norm["eps"])

    def __call__(self, final: Tensor) -> tuple[Tensor, float]:
        """Return states bf16 [T, H] whose norm is `final` [T, H], and the mean relative difference.

        Raises:
            RunError: the difference is above rounding.
        """
        wanted = final.float()
        weight = self._weight
        raw = torch.where(weight.abs() < 1e-6, 0.0, wanted / weight).bfloat16()
        length = raw.float().pow(2).mean(-1, keepdim=True)
        again = raw.float() * torch.rsqrt(length + self._eps) * weight
        error = (again - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
        found = float(error.mean())
        if not found <= _ALLOWED:
            raise RunError(
                f"the final norm cannot be undone: the difference is {found:.1e}, more than "
                f"rounding ({_ALLOWED:.0e}); capture the last block as well"
            )
        return raw, found


# -- to speculators --------------------------------------------------------------------------------


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
