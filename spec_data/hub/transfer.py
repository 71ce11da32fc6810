"""`spec-data push` and `pull`: a dataset to the Hugging Face Hub and back, every shard checked.

    DIR/.pull.json   what is being downloaded: repository, revision, commit; removed at the end

The Hub has the files of a dataset as they are, and the documents without states, for its viewer.
manifest.json goes up and comes down last, so what has a manifest is complete. Both resume: the
client skips what has arrived, and a download stays with the commit of its first run.
"""

import glob
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.dataset_card import CARD, DOCUMENTS, dataset_card
from spec_data.shards.errors import (
    ConfigError,
    DatasetError,
    MissingError,
    RunError,
    SpecDataError,
    TargetError,
)
from spec_data.shards.files import (
    dump_json,
    read_object,
    remove,
    remove_dead_of,
    sha256_file,
    temporary_name,
    write_atomically,
)
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_data.shards.seal import datasets_files
from spec_data.terminal.command import Result
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_data.terminal.progress import progress, size

log = logging.getLogger(__name__)

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_OF_HTTP = ("httpx", "httpcore", "requests")  # and their next major releases
_RECORD = ".pull.json"


def hub() -> HfApi:
    """Return the client of the Hub (of HF_ENDPOINT, where it is set)."""
    return HfApi(library_name="spec-data")


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of the client into ours."""
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{repo}: not the name of a repository: {error}") from None
    except LocalTokenNotFoundError:
        raise ConfigError(f"{repo}: this needs an account; {_LOG_IN}") from None
    except RevisionNotFoundError:
        raise MissingError(f"{repo}: no such revision") from None
    except RepositoryNotFoundError:
        raise MissingError(
            f"{repo}: no such dataset on the Hub, or it is private: {_LOG_IN}"
        ) from None
    except SpecDataError:
        raise
    except Exception as error:  # of several libraries: no network, a full disk, a broken upload
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise ConfigError(f"{repo}: the Hub does not allow it; {_LOG_IN}") from None
        library = type(error).__module__.partition(".")[0]
        if not (isinstance(error, OSError | RuntimeError) or library.startswith(_OF_HTTP)):
            raise
        (first, *_) = [*str(error).strip().splitlines(), type(error).__name__]
        raise RunError(f"{repo}: {first}; run the same command again to resume") from None


# -- push -------------------------------------------------------------------------------------


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

    again = property(lambda self: "" if self.uploaded else "next")

    def __str__(self) -> str:
        text = (
            f"{self.files} files, {size(self.bytes)}, and the documents without states: {self.repo}"
        )
        return text if self.uploaded else f"{text}; nothing was uploaded"


def push(data: Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Pushed:
    """Upload a dataset to the Hub, or resume an upload that was interrupted."""
    dataset = HiddenStatesDataset(data)
    manifest, path = dataset.manifest, dataset.path
    if dataset.view is not None or dataset.mirror is not None:
        raise ConfigError(
            f"--data {dataset.location}: a view or a remote dataset has no shards here; make a "
            "dataset of it with `spec-data copy`"
        )
    names = {*manifest.checksums(), *datasets_files(manifest), MANIFEST}
    if lacking := sorted(name for name in names if not (path / name).is_file()):
        raise MissingError(f"{path / lacking[0]}: missing; copy or generate the dataset again")
    total = sum((path / name).stat().st_size for name in names)
    pushed = Pushed(repo=repo, files=len(names), bytes=total, uploaded=not dry_run)
    if dry_run:
        return pushed
    if changed := _changed(path, manifest):
        raise DatasetError(f"{path / changed}: not as it was sealed; copy or generate it again")
    card = path / CARD
    files: dict[str, Any] = {name: path / name for name in sorted(names)}
    files[CARD] = card if card.is_file() else dataset_card(manifest).encode()
    api = hub()
    remove_dead_of(path.resolve())
    scratch = temporary_name(path.resolve())  # the rows of a large dataset do not fit in a /tmp
    scratch.mkdir()
    with ExitStack() as at_end, _hub_errors(repo):
        at_end.callback(remove, scratch)
        rows = f"{DOCUMENTS}/part-00000.arrow"
        files[rows] = scratch / "rows.arrow"
        _write_viewer_rows(dataset, files[rows])
        hidden = True if private else None
        made = api.create_repo(repo, repo_type="dataset", private=hidden, exist_ok=True)
        pushed = replace(pushed, repo=(repo := made.repo_id))  # with its owner
        info = api.dataset_info(repo)
        if private and info.private is False:
            raise ConfigError(
                f"{repo} is public: make it private on the Hub, or push without --private (nothing "
                "was uploaded)"
            )
        present = {f.rfilename for f in info.siblings or ()}
        if MANIFEST in present:
            _refuse_another(api, repo, manifest.fingerprint, scratch)
        left = []  # by a push of another dataset that did not end
        if MANIFEST not in present and "state.json" in present:
            arrow = re.compile(rf"(shards|{DOCUMENTS})/[^/]+\.arrow")
            left = [name for name in sorted(present - files.keys()) if arrow.fullmatch(name)]
        removed = [CommitOperationDelete(name) for name in left]
        for last in (False, True):  # what has a manifest is complete
            added = [CommitOperationAdd(n, f) for n, f in files.items() if (n == MANIFEST) == last]
            api.create_commit(
                repo,
                [*removed, *added] if last else added,
                repo_type="dataset",
                commit_message=f"Dataset {manifest.fingerprint[:16]}",
            )
    return pushed


def _refuse_another(api: HfApi, repo: str, fingerprint: str, scratch: Path) -> None:
    """Refuse a repository with the manifest of another dataset: its shards would be mixed."""
    file = api.hf_hub_download(repo, MANIFEST, repo_type="dataset", local_dir=scratch)
    try:
        present = read_object(Path(file)).get("fingerprint")
    except DatasetError:  # it names our copy, which is removed
        raise DatasetError(
            f"{repo}/{MANIFEST}: not the manifest of a dataset; push to another repository, or "
            "delete that one first"
        ) from None
    if present != fingerprint:
        raise ConfigError(
            f"{repo} holds another dataset (fingerprint {str(present)[:16]}, this one is "
            f"{fingerprint[:16]}); push to another repository, or delete that one first"
        )


_ROWS_AT_ONCE = 1_000
_VIEWER_ROW = pa.schema(
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


def _write_viewer_rows(dataset: HiddenStatesDataset, file: Path) -> None:
    """Write all documents without states: what the Hub's viewer and people read.

    An Arrow stream like the shards: `load_dataset` reads all configurations in one format.
    """
    reader = HiddenStatesDataset(dataset.path, ["input_ids", "loss_mask"])
    try:
        decode = load_tokenizer(dataset.target_dir, False).decode
    except TargetError:
        log.warning(
            "warning[viewer]: the tokenizer has Python code of its own, or cannot be loaded: the "
            "viewer shows ids and no text"
        )

        def decode(ids: list[int]) -> str:
            return ""

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

    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, _VIEWER_ROW) as writer:
        starts = range(0, len(reader), _ROWS_AT_ONCE)
        for start in progress(starts, desc="documents", unit="thousands", leave=False):
            rows = [row(i) for i in range(start, min(start + _ROWS_AT_ONCE, len(reader)))]
            writer.write_table(pa.Table.from_pylist(rows, _VIEWER_ROW))


# -- pull -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pulled(Result):
    """What `pull` downloaded, or would download."""

    path: Path
    repo: str
    commit: str
    bytes: int
    documents: int | None
    """None before anything was downloaded."""

    @property
    def next_command(self) -> tuple[str, ...]:  # type: ignore[override]
        """Prove what was downloaded."""
        return ("spec-data", "verify", str(self.path)) if self.documents is not None else ()

    again = property(lambda self: "next" if self.documents is None else "")

    def __str__(self) -> str:
        text = f"{self.repo} at {self.commit[:12]}, {size(self.bytes)}"
        if self.documents is None:
            return f"{text}; nothing was downloaded"
        return f"{text}: {self.documents:,} documents in {self.path}, every file is intact"


def pull(repo: str, out: Path, *, revision: str | None = None, dry_run: bool = False) -> Pulled:
    """Download a dataset from the Hub, or resume a download that was interrupted."""
    asked = {"repo": repo, "revision": revision}
    begun = _begun(asked, out)
    api = hub()
    given: dict[str, Any] = {"repo_type": "dataset"}
    with TemporaryDirectory() as scratch, _hub_errors(repo):
        commit = begun["commit"] if begun else revision
        info = api.dataset_info(repo, revision=commit, files_metadata=True)
        files = {f.rfilename: f.size or 0 for f in info.siblings or ()}
        if MANIFEST not in files:
            raise DatasetError(f"{repo}: no {MANIFEST}, so `push` did not upload it, or not all")
        given["revision"] = info.sha
        file = Path(api.hf_hub_download(repo, MANIFEST, **given, local_dir=scratch))
        manifest = Manifest.read(f"{repo}/{MANIFEST}", file.read_bytes())
    needed = {*manifest.checksums(), *datasets_files(manifest), MANIFEST}
    if lacking := sorted(needed - files.keys()):
        raise DatasetError(f"{repo}: {lacking[0]} is missing; push the dataset again")
    others = files.keys() - needed - {CARD}
    wanted = sum(size for name, size in files.items() if name not in others)
    pulled: dict[str, Any] = {"path": out, "repo": repo, "commit": str(info.sha), "bytes": wanted}
    if dry_run:
        return Pulled(**pulled, documents=None)
    if not begun:
        if (out / MANIFEST).is_file():  # the same is completed
            if Manifest.read(out / MANIFEST).fingerprint != manifest.fingerprint:
                raise ConfigError(f"{out} holds another dataset; choose another DIR")
        else:
            make_directory("--out", out)
            if wanted > (free := shutil.disk_usage(out).free):
                raise RunError(f"{out}: {size(wanted)} are needed, but only {size(free)} are free")
        write_atomically(out / _RECORD, dump_json(asked | {"commit": info.sha}))
    given["local_dir"] = str(out)
    left_out = [glob.escape(name) for name in (*others, MANIFEST)]
    with _hub_errors(repo):
        api.snapshot_download(repo, **given, ignore_patterns=left_out)
        # without a network it returns what is there
        if lacking := sorted(name for name in needed - {MANIFEST} if not (out / name).is_file()):
            raise RunError(f"{repo}: {lacking[0]} did not arrive; run the same command again")
        if damaged := _changed(out, manifest):
            (out / damaged).unlink()
            raise DatasetError(
                f"{out / damaged}: damaged on the way, so it was deleted; run the same command "
                "again to download it"
            )
        api.snapshot_download(repo, **given, allow_patterns=[MANIFEST])
    shutil.rmtree(out / ".cache", ignore_errors=True)
    (out / _RECORD).unlink()
    return Pulled(**pulled, documents=manifest.totals.documents)


def _changed(folder: Path, manifest: Manifest) -> str | None:
    """Return the name of a file that is not as it was sealed; None: all are."""
    made = datasets_files(manifest).items()
    sums = manifest.checksums() | {name: sha256(text.encode()).hexdigest() for name, text in made}
    checked = progress(sums, desc="check", unit="files", leave=False)
    return next((name for name in checked if sha256_file(folder / name) != sums[name]), None)


def _begun(asked: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """Return what an interrupted run was downloading to `out`; None if there is none."""
    check_directory_to_write("--out", out)
    record = out / _RECORD
    if record.is_file():
        begun: dict[str, Any] = {}
        with suppress(DatasetError):
            begun = read_object(record)
        if not all(isinstance(begun.get(name), str) for name in ("repo", "commit")):
            raise DatasetError(f"{record}: damaged; choose another DIR, or delete {out} first")
        if not asked.items() <= begun.items():
            raise ConfigError(
                f"{out} holds a part of {begun['repo']} at "
                f"{begun.get('revision') or 'the main branch'}; resume that download, or choose "
                "another DIR"
            )
        return begun
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise ConfigError(f"{out} is not empty; choose another DIR (nothing was changed)")
    return None
