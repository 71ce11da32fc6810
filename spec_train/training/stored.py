"""Reading a run directory: which draft it stands for, its run.json, its checkpoints.

Everything that decides how a run resumes is verified before it is used: the checksum of every file,
and that a checkpoint is the one that its directory's name says.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError, RunError
from spec_data.shards.files import sha256_file
from spec_data.shards.path_kinds import Kind, expect
from spec_data.shards.resumable import read_record
from spec_train.formats.draft_files import CONFIG, WEIGHTS, find_weights

RUN = "run.json"
STATE_TENSORS, STATE = "training_state.safetensors", "training_state.json"
HELD_OUT = "held-out.json"
"""Simulated decoding of the best draft over the held-out documents, as `eval --data` reports it."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{8,})$")


@dataclass
class Saved:
    """A checkpoint read from disk: `state` is plain JSON, `tensors` holds the rest."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def resolve_draft_dir(path: str | Path) -> Path:
    """Return the draft directory for `path`: `path` itself, or the best draft of a run directory.

    A run without a best draft falls back to its last checkpoint. A best draft that lacks a file
    does not: another draft would be used without a word. A checkpoint may be named without leading
    zeros, RUN/checkpoint-150.

    Raises:
        MissingError: `path` does not exist, is neither a draft nor a run, or lacks a file.
    """
    path = Path(path)
    step = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if step and not path.exists():
        padded = path.with_name(f"checkpoint-{int(step[1]):08d}")
        path = padded if padded.exists() else path
    if _has_draft(path):
        expect(path, Kind.DRAFT)
        return path
    for link in (path / "best", path / "last"):
        if _has_draft(link):
            return link
        if link.is_symlink() or link.is_dir():
            raise MissingError(
                f"{link}: {CONFIG} or {WEIGHTS} is missing; restore it, or name a checkpoint of "
                "the run"
            )
    for checkpoint in reversed(checkpoints_of(path)):
        if _has_draft(checkpoint):
            return checkpoint
    expect(path, Kind.DRAFT)
    raise MissingError(
        f"{path}: neither a draft (config.json and model.safetensors or pytorch_model.bin) nor a "
        "run with a checkpoint; pass the directory that `spec-train fit --out` wrote"
    )


def _has_draft(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and find_weights(folder) is not None


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoint directories of a run, oldest first."""
    named = [p for p in run.glob("checkpoint-*") if p.is_dir() and _CHECKPOINT.match(p.name)]
    return sorted(named, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    match = _CHECKPOINT.match(checkpoint.name)
    return int(match[1]) if match else -1


def read_run_json(run: Path) -> dict[str, Any]:
    """Read run.json of a run: a dict with the dicts `identity` and `notes`.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    record = read_record(run / RUN) or {}
    if {"identity", "notes"} <= record.keys():
        return record
    raise RunError(
        f"{run / RUN}: damaged or missing; restore it, or start in another --out (add --init-from "
        f"{run} to start from this run's best draft)"
    )


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint and verify its checksums.

    Raises:
        DraftError: it is damaged, or another checkpoint than its name says.
    """
    state = read_record(path / STATE)
    if state is None:
        raise DraftError(f"{path / STATE}: damaged or missing (its checksum differs)")
    if state["step"] != _step_of(path):
        raise DraftError(
            f"{path / STATE}: holds step {state['step']}, but its directory is called {path.name}"
        )
    for name, digest in state["files"].items():
        if not (path / name).is_file() or sha256_file(path / name) != digest:
            raise DraftError(f"{path / name}: damaged or missing (its checksum differs)")
    return Saved(path, state["step"], state, load_file(path / STATE_TENSORS))
