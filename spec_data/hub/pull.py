"""`spec-data pull`: download a dataset that `push` uploaded, and check every shard.

    DIR/.pull.json   what is being downloaded: repository, revision, commit; removed at the end

An interrupted download goes on when the command is run again, with the commit of the first run.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.hub.hub_calls import SEALED_CARD, hub, hub_errors
from spec_data.hub.hub_card import DOCUMENTS
from spec_data.options.hub_options import PullConfig
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.seal import CARD, check_shard
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_data.terminal.progress import progress, size
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.write_view import write_view

_RECORD = ".pull.json"


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What `pull` downloaded, or would download."""

    path: Path
    repo: str
    commit: str
    bytes: int
    documents: int | None
    """None before anything was downloaded."""

    def __str__(self) -> str:
        text = f"{self.repo} at {self.commit[:12]}, {size(self.bytes)}"
        if self.documents is None:
            return f"{text}; nothing was downloaded"
        return f"{text}: {self.documents:,} documents in {self.path}, every shard is intact"


def pull(config: PullConfig) -> Pulled:
    """Download a dataset from the Hub, or resume a download that was interrupted.

    Raises:
        MissingError: no such repository or revision.
        DatasetError: the repository holds no dataset of spec-data, or a shard is damaged.
        ConfigError: DIR holds something else. RunError: the Hub cannot be reached, or the disk is
            too small.
    """
    if config.kept:
        return _pull_columns(config)
    out = Path(config.out)
    begun = _begun(config, out)
    api = hub()
    with hub_errors(config.repo):
        revision = begun["commit"] if begun else config.revision
        info = api.dataset_info(config.repo, revision=revision, files_metadata=True)
    files = {f.rfilename: f.size or 0 for f in info.siblings or ()}
    if MANIFEST not in files:
        raise DatasetError(f"{config.repo}: no {MANIFEST}, so `push` did not upload it, or not all")
    left_out = [".gitattributes", f"{DOCUMENTS}/*", *([CARD] if SEALED_CARD in files else [])]
    wanted = sum(s for n, s in files.items() if not n.startswith(f"{DOCUMENTS}/"))
    done: dict[str, Any] = {"path": out, "repo": config.repo, "commit": str(info.sha)}
    if config.dry_run:
        return Pulled(**done, bytes=wanted, documents=None)
    if not begun:
        _check_space(out, wanted)
        make_directory("--out", out)
        write_atomically(out / _RECORD, dump_json(_asked(config) | {"commit": info.sha}))
    given: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": str(out)}
    with hub_errors(config.repo):
        api.snapshot_download(config.repo, **given, ignore_patterns=[*left_out, MANIFEST])
        api.snapshot_download(config.repo, **given, allow_patterns=[MANIFEST])
    if SEALED_CARD in files and (out / SEALED_CARD).is_file():
        (out / SEALED_CARD).replace(out / CARD)
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


def _pull_columns(config: PullConfig) -> Pulled:
    """Write the dataset with fewer columns; its shards are downloaded whole into the cache."""
    with hub_errors(config.repo):
        commit = hub().dataset_info(config.repo, revision=config.revision).sha
    url = f"hf://datasets/{config.repo}@{commit}"
    view = plan_drop_columns(config.smaller(url, config.out))
    done: dict[str, Any] = {"path": Path(config.out), "repo": config.repo, "commit": str(commit)}
    size_of = sum(r.bytes for r in view.parts[0].stored.manifest.shards)
    if config.dry_run:
        return Pulled(**done, bytes=size_of, documents=None)
    write_view(Path(config.out), view)
    return Pulled(**done, bytes=size_of, documents=view.documents)


def _begun(config: PullConfig, out: Path) -> dict[str, Any] | None:
    """Return what an interrupted run was downloading to `out`; None if there is none.

    Raises:
        ConfigError: `out` holds something else, or another download.
    """
    check_directory_to_write("--out", out)
    record = out / _RECORD
    if record.is_file():
        begun: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if not _asked(config).items() <= begun.items():
            raise ConfigError(
                f"{out} holds a part of {begun['repo']} at "
                f"{begun.get('revision') or 'the main branch'}; resume that download, or choose "
                "another DIR"
            )
        return begun
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another DIR (nothing was changed)")
    return None


def _asked(config: PullConfig) -> dict[str, Any]:
    """Return what decides the commit that is downloaded."""
    return {"repo": config.repo, "revision": config.revision}


def _check_space(out: Path, needed: int) -> None:
    place = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RunError(f"{out}: {size(needed)} are needed, but only {size(free)} are free")
