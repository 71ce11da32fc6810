"""Draft directories: config.json and model.safetensors, written in one step, read with checks."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.files import dump_json, replace_durably, write_atomically


def save_draft(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write model.safetensors and config.json (which says `dtype`), each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".model.safetensors.{os.getpid()}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    config = config | {"dtype": name, "torch_dtype": name}
    write_atomically(folder / "config.json", dump_json(config))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft directory, as plain values."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; give the directory of a draft") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DraftError(f"{path}: expected an object, found a {type(raw).__name__}")
    return raw


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    if not path.is_file():
        raise MissingError(f"{path}: no such file; the draft's weights are missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DraftError(f"{path}: damaged ({error}); copy it again") from None


def check_tensors(
    tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    """Raise DraftError unless names and shapes are exactly the `expected` ones."""
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    faults += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise DraftError(f"{where} does not fit its config.json: {'; '.join(faults)}")
