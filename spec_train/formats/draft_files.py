"""The files of a draft, config.json and its weights: read, check and write them.

This project writes model.safetensors. Other trainers also publish several safetensors files with an
index, and `pytorch_model.bin`. Of a .bin file only tensors are loaded: torch refuses everything
else in it (`weights_only=True`), so reading one runs no code of the file.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.models.config_values import wrong_value
from spec_data.models.torch_files import BadTensorsError, load_tensors
from spec_data.shards.errors import DraftError, MissingError, an
from spec_data.shards.file_heads import check_files, instead
from spec_data.shards.files import (
    atomic_write,
    canonical_json,
    cause,
    dump_json,
    use_default_mode,
    weight_map,
    write_atomically,
)
from spec_data.shards.json_texts import read_json_text
from spec_train.formats.draft_seal import (
    MARK,
    SECTION,
    broken_seal,
    sealed_config,
    some_of,
    without_seal,
)

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_OTHERS = (f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights of other trainers, in the order in which they are looked for after `WEIGHTS`."""


@dataclass(frozen=True)
class DraftFiles:
    """The contents of a draft directory, in any form; `where` is its path, for messages."""

    config: dict[str, Any]
    """config.json without the seal."""
    tensors: dict[str, Tensor]
    where: str
    sealed: bool = False
    """Whether the files were read with a seal, and are as they were sealed."""

    @property
    def config_path(self) -> str:
        return str(Path(self.where) / CONFIG)

    @property
    def weights_path(self) -> str:
        return str(find_weights(Path(self.where)) or Path(self.where) / WEIGHTS)

    def bad_config(self, problem: str) -> DraftError:
        return DraftError(f"{self.config_path}: {problem}")

    def bad_weights(self, problem: str) -> DraftError:
        return DraftError(f"{self.weights_path}: {problem}")


def read_files(directory: str | Path, accept_edited: bool = False) -> DraftFiles:
    """Read a draft directory without conversion, and compare it with its seal, if it has one.

    With `accept_edited`, a draft that differs from its seal is read with a warning.

    Raises:
        MissingError: a file is absent.
        DraftError: a file is damaged, or the draft is not as it was sealed; names what differs.
    """
    folder = Path(directory)
    if folder.is_dir():
        check_files(folder, DraftError)
    config, seal = without_seal(read_config(folder))
    weights = find_weights(folder) or folder / WEIGHTS
    tensors = _unwrapped(read_tensors(weights), weights)
    problems = []
    if seal is not None:
        problems = broken_seal(config, seal, tensors)
    elif SECTION in config or _marked(weights):
        problems = [f"{CONFIG} has no seal, but the draft was written with one"]
    if problems and not accept_edited:
        raise DraftError(
            f"{folder}: not as it was sealed ({some_of(problems)}), so it was edited or damaged. "
            "Copy it again, or if this is intended, pass --accept-edited to `spec-train export`, "
            "`eval` or `fit` (accept_edited=True in Python); an export then has a new seal"
        )
    if problems:
        log.warning("warning[edited]: %s: accepted as edited (%s)", folder, some_of(problems))
    return DraftFiles(config, tensors, str(folder), seal is not None and not problems)


_INNER = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\.")
"""Parts of names that torch.compile, FSDP, activation checkpointing and DDP add."""
_OWN = {"mtp", "layers", "midlayer"}
"""Modules that may hold all tensors of a file."""


def _unwrapped(tensors: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the tensors of a draft that was saved inside other modules under the draft's names.

    No draft has one module around all of its tensors, so what all names begin with is left out, as
    `module.`, `draft_model.` or `base_model.model.`; but not the name of an MTP block, which is no
    draft of its own.

    Raises:
        DraftError: two tensors then have one name.
    """
    plain = {name: _INNER.sub("", name) for name in tensors}
    while len(outer := {name.partition(".")[0] for name in plain.values()}) == 1:
        if outer <= _OWN or not all("." in name for name in plain.values()) or len(plain) == 1:
            break
        plain = {old: name.partition(".")[2] for old, name in plain.items()}
    result = {name: tensors[old] for old, name in plain.items()}
    if len(result) < len(tensors):
        raise DraftError(f"{where}: tensors of a wrapped model, two of which have one name inside")
    if result.keys() != tensors.keys():
        example = next(old for old, name in plain.items() if old != name)
        log.info("%s: saved from a wrapped model: %s is %s", where, example, plain[example])
    return result


def write_files(files: DraftFiles, directory: str | Path) -> None:
    """Write both files with a seal, each atomically, the config last. Tensors are on the CPU."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config, metadata = sealed_config(files.config, files.tensors), {"format": "pt"} | MARK
    with atomic_write(folder / WEIGHTS) as temporary:
        save_file(files.tensors, temporary, metadata=metadata)
        _sort_metadata(temporary, metadata)
        use_default_mode(temporary)  # safetensors writes files with mode 0600
    write_atomically(folder / CONFIG, dump_json(config))


def _sort_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Rewrite the metadata of a safetensors file in place, sorted by name.

    safetensors writes it in random order; equal drafts should have equal bytes. The header is the
    length of a JSON text, 8 bytes, and that text. A file whose header has another form is complete
    all the same, and is left as it is.
    """
    key, ordered = b'"__metadata__":', canonical_json(metadata)
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        before, _, after = file.read(length).partition(key)
        start = len(before) + len(key)
        text = after[: len(ordered)]
        try:
            alike = json.loads(text) == metadata
        except ValueError:  # also text that is not UTF-8
            alike = False
        if alike:
            file.seek(8 + start)
            file.write(ordered)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft directory.

    Raises:
        MissingError: it is absent. DraftError: it is not a JSON object, or has a key twice.
    """
    path = folder / CONFIG
    if not path.exists():
        if (folder / "adapter_config.json").is_file():
            raise DraftError(
                f"{folder}: holds a LoRA adapter, as UNO's drafts do, which works inside its "
                "target; drafts of spec-train are models of their own, so it cannot be read"
            )
        raise MissingError(f"{path}: no such file; pass the directory of a draft")
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the config.json of a draft, which may have another name. Errors as of `read_config`."""
    try:
        raw = read_json_text(path, pairs=_once)
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file") from None
    except OSError as error:
        raise DraftError(f"{path}: cannot be read ({cause(error)})") from None
    except ValueError as error:  # of JSON and of UTF-8
        why = instead(path, f"not valid JSON ({error}); copy the draft again")
        raise DraftError(f"{path}: {why}") from None
    if not isinstance(raw, dict):
        raise DraftError(f"{path}: expected a JSON object, found {an(type(raw).__name__)}")
    # In our own part are the options of a run, of which 0 is the default of some.
    if wrong := wrong_value(raw, (SECTION,)):
        raise DraftError(f"{path}: {wrong}; copy the draft again")
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object; readers differ in which of two equal keys they use."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"twice in one object: {', '.join(twice)}")
    return table


def find_weights(folder: Path) -> Path | None:
    """Return the file with a draft's weights, or the index of several; None if there is none."""
    names = (WEIGHTS, *_OTHERS)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors or .bin file, or of all files that an index names.

    Raises:
        MissingError: a file is absent. DraftError: one is damaged, or holds more than tensors.
    """
    if not path.is_file():
        raise MissingError(f"{path}: no such file; the draft's weights are missing")
    if path.suffix == ".json":
        parts = map(read_tensors, sorted(set(weight_map(path, DraftError).values())))
        return {name: value for part in parts for name, value in part.items()}
    if path.suffix in (".bin", ".pt"):
        return _read_bin(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        why = instead(path, f"damaged ({error}); copy it again")
        raise DraftError(f"{path}: {why}") from None


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_tensors(path)
    except BadTensorsError as error:
        raise DraftError(f"{path}: {error}") from None
    except Exception as error:  # of many types: the one for refused contents is no torch class
        why = instead(
            path,
            "damaged, or it holds more than tensors, which could run code when it is loaded "
            f"({str(error).partition(chr(10))[0]}). Copy it again, or convert it to "
            "model.safetensors with the program that wrote it",
        )
        raise DraftError(f"{path}: {why}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise DraftError(f"{path}: expected tensors by name; convert it to model.safetensors")
    return tensors


def _marked(weights: Path) -> bool:
    """Return whether the metadata of a file of weights says that there is a seal."""
    if weights.name != WEIGHTS:
        return False
    with safe_open(weights, "pt") as file:
        return MARK.items() <= (file.metadata() or {}).items()


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
