"""Identify the target and the tokenizer by hashes, which decide whether data may be mixed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from spec_data.shards.errors import MissingError, TargetError
from spec_data.shards.files import sha256_json
from spec_data.target.hooks import text_config

_FULL_HASH_BYTES = 4 << 30
_SAMPLE, _SAMPLES = 1 << 16, 256  # bytes per block, blocks per file
_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def resolve_model(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Return the local directory of a model directory or Hub id, and the Hub commit (or None).

    Raises:
        MissingError: `name` is no model directory, and neither the Hub nor its local cache has it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise MissingError(f"{path}: no config.json, so this is not a model directory")
        return path, None
    try:
        snapshot = snapshot_download(name, revision=revision, allow_patterns=_FILES)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingError(
            f"{name}: not a directory here, and not available from the Hub: {reason}"
        ) from None
    return Path(snapshot), Path(snapshot).name


def config_hash(directory: Path) -> str:
    """Return the hash of config.json without the fields that change when a model is saved again."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TargetError(f"{directory / 'config.json'}: not valid JSON: {error}") from None
    return sha256_json({k: v for k, v in config.items() if k not in _VOLATILE})


def weights_hash(directory: Path) -> str:
    """Return the hash of the safetensors files of a model directory.

    Up to 4 GB the whole files are hashed ("sha256:..."), above that 256 blocks of 64 KiB of each
    file ("sampled-sha256:..."). A sampled hash covers the header, name and size of each file, so
    renamed, re-sharded or re-quantised weights never count as the same.

    Raises:
        TargetError: there are no safetensors files.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise TargetError(f"{directory}: no .safetensors weights; convert the checkpoint first")
    sampled = sum(f.stat().st_size for f in files) > _FULL_HASH_BYTES
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if not sampled:
                while block := stream.read(1 << 22):
                    digest.update(block)
                continue
            for index in range(_SAMPLES):
                stream.seek(index * max(size - _SAMPLE, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    return ("sampled-sha256:" if sampled else "sha256:") + digest.hexdigest()


def target_identity(name: str, directory: Path, commit: str | None, config: Any) -> dict[str, Any]:
    """Return the manifest's `target`, without loading any weights.

    Args:
        name: the target as the user wrote it; a local path is stored as its last part only.
        directory: the resolved model directory.
        commit: the Hub commit, None for a local directory.
        config: the transformers configuration of the target.
    """
    text = text_config(config)
    quantization: Any = getattr(config, "quantization_config", None)
    return {
        "name": name if commit else directory.resolve().name,
        "revision": commit,
        "architectures": config.architectures or [],
        "model_type": config.model_type,
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "quantization": quantization.to_dict()
        if hasattr(quantization, "to_dict")
        else quantization,
        "config_hash": config_hash(directory),
        "weights_hash": weights_hash(directory),
    }


def tokenizer_identity(tokenizer: Any, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's `tokenizer`: hashes of vocabulary and chat template, and the kwargs."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = json.loads(backend.to_str())
        for volatile in ("truncation", "padding"):
            vocabulary.pop(volatile, None)
    else:
        vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template
    return {
        "hash": sha256_json(vocabulary),
        "chat_template_hash": sha256_json(template) if template else None,
        "chat_template_kwargs": template_kwargs,
        "size": len(tokenizer),
    }
