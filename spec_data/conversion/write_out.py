"""`spec-data export`: write a dataset in the layout of another trainer, document by document.

    OTHER/spec-data-export.json     what is written there: dataset, layers, documents

A file is complete if it exists, so an interrupted run goes on with the first document without one.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spec_data.conversion.speculators import SpeculatorsWriter
from spec_data.conversion.table_layout import SpecForgeWriter
from spec_data.generation.explained_failures import explained_failures
from spec_data.options.conversion_options import ExportDataConfig
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import dump_json, is_temporary, temporary_files, write_atomically
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import ALL, FINAL
from spec_data.terminal.paths import make_directory
from spec_data.terminal.progress import progress, size

RECORD = "spec-data-export.json"


class DocumentWriter(Protocol):
    """Writes the documents of a dataset in one layout."""

    columns: list[str]
    states_per_token: int

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int], out: Path) -> None:
        """Prepare to write some layers of a dataset to `out`."""

    def file(self, number: int) -> Path:
        """Return the file of a document; it is complete if it exists."""

    def write(self, number: int, document: dict[str, Any]) -> None:
        """Write a document of `input_ids`, `loss_mask` and the columns."""

    def finish(self, dataset: HiddenStatesDataset, count: int) -> list[str]:
        """Complete the directory of `count` documents; return lines on what to know about it."""


_WRITERS: dict[str, type[DocumentWriter]] = {
    "speculators": SpeculatorsWriter,
    "specforge": SpecForgeWriter,
}


@dataclass(frozen=True, kw_only=True)
class ExportedStates:
    """What `export` wrote, or would write: `lines` say what the other trainer must be told."""

    path: Path
    to: str
    documents: int
    bytes: int
    written: bool
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.documents:,} documents for {self.to}, {size(self.bytes)} of states"
        return "\n".join([head if self.written else f"{head}; nothing was written", *self.lines])


def export_dataset(config: ExportDataConfig) -> ExportedStates:
    """Write a dataset for another trainer, or resume a run that was interrupted.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that the dataset does not have, or another export is in the directory.
        RunError: the disk is full.
    """
    dataset = HiddenStatesDataset(config.data)
    layers = _layers(config, dataset)
    _check_final(dataset)
    out = Path(config.out)
    writer = _WRITERS[config.to](dataset, layers, out)
    count = min(config.limit or len(dataset), len(dataset))
    tokens = int(dataset.lengths[:count].sum())
    needed = tokens * writer.states_per_token * dataset.manifest.hidden_size * 2
    done = ExportedStates(
        path=out, to=config.to, documents=count, bytes=needed, written=not config.dry_run
    )
    if config.dry_run:
        return done
    record = {
        "to": config.to,
        "fingerprint": dataset.manifest.fingerprint,
        "layers": layers,
        "documents": count,
        "target": dataset.manifest.target.get("name"),
    }
    _claim(out, record)
    for unfinished in temporary_files(out):
        unfinished.unlink()
    left = [n for n in range(count) if not writer.file(n).is_file()]
    _check_space(out, needed * len(left) // max(1, count))
    columns = list(dict.fromkeys(["input_ids", "loss_mask", *writer.columns]))
    reader = HiddenStatesDataset(config.data, columns)
    tokens_only = HiddenStatesDataset(config.data, ["input_ids", "loss_mask"])
    with explained_failures(out):
        for number in progress(left, desc="export", unit="docs"):
            writer.file(number).parent.mkdir(parents=True, exist_ok=True)
            writer.write(number, reader[number])
        lines = writer.finish(tokens_only, count)
    return ExportedStates(**{**vars(done), "lines": tuple(lines)})


def _layers(config: ExportDataConfig, dataset: HiddenStatesDataset) -> list[int]:
    """Return the layers to write, ascending."""
    known = list(dataset.manifest.layers)
    if config.layers is None:
        asked = known
    else:
        try:
            asked = sorted({int(part) for part in config.layers.split(",")})
        except ValueError:
            raise ConfigError(f"--layers {config.layers!r}: expected ids such as 1,3,5") from None
    missing = [k for k in asked if k not in known]
    if missing or not asked:
        has = ",".join(map(str, known)) or "no layer"
        raise ConfigError(f"--layers {config.layers or ''}: the dataset has {has}")
    return asked


def _check_final(dataset: HiddenStatesDataset) -> None:
    """Refuse a dataset without the final state of every token.

    Raises:
        DatasetError: see above.
    """
    if FINAL not in dataset.columns or dataset.final != ALL:
        raise DatasetError(
            f"{dataset.path}: other trainers read the final state of every token, and this dataset "
            f"has {'it only where the next is supervised' if FINAL in dataset.columns else 'none'}"
            "; capture with --supervision final-hidden and --final all"
        )


def _claim(out: Path, record: dict[str, Any]) -> None:
    """Make the directory, or check that the same export began in it.

    Raises:
        ConfigError: it holds another export.
        DatasetError: it holds something else, or what says which export is damaged.
    """
    file = out / RECORD
    if file.is_file():
        try:
            saved = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise DatasetError(f"{file}: damaged; choose another --out, or delete {out}") from None
        changed = differing_settings(saved, record)
        if changed:
            raise ConfigError(
                f"{out} holds another export:\n  " + "\n  ".join(changed) + "\nUse another --out"
            )
        return
    if out.exists() and not all(map(is_temporary, out.iterdir())):
        raise DatasetError(f"{out} is not empty; choose another --out (nothing was changed)")
    make_directory("--out", out)
    write_atomically(file, dump_json(record))


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise RunError(
            f"{out}: {size(needed)} are to be written, but only {size(free)} are free. Free some "
            "space, or write fewer --layers or a --limit"
        )
