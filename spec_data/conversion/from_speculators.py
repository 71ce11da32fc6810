"""speculators: a token dataset of `datasets`, and `hidden_states/hs_I.safetensors` per row I.

A file has `token_ids` [T] and `hidden_states` [T, n + 1, H]: the n layers, then the last state.
Layer ids are those of vLLM: inputs of blocks. The last one, L, is the state before the final norm.
They are not stored; without the option they are 2, L/2 and L-3. With `hidden_states_scales`
[T, 1, 1] the states are 8-bit floats to be multiplied. Rows without a file are no samples. The
`data_I.pt` files of older releases are refused: what their last state is changed between them.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import torch
from safetensors import SafetensorError, safe_open

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
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.layer_ids import as_block_inputs, eagle3_layers

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
