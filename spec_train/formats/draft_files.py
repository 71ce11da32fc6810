"""The files of a draft, config.json and model.safetensors: read, check and write them."""

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
    """The contents of a draft directory, in any form; `where` is its path, for messages."""

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
    """Read a draft directory without conversion.

    Raises:
        MissingError: a file is absent. DraftError: a file is damaged.
    """
    folder = Path(directory)
    config = read_config(folder)
    return DraftFiles(config, read_tensors(folder / WEIGHTS), str(folder))


def write_files(files: DraftFiles, directory: str | Path) -> None:
    """Write both files, each atomically, the config last. Tensors must be on the CPU."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    save_file(files.tensors, temporary, metadata={"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / WEIGHTS)
    write_atomically(folder / CONFIG, dump_json(files.config))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft directory.

    Raises:
        MissingError: it is absent. DraftError: it is not a JSON object.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; pass the directory of a draft") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftError(f"{path}: not valid JSON ({error}); copy the draft again") from None
    if not isinstance(raw, dict):
        raise DraftError(f"{path}: expected a JSON object, found a {type(raw).__name__}")
    return raw


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Raises:
        MissingError: it is absent. DraftError: it is damaged.
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
    """Raise DraftError unless names and shapes equal the `expected` ones; lists every fault."""
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    faults += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise DraftError(f"{where} does not match its config.json: {'; '.join(faults)}")
