"""Crafted indexes and shards whose checksums agree: refused in words, never a crash."""

import collections
import re
import struct

import numpy as np
import pyarrow as pa
import pytest

from spec_data.shards.errors import DatasetError
from spec_data.shards.index import INDEX_SCHEMA
from tests.faults.datasets import (
    INDEX,
    index_table,
    linked_copy,
    read_everything,
    set_column,
    stream_of,
    trace_everywhere,
    trace_file,
    trace_shard,
    use,
)
from tests.faults.tools import count, report, survived, trials
from tests.spec_data.shards import integrity_tools

whole = integrity_tools.whole
TEXTS = ("doc_id", "source")


@pytest.fixture
def data(whole, tmp_path):
    return linked_copy(whole, tmp_path / "data", INDEX, "shards/unit-00000.arrow")


def offsets_place(content: bytes, column: str) -> int:
    """Where the offsets of a column of texts or lists begin in an Arrow stream."""
    buffer = pa.py_buffer(content)
    (batch,) = pa.ipc.open_stream(buffer)
    return batch.column(column).buffers()[1].address - buffer.address


# -- the index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", TEXTS)
@pytest.mark.parametrize(
    ("where", "offset"),
    [
        (0, -(2**31)),
        (12, 10_000),
        (6, 3),  # below the one before it
    ],
)
def test_texts_with_bad_offsets_are_refused(data, column, where, offset):
    content = bytearray((data / INDEX).read_bytes())
    struct.pack_into("<i", content, offsets_place(bytes(content), column) + 4 * where, offset)
    trace_file(data, INDEX, bytes(content))
    (outcome,) = survived(lambda _: use(data), 1)
    assert re.match(r"refused: .*index\.arrow: damaged \(.*\| refused: ", outcome), outcome


@pytest.mark.parametrize(
    ("column", "row", "value", "said"),
    [
        ("row", 5, 4, "not in the order of the manifest's shards"),
        ("first_supervised", 4, 1_000, "document 4 has impossible counts"),
        ("tokens", 2, 2**31 - 1, r"tokens, the manifest says"),
    ],
)
def test_numbers_that_cannot_be_are_refused(data, column, row, value, said):
    table = set_column(index_table(data), column, lambda v: v.__setitem__(row, value))
    trace_file(data, INDEX, stream_of(table))
    with pytest.raises(DatasetError, match=rf"index\.arrow: .*{said}"):
        read_everything(data)


def nullable(table: pa.Table) -> pa.Table:
    """The same schema in words, with a null in the bytes."""
    arrays = [column.chunk(0) for column in table.columns]
    bits = pa.py_buffer(b"\xfe\xff")
    arrays[3] = pa.Array.from_buffers(pa.int32(), 12, [bits, arrays[3].buffers()[1]], 1)
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["checksum"]), "columns are not those of an index"),
        (lambda t: t.cast(pa.schema([(f.name, f.type) for f in t.schema])), "columns are not"),
        (nullable, "values are null"),
    ],
)
def test_the_schema_is_exact(data, change, said):
    trace_file(data, INDEX, stream_of(change(index_table(data))))
    with pytest.raises(DatasetError, match=rf"index\.arrow: .*{said}"):
        read_everything(data)


def compressed(content: bytes, codec: str, extra: pa.RecordBatch | None = None) -> bytes:
    """The same stream with compressed bodies, and one more record batch."""
    reader, sink = pa.ipc.open_stream(pa.py_buffer(content)), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, reader.schema, options=options) as stream:
        for batch in [*reader, *([extra] if extra else [])]:
            stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_bodies_are_refused_before_they_are_unpacked(data, codec):
    """64 kB can hold gigabytes: here 100 MB, of which nothing may be unpacked."""
    row = dict.fromkeys(INDEX_SCHEMA.names, 0) | {"doc_id": "x", "source": "x" * 10**8}
    bomb = pa.RecordBatch.from_pylist([row], INDEX_SCHEMA)
    index, shard = (data / INDEX).read_bytes(), (data / "shards/unit-00000.arrow").read_bytes()
    trace_file(data, INDEX, compressed(index, codec, bomb))
    assert (data / INDEX).stat().st_size < 2**20
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        assert use(data).count("index.arrow: damaged (a record batch is compressed") == 2
        trace_file(data, INDEX, index)
        trace_shard(data, 0, compressed(shard, codec))
        assert use(data).count("unit-00000.arrow: damaged (a record batch is compressed") == 2
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 10**7


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("place", ["index", "shard"])
def test_messages_of_another_kind_are_refused(data, place, number):
    """Arrow took the bytes of any for those of a schema, and read wherever they led."""
    file = INDEX if place == "index" else "shards/unit-00000.arrow"
    whole = (data / file).read_bytes()
    start = 8 if number == 0 else 16 + struct.unpack_from("<I", whole, 4)[0]
    table = start + struct.unpack_from("<I", whole, start)[0]
    fields = table - struct.unpack_from("<i", whole, table)[0]
    kind_at = table + struct.unpack_from("<H", whole, fields + 4 + 2)[0]  # Message.header_type
    kinds = (0, 2, 4, 5, 6, 255)

    def use_as(trial: int) -> str:
        content = bytearray(whole)
        content[kind_at] = kinds[trial]
        trace_file(data, INDEX, bytes(content)) if place == "index" else trace_shard(
            data, 0, bytes(content)
        )
        return use(data)

    for outcome in survived(use_as, len(kinds)):
        said = rf"{file}: damaged \((its messages are not a schema and|Invalid flatbuffers)"
        assert len(re.findall(said, outcome)) == 2, outcome


def mutated(content: bytes, rng: np.random.Generator, first: int = 0) -> bytes:
    """Set one to four 8-, 32- or 64-bit values to something that hurts."""
    raw = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        size = int(rng.choice([1, 4, 8]))
        place = int(rng.integers(first, len(raw) - size)) // size * size
        bad = [-1, 0, 1, 2 ** (8 * size - 1) - 1, -(2 ** (8 * size - 1)), int(rng.integers(256))]
        value = int(bad[rng.integers(len(bad))]) % 2 ** (8 * size)
        raw[place : place + size] = value.to_bytes(size, "little")
    return bytes(raw)


def campaign(name: str, default: int, make) -> None:
    """Make each crafted dataset, and use it in a process that may die of it."""
    generators = [rng for _, rng in trials(name, default)]
    outcomes = survived(lambda trial: use(make(trial, generators[trial])), count(default))
    report(name, collections.Counter(str(o).split(":")[0].split(" ")[0] for o in outcomes))
    bad = {n: o for n, o in enumerate(outcomes) if not str(o).startswith(("refused:", "read"))}
    assert not bad, bad


# -- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["index", "shard"])
def test_random_values_never_crash(data, place):
    """With the checksums of the file computed again."""
    content = (data / (INDEX if place == "index" else "shards/unit-00000.arrow")).read_bytes()

    def make(trial, rng):
        changed = mutated(content, rng)
        trace_file(data, INDEX, changed) if place == "index" else trace_shard(data, 0, changed)
        return data

    campaign(place, 60, make)


def test_random_values_whose_every_checksum_agrees_never_crash(data):
    """Also those of rows and of the index: nothing but the meaning is left to tell."""
    content = (data / "shards" / "unit-00000.arrow").read_bytes()

    def make(trial, rng):
        changed = mutated(content, rng, len(content) // 40)
        try:
            trace_everywhere(data, 0, changed)
        except (pa.ArrowException, AttributeError, ValueError, IndexError, OSError):
            trace_shard(data, 0, changed)  # not even its author could read it
        return data

    campaign("shard and its checksums", 40, make)
