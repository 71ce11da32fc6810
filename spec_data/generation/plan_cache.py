"""Rendered documents are kept between commands, so `estimate` and `generate` render a corpus once.

An entry is a directory named by a hash of everything that decides the documents: the bytes of the
corpus, tokenizer and template, the options of rendering, and the releases of the libraries. It
holds the plan file and rendered.json, written last. Options that decide only how documents are
captured (layers, codec, size of shards, the target's weights) are not part of it.

The cache is the folder plans of the cache directory (see `shards.cache_directory`). It is limited
to SPEC_DATA_CACHE_SIZE (10GB; 0 switches it off): the entries that were not used for the longest
time are removed. An entry whose bytes are not those that were written is made again. The
lock of an entry lets processes that need the same documents wait for the one that renders them.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from filelock import FileLock, Timeout

from spec_data.corpus.record_reader import SourceReport
from spec_data.generation.plan import DocumentCounts, link_or_copy
from spec_data.generation.plan_file import PlannedDocuments, Scratch, remove_scratch
from spec_data.options.option_values import parse_size
from spec_data.shards.files import (
    CACHE_VARIABLE,
    cache_directory,
    dump_json,
    sha256_file,
    sha256_json,
    write_atomically,
)

logger = logging.getLogger(__name__)

SIZE = "SPEC_DATA_CACHE_SIZE"
_LIMIT = "10GB"
_PLAN, _FACTS = "plan.arrow", "rendered.json"
_DAY = 86_400.0


class Rendered(NamedTuple):
    """What rendering a corpus results in: documents, counts, and a report of every source."""

    documents: PlannedDocuments
    counts: DocumentCounts
    reports: list[SourceReport]


def cache_limit() -> int:
    """Return how many bytes the cache may have; 0: there is none.

    Raises:
        ConfigError: SPEC_DATA_CACHE_SIZE is no size.
    """
    return parse_size(os.environ.get(SIZE, _LIMIT))


class PlanCache:
    """The entries of the cache."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Use `folder` for at most `limit` bytes.

        Raises:
            OSError: the directory cannot be made.
        """
        self.folder, self._limit = folder, limit
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_old_scratch()

    def rendered(
        self, key: dict[str, Any], render: Callable[[], Rendered], scratch: Path | None
    ) -> tuple[Rendered, bool]:
        """Return the documents of `key`, and whether they were here; else `render` them.

        Args:
            key: everything that decides them.
            render: renders the corpus.
            scratch: where the returned documents get a file of their own; None: that of the entry.
        """
        name = sha256_json(key).removeprefix("sha256:")[:40]
        with self._locked(name):
            found = self._read(name, key, scratch)
            if found is not None:
                return found, True
            made = render()
            if [r.sha256 for r in made.reports] == key["corpus_hashes"][: len(made.reports)]:
                self._write(name, key, made)
            return made, False

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = FileLock(self.folder / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.info("another process is rendering this corpus; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _read(self, name: str, key: dict[str, Any], scratch: Path | None) -> Rendered | None:
        entry = self.folder / name
        try:
            facts = json.loads((entry / _FACTS).read_text(encoding="utf-8"))
            sha256 = facts["documents_sha256"]
            if facts["key"] != key or sha256_file(entry / _PLAN) != sha256:
                raise ValueError("its bytes are not those that were written")
            own = Scratch(scratch) if scratch else None
            file = own.path / _PLAN if own else entry / _PLAN
            if own:
                link_or_copy(entry / _PLAN, file)
            documents = PlannedDocuments(file, sha256, own)
            counts = DocumentCounts(**facts["counts"])
            reports = [SourceReport(**report) for report in facts["reports"]]
            os.utime(entry / _FACTS)  # used last
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            logger.warning("%s: a damaged entry of the cache is made again (%s)", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        logger.info("the documents were rendered before: %s", entry)
        return Rendered(documents, counts, reports)

    def _write(self, name: str, key: dict[str, Any], made: Rendered) -> None:
        """Keep what was rendered, unless it is larger than the cache or cannot be written."""
        entry = self.folder / name
        try:
            size = made.documents.file.stat().st_size
            if size > self._limit:
                logger.info(
                    "the documents take %d bytes, more than the cache may have (%s), so another "
                    "command renders them again", size, SIZE,
                )  # fmt: skip
                return
            shutil.rmtree(entry, ignore_errors=True)
            entry.mkdir()
            link_or_copy(made.documents.file, entry / _PLAN)
            facts = {
                "key": key,
                "documents_sha256": made.documents.sha256,
                "counts": asdict(made.counts),
                "reports": [asdict(report) for report in made.reports],
            }
            write_atomically(entry / _FACTS, dump_json(facts))
            self._shrink(name)
        except OSError as error:
            logger.warning("%s: not kept in the cache: %s", entry, error)
            shutil.rmtree(entry, ignore_errors=True)

    def _shrink(self, new: str) -> None:
        """Remove the entries that were not used for the longest time, but not the new one."""
        sizes: list[tuple[float, int, Path]] = []
        for facts in self.folder.glob(f"*/{_FACTS}"):
            try:
                size = (facts.parent / _PLAN).stat().st_size
                sizes.append((facts.stat().st_mtime, size, facts.parent))
            except OSError:
                continue  # another process removes it
        total = sum(size for _, size, _ in sizes)
        for _, size, entry in sorted(sizes):
            if total <= self._limit:
                return
            if entry.name != new:
                (entry / _FACTS).unlink(missing_ok=True)  # first: half an entry is none
                shutil.rmtree(entry, ignore_errors=True)
                total -= size

    def _remove_old_scratch(self) -> None:
        """Remove what processes left that were killed while they rendered."""
        remove_scratch(self.folder, older_than=time.time() - _DAY)


def open_cache() -> PlanCache | None:
    """Return the cache, or None if it is switched off or its directory cannot be written.

    Raises:
        ConfigError: SPEC_DATA_CACHE_SIZE is no size.
    """
    limit, folder = cache_limit(), cache_directory("plans")
    if not limit:
        return None
    try:
        return PlanCache(folder, limit)
    except OSError as error:
        logger.warning(
            "%s: rendered documents cannot be kept here (%s); set %s to another directory, or %s=0",
            folder, error.strerror, CACHE_VARIABLE, SIZE,
        )  # fmt: skip
        return None
