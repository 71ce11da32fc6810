"""The files of an MTP block: our checkpoint, and a copy of its target with the block in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from spec_data.models.families import block_count
from spec_data.models.mtp import mtp_tensors, own_tensors, target_tensors
from spec_data.models.weight_files import OTHER_BLOCK, weight_names, weights_hash
from spec_data.shards.errors import TargetError, an
from spec_data.shards.file_system import link_or_copy
from spec_data.shards.files import dump_json, read_object, use_default_mode, write_atomically
from spec_train.formats.draft_files import DraftFiles, check_tensors
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import KindFiles, unchanged
from spec_train.formats.names import EMBEDDING, TYPE
from spec_train.formats.write import TARGET

_SHARING = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_WHAT = "MTP, layers for several tokens that come with their target"


def _foreign(files: DraftFiles) -> Iterator[tuple[str, str]]:
    """Yield what published drafts have of it: they are no drafts of their own."""
    for name in files.config.get("architectures") or ():
        if "MTP" in name or name.endswith("NextN"):
            yield an(name), _WHAT
        elif name in _SHARING:
            yield an(name), "layers that read the target's own keys and values"
    if files.config.get(TYPE) == "mtp":
        yield f"{TYPE} = mtp", _WHAT
    if any(name.startswith("mtp.") for name in files.tensors):  # keys: also of copied targets
        yield "tensors mtp.*", _WHAT


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    base = config[SECTION].get("target") or {}  # the target's config
    blocks = base.get("num_nextn_predict_layers") or 1
    return {"target_type": base.get("model_type"), "mtp_blocks": blocks}


def write_into_target(draft: DraftFiles, target: Path, out: Path) -> bool:
    """Write a copy of the directory `target`, with the block of an MTP draft, to the new `out`.

    The weight files that hold the block are written again. A changed tensor has the target's own
    name, dtype and file, so the target's index stays right, and no file holds an old tensor of that
    name. All other files are links to the target's. Return whether it reads back as this block.

    Raises:
        DraftError: the target's block has other tensors.
        TargetError: the target has none of a known layout, or a damaged file.
    """
    blocks, files = _blocks(target), weight_names(target)
    changed = target_tensors(_block(draft), blocks, files)
    shapes = {name: tuple(value.shape) for name, value in mtp_tensors(target, blocks).items()}
    if not shapes:
        raise TargetError(f"{target}: its MTP block is not there, or quantised: take the full one")
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
        if file not in written and file.name not in ("README.md", OTHER_BLOCK):
            link_or_copy(file.resolve(), out / file.name)
    weights = {"target": weights_hash(target), "files": weights_hash(out)}
    write_atomically(out / OTHER_BLOCK, dump_json(weights))
    return _same_block(draft, out)


def _same_block(draft: DraftFiles, folder: Path) -> bool:
    """Return whether the MTP block of a model directory is that of a draft, in its dtype."""
    blocks, wanted = _blocks(folder), _block(draft)
    stored, _ = own_tensors(mtp_tensors(folder, blocks), blocks)
    return stored.keys() == wanted.keys() and all(
        torch.equal(value.to(stored[name].dtype), stored[name]) for name, value in wanted.items()
    )


def _blocks(folder: Path) -> int:
    return block_count(read_object(folder / "config.json", TargetError)) or 0


def _block(draft: DraftFiles) -> dict[str, torch.Tensor]:
    return {name: value for name, value in draft.tensors.items() if name != EMBEDDING}


FILES = KindFiles(
    title="MTP",
    what="an MTP draft",
    forms={"hf": unchanged, TARGET: unchanged},
    into_target=write_into_target,
    foreign=_foreign,
    facts=_facts,
)
