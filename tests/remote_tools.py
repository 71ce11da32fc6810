"""Datasets on memory://, for tests of commands that take URLs."""

from pathlib import Path

import fsspec


def put_in_memory(directory: Path, url: str) -> None:
    """Copy every file of a directory to a memory:// URL."""
    system = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    for file in directory.rglob("*"):
        if file.is_file():
            system.pipe_file(f"{root}/{file.relative_to(directory)}", file.read_bytes())


def forget_memory() -> None:
    """Delete everything on memory://."""
    fsspec.filesystem("memory").store.clear()
