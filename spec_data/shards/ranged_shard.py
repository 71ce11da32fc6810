"""One remote shard: its hollow copy is mapped like a shard, its values are fetched by ranges.

Values are copied out of the cache and compared with their checksum at every read (unless checks are
switched off): a network and a disk that others write to are trusted less than one's own files. What
does not agree is fetched once more from the storage before it is called damaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.shards.block_cache import BLOCK
from spec_data.shards.checking import NEVER
from spec_data.shards.checksums import batches_of, checksum
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.hollow import mapped, message_spans
from spec_data.shards.mirror import Mirror
from spec_data.shards.schema import Column, Manifest, ShardRecord
from spec_data.shards.shard import IndexRows, Place, Shard


def open_ranged(
    mirror: Mirror,
    manifest: Manifest,
    record: ShardRecord,
    index: IndexRows,
    check: str,
) -> "RangedShard":
    """Open a remote shard; a hollow copy that is not the manifest's is fetched once more.

    The arguments are those of `Shard`.

    Raises:
        DatasetError: the shard is damaged, or the dataset was replaced. MissingError: it is gone.
    """
    given = (mirror, manifest, record, index, check)
    try:
        return RangedShard(*given)
    except DatasetError:
        mirror.forget(record)
    try:
        return RangedShard(*given)
    except DatasetError as error:
        raise mirror.explained(error) from None


class RangedShard(Shard):
    """A shard whose values are on remote storage. Arrays that it returns are copies."""

    def __init__(
        self,
        mirror: Mirror,
        manifest: Manifest,
        record: ShardRecord,
        index: IndexRows,
        check: str,
    ) -> None:
        """Fetch the hollow copy of the shard that `record` describes, unless it is there; map it.

        Raises:
            As `Shard`. MissingError: there is no such shard.
        """
        self._mirror, self._unchecked = mirror, check == NEVER
        self._hollow = self._fetch_hollow(record)  # here, where its errors are no damage
        super().__init__(mirror.directory, manifest, record, index, check)

    def _fetch_hollow(self, record: ShardRecord) -> Path:
        where = self._mirror.storage.where(record.file)
        try:
            return self._mirror.hollow_copy(record)
        except FileNotFoundError:
            raise self._mirror.explained(MissingError(f"{where}: shard is missing")) from None
        except pa.ArrowException as error:
            raise DatasetError(f"{where}: damaged ({error}); upload this shard again") from None

    def _mapped(self) -> tuple[pa.Schema, list[pa.RecordBatch], str]:
        self.file = self._hollow
        self._buffer = mapped(self.file)
        return batches_of(pa.BufferReader(self._buffer))

    def where(self, row: int) -> str:
        """Name a row in an error message: URL, number, document."""
        where = self._mirror.storage.where(self.record.file)
        return f"{where}: row {row} (document {self.index.ids[row].as_py()})"

    def fetch_ahead(self, row: int, columns: list[Column]) -> int:
        """Begin to fetch the values of a document; return how many bytes that are."""
        place, total = self.place(row), 0
        for column in columns:
            parts = (column, column.scale_part, *column.escape_parts) if column.lossy else (column,)
            for part in parts:
                start, stop = self._range(super()._part(part, place))
                if start < stop:
                    numbers = range(start // BLOCK, -(-stop // BLOCK))
                    self._mirror.blocks.fetch_ahead(self.record.file, self.record.bytes, numbers)
                total += stop - start
        return total

    def _range(self, view: np.ndarray) -> tuple[int, int]:
        """Return where the bytes of a view of the hollow copy are in the shard."""
        if not view.nbytes:
            return 0, 0
        start = view.__array_interface__["data"][0] - self._buffer.address
        return start, start + view.nbytes

    def _fetched(self, start: int, stop: int, fresh: bool = False) -> np.ndarray:
        """Return bytes of the shard, uint8 [stop - start], in new memory."""
        name, size = self.record.file, self.record.bytes
        try:
            return self._mirror.blocks.read(name, size, start, stop, fresh)
        except FileNotFoundError:
            where = self._mirror.storage.where(name)
            raise self._mirror.explained(MissingError(f"{where}: shard is missing")) from None

    def _part(self, column: Column, place: Place) -> np.ndarray:
        view = super()._part(column, place)
        start, stop = self._range(view)
        for fresh in (False, True):
            raw = self._fetched(start, stop, fresh)
            found = raw.view(view.dtype).reshape(view.shape)
            if self._unchecked or self._agrees(column.name, place, found):
                return found
        error = DatasetError(
            f"{self.where(place.row)}, column {column.name}: damaged: its bytes do not match their "
            "checksum; upload this shard again (`spec-data verify` lists all damage)"
        )
        raise self._mirror.explained(error)

    def _agrees(self, field: str, place: Place, chunk: np.ndarray) -> bool:
        stored = self._checksums[place.batch][place.local, self._fields[field]]
        return bool(stored == checksum(chunk))

    def _whole_batch(self, batch: int) -> pa.RecordBatch:
        start, stop = message_spans(self._buffer)[batch]
        message = pa.ipc.read_message(pa.py_buffer(self._fetched(start, stop)))
        return pa.ipc.read_record_batch(message, self.batches[batch].schema)

    def place(self, row: int) -> Place:
        """Return where to read a row, whose checksums are compared with the index once."""
        with self._explained():
            return super().place(row)

    def texts(self, place: Place) -> dict[str, Any]:
        """Return doc_id, source and turns of a row."""
        with self._explained():
            return super().texts(place)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            self._mirror.forget(self.record)  # so that the next run fetches it again
            raise self._mirror.explained(error) from None
