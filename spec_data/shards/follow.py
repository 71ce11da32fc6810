"""FollowedDataset: read a dataset directory while it is still being generated.

Generation first writes its plan, which has everything about the documents except their states. It
writes a unit's record after the unit's shard, so a unit can be read once its record exists and its
checksum matches. Sealing deletes the plan. In a sealed directory the same view comes from the index
and from `left_out.arrow`, which holds the planned documents that capture left out because their
states were not usable. Left-out documents keep their place in the order, and are read as documents
without a supervised token.

    .generate/plan.{json,arrow}, target.json, unit-00000.json    see spec_data/commands/generate.py
"""

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.checking import FIRST, known_policy
from spec_data.shards.checksums import read_batches
from spec_data.shards.errors import DatasetError, MissingError, RunError
from spec_data.shards.files import sha256_file, sha256_json, unit_name
from spec_data.shards.reader import INDEX, MANIFEST, HiddenStatesDataset, checked_file
from spec_data.shards.schema import CountsRecord, Manifest, ShardRecord, Totals
from spec_data.shards.shard import CodedRows, IndexRows, Shard

# -- planned ---------------------------------------------------------------------------------------
# The documents of a generation plan: what is known about them before any state exists.


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The documents of a generation plan, in order; unit u has documents units[u] to units[u+1]."""

    ids: pa.StringArray
    lengths: np.ndarray  # int64 [N]
    supervised: np.ndarray  # int64 [N]
    first_supervised: np.ndarray  # int64 [N]; the length where there is none
    units: np.ndarray  # int64 [U + 1]


class PlanTokens:
    """Token ids and loss masks of planned documents, read from plan.arrow or left_out.arrow."""

    def __init__(self, file: Path) -> None:
        """Read `file`, a shard with the columns doc_id, input_ids and loss_mask.

        Raises:
            DatasetError: it is none, also where its checksum was computed again.
        """
        table = _whole_table(file)
        self.ids = pa.concat_arrays(table.column("doc_id").chunks)
        chunks = {name: table.column(name).chunks for name in ("input_ids", "loss_mask")}
        flat = {
            name: np.concatenate([c.flatten().to_numpy() for c in parts])
            for name, parts in chunks.items()
        }
        self._flat = {name: torch.from_numpy(values) for name, values in flat.items()}
        sizes = [np.diff(c.offsets.to_numpy()) for c in chunks["loss_mask"]]
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def planned(self, units: np.ndarray) -> Planned:
        """Count tokens and supervised tokens of the documents; `units` as in Planned."""
        mask = self._flat["loss_mask"].numpy()
        lengths = np.diff(self.offsets)
        total = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        count = total[self.offsets[1:]] - total[self.offsets[:-1]]
        first = np.searchsorted(total, total[self.offsets[:-1]] + 1) - 1 - self.offsets[:-1]
        return Planned(
            ids=self.ids,
            lengths=lengths,
            supervised=count,
            first_supervised=np.where(count > 0, first, lengths),
            units=units,
        )

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | np.ndarray],
        start: int,
        length: int | None,
    ) -> int:
        """Copy ids and mask of document `index`, at most `length` tokens, to `start` in `out`.

        `out` maps "input_ids" and "loss_mask" to CPU tensors or arrays [T]. Returns the number of
        tokens copied.
        """
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        count = last - first if length is None else min(length, last - first)
        for name, values in out.items():
            values[start : start + count] = self._flat[name][first : first + count]
        return count


def _whole_table(file: Path) -> pa.Table:
    """Read a table of planned documents, and check all that reading its values relies on."""
    try:
        schema, batches, _ = read_batches(file)
        table = pa.Table.from_batches(batches, schema)
        table.validate(full=True)
        kinds = {f.name: f.type for f in table.schema}
        known = {"doc_id": pa.string(), "input_ids": pa.int32(), "loss_mask": pa.uint8()}
        for name, kind in known.items():
            found = kinds.get(name)
            values = found.value_type if isinstance(found, pa.LargeListType) else found
            if values != kind or table.column(name).null_count:
                raise pa.ArrowInvalid(f"column {name} is missing, null or of another type")
        offsets = [
            [c.offsets.to_numpy() for c in table.column(name).chunks]
            for name in ("input_ids", "loss_mask")
        ]
        if not all(map(np.array_equal, *offsets)) or any(o[0] for o in offsets[0]):
            raise pa.ArrowInvalid("ids and masks have other lengths")
        return table
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise DatasetError(f"{file}: damaged ({error}); copy or generate it again") from None


def merged(stored: Planned, left: Planned, places: np.ndarray) -> Planned:
    """Return all planned documents in order: stored ones, and left-out ones at their `places`.

    `places` int64 [K] are ascending numbers of documents in the generation plan.
    """
    count = len(stored.lengths) + len(places)
    out = np.zeros(count, dtype=bool)  # True at the places of left-out documents
    out[places] = True

    def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [N - K] and [K] to int64 [N]
        values = np.empty(count, np.int64)
        values[~out], values[places] = a, b
        return values

    order = merge(np.arange(len(stored.lengths)), np.arange(count)[len(stored.lengths) :])
    return Planned(
        ids=pa.concat_arrays([stored.ids, left.ids]).take(pa.array(order)),
        lengths=merge(stored.lengths, left.lengths),
        supervised=merge(stored.supervised, left.supervised),
        first_supervised=merge(stored.first_supervised, left.first_supervised),
        units=stored.units,
    )


# -- follow ----------------------------------------------------------------------------------------


WORK = ".generate"
LEFT_OUT = "left_out.arrow"
_POLL = 0.2  # seconds between two looks
_LOG_AGAIN = 60.0  # seconds between two log lines
_COMMON = (
    *("settings", "target", "identity", "corpus", "mask", "layers", "draft_layers", "supervision"),
    *("final", "teacher", "codec", "columns", "head", "positions", "packing"),
)

log = logging.getLogger(__name__)


class FollowedDataset(HiddenStatesDataset):
    """A dataset still being generated. Ids and masks are readable at once; states unit by unit.

    Its documents are those of the generation plan, complete from the start. Read states only after
    `wait_for`.
    """

    def __init__(
        self,
        path: str | Path,
        timeout: float = 3600.0,
        check: str = FIRST,
        await_start: bool = False,
    ) -> None:
        """Open `path` and wait until its plan and target exist.

        `timeout` (seconds) limits this wait, and later the wait for any one unit. `check` is as for
        HiddenStatesDataset; besides, the SHA-256 of each unit is checked before its first use.
        With `await_start`, also wait for a generation that has not begun yet.

        Raises:
            MissingError: `path` is not a dataset, and none is being generated there.
            RunError: the plan or the target did not appear in time.
            DatasetError: the plan is damaged, or `path` is a view.
            ConfigError: an unknown `check`.
        """
        self._check = known_policy(check)
        self.path = Path(path)
        self.timeout = timeout
        if not await_start and not self._begun():
            raise MissingError(
                f"{self.path}: not a dataset, and none is being generated there; start `spec-data "
                "generate` first"
            )
        self._tokens: PlanTokens | None = None
        self._seal: Manifest | None = None
        self._out: dict[int, list[int]] = {}  # unit -> places in it of left-out documents
        self._wait(self._begun, f"`spec-data generate --out {path}` to begin", threading.Event())
        self._wait(self._described, "the proof of the target", threading.Event())
        sealed = self._sealed()
        if sealed is not None and sealed.view is not None:
            raise DatasetError(f"{self.path}: a view is complete, so leave --follow out")
        if sealed is not None:
            described = sealed
            self.planned = self._from_index(sealed)
        else:
            described = Manifest.of(_read_json(self.path / WORK / "target.json"))
            self.planned = self._from_plan()
        self.manifest = self._view(described)
        self._columns = {c.name: c for c in self.manifest.columns}
        self._shards = {}

    def _sealed(self) -> Manifest | None:
        file = self.path / MANIFEST
        if self._seal is None and file.is_file():
            self._seal = Manifest.read(file)
        return self._seal

    def _begun(self) -> bool:
        """Return whether a dataset is here, or is being generated."""
        return (self.path / WORK).is_dir() or (self.path / MANIFEST).is_file()

    def _described(self) -> bool:
        """Return whether everything except units exists."""
        work = self.path / WORK
        whole = (work / "plan.json").is_file() and (work / "target.json").is_file()
        return (self.path / MANIFEST).is_file() or whole

    def _view(self, described: Manifest) -> Manifest:
        """Return the part of the manifest that is the same before and after sealing."""
        planned = self.planned
        digest = sha256_json([planned.ids.to_pylist(), planned.lengths.tolist()])
        files = {n: r for n, r in described.files.items() if n not in (INDEX, LEFT_OUT)}
        totals = Totals(documents=len(planned.lengths), tokens=int(planned.lengths.sum()))
        return Manifest(
            **{name: getattr(described, name) for name in _COMMON},
            where=str(self.path / MANIFEST),
            policy="off-policy",
            documents=CountsRecord(),
            files=files,
            totals=totals,
            planned=digest,
        ).with_fingerprint()

    # -- what is planned --------------------------------------------------------------------------

    def _from_plan(self) -> Planned:
        meta = _read_json(self.path / WORK / "plan.json")
        file = self.path / WORK / "plan.arrow"
        if not file.is_file() or sha256_file(file) != meta["documents_sha256"]:
            raise DatasetError(f"{file}: damaged, or being replaced; run the command again")
        self._tokens = tokens = PlanTokens(file)
        ends = [last for _, last in meta["units"]]
        return tokens.planned(np.array([0, *ends], np.int64))

    def _from_index(self, sealed: Manifest) -> Planned:
        """Rebuild the plan of a sealed dataset from its stored and its left-out documents."""
        stored = HiddenStatesDataset(self.path)
        count = np.array([shard.rows for shard in sealed.shards], np.int64)
        left = sealed.left_out
        places = np.array(left.places, np.int64)
        np.add.at(count, np.array(left.units, np.int64), 1)
        units = np.concatenate([[0], np.cumsum(count)])
        for place, unit in zip(left.places, left.units, strict=True):
            self._out.setdefault(unit, []).append(place - int(units[unit]))
        own = Planned(
            ids=stored.id_array,
            lengths=stored.lengths,
            supervised=stored.supervised,
            first_supervised=stored.first_supervised,
            units=units,
        )
        if not len(places):
            return own
        file = checked_file(self.path, LEFT_OUT, sealed)
        self._left = PlanTokens(file)
        if len(self._left.ids) != len(places) or int(places[-1]) >= int(units[-1]):
            raise DatasetError(f"{file}: not the left_out of the manifest; copy it again")
        self._left_places = {place: i for i, place in enumerate(left.places)}
        return merged(own, self._left.planned(units), places)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per planned document, int64 [N]."""
        return self.planned.lengths

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per planned document, int64 [N]."""
        return self.planned.supervised

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return self.planned.first_supervised

    @cached_property
    def id_array(self) -> pa.StringArray:
        """Content hashes of the planned documents."""
        return self.planned.ids

    def unit_of(self, index: int) -> int:
        """Return the unit of a planned document."""
        return int(np.searchsorted(self.planned.units, index, "right")) - 1

    def shard_of(self, index: int) -> str:
        """Return the name of the shard file that holds, or will hold, a document."""
        return _shard_name(self.unit_of(index))

    def source_of(self, index: int) -> str:
        """Return the source of a document; its unit must exist, as for its states."""
        shard, row = self._locate(index)
        return str(shard.texts(shard.place(row))["source"])

    # -- what exists so far -----------------------------------------------------------------------

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Wait until the units of documents `rows` exist and are checked; return True.

        Returns False when `stop` is set while waiting.

        Raises:
            RunError: a unit did not appear within `timeout` seconds.
            DatasetError: a shard is not the one that was written.
        """
        for unit in sorted({self.unit_of(row) for row in rows}):
            if unit in self._shards:
                continue
            if not self._wait(
                lambda u=unit: self._record(u) is not None, self._awaited(unit), stop
            ):
                return False
            self._open(unit)
        return True

    def _awaited(self, unit: int) -> str:
        return f"unit {unit + 1} of {len(self.planned.units) - 1}"

    def _wait(self, there: Any, what: str, stop: threading.Event) -> bool:
        start = logged = time.monotonic()
        first = True
        while not there():
            now = time.monotonic()
            if now - start > self.timeout:
                raise RunError(
                    f"{self.path}: waited {self.timeout:g} s for {what}; see whether `spec-data "
                    "generate` is still running there. The same command resumes from the last "
                    "checkpoint"
                )
            if first or now - logged > _LOG_AGAIN:
                done = sum(1 for _ in (self.path / WORK).glob("unit-*.json"))
                log.info("%s: waiting for %s (%d units are done)", self.path, what, done)
                first, logged = False, now
            if stop.wait(_POLL):
                return False
        return True

    def _record(self, unit: int) -> tuple[ShardRecord, list[int]] | None:
        """Return a unit's record and its left-out places; None while it is not finished."""
        file = self.path / WORK / f"{unit_name(unit)}.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            return msgspec.convert(raw["record"], ShardRecord), list(raw.get("left_out", []))
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError):
            return None
        sealed = self._sealed()  # sealing deletes the record, and may just have happened
        if sealed is None:
            return None
        left = sealed.left_out
        start = int(self.planned.units[unit])
        out = [p - start for p, u in zip(left.places, left.units, strict=True) if u == unit]
        return sealed.shards[unit], out

    def _open(self, unit: int) -> None:
        found = self._record(unit)
        if found is None:
            raise DatasetError(
                f"{self.path}: unit {unit} has no readable record; generate it again"
            )
        record, out = found
        file = self.path / record.file
        if not file.is_file() or sha256_file(file) != record.sha256:
            raise DatasetError(
                f"{file}: not the shard that was written (its checksum differs); delete it and its "
                f"record {WORK}/{unit_name(unit)}.json, and run `spec-data generate` again"
            )
        self._out[unit] = out
        if out:
            log.warning("warning: unit %d: %d planned documents were left out", unit, len(out))
        index = self._planned_rows(unit, out)
        self._shards[unit] = Shard(self.path, self.manifest, record, index, self._check)

    def _planned_rows(self, unit: int, out: list[int]) -> IndexRows:
        """Return the plan's facts on the documents that a unit holds, without left-out ones.

        There is no index yet to hold checksums of rows; `_open` has just compared the SHA-256 of
        the whole shard instead.
        """
        first, last = self.planned.units[unit : unit + 2].tolist()
        rows = np.delete(np.arange(first, last), out)
        kept = self.supervised[rows] - (self.first_supervised[rows] == 0)
        ids = self.id_array.take(pa.array(rows))
        return IndexRows(first, ids, self.lengths[rows], kept, None)

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        unit = self.unit_of(index)
        if unit not in self._shards:
            self._open(unit)
        place = index - int(self.planned.units[unit])
        return self._shards[unit], place - sum(other < place for other in self._out[unit])

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
    ) -> int:
        """Copy a document as HiddenStatesDataset.read_into does.

        If `out` asks for states, a left-out document has its token ids, no supervised token, and
        zero states. If `out` asks for ids and masks only, they are those of the plan, also for a
        left-out document.
        """
        plain = {name: t for name, t in out.items() if not isinstance(t, CodedRows)}
        plan = self._planned_tokens(index)
        if not out.keys() - {"input_ids", "loss_mask"}:
            if plan is not None:
                return plan[0].read_into(plan[1], plain, start, length)
            return super().read_into(index, out, start, length)
        unit = self.unit_of(index)
        if unit not in self._shards:
            self._open(unit)
        if index - int(self.planned.units[unit]) not in self._out[unit]:
            return super().read_into(index, out, start, length)
        whole = int(self.lengths[index])
        count = whole if length is None else min(length, whole)
        for name, values in plain.items():  # CodedRows get no row, which also means zeros
            if name != "input_ids":
                values[start : start + count] = 0
        if plan is not None and "input_ids" in out:
            plan[0].read_into(plan[1], {"input_ids": plain["input_ids"]}, start, count)
        return count

    def _planned_tokens(self, index: int) -> "tuple[PlanTokens, int] | None":
        """Return where a document's ids and mask can be read without its unit; None: nowhere."""
        if self._tokens is not None:
            return self._tokens, index
        places = getattr(self, "_left_places", {})
        return (self._left, places[index]) if index in places else None


def _shard_name(unit: int) -> str:
    return f"shards/{unit_name(unit)}.arrow"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file}: cannot be read ({error}); run the command again") from None
    return found
