"""A trained MTP block inside its target: the weight files that hold it, written again.

A changed tensor has the target's own name, dtype and file, so the target's index stays right, and
no file holds an old tensor of that name. All other files are links to the target's.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_data.models.families import block_count
from spec_data.models.mtp import mtp_tensors, own_tensors, target_tensors, weight_names
from spec_data.shards.errors import TargetError
from spec_data.shards.files import read_object, use_default_mode
from spec_train.formats.draft_files import DraftFiles, check_tensors
from spec_train.formats.names import EMBEDDING


def write_into_target(draft: DraftFiles, target: Path, out: Path) -> None:
    """Write a copy of the directory `target`, with the block of an MTP draft, to the new `out`.

    Raises:
        DraftError: the target's block has other tensors.
        TargetError: the target has none of a known layout, or a damaged file.
    """
    blocks, files = _blocks(target), weight_names(target)
    changed = target_tensors(_block(draft), blocks, files)
    shapes = {name: tuple(value.shape) for name, value in mtp_tensors(target, blocks).items()}
    check_tensors(changed, shapes, f"{draft.where}, beside {target},")
    out.mkdir(parents=True)
    written = {files[name] for name in changed}
    for file in sorted(written):
        with safe_open(file, "pt") as old:
            tensors = {n: old.get_tensor(n) for n in old.keys()}  # noqa: SIM118 (not a mapping)
            metadata = old.metadata()
        new = {n: changed[n].to(value.dtype) for n, value in tensors.items() if n in changed}
        save_file(tensors | new, out / file.name, metadata=metadata)
        use_default_mode(out / file.name)  # safetensors writes files with mode 0600
    for file in sorted(target.iterdir()):
        if file not in written and file.name != "README.md":
            (out / file.name).symlink_to(file.resolve())


def same_block(draft: DraftFiles, folder: Path) -> bool:
    """Return whether the MTP block of a model directory is that of a draft, in its dtype."""
    blocks, wanted = _blocks(folder), _block(draft)
    stored, _ = own_tensors(mtp_tensors(folder, blocks), blocks)
    return stored.keys() == wanted.keys() and all(
        torch.equal(value.to(stored[name].dtype), stored[name]) for name, value in wanted.items()
    )


def _blocks(folder: Path) -> int:
    return block_count(read_object(folder / "config.json", TargetError)) or 0


def _block(draft: DraftFiles) -> dict[str, Tensor]:
    return {name: value for name, value in draft.tensors.items() if name != EMBEDDING}
