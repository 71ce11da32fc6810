"""SpecForge: `rows_A-B/data_I.ckpt` or `.ckpt.gz`, written by scripts/prepare_hidden_states.py.

A table has `input_ids` [T], `loss_mask` [T], `aux_hidden_state` [1, T, n * H] and `hidden_state`
[1, T, H], which is the input of the LM head. Layer ids are those of SGLang's engine: outputs of
blocks. They are not stored; without the option they are 1, L/2-1 and L-4.
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
from spec_data.shards.layer_ids import eagle3_layers

NAMES = TableNames(aux="aux_hidden_state", last="hidden_state")


def open_specforge(path: Path, given: Sequence[int] | None, sizes: TargetSizes) -> TableLayout:
    """Open a directory that SpecForge wrote; see `layouts.open_layout`."""
    usual = eagle3_layers(sizes.blocks)
    layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, "SpecForge")
    conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
    files = files_in_order(path, (".ckpt", ".ckpt.gz"), "SpecForge")
    return TableLayout("SpecForge", path, files, NAMES, conventions, sizes)
