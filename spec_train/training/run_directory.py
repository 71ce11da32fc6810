"""A run directory: settings, metrics, checkpoints that survive any crash, the best draft.

    RUN/fit.json               every option, resolved: `--config RUN/fit.json` repeats the run
    RUN/run.json               the run's identity: draft, dataset, settings that may not change
    RUN/machine.json           on what it trained, and from which step on: device, versions
    RUN/metrics.jsonl          one line per log or validation, append-only
    RUN/checkpoint-00000500/   a draft directory + training_state.safetensors and .json
    RUN/last, RUN/best         links to the newest checkpoint and to the best draft directory; no
                               `best` before the first validation of a trained draft. Where there
                               are no links: small files with the name that they stand for
    RUN/held-out-00000500.json simulated decoding of the best draft, of step 500

A directory is written under a temporary name, synced and renamed; a link is replaced atomically.
So a kill at any moment leaves the previous state complete, and leftovers are recognised by name.
The best draft is what the link `best` says: it turns last, and validation.json names the run.
training_state.json is written last and holds the hash of every other file: everything that decides
how a run resumes is verified before it is used. No pickle anywhere.
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.shards.errors import (
    ConfigError,
    DraftError,
    FileError,
    MissingError,
    RunError,
    SpecDataError,
)
from spec_data.shards.file_system import followed, linked_name, make_link, replace_durably
from spec_data.shards.files import (
    atomic_write,
    cause,
    dump_json,
    is_temporary,
    read_object,
    remove,
    sha256_file,
    sha256_json,
    temporary_name,
    use_default_mode,
    write_atomically,
    writing,
)
from spec_data.shards.path_kinds import Kind, expect
from spec_data.shards.resumable import differing_settings, process_lock, read_record, write_record
from spec_data.terminal import NOTICE
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_train.formats.draft_files import CONFIG, WEIGHTS, find_weights
from spec_train.training.result import BEST_FIGURES

log = logging.getLogger(__name__)

RUN, METRICS, MACHINE, _LOCK = "run.json", "metrics.jsonl", "machine.json", ".lock"
STATE_TENSORS, STATE = "training_state.safetensors", "training_state.json"
VALIDATION = "validation.json"
"""In the directory of the best draft: the figures of its validation."""
OF_CARDS = ("by_source", "by_context", "by_mode")
"""What of the simulated decoding is there, too: figures for its card, and no texts."""
_HELD_OUT = "held-out.json"
"""Where earlier releases wrote what `held_out_file` names."""
DECODED = "decoded.json"
"""The last real decoding with the best draft, as `eval --json` reports it."""

# -- reading ---------------------------------------------------------------------------------------


@dataclass
class Saved:
    """A checkpoint read from disk: `state` is plain JSON, `tensors` holds the rest."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def chosen_draft_dir(path: str | Path) -> Path:
    """Return `resolve_draft_dir(path)`, and say what of a run is meant where it is not its best.

    Commands call this once; errors as there.
    """
    folder, run = resolve_draft_dir(path), Path(path).expanduser()
    step, said = step_of(folder), best_step(run)
    if said is not None and folder == link_of(run):
        if not (folder / VALIDATION).is_file():  # a checkpoint, or a copy of other files
            log.warning(
                "warning[best]: %s has no %s, so nothing says that it is the best draft, of step "
                "%d: it was changed since; `best-*` beside it may still hold that one",
                *(folder, VALIDATION, said),
            )
        elif step is not None and step < said:
            log.warning(
                "warning[best]: %s holds step %d, and the checkpoint says that step %d was the "
                "best: a failed write of an earlier release, or a change since, lost that one",
                *(folder, step, said),
            )
    if _of_another_run(folder, folder.resolve().parent):  # `resolve_draft_dir` refuses its run
        log.warning(
            "warning[best]: %s: the draft of another run than the one it lies in: its "
            "validation.json does not name that run.json",
            folder,
        )
    if step == 0:
        log.warning(
            "warning[untrained]: %s: the draft of step 0: this run has trained nothing yet", folder
        )
    elif not _has_draft(followed(run)) and folder != followed(run / "best"):
        which = "" if step is None else f", step {step:,}"
        text = "%s: no trained draft was validated yet, so it means %s%s"
        log.log(NOTICE, text, path, folder, which)
    return folder


def step_of(folder: Path) -> int | None:
    """Return the step of a draft in a run; None: its files do not tell."""
    for file in (VALIDATION, STATE):
        with contextlib.suppress(OSError, DraftError):
            step = read_object(folder / file, DraftError).get("step")
            return step if isinstance(step, int) else None
    return None


def link_of(run: Path) -> Path:
    """Return what a run stands for: `best`, or `last` while no trained draft is best."""
    best, last = followed(run / "best"), followed(run / "last")
    there = best.is_dir() or linked_name(best) is not None
    return last if not there or (step_of(best) == 0 and _has_draft(last)) else best


def held_out_file(run: Path) -> Path | None:
    """Return the file with simulated decoding of the best draft; None: there is none.

    It has what `eval --data` reports over the held-out documents.
    """
    step = step_of(link_of(run))
    file, old = run / held_out_name(step or 0), run / _HELD_OUT
    if file.is_file():
        if not _names_another_run(file, run):
            return file
        log.warning("warning[best]: %s: of another run, and left out: it was put there", file)
        return None
    with contextlib.suppress(OSError, DraftError):
        return old if read_object(old, DraftError).get("step") == step else None
    return None


def held_out_name(step: int) -> str:
    """Return the name of the file with simulated decoding of the best draft of a step."""
    return f"held-out-{step:08d}.json"


def run_id(run: Path) -> str | None:
    """Return what tells a run from others: the SHA-256 of run.json; None: it cannot be read."""
    record = read_record(run / RUN)
    return None if record is None else sha256_json(record)


def _of_another_run(folder: Path, run: Path) -> bool:
    """Return whether a best draft says that it is of another run than `run`."""
    return _names_another_run(folder / VALIDATION, run)


def _names_another_run(file: Path, run: Path) -> bool:
    """Return whether a file of figures says that it is of another run than `run`."""
    try:
        own = read_object(file, DraftError).get("run")
    except (OSError, DraftError):
        return False
    known = run_id(run)
    return own is not None and known is not None and own != known


def best_step(run: Path) -> int | None:
    """Return which step the newest checkpoint of a run says was the best; None: none yet."""
    for checkpoint in reversed(checkpoints_of(run)):
        if (state := read_record(checkpoint / STATE)) is not None:
            step = (state.get("best") or {}).get("step")
            return step if isinstance(step, int) and step > 0 else None
    return None


def newer_than_best(folder: Path) -> tuple[int, int] | None:
    """Return the steps of the best draft of a run, `folder`, and of a newer last one; else None."""
    run = folder.absolute().parent
    newest = followed(run / "last")
    if newest.is_dir() and folder.resolve() == followed(run / "best").resolve():
        best, last = step_of(folder), step_of(newest)
        if best is not None and last is not None and best < last:
            return best, last
    return None


def resolve_draft_dir(path: str | Path) -> Path:
    """Return the draft directory for `path`: `path` itself, or the best draft of a run directory.

    A run without a best draft falls back to its last checkpoint; so does one whose best draft is
    that of step 0, as earlier releases wrote it. One whose best draft is lost, is that of another
    run or lacks a file does not: another draft would be used without a word. See `link_of`.

    Raises:
        MissingError: `path` does not exist, is neither a draft nor a run, or lacks a file.
    """
    path = followed(Path(path).expanduser())
    if _has_draft(path):
        expect(path, Kind.DRAFT)
        return path
    link = link_of(path)
    other = f"name a checkpoint of the run, such as {path / 'last'}"
    if (step := best_step(path)) is not None and link != followed(path / "best"):
        raise MissingError(
            f"{path / 'best'}: missing, though the best draft of this run was that of step "
            f"{step:,}; restore it, or {other}"
        )
    if _has_draft(link):
        if _of_another_run(link, path):  # of the run that is asked for: it may lie elsewhere
            raise MissingError(
                f"{link}: this is the draft of another run: its {VALIDATION} does not name the "
                f"{RUN} beside it; restore the own one, or {other}"
            )
        if link == followed(path / "last") and link.resolve().parent != path.resolve():
            raise MissingError(
                f"{path / 'last'}: points out of this run, to {link.resolve()}; restore it, or "
                "name the checkpoint that you mean"
            )
        return link
    if link.is_dir() or linked_name(link) is not None:
        raise MissingError(f"{link}: {CONFIG} or {WEIGHTS} is missing; restore it, or {other}")
    for checkpoint in reversed(checkpoints_of(path)):
        if _has_draft(checkpoint):
            return checkpoint
    expect(path, Kind.DRAFT)
    forms = (".safetensors", ".pt", ".pth", ".onnx", ".h5", ".gguf")
    others = sorted(p.name for p in path.iterdir() if p.suffix in forms)
    held = f", but {', '.join(others[:3])}, in a form that is not read" if others else ""
    raise MissingError(
        f"{path}: neither a draft (config.json and model.safetensors or pytorch_model.bin) nor a "
        f"run with a checkpoint{held}; pass the directory that `spec-train fit --out` wrote"
    )


def _has_draft(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and find_weights(folder) is not None


def checkpoint_name(step: int) -> str:
    """Return the name of the directory of a checkpoint."""
    return f"checkpoint-{step:08d}"


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoint directories of a run, oldest first."""
    return sorted(p for p in run.glob("checkpoint-" + 8 * "[0-9]") if p.is_dir())


def _former_best(run: Path) -> list[Path]:
    """Directories that `best` points or pointed at; an export beside them is not one."""
    return [p for p in run.glob("best-*") if re.fullmatch(r"best-\d{8}(-again)?", p.name)]


def _held_out_files(run: Path) -> list[Path]:
    """Files with simulated decoding of drafts that are or were the best."""
    found = (p for p in run.glob("held-out*") if re.fullmatch(r"held-out(-\d{8})?\.json", p.name))
    return sorted(found)


def read_run_json(run: Path) -> dict[str, Any]:
    """Read run.json of a run: a dict with the dict `identity`, and `total_steps`.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    record = read_record(run / RUN) or {}
    if {"identity", "total_steps"} <= record.keys():
        return record
    raise RunError(
        f"{run / RUN}: damaged or missing; restore it, or start in another --out (add --init-from "
        f"{run} to start from this run's best draft)"
    )


def read_machine(run: Path) -> list[dict[str, Any]]:
    """Return on what a run trained: `machine_facts`, each with the `step` it began with.

    Nothing depends on it: [] if it is damaged, or of an earlier release, which wrote none.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, SpecDataError):
        sittings = read_object(run / MACHINE)["sittings"]
        known = {"step": int, "device": str, "threads": int, "versions": dict}
        if all(isinstance(one[name], kind) for one in sittings for name, kind in known.items()):
            return list(sittings)
    return []


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint and verify its checksums.

    Raises:
        DraftError: it is damaged, or another checkpoint than its name says.
    """
    state = read_record(path / STATE)
    if state is None:
        raise DraftError(f"{path / STATE}: damaged or missing (its checksum differs)")
    if path.name != checkpoint_name(state["step"]):
        raise DraftError(
            f"{path / STATE}: holds step {state['step']}, but its directory is called {path.name}"
        )
    for name, digest in state["files"].items():
        if not (path / name).is_file() or sha256_file(path / name) != digest:
            raise DraftError(f"{path / name}: damaged or missing (its checksum differs)")
    return Saved(path, state["step"], state, load_file(path / STATE_TENSORS))


# -- writing ---------------------------------------------------------------------------------------


class RunDirectory:
    """The directory of one run. A lock file admits one process at a time."""

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        """Lock `path`, creating it if needed; `save` keeps the newest `keep` checkpoints.

        Raises:
            ConfigError: `path` cannot be written, or is a directory with other contents than a run.
            RunError: another process uses it.
        """
        self.path, self.keep = Path(path), keep
        self._id: str | None = None  # of `run_id`, once it is recorded
        check_directory_to_write("--out", self.path)
        paths = list(self.path.iterdir()) if self.path.is_dir() else []
        names = {p.name for p in paths if p.name != _LOCK and not is_temporary(p)}
        if names and RUN not in names:
            raise ConfigError(
                f"--out {self.path}: not empty and not a run of spec-train; pass another directory"
            )
        make_directory("--out", self.path)
        busy = (
            f"--out {self.path}: another spec-train fit is running here; wait until it ends, or "
            "pass another directory"
        )
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(process_lock(self.path / _LOCK, busy))
        self.close = self._lock.close
        for leftover in filter(is_temporary, paths):
            remove(leftover)

    # -- settings ---------------------------------------------------------------------------------

    def started(self) -> dict[str, Any] | None:
        """Return the identity of the run that has checkpoints here; None if there is none.

        Raises:
            RunError: run.json is damaged.
        """
        learned = bool(checkpoints_of(self.path) or list(self.path.glob("damaged-*")))
        return read_run_json(self.path)["identity"] if learned else None

    def record(
        self,
        identity: dict[str, Any],
        count_steps: Callable[[], int],
        parts: Set[str] = frozenset(),
    ) -> int:
        """Write run.json, or compare with an existing one; return the number of steps of the run.

        `parts` are fingerprints of the datasets of which the data have all documents: data that
        have grown are named. A run without a checkpoint has nothing to lose, so it restarts with
        the new settings.

        Raises:
            ConfigError: the run was started with another identity; lists the differing fields.
            RunError: run.json is damaged.
        """
        if (self.path / RUN).is_file():
            run = read_run_json(self.path)
            differing = differing_settings(run["identity"], identity)
            if differing and self.started() is not None:
                old, new = (table.get("dataset") for table in (run["identity"], identity))
                before = [old] if isinstance(old, str) else old or []
                advice = "Resume with the old settings, or start in another --out (add --init-from "
                advice += f"{self.path} to start from this run's best draft)"
                if old != new and before and parts >= set(before):
                    advice = (
                        "The data have all documents that this run was given, and more: train "
                        f"further on them with --init-from {self.path} in another --out"
                    )
                lines = "\n  ".join(differing)
                raise ConfigError(
                    f"--out {self.path} holds a run with other settings:\n  {lines}\n{advice}"
                )
            if not differing:
                self._id = sha256_json(run)
                return int(run["total_steps"])
        total = count_steps()
        record = {"identity": identity, "total_steps": total}
        write_record(self.path / RUN, record)
        self._id = sha256_json(json.loads(json.dumps(record)))  # as `run_id` reads it
        return total

    def write_options(self, options: dict[str, Any]) -> None:
        """Replace fit.json."""
        write_atomically(self.path / "fit.json", dump_json(options))

    def write_machine(self, facts: dict[str, Any], step: int) -> None:
        """Note on what the run goes on from a step; notes of steps that are undone go."""
        sittings = [one for one in read_machine(self.path) if one["step"] < step]
        if not sittings or {**sittings[-1], "step": step} != {"step": step, **facts}:
            sittings.append({"step": step, **facts})
        write_atomically(self.path / MACHINE, dump_json({"sittings": sittings}))

    # -- metrics ----------------------------------------------------------------------------------

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl; non-finite numbers become null."""
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in line.items()}
        path = self.path / METRICS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")

    def begin(self) -> None:
        """Delete what an attempt without a checkpoint left behind."""
        for name in ("best", METRICS, DECODED):
            remove(self.path / name)
        for left in (*_former_best(self.path), *_held_out_files(self.path)):
            remove(left)

    def truncate_metrics(self, step: int) -> None:
        """Drop lines after `step`, and a last line that is incomplete."""
        file = self.path / METRICS
        if not file.is_file():
            return
        lines = []
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    lines.append(line + "\n")
        write_atomically(file, "".join(lines))

    # -- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        save_draft: Callable[[Path], None],
        tensors: dict[str, Tensor],
        state: dict[str, Any],
    ) -> Path:
        """Write checkpoint `step`, point `last` at it, and delete the oldest beyond `keep`.

        `save_draft` writes the files of the draft into an empty folder.
        """
        final = self.path / checkpoint_name(step)
        with self._written(final) as folder:
            save_draft(folder)
            contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
            save_file(contiguous, folder / STATE_TENSORS)
            files = {p.name: sha256_file(p) for p in sorted(folder.iterdir())}
            write_record(folder / STATE, {"step": step, **state, "files": files})
        with self._changing(final):
            self._settle(final)
        return final

    def _settle(self, newest: Path) -> None:
        """Point `last` at the newest checkpoint; delete the oldest, and drafts that were best."""
        if self._pointed("last") != newest.name:
            self._link("last", newest)
        for old in checkpoints_of(self.path)[: -self.keep]:
            remove(old)
        self._remove_former_best()

    def _remove_former_best(self) -> None:
        if best := self._pointed("best"):
            # by its name: what cannot be read just now must not cost the figures of this draft
            figures = best.removesuffix("-again").replace("best", "held-out") + ".json"
            kept = [best, figures, *([] if (self.path / figures).is_file() else [_HELD_OUT])]
            for old in (*_former_best(self.path), *_held_out_files(self.path)):
                if old.name not in kept:
                    remove(old)

    def load_newest(self) -> Saved | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint.

        A damaged checkpoint is logged and renamed to `damaged-...`; then the one before it is read.
        What a kill after the rename of a checkpoint left undone is done: see `_settle`.

        Raises:
            RunError: there are checkpoints, and all are damaged.
        """
        problems = []
        for checkpoint in reversed(checkpoints_of(self.path)):
            try:
                saved = read_checkpoint(checkpoint)
                self._settle(checkpoint)
                saved.state["best"] = self._best_on_disk(saved)
                return saved
            except DraftError as error:
                problems.append(str(error))
                aside = self.path / f"damaged-{checkpoint.name}"
                remove(aside)
                checkpoint.rename(aside)
                log.warning(
                    "warning[damaged-checkpoint]: %s; renamed to %s, trying the checkpoint "
                    "before it",
                    error,
                    aside.name,
                )
        damaged = sorted(p.name for p in self.path.glob("damaged-*"))
        if damaged:  # now or in an earlier call: never restart over what was learned
            raise RunError(
                f"{self.path}: all checkpoints are damaged: {'; '.join(problems or damaged)}. "
                "Repair one and rename it back, without damaged-, or start in another --out "
                f"(add --init-from {self.path} to start from its best draft), or empty this one"
            )
        return None

    def _best_on_disk(self, saved: Saved) -> dict[str, Any] | None:
        """Return the figures of the best draft: of the one that the link `best` names.

        A run that was killed may have written it after the checkpoint. None: there is none.
        """
        said = saved.state["best"]
        said = said if said and said["step"] else None  # an earlier release kept those of step 0
        best = followed(self.path / "best")
        why = ""
        try:
            found = read_object(best / VALIDATION, DraftError)
        except (OSError, DraftError):
            if said is None or _has_draft(best):
                return said
            found, why = {}, "it is missing"
        if _of_another_run(best, self.path):
            found, why = {}, "it is the draft of another run"
        step = found.get("step")
        figures = None
        if isinstance(step, int) and step > 0:
            figures = {name: found.get(name) for name in ("step", *BEST_FIGURES)}
            if said is not None and step < said["step"]:
                why = f"it holds step {step:,}"
        if said is not None and why:
            log.warning(
                "warning[best]: %s: %s, and the checkpoint says that step %d was the best: later "
                "drafts are compared with what is there. An earlier run of this command failed "
                "while it wrote there, or files were changed since",
                self.path / "best",
                why,
                said["step"],
            )
        if figures is not None and said is not None and step == said["step"]:
            return said
        return figures

    def save_best(
        self,
        step: int,
        save_draft: Callable[[Path], None],
        metrics: dict[str, Any],
        simulated: dict[str, Any],
    ) -> Path:
        """Replace `best` by the current draft; its metrics go to validation.json.

        `simulated` goes to the run directory, not into `best`: its samples are texts of the
        dataset, and `best` may be published. It is there before the link turns, under the name of
        its step: so a kill between leaves each draft with its own.
        """
        # a resumed run may measure the same step again: never overwrite the target of `best`
        final = self.path / f"best-{step:08d}"
        if self._pointed("best") == final.name:
            final = self.path / f"{final.name}-again"
        of = {"run": self._id} if self._id else {}
        parts = {name: simulated[name] for name in OF_CARDS if name in simulated}
        with self._written(final) as folder:
            save_draft(folder)
            text = dump_json({"step": step, **metrics, **parts, **of})
            (folder / VALIDATION).write_text(text, encoding="utf-8")
        with self._changing(final):
            file = self.path / held_out_name(step)
            if simulated:
                write_atomically(file, dump_json({"step": step, **simulated, **of}))
            else:
                remove(file)
            self._link("best", final)
            self._remove_former_best()
        return final

    def on_disk(self) -> str:
        """Say which checkpoint and which best draft are complete, for an error of writing."""
        newest = checkpoints_of(self.path)[-1:]
        parts = [f"the newest checkpoint is {newest[0].name}" if newest else "no checkpoint yet"]
        if (best := self._pointed("best")) is not None:
            step = step_of(self.path / best)
            if step is None and (named := re.match(r"best-(\d+)", best)):
                step = int(named[1])  # a disk that fails may refuse to read, too
            parts.append(f"`best` is of step {step}")
        return f"On the disk: {', '.join(parts)}"

    def _pointed(self, name: str) -> str | None:
        return linked_name(self.path / name)

    @contextlib.contextmanager
    def _changing(self, path: Path) -> Iterator[None]:
        """Say in words what the system refuses to write for `path`, or to change beside it."""
        try:
            with writing(path):
                yield
        except FileError:
            raise
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({cause(error)})") from error

    @contextlib.contextmanager
    def _written(self, final: Path) -> Iterator[Path]:
        """Yield a new folder, which gets the name `final` once everything in it is on the disk.

        What has that name is removed: a damaged checkpoint, or one that is saved a second time.
        """
        with self._changing(final):
            remove(final)
            with atomic_write(final) as folder:
                folder.mkdir()
                yield folder
                for file in list(folder.iterdir()):
                    use_default_mode(file)  # safetensors writes files with mode 0600

    def _link(self, name: str, folder: Path) -> None:
        """Point the relative link `name` at `folder`; replace the old link atomically."""
        temporary = temporary_name(self.path / name)
        try:
            make_link(temporary, folder.name)
            replace_durably(temporary, self.path / name)
        finally:
            with contextlib.suppress(OSError):
                remove(temporary)
