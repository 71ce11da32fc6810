"""The seal of a draft: what its config.json and its tensors were when this project wrote them.

A draft that was damaged or edited still loads, and the target then accepts few of its tokens. So
`write_files` stores a seal in the section `spec_train` of config.json, and `read_files` compares:

    "seal": {"version": 1,
             "config": every other field of config.json, as one text of JSON,
             "tensors": {name: xxh3_64 of dtype, shape and bytes},
             "checksum": SHA-256 of the three above}

The config is a text so that a replacement in config.json (`sed`) rarely changes both copies, and
the checksum detects it if it does. The metadata of model.safetensors says that there is a seal, so
that a seal that was removed is noticed. The seal finds damage and edits; it is not a signature.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64

from spec_data.shards.files import canonical_json, sha256_json

SECTION = "spec_train"
"""The key of config.json with everything that only this project reads."""
SEAL = "seal"
VERSION = 1
MARK = {SECTION: "sealed"}
"""Metadata of model.safetensors that is written together with a seal."""
_SHOWN = 8


def sealed_config(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return `config`, which has a section of this project, with a seal of it and of `tensors`."""
    plain, _ = without_seal(config)
    seal: dict[str, Any] = {
        "version": VERSION,
        "config": canonical_json(plain).decode(),
        "tensors": {name: tensor_checksum(tensors[name]) for name in sorted(tensors)},
    }
    seal["checksum"] = sha256_json(seal)
    return plain | {SECTION: plain[SECTION] | {SEAL: seal}}


def without_seal(config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return `config` without its seal, and the seal; None if there is none."""
    section = config.get(SECTION)
    if not isinstance(section, dict) or SEAL not in section:
        return config, None
    others = {name: value for name, value in section.items() if name != SEAL}
    return config | {SECTION: others}, section[SEAL]


def tensor_checksum(tensor: Tensor) -> str:
    """Return the xxh3_64, 16 hex digits, of dtype, shape and bytes of a tensor on the CPU."""
    digest = xxh3_64(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    flat = tensor.detach().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def broken_seal(config: dict[str, Any], seal: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Compare a draft with its seal; return what differs, one sentence each, [] if nothing does.

    `config` is without the seal.
    """
    if not isinstance(seal, dict) or set(seal) != {"version", "config", "tensors", "checksum"}:
        return ["the seal itself is damaged"]
    try:
        problems = list(_leaves(json.loads(seal["config"]), config))
    except (TypeError, ValueError):
        problems = []  # the checksum reports it
    if seal["checksum"] != sha256_json({k: v for k, v in seal.items() if k != "checksum"}):
        return ["the seal itself is damaged (its checksum differs)", *problems]
    if seal["version"] != VERSION:
        return [f"the seal has version {seal['version']}, this release reads {VERSION}"]
    return problems + _other_tensors(seal["tensors"], tensors)


def _leaves(sealed: Any, current: Any, path: str = "") -> Iterator[str]:
    if isinstance(sealed, dict) and isinstance(current, dict):
        for name in [*sealed, *(n for n in current if n not in sealed)]:
            inner = f"{path}.{name}" if path else name
            if name not in current:
                yield f"{inner}: sealed {_short(sealed[name])}, now missing"
            elif name not in sealed:
                yield f"{inner}: added, {_short(current[name])}"
            else:
                yield from _leaves(sealed[name], current[name], inner)
    elif not same_value(sealed, current):
        yield f"{path}: sealed {_short(sealed)}, found {_short(current)}"


def same_value(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    return bool(a == b)


def _other_tensors(sealed: Any, tensors: dict[str, Tensor]) -> list[str]:
    if not isinstance(sealed, dict):
        return ["the seal itself is damaged"]
    problems = [f"tensor {name} is missing" for name in sealed if name not in tensors]
    problems += [f"tensor {name} was added" for name in tensors if name not in sealed]
    return problems + [
        f"tensor {name} has other values than when it was sealed"
        for name, value in tensors.items()
        if name in sealed and tensor_checksum(value) != sealed[name]
    ]


def some_of(problems: Sequence[str]) -> str:
    """Return the first few problems as one text."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
