"""`spec-data push`: upload a sealed dataset, with rows for the Hub's viewer.

    DIR-push-FINGERPRINT/   links to the files of the dataset, and documents/*.arrow

The folder is uploaded and then removed. The same command resumes an interrupted upload. The
first 16 digits of the fingerprint are in its name, so it is no directory of the user. A view is
copied beside itself first, because the Hub needs its shards.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from huggingface_hub import HfApi

from spec_data.hub.hub_calls import hub, hub_errors
from spec_data.models.reading import load_tokenizer
from spec_data.shards.dataset_card import CARD, DOCUMENTS, dataset_card
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import atomic_write, write_atomically
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.seal import check_shard, datasets_files
from spec_data.terminal.command import Result
from spec_data.terminal.paths import make_directory
from spec_data.terminal.progress import progress, size
from spec_data.views.copy import copy_bytes, plain_copy, write_copy


@dataclass(frozen=True, kw_only=True)
class Pushed(Result):
    """What `push` uploaded, or would upload."""

    repo: str
    files: int
    bytes: int
    uploaded: bool

    @property
    def next_command(self) -> tuple[str, ...]:  # type: ignore[override]
        """Download it somewhere else."""
        return ("spec-data", "pull", self.repo, "DIR") if self.uploaded else ()

    def __str__(self) -> str:
        text = (
            f"{self.files} files, {size(self.bytes)}, and the documents without states: {self.repo}"
        )
        return text if self.uploaded else f"{text}; nothing was uploaded"


def push(data: Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Pushed:
    """Upload a dataset to the Hub, or resume an upload that was interrupted.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        ConfigError: no right to write there, or the repository holds another dataset.
        RunError: the Hub cannot be reached.
    """
    dataset = HiddenStatesDataset(data)
    if dataset.view is not None:
        return _push_view(dataset, repo, private=private, dry_run=dry_run)
    names = dataset_files(dataset)
    total = sum((dataset.path / name).stat().st_size for name in names)
    done = Pushed(repo=repo, files=len(names), bytes=total, uploaded=not dry_run)
    if dry_run:
        return done
    for record in progress(dataset.manifest.shards, desc="check", unit="shards", leave=False):
        check_shard(dataset.path, record)
    folder = staged_folder(dataset)
    _stage(dataset, names, folder)
    api = hub()
    with hub_errors(repo):
        given: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
        api.create_repo(**given, private=True if private else None, exist_ok=True)
        _refuse_another(api, repo, dataset.manifest.fingerprint)
        message = f"Dataset {_short(dataset)}"
        given |= {"folder_path": str(folder), "commit_message": message}
        api.upload_folder(**given, ignore_patterns=[MANIFEST, ".cache/*"])
        api.upload_folder(**given, allow_patterns=[MANIFEST])  # last: what has one is complete
    shutil.rmtree(folder)
    return done


def _push_view(dataset: HiddenStatesDataset, repo: str, *, private: bool, dry_run: bool) -> Pushed:
    """Write a copy of a view beside it, push that, and remove it."""
    copy = plain_copy(dataset)
    if dry_run:
        return Pushed(repo=repo, files=0, bytes=copy_bytes(copy), uploaded=False)
    out = staged_folder(dataset, "copy")
    write_copy(out, copy)
    done = push(out, repo, private=private)
    shutil.rmtree(out)
    return done


def staged_folder(dataset: HiddenStatesDataset, kind: str = "push") -> Path:
    """Return the folder beside a dataset from which it is uploaded."""
    path = dataset.path.resolve()
    return path.with_name(f"{path.name}-{kind}-{_short(dataset)}")


def _short(dataset: HiddenStatesDataset) -> str:
    return dataset.manifest.fingerprint[:16]


def dataset_files(dataset: HiddenStatesDataset) -> list[str]:
    """Return the names of all files of a dataset but its card."""
    names = [*(r.file for r in dataset.manifest.shards), *dataset.manifest.files]
    tables = [dataset.manifest.codec.file] if dataset.manifest.codec else []
    return sorted({*names, *tables, *datasets_files(dataset.manifest), MANIFEST})


def _stage(dataset: HiddenStatesDataset, names: list[str], folder: Path) -> None:
    """Make the folder that is uploaded: links to the files, the card, and the documents."""
    make_directory("--data", folder)
    for name in names:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to((dataset.path / name).resolve())
    card = dataset.path / CARD
    text = card.read_bytes() if card.is_file() else dataset_card(dataset.manifest)
    write_atomically(folder / CARD, text)
    write_viewer_rows(dataset, folder / DOCUMENTS)


def _refuse_another(api: HfApi, repo: str, fingerprint: str) -> None:
    """Refuse a repository with the manifest of another dataset: its shards would be mixed."""
    given: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
    if MANIFEST not in {f.rfilename for f in api.dataset_info(repo).siblings or ()}:
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = api.hf_hub_download(**given, filename=MANIFEST, local_dir=scratch)
        present = json.loads(Path(file).read_text(encoding="utf-8")).get("fingerprint")
    if present != fingerprint:
        raise ConfigError(
            f"{repo} holds another dataset (fingerprint {str(present)[:16]}, this one is "
            f"{fingerprint[:16]}); push to another repository, or delete that one first"
        )


# -- viewer rows -----------------------------------------------------------------------------------
# The documents of a dataset without states: what the Hub's viewer and people read. They are Arrow
# streams like the shards: `load_dataset` reads all configurations of a card in one format.

_PER_FILE, _PER_GROUP = 100_000, 1_000
_SCHEMA = pa.schema(
    {
        "doc_id": pa.string(),
        "source": pa.string(),
        "text": pa.string(),
        "supervised_text": pa.string(),
        "tokens": pa.int32(),
        "supervised": pa.int32(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
    }
)


def write_viewer_rows(dataset: HiddenStatesDataset, folder: Path) -> None:
    """Write `part-00000.arrow`, ... of all documents to `folder`; files that exist are kept."""
    reader = HiddenStatesDataset(dataset.location, ["input_ids", "loss_mask"])
    decode = load_tokenizer(dataset.target_dir, False).decode
    folder.mkdir(parents=True, exist_ok=True)

    def row(number: int) -> dict[str, Any]:
        document = reader[number]
        ids, mask = document["input_ids"].tolist(), document["loss_mask"].long().tolist()
        supervised = [i for i, m in zip(ids, mask, strict=True) if m]
        return document | {
            "text": decode(ids),
            "supervised_text": decode(supervised),
            "tokens": len(ids),
            "supervised": len(supervised),
            "input_ids": ids,
            "loss_mask": mask,
        }

    parts = range(0, len(reader), _PER_FILE)
    for number, first in enumerate(progress(parts, desc="documents", unit="files", leave=False)):
        file = folder / f"part-{number:05d}.arrow"
        if file.is_file():
            continue
        with (
            atomic_write(file) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_stream(sink, _SCHEMA) as writer,
        ):
            last = min(first + _PER_FILE, len(reader))
            for start in range(first, last, _PER_GROUP):
                rows = [row(i) for i in range(start, min(start + _PER_GROUP, last))]
                writer.write_table(pa.Table.from_pylist(rows, _SCHEMA))
