"""NVIDIA Model-Optimizer: one `CONVERSATION.pt` per conversation, of compute_hidden_states_hf.py.

A table has `input_ids` [T], `aux_hidden_states` [T, n * H] and `hidden_states` [T, H], the state
after the final norm; `loss_mask` [T] only if the dump was made with --answer-only-loss. The ids of
its --aux-layers are outputs of blocks. They are not stored; without the option they are the inputs
of the blocks 2, L/2 and L-3.
"""

from collections.abc import Sequence
from pathlib import Path

from spec_data.conversion.stored_samples import (
    AFTER,
    OUTPUTS,
    Conventions,
    TargetSizes,
    chosen_layers,
)
from spec_data.conversion.table_layout import TableLayout, TableNames, files_in_order
from spec_data.shards.layer_ids import from_block_inputs

_NAMES = TableNames(aux="aux_hidden_states", last="hidden_states")


def open_modelopt(path: Path, given: Sequence[int] | None, sizes: TargetSizes) -> TableLayout:
    """Open a directory that Model-Optimizer wrote; see `layouts.open_layout`."""
    inputs = sorted({2, max(0, sizes.blocks // 2), max(1, sizes.blocks - 3)})
    usual = from_block_inputs(inputs)
    layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, "Model-Optimizer")
    conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
    files = files_in_order(path, (".pt",), "Model-Optimizer")
    return TableLayout("Model-Optimizer", path, files, _NAMES, conventions, sizes)
