"""A draft as files: config.json and model.safetensors, read, checked and written whole."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.files import dump_json, replace_durably, write_atomically

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class DraftFiles:
    """What a draft directory holds, in whatever form; `where` is the directory, for messages."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    where: str

    @property
    def config_path(self) -> str:
        """Path of its config.json."""
        return str(Path(self.where) / CONFIG)

    @property
    def weights_path(self) -> str:
        """Path of its model.safetensors."""
        return str(Path(self.where) / WEIGHTS)


def read_files(directory: str | Path) -> DraftFiles:
    """Read a draft directory as it is.

    Raises:
        MissingError, DraftError: a file is absent or damaged.
    """
    folder = Path(directory)
    config = read_config(folder)
    return DraftFiles(config, read_tensors(folder / WEIGHTS), str(folder))


def write_files(files: DraftFiles, directory: str | Path) -> None:
    """Write both files, each in one step, the config last. Tensors must be on the CPU."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    save_file(files.tensors, temporary, metadata={"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / WEIGHTS)
    write_atomically(folder / CONFIG, dump_json(files.config))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft directory, as plain values.

    Raises:
        MissingError, DraftError: absent, or no JSON object.
    """
    path = folder / CONFIG
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
    """All tensors of a safetensors file.

    Raises:
        MissingError, DraftError: absent, or damaged.
    """
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
