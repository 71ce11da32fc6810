"""Draft directories for tests: with the seal removed, or sealed again after an edit."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from spec_train.formats.draft_files import DraftFiles, write_files
from spec_train.formats.draft_seal import SEAL, SECTION


def read_json(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft."""
    return json.loads((folder / "config.json").read_text())


def write_json(folder: Path, raw: dict[str, Any]) -> None:
    """Replace config.json of a draft."""
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


def unseal(folder: Path) -> Path:
    """Remove every trace of the seal, as in a draft of an older release; return `folder`."""
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
