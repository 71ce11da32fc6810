"""`spec-data pull`: download a dataset that `push` uploaded, and check every shard.

    DIR/.pull.json   what is being downloaded: repository, revision, commit; removed at the end

An interrupted download goes on when the command is run again, with the commit of the first run.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.hub.hub_calls import hub, hub_errors
from spec_data.shards.dataset_card import DOCUMENTS
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.seal import check_shard
from spec_data.terminal.command import Result
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_data.terminal.progress import progress, size

_RECORD = ".pull.json"


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

    def __str__(self) -> str:
        text = f"{self.repo} at {self.commit[:12]}, {size(self.bytes)}"
        if self.documents is None:
            return f"{text}; nothing was downloaded"
        return f"{text}: {self.documents:,} documents in {self.path}, every shard is intact"


def pull(repo: str, out: Path, *, revision: str | None = None, dry_run: bool = False) -> Pulled:
    """Download a dataset from the Hub, or resume a download that was interrupted.

    Raises:
        MissingError: no such repository or revision.
        DatasetError: the repository holds no dataset of spec-data, or a shard is damaged.
        ConfigError: DIR holds something else. RunError: the Hub cannot be reached, or the disk is
            too small.
    """
    asked = {"repo": repo, "revision": revision}
    begun = _begun(asked, out)
    api = hub()
    with hub_errors(repo):
        commit = begun["commit"] if begun else revision
        info = api.dataset_info(repo, revision=commit, files_metadata=True)
    files = {f.rfilename: f.size or 0 for f in info.siblings or ()}
    if MANIFEST not in files:
        raise DatasetError(f"{repo}: no {MANIFEST}, so `push` did not upload it, or not all")
    left_out = [".gitattributes", f"{DOCUMENTS}/*"]
    wanted = sum(s for n, s in files.items() if not n.startswith(f"{DOCUMENTS}/"))
    done: dict[str, Any] = {"path": out, "repo": repo, "commit": str(info.sha)}
    if dry_run:
        return Pulled(**done, bytes=wanted, documents=None)
    if not begun:
        make_directory("--out", out)
        if wanted > (free := shutil.disk_usage(out).free):
            raise RunError(f"{out}: {size(wanted)} are needed, but only {size(free)} are free")
        write_atomically(out / _RECORD, dump_json(asked | {"commit": info.sha}))
    given: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": str(out)}
    with hub_errors(repo):
        api.snapshot_download(repo, **given, ignore_patterns=[*left_out, MANIFEST])
        api.snapshot_download(repo, **given, allow_patterns=[MANIFEST])
    dataset = HiddenStatesDataset(out)
    for record in progress(dataset.manifest.shards, desc="check", unit="shards", leave=False):
        try:
            check_shard(out, record)
        except DatasetError:
            (out / record.file).unlink(missing_ok=True)
            raise DatasetError(
                f"{out / record.file}: damaged on the way, so it was deleted; run the same command "
                "again to download it"
            ) from None
    shutil.rmtree(out / ".cache", ignore_errors=True)
    (out / _RECORD).unlink()
    return Pulled(**done, bytes=wanted, documents=len(dataset))


def _begun(asked: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """Return what an interrupted run was downloading to `out`; None if there is none."""
    check_directory_to_write("--out", out)
    record = out / _RECORD
    if record.is_file():
        begun: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if not asked.items() <= begun.items():
            raise ConfigError(
                f"{out} holds a part of {begun['repo']} at "
                f"{begun.get('revision') or 'the main branch'}; resume that download, or choose "
                "another DIR"
            )
        return begun
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another DIR (nothing was changed)")
    return None
