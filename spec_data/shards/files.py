"""Files that are whole or absent: write to a temporary name, fsync, rename, fsync the folder."""

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

_BLOCK = 1 << 20


def unit_name(unit: int) -> str:
    """Return the name that a unit's files share, without suffix: unit-00000."""
    return f"unit-{unit:05d}"


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process or machine uses; `.*.tmp` files are leftovers."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def replace_durably(temporary: Path, final: Path) -> None:
    """Rename `temporary` (already fsynced) over `final` and make the rename durable."""
    temporary.replace(final)
    sync_directory(final.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, data: bytes | str) -> Path:
    """A temporary file beside `path` that holds `data`, on the disk."""
    temporary = temporary_name(path)
    with temporary.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a small file in one step; a reader sees the old one, the new one, or none."""
    temporary = _written(path, data)
    replace_durably(temporary, path)


def write_once(path: Path, data: bytes | str) -> None:
    """Write a small file unless it exists: of several writers the first one wins."""
    temporary = _written(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: the last one wins, with the same bytes
        temporary.replace(path)
    temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def dump_json(value: Any) -> str:
    """JSON as every file of a dataset holds it: stable bytes, readable, newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def canonical_json(value: Any) -> bytes:
    """JSON without whitespace and with sorted keys: what is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash of a whole file, read in blocks."""
    return _digest_file(path, hashlib.sha256())


def xxh3_file(path: Path) -> str:
    """xxh3_64 of a whole file, 16 hex digits: ten times as fast, and no proof against forgers."""
    return _digest_file(path, xxh3_64())


def _digest_file(path: Path, digest: Any) -> str:
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return str(digest.hexdigest())
