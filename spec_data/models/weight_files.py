"""The weight files of a model directory: which ones they are, what they hold, their hash."""

import hashlib
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from spec_data.shards.errors import MissingError, TargetError
from spec_data.shards.file_heads import instead
from spec_data.shards.files import cause, read_object, weight_map
from spec_data.shards.path_kinds import JOIN_PARTS, in_parts
from spec_data.shards.regular_files import special_kind

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_PART = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
_FULL_HASH_BYTES = 4 << 30
_SAMPLE, _SAMPLES = 1 << 16, 256  # bytes per block, blocks per file


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, sorted; each is checked to be complete.

    Raises:
        TargetError: there is none, a file is damaged or shorter than its header says, or the
            directory holds an adapter.
        MissingError: a file that the index names is absent.
    """
    if (adapter := directory / "adapter_config.json").is_file():
        raise TargetError(
            f"{adapter}: transformers adds this adapter to the weights where peft is installed and "
            "ignores it elsewhere; merge it into the model, or move it away"
        )
    index = directory / INDEX
    indexed = set(weight_map(index, TargetError).values()) if index.is_file() else set()
    if missing := sorted(str(file) for file in indexed if not file.is_file()):
        raise MissingError(
            f"{missing[0]}: no such file, but {INDEX} names it; copy or download the model again"
        )
    files = sorted(indexed | set(directory.glob("*.safetensors")))
    if not files:
        raise TargetError(f"{directory}: no .safetensors weights{_elsewhere(directory)}")
    if wrong := _not_loaded(directory, index, indexed, files):
        raise TargetError(wrong)
    for file in files:
        if kind := special_kind(file):
            raise TargetError(f"{file}: this is {kind}, not a file; copy or download it again")
        try:
            with safe_open(file, "pt"):  # reads the header alone
                pass
        except (SafetensorError, OSError) as error:
            why = instead(
                file,
                f"truncated or damaged ({file.stat().st_size:,} bytes; {cause(error)}); copy or "
                "download this file again",
            )
            raise TargetError(f"{file}: {why}") from None
    return files


def _elsewhere(directory: Path) -> str:
    """Return what a model directory holds instead of safetensors files, and what to do about it."""
    names = sorted(p.name for p in directory.iterdir())
    if parts := [name for name in names if in_parts(name)]:
        return (
            f", only parts of several processes ({', '.join(parts[:3])}); {JOIN_PARTS}, then save "
            "the model with save_pretrained"
        )
    if others := [name for name in names if name.endswith(_OTHER_FORMS)]:
        return (
            f", only {', '.join(others[:3])}, which spec-data does not load; convert them: load "
            "the model with transformers and call save_pretrained on it"
        )
    if inner := sorted(directory.glob("*/*.safetensors")):
        return f" in this directory, only in {inner[0].parent}: pass the directory of the model"
    return "; copy or download the model again"


def _not_loaded(directory: Path, index: Path, indexed: set[Path], files: list[Path]) -> str:
    """Return why transformers and engines would not load these files, or not the same; "": do."""
    one = directory / _ONE
    if one in files:
        if indexed and one not in indexed:
            return (
                f"{directory}: two models, {_ONE} and the files that {INDEX} names: transformers "
                "loads the first, engines the others; move away those that are not this model's"
            )
        return ""
    if indexed:
        table = read_object(index, TargetError).get("metadata")
        why = (
            f'{index}: no metadata, without which transformers loads no parts; add "metadata": {{}}'
        )
        return "" if isinstance(table, dict) else why
    if all(f.name.startswith("consolidated") for f in files):
        return (
            f"{files[0]}: weights in their makers' own form (Mistral's), which transformers does "
            "not read; copy model*.safetensors of the same repository too"
        )
    shown = ", ".join(file.name for file in files[:3])
    counts = {int(found[2]) for file in files if (found := _PART.search(file.name))}
    here = sum(bool(_PART.search(file.name)) for file in files)
    if counts:
        return (
            f"{directory}: {here} of {max(counts)} parts of a model ({shown}), without {INDEX}, "
            "which says what is in them; copy that file and all parts of the same repository"
        )
    return (
        f"{directory}: weights under other names ({shown}) than transformers loads: {_ONE}, or "
        f"parts that {INDEX} names. If this is the whole model, rename its file to {_ONE}"
    )


def weight_names(directory: Path) -> dict[str, Path]:
    """Return the file of every tensor of a checkpoint; errors as `weight_files`.

    Of a tensor that is in several files, such as model.fp16.safetensors, it is the one that is
    loaded.
    """
    files: dict[str, Path] = {}
    parts = weight_files(directory)
    one, index = directory / _ONE, directory / INDEX
    loaded = {one} if one in parts else set(weight_map(index, TargetError).values())
    for file in sorted(parts, key=loaded.__contains__):  # the loaded ones last
        with safe_open(file, "pt") as weights:
            files |= dict.fromkeys(weights.keys(), file)
    return files


OTHER_BLOCK = "other_mtp_block.json"
"""Of a copy of a target with a trained MTP block: the hash of the target's weights, and its own."""


def weights_hash(directory: Path) -> str:
    """Return the hash of the safetensors files of a model directory.

    Up to 4 GB the whole files are hashed ("sha256:..."), above that 256 blocks of 64 KiB of each
    file ("sampled-sha256:..."). A sampled hash covers the header, name and size of each file, so
    renamed, re-sharded or re-quantised weights never count as the same. A copy with another MTP
    block, which computes the same states, has the hash of its target.

    Raises:
        TargetError, MissingError: as `weight_files`.
    """
    files = weight_files(directory)
    sampled = sum(f.stat().st_size for f in files) > _FULL_HASH_BYTES
    digest: Any = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory).as_posix()}:{size}\n".encode())
        with file.open("rb") as stream:
            if not sampled:
                while block := stream.read(1 << 22):
                    digest.update(block)
                continue
            for index in range(_SAMPLES):
                stream.seek(index * max(size - _SAMPLE, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    found = ("sampled-sha256:" if sampled else "sha256:") + digest.hexdigest()
    other = directory / OTHER_BLOCK
    of = read_object(other, TargetError) if other.is_file() else {}
    return str(of["target"]) if of.get("files") == found and "target" in of else found
