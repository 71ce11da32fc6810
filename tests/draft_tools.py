"""Draft directories for tests: edited, with the seal removed, or sealed again after an edit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from spec_train.formats.draft_files import DraftFiles, write_files
from spec_train.formats.draft_seal import SEAL, SECTION

Change = Callable[[dict[str, Any]], Any]
"""An edit of a config.json, in place."""


def edited(folder: Path, change: Change) -> Path:
    """Change config.json in place; the seal stays."""
    raw = read_json(folder)
    change(raw)
    write_json(folder, raw)
    return folder


def set_ids(raw: dict[str, Any], shift: int) -> None:
    """Shift the layer ids that engines read."""
    key = "eagle_aux_hidden_state_layer_ids"
    raw[key] = [k + shift for k in raw[key]]


def read_json(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft."""
    return json.loads((folder / "config.json").read_text())


def write_json(folder: Path, raw: dict[str, Any]) -> None:
    """Replace config.json of a draft."""
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


def unseal(folder: Path) -> Path:
    """Remove every trace of the seal; return `folder`."""
    raw = read_json(folder)
    raw[SECTION].pop(SEAL)
    write_json(folder, raw)
    weights = folder / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    return folder


def reseal(folder: Path) -> Path:
    """Seal a draft as it is now; return `folder`."""
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    write_files(DraftFiles(read_json(folder), tensors, str(folder)), folder)
    return folder
