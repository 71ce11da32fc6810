"""The weight files of a model directory: only safetensors, complete, and hashed.

Other files (`pytorch_model.bin`) are never loaded, because they are not hashed: a dataset could be
captured from a model that its manifest does not name.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from spec_data.shards.errors import MissingError, TargetError
from spec_data.shards.records import safe_path

_ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_FULL_HASH_BYTES = 4 << 30
_SAMPLE, _SAMPLES = 1 << 16, 256  # bytes per block, blocks per file


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, sorted; each is checked to be complete.

    Raises:
        TargetError: there is none, a file is damaged or shorter than its header says, or the
            directory holds an adapter.
        MissingError: a file that the index names is absent.
    """
    if (directory / _ADAPTER).is_file():
        raise TargetError(
            f"{directory / _ADAPTER}: transformers adds this adapter to the weights where peft is "
            "installed and ignores it elsewhere; merge it into the model, or move it away"
        )
    indexed = {directory / name for name in _indexed(directory)}
    for file in indexed:
        if not file.is_file():
            raise MissingError(
                f"{file}: no such file, but {_INDEX} names it; copy or download the model again"
            )
    files = sorted(indexed | set(directory.glob("*.safetensors")))
    if not files:
        others = sorted(p.name for kind in ("*.bin", "*.pt*") for p in directory.glob(kind))
        raise TargetError(
            f"{directory}: no .safetensors weights"
            + (
                f", only {', '.join(others[:3])}, which spec-data does not load; convert them: "
                "load the model with transformers and call save_pretrained on it"
                if others
                else "; copy or download the model again"
            )
        )
    for file in files:
        try:
            with safe_open(file, "pt"):  # reads the header alone
                pass
        except (SafetensorError, OSError) as error:
            raise TargetError(
                f"{file}: truncated or damaged ({file.stat().st_size:,} bytes; {error}); copy or "
                "download this file again"
            ) from None
    return files


def _indexed(directory: Path) -> set[str]:
    index = directory / _INDEX
    if not index.is_file():
        return set()
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(map(safe_path, names)):
            raise ValueError("it names files outside its directory, or ones that cannot be")
        return names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(
            f"{index}: damaged ({type(error).__name__}: {error}); copy the model again"
        ) from None


def weights_hash(directory: Path) -> str:
    """Return the hash of the safetensors files of a model directory.

    Up to 4 GB the whole files are hashed ("sha256:..."), above that 256 blocks of 64 KiB of each
    file ("sampled-sha256:..."). A sampled hash covers the header, name and size of each file, so
    renamed, re-sharded or re-quantised weights never count as the same.

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
    return ("sampled-sha256:" if sampled else "sha256:") + digest.hexdigest()
