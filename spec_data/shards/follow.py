"""FollowedDataset: read a dataset directory while it is still being generated.

    .generate/plan.{json,arrow}   everything about the documents except their states; comes first
    .generate/prompts.arrow       the number of the prompt of every document, before plan.json
    .generate/unit-00000.json     the record of a unit, after its shard

Sealing deletes both. Then the same documents come from the index and from `left_out.arrow`, which
holds those that capture left out because their states were not usable. They keep their place in
the order, and are read as documents without a supervised token. A dataset that is passed on (see
`passing`) is never sealed.
"""

import bisect
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.checksums import list_views, numbers, read_batches
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.files import cause, read_object, sha256_file, sha256_json, unit_name
from spec_data.shards.index import PROMPT, index_column
from spec_data.shards.passing import PASS_ON, Consumer, Passed, Ring
from spec_data.shards.pins import check_pin, split_pin
from spec_data.shards.reader import INDEX, MANIFEST, MASK, HiddenStatesDataset
from spec_data.shards.schema import CountsRecord, Manifest, ShardRecord, Totals, mask_counts
from spec_data.shards.shard import CodedRows, IndexRows, Shard

WORK = ".generate"
LEFT_OUT = "left_out.arrow"
PROMPTS = "prompts.arrow"
_POLL = 0.2  # seconds between two looks
_COMMON = (
    *("settings", "target", "identity", "corpus", "mask", "layers", "draft_layers", "supervision"),
    *("final", "teacher", "codec", "columns", "head", "positions", "packing"),
)
_PLANNED = pa.schema(
    {"doc_id": pa.string(), "input_ids": pa.large_list(pa.int32()), MASK: pa.large_list(pa.uint8())}
)

log = logging.getLogger(__name__)


def _deciding(described: Manifest) -> tuple[Any, ...]:
    """Return what a dataset and its plan have in common, and no other capture has."""
    return described.settings, described.identity, described.columns, described.head


def _read_prompts(file: Path, count: int) -> np.ndarray:
    """Return the prompts of `count` documents, uint64 [count]; zeros if there is no file."""
    if not file.is_file():
        return np.zeros(count, np.uint64)
    try:
        prompts = pa.ipc.open_stream(file.read_bytes()).read_all().column(PROMPT).to_numpy()
        if prompts.dtype != np.uint64 or len(prompts) != count:
            raise pa.ArrowInvalid("not a number per document")
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DatasetError(f"{file}: damaged ({cause(error)}); generate it again") from None
    return np.array(prompts)


class PlannedDocuments:
    """The D documents of plan.arrow or left_out.arrow, mapped: the file may be removed meanwhile.

    Attributes:
        ids: content hashes. offsets: where tokens of a document begin, int64 [D + 1].
        lengths, supervised, first_supervised: as HiddenStatesDataset has them, int64 [D] each.
        prompts: those of the file beside plan.arrow, uint64 [D]; without one, zeros.
    """

    def __init__(self, file: Path) -> None:
        """Map `file`.

        Raises:
            DatasetError: it is no shard with these columns, or damaged.
        """
        try:
            schema, batches, _ = read_batches(file)
            self._table = pa.Table.from_batches(batches, schema)
            table = self._table.select(_PLANNED.names).cast(_PLANNED)
            table.validate(full=True)
            views = [[list_views(c) for c in table[name].chunks] for name in _PLANNED.names[1:]]
            if any(not np.array_equal(a, b) for (a, _), (b, _) in zip(*views, strict=True)):
                raise pa.ArrowInvalid("ids and masks have other lengths")
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
            raise DatasetError(
                f"{file}: damaged ({cause(error)}); copy or generate it again"
            ) from None
        self.ids: pa.StringArray = index_column(table, "doc_id")
        none = np.zeros(0, np.int64)
        self._masks = [(mask, offsets) for offsets, mask in views[1]]
        self.lengths = np.concatenate([none, *(np.diff(offsets) for _, offsets in self._masks)])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        counts = [mask_counts(*chunk) for chunk in self._masks]
        self.supervised, self.first_supervised = (
            np.concatenate([none, *(count[i] for count in counts)]) for i in (0, 1)
        )
        self.prompts = _read_prompts(file.with_name(PROMPTS), len(self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Return `input_ids` (int32) and `loss_mask` (uint8) of documents `first` to `last` - 1.

        They are new arrays, [n] each, one document after another.
        """
        rows = self._table.slice(first, last - first)
        return {
            name: np.concatenate([numbers(chunk.flatten()) for chunk in rows[name].chunks])
            for name in _PLANNED.names[1:]
        }


class FollowedDataset(HiddenStatesDataset):
    """A dataset still being generated. Ids and masks are readable at once; states unit by unit.

    Its documents are those of the generation plan, complete from the start; unit u has documents
    units[u] to units[u + 1] (int64 [U + 1]). Read states only after `wait_for`.
    """

    def __init__(
        self, path: str | Path, timeout: float = 3600.0, await_start: bool = False
    ) -> None:
        """Open `path` and wait until its plan and target exist.

        `timeout` (seconds) limits this wait, and later that for any one unit. With `await_start`,
        also wait for a generation that has not begun yet.

        Raises:
            MissingError: `path` is not a dataset, and none is being generated there.
            RunError: the plan or the target did not appear in time.
            DatasetError: the plan is damaged, or `path` is a view.
        """
        path, self.pin = split_pin(path)
        if self.pin and not (Path(path) / MANIFEST).is_file():
            raise ConfigError(
                f"{path}@{self.pin}: a fingerprint is that of a finished dataset, and this one is "
                "not finished; leave it out"
            )
        self.path, self.timeout, self._work = Path(path), timeout, Path(path) / WORK
        self._manifest: Manifest | None = None  # of the sealed dataset
        self._left_out: dict[int, list[int]] = {}  # unit -> documents without states, ascending
        self._rows: dict[int, int] | None = None  # document -> its number in `_plan`; None: equal
        self._plan: PlannedDocuments | None = None  # those whose tokens can be read before states
        if not await_start and not self._begun():
            raise MissingError(
                f"{self.path}: not a dataset, and none is being generated there; start `spec-data "
                "generate` first"
            )
        self._wait(self._begun, f"`spec-data generate --out {path}` to begin", threading.Event())
        self._wait(self._described, "the proof of the target", threading.Event())
        described = self._from_plan() if self._sealed() is None else self._from_index()
        files = {n: r for n, r in described.files.items() if n not in (INDEX, LEFT_OUT)}
        # the part of the manifest that is the same before and after sealing
        self.manifest = Manifest(
            **{name: getattr(described, name) for name in _COMMON},
            where=str(self.path / MANIFEST),
            policy="off-policy",
            documents=CountsRecord(),
            files=files,
            totals=Totals(documents=len(self.lengths), tokens=int(self.lengths.sum())),
            planned=sha256_json([self.id_array.to_pylist(), self.lengths.tolist()]),
        ).with_fingerprint()
        self._columns, self._shards = self.declared, {}
        self._described_by = _deciding(described)
        self.passed_on = bool(described.settings.get("pass_on"))
        self._consumer: Consumer | None = None
        self._kept: list[int] = []
        self._ahead = self.trained = 0  # units before them were waited for, and trained on

    def _sealed(self) -> Manifest | None:
        file = self.path / MANIFEST
        if self._manifest is None and file.is_file():
            self._manifest = Manifest.read(file)
            check_pin(str(self.path), self._manifest.fingerprint, self.pin)
        return self._manifest

    def _begun(self) -> bool:
        """Return whether a dataset is here, or is being generated."""
        return self._work.is_dir() or (self.path / MANIFEST).is_file()

    def _described(self) -> bool:
        """Return whether everything except units exists."""
        planned = all((self._work / name).is_file() for name in ("plan.json", "target.json"))
        return planned or (self.path / MANIFEST).is_file()

    def _from_plan(self) -> Manifest:
        """Take the documents of the plan; return the manifest of the target."""
        file = self._work / "plan.arrow"
        try:
            meta = read_object(self._work / "plan.json")
            described = Manifest.of(read_object(self._work / "target.json"))
            if sha256_file(file) != meta["documents_sha256"]:
                raise DatasetError(f"{file}: damaged, or being replaced; run the command again")
        except OSError as error:  # sealing deletes it
            raise DatasetError(f"{self._work}: {cause(error)}; run the command again") from None
        self._plan = plan = PlannedDocuments(file)
        self.units = np.array([0, *(last for _, last in meta["units"])], np.int64)
        self.id_array, self.lengths = plan.ids, plan.lengths
        self.supervised, self.first_supervised = plan.supervised, plan.first_supervised
        self.prompts = plan.prompts
        return described

    def _from_index(self) -> Manifest:
        """Put the stored and the left-out documents of a sealed dataset in the plan's order."""
        stored = HiddenStatesDataset(self.path)
        if stored.view is not None:
            raise DatasetError(f"{self.path}: a view is complete, so leave --follow out")
        left = stored.manifest.left_out
        count = np.array([shard.rows for shard in stored.manifest.shards], np.int64)
        np.add.at(count, np.array(left.units, np.int64), 1)
        self.units = np.concatenate([[0], np.cumsum(count)])
        self.id_array, self.lengths = stored.id_array, stored.lengths
        self.supervised, self.first_supervised = stored.supervised, stored.first_supervised
        self.prompts = stored.prompts
        if not left.places:
            return stored.manifest
        file = stored.file(LEFT_OUT)
        self._plan = plan = PlannedDocuments(file)
        if len(plan) != len(left.places) or left.places[-1] >= self.units[-1]:
            raise DatasetError(f"{file}: not the left_out of the manifest; copy it again")
        self._rows = {document: row for row, document in enumerate(left.places)}
        # int64 [N]: in the plan's order, numbers of documents of `stored` and then of `plan`
        gaps = np.array(left.places) - np.arange(len(plan))
        order = np.insert(np.arange(len(stored)), gaps, len(stored) + np.arange(len(plan)))
        self.id_array = pa.concat_arrays([stored.id_array, plan.ids]).take(pa.array(order))
        if left.prompts:
            plan.prompts = np.array([int(number, 16) for number in left.prompts], np.uint64)
        self.lengths, self.supervised, self.first_supervised, self.prompts = (
            np.concatenate([getattr(stored, name), getattr(plan, name)])[order]
            for name in ("lengths", "supervised", "first_supervised", "prompts")
        )
        return stored.manifest

    def unit_of(self, index: int) -> int:
        """Return the unit of a planned document."""
        return int(np.searchsorted(self.units, index, "right")) - 1

    def shard_of(self, index: int) -> str:
        """Return the name of the shard file that holds, or will hold, a document."""
        return f"shards/{unit_name(self.unit_of(index))}.arrow"

    def source_of(self, index: int) -> str:
        """Return the source of a document; its unit must exist, as for its states."""
        shard, row = self.locate(index)
        return str(shard.texts(row)["source"])

    # -- units ------------------------------------------------------------------------------------

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Wait until the units of documents `rows` exist and are checked; False: `stop` was set.

        Raises:
            RunError: a unit did not appear within `timeout` seconds.
            DatasetError: a shard is not the one that was written.
        """
        units = {self.unit_of(row) for row in rows}
        if self.passed_on and max(units, default=-1) >= self._ahead:
            units |= set(range(self._ahead, max(units)))  # so that what is deleted is there
            self._ahead = max(units) + 1
        for unit in sorted(units - self._shards.keys()):
            what = f"unit {unit + 1} of {len(self.units) - 1}"
            if not self._wait(lambda u=unit: self._record(u) is not None, what, stop):
                return False
            self.shard(unit)
        return True

    def _wait(self, there: Callable[..., bool], what: str, stop: threading.Event) -> bool:
        until = 0.0
        while not there():
            if not until:
                log.info("%s: waiting for %s", self.path, what)
                until = time.monotonic() + self.timeout
            if time.monotonic() > until:
                raise RunError(
                    f"{self.path}: waited {self.timeout:g} s for {what}; see whether `spec-data "
                    "generate` is still running there. The same command resumes from the last "
                    "checkpoint"
                )
            if stop.wait(_POLL):
                return False
        return True

    def _record(self, unit: int) -> tuple[ShardRecord, list[int]] | None:
        """Return a unit's record and its left-out documents; None while it is not finished."""
        first, last = self.units[unit : unit + 2].tolist()
        try:
            raw = json.loads((self._work / f"{unit_name(unit)}.json").read_text(encoding="utf-8"))
            record = msgspec.convert(raw["record"], ShardRecord)
            return record, [first + number for number in raw.get("left_out", [])]
        except FileNotFoundError:
            sealed = self._sealed()  # sealing deletes the record, and may just have happened
        except (ValueError, TypeError, KeyError):
            return None
        if sealed is None:
            return None
        return sealed.shards[unit], [n for n in sealed.left_out.places if first <= n < last]

    def shard(self, number: int) -> Shard:
        """Return the shard of a unit; its SHA-256 is compared when it is first used."""
        if (shard := self._shards.get(number)) is not None:
            return shard
        if (recorded := self._record(number)) is None:
            raise DatasetError(
                f"{self.path}: unit {number} has no readable record; generate it again"
            )
        record, left_out = recorded
        self._refuse_another()
        file = self.path / record.file
        if self.passed_on and not file.is_file() and Passed.read(self._work).gone(number):
            raise DatasetError(
                f"{file}: a trainer has used and deleted it (--pass-on), and one can train on it "
                "only once; generate again into another --out"
            )
        if not file.is_file() or sha256_file(file) != record.sha256:
            raise DatasetError(
                f"{file}: not the shard that was written (its checksum differs); delete it and its "
                f"record {WORK}/{unit_name(number)}.json, and run `spec-data generate` again"
            )
        self._left_out[number] = sorted(left_out)
        rows = np.setdiff1d(np.arange(self.units[number], self.units[number + 1]), left_out)
        index = IndexRows(
            first=int(self.units[number]),
            ids=self.id_array.take(pa.array(rows)),
            lengths=self.lengths[rows],
            stored=self.supervised[rows] - (self.first_supervised[rows] == 0),
            checksums=None,
        )
        shard = self._shards[number] = self._opened(file, record, index)
        return shard

    def _refuse_another(self) -> None:
        """Raise DatasetError if what was opened was generated again, by another command.

        `generate` makes a new plan where no unit is finished, and a directory can be deleted.
        """
        now = self._sealed()
        try:
            now = now or Manifest.of(read_object(self._work / "target.json"))
        except FileNotFoundError:  # sealing has just deleted it
            now = self._sealed()
        if now is None or _deciding(now) != self._described_by:
            raise DatasetError(
                f"{self.path}: it is generated again, with another target or other settings, since "
                "this run began to follow it; begin a new run"
            )

    @property
    def growing(self) -> "FollowedDataset":
        """This dataset: it is still being generated."""
        return self

    # -- passing on -------------------------------------------------------------------------------

    def ring(self) -> Ring:
        """Return how many bytes of shards a dataset that is passed on may hold."""
        self._wait((self._work / PASS_ON).is_file, "the bytes of --pass-on", threading.Event())
        return Ring.read(self._work)

    def pass_on(self, run: Path | None, kept: list[int], trained: int, needed: int) -> None:
        """Begin, or go on, to delete shards that `run` has used; None: another process does.

        The units `kept` stay. A checkpoint of `run` contains the units before `trained`, and it
        needs shards of `needed` bytes at a time.

        Raises:
            ConfigError: another run deletes them, or shards that this one needs are deleted.
        """
        self._kept, self._ahead = kept, max(self._ahead, trained)
        self.forget(trained)
        if run is not None:
            self._consumer = Consumer(self.path, self._work, run, kept, trained, needed)

    def pass_all_on(self, run: Path) -> None:
        """Delete the shards that a kill after the last checkpoint of `run` has left, if any."""
        passed = Passed.read(self._work)
        if self.passed_on and passed.run == str(run.resolve()):
            self.pass_on(run, passed.kept, len(self.units) - 1, passed.needed)

    def forget(self, trained: int) -> None:
        """Close the units before `trained`, which are not read again: open ones take space."""
        for unit in range(self.trained, trained):
            if unit not in self._kept:
                self._shards.pop(unit, None)
                self._left_out.pop(unit, None)
        self.trained = max(self.trained, trained)

    def free(self, trained: int) -> None:
        """Delete the shards of the units before `trained`; a durable checkpoint contains them."""
        if self._consumer is not None:
            self._consumer.free(trained)

    # -- documents --------------------------------------------------------------------------------

    def locate(self, index: int, column: str | None = None) -> tuple[Shard, int]:
        """Return the shard of a document that is not left out, and its row there."""
        unit = self.unit_of(index)
        shard, first = self.shard(unit), int(self.units[unit])
        return shard, index - first - bisect.bisect_left(self._left_out[unit], index)

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
        *,
        marked: bool = True,
    ) -> int:
        """Copy a document as HiddenStatesDataset.read_into does.

        A left-out document has zero states and no supervised token; where `out` asks for ids and
        masks only, they are those of the plan.
        """
        row = index if self._rows is None else self._rows.get(index)
        states = bool(out.keys() - {"input_ids", MASK})
        if states or self._plan is None or row is None:
            unit = self.unit_of(index)
            self.shard(unit)
            if index not in self._left_out[unit]:
                return super().read_into(index, out, start, length, marked=marked)
        complete = int(self.lengths[index])
        count = complete if length is None else min(length, complete)
        tokens = {} if self._plan is None or row is None else self._plan.tokens(row, row + 1)
        for name, values in out.items():
            if isinstance(values, CodedRows):  # these get no row, which also means zeros
                continue
            if name in tokens and not (states and name == MASK):
                values[start : start + count] = torch.from_numpy(tokens[name][:count])
            else:
                values[start : start + count] = 0
        return count
