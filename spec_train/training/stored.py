"""Reading a run directory: which draft it stands for, its run.json, its checkpoints.

Everything that decides how a run resumes is verified before it is used: the checksum of every file,
and that a checkpoint is the one that its directory's name says.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError, RunError
from spec_data.shards.files import dump_json, sha256_file, sha256_json
from spec_data.shards.path_kinds import Kind, expect
from spec_train.formats.draft_files import CONFIG, WEIGHTS, find_weights

# -- checked json ----------------------------------------------------------------------------------
# JSON files of a run with a checksum of their own content: `run.json`, `training_state.json`.
#
# The checksum is the SHA-256 of the other fields in canonical form, so indenting a file again is
# not damage, and a changed digit is.


CHECKSUM = "checksum"


def dump_checked(table: dict[str, Any]) -> str:
    """Return the text of a file with `table` and its checksum."""
    plain = json.loads(json.dumps({k: v for k, v in table.items() if k != CHECKSUM}))
    return dump_json(plain | {CHECKSUM: sha256_json(plain)})


def is_intact(table: dict[str, Any]) -> bool:
    """Return whether the content of a file fits its checksum."""
    content = {name: value for name, value in table.items() if name != CHECKSUM}
    return bool(table.get(CHECKSUM) == sha256_json(content))


# -- stored ----------------------------------------------------------------------------------------


STATE_TENSORS = "training_state.safetensors"
STATE = "training_state.json"
HELD_OUT = "held-out.json"
"""The walk of the best draft over the held-out documents, as `eval --data` reports it."""
STATE_FORMAT = 1
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
    found = [p for p in run.glob("checkpoint-*") if p.is_dir() and _CHECKPOINT.match(p.name)]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    match = _CHECKPOINT.match(checkpoint.name)
    return int(match[1]) if match else -1


def read_run_json(run: Path) -> dict[str, Any]:
    """Read run.json of a run: a dict with the dicts `identity` and `notes`.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    file = run / "run.json"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if not is_intact(table):
            raise ValueError("its checksum differs or is missing")
        found = {name: dict(table.get(name) or {}) for name in ("identity", "notes")}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file}: damaged or missing ({error}); restore it, or start in another --out (add "
            f"--init-from {run} to start from this run's best draft)"
        ) from None
    return found


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint and verify its checksums.

    Raises:
        DraftError: it is damaged. RunError: another release wrote it.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        _check_state(path, state)
        for name, digest in state["files"].items():
            if sha256_file(path / name) != digest:
                raise DraftError(f"{path / name}: damaged (its checksum differs)")
        tensors = load_file(path / STATE_TENSORS)
    except DraftError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
        SafetensorError,
    ) as error:
        raise DraftError(f"{path}: damaged checkpoint ({error})") from None
    return Saved(path=path, step=state["step"], state=state, tensors=tensors)


def _check_state(path: Path, state: dict[str, Any]) -> None:
    """Check training_state.json of the checkpoint `path` before anything in it is used.

    Raises:
        DraftError: it is damaged, or of another checkpoint. RunError: another release wrote it.
        KeyError, TypeError, AttributeError: it is damaged.
    """
    file, kind = path / STATE, state["format"]
    if not is_intact(state):
        raise DraftError(f"{file}: damaged (its checksum differs or is missing)")
    if kind != STATE_FORMAT:
        raise RunError(
            f"{path}: written by another release (format {kind}, this release reads "
            f"{STATE_FORMAT}); resume with that release, or start in another --out"
        )
    if not {CONFIG, WEIGHTS, STATE_TENSORS} <= state["files"].keys():
        raise DraftError(f"{file}: damaged (files missing in it)")
    if state["step"] != _step_of(path):
        raise DraftError(
            f"{file}: holds step {state['step']}, but its directory is called {path.name}"
        )
