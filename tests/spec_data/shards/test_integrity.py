"""Every kind of damage is an error at open or at first touch that names its place."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from tests.factory import tiny_dataset
from tests.spec_data.runs import verify
from tests.spec_data.shards import codec_tools, integrity_tools
from tests.spec_data.shards.integrity_tools import equal, flip, place_of, read_all, shard_file

target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed
whole, data = integrity_tools.whole, integrity_tools.data
unchecked = integrity_tools.unchecked
LISTS = ("input_ids", "hidden.final")


# -- what is stored -------------------------------------------------------------------------------


def test_checksums_are_those_that_format_md_describes(whole):
    """From Python values, one number at a time, without spec_data."""
    index = iter(pa.ipc.open_stream(pa.OSFile(str(whole / "index.arrow"))).read_all().to_pylist())
    for record in json.loads((whole / "manifest.json").read_text())["shards"]:
        outline = xxhash.xxh3_64()
        for message in pa.ipc.MessageReader.open_stream(pa.OSFile(str(whole / record["file"]))):
            outline.update(message.metadata.to_pybytes())
        assert record["outline"] == outline.hexdigest()
        for batch in pa.ipc.open_stream(pa.OSFile(str(whole / record["file"]))):
            names = batch.schema.names
            assert names[-1] == "checksums"
            for row in batch.to_pylist():
                expected = []
                for name in names[:-1]:
                    kind, value = batch.schema.field(name).type, row[name]
                    if name == "turns":
                        lines = [f"{t['role']} {t['start']} {t['end']}\n" for t in value]
                        chunk = "".join(lines).encode()
                    elif isinstance(value, str):
                        chunk = value.encode()
                    else:
                        while not pa.types.is_primitive(kind):
                            kind = kind.value_type
                        chunk = np.array(value, kind.to_pandas_dtype()).tobytes()
                    expected.append(xxhash.xxh3_64(chunk).intdigest())
                assert row["checksums"] == expected
                indexed = next(index)
                assert indexed["doc_id"] == row["doc_id"]
                sums = np.array(expected, "<u8").tobytes()
                assert indexed["checksum"] == xxhash.xxh3_64(sums).intdigest()
    data = (whole / "index.arrow").read_bytes()
    record = json.loads((whole / "manifest.json").read_text())["files"]["index.arrow"]
    assert record["xxh3"] == xxhash.xxh3_64(data).hexdigest()


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", LISTS)
def test_a_flipped_bit_is_named_by_reader_and_verify(data, column, capsys):
    a, b = place_of(data, 1, column, 2)
    flip(shard_file(data, 1), (a + b) // 2)
    document = HiddenStatesDataset(data).doc_ids[6]
    said = rf"unit-00001\.arrow: row 2 \(document {document}\), column {column}: damaged"
    with pytest.raises(DatasetError, match=said):
        read_all(data)
    out = {column: torch.zeros((64, 32) if "hidden" in column else 64)}
    with pytest.raises(DatasetError, match=said):
        HiddenStatesDataset(data).read_into(6, out)
    assert verify(data=str(data), device="cpu") == 1
    out = capsys.readouterr().out
    assert f"FAIL  shards/unit-00001.arrow row 2, document {document}, column {column}" in out
    assert out.count("FAIL") == 2, out  # this and the sha256 of the shard


def test_no_flipped_bit_of_metadata_becomes_garbage(data, whole):
    """Schema, lengths and places of buffers: an error in words, or nothing has changed."""
    expected = read_all(whole)
    file, rng = shard_file(data, 0), np.random.default_rng(0)
    raw = file.read_bytes()
    start = min(place_of(data, 0, c, 0)[0] for c in LISTS)  # before it: schema and metadata
    caught, places = 0, rng.integers(0, start, 60).tolist()
    for place in places:
        flip(file, place, int(rng.integers(8)))
        try:
            assert all(map(equal, read_all(data), expected)), place
        except SpecDataError as error:
            assert "unit-00000.arrow" in str(error)
            caught += 1
        file.write_bytes(raw)
    assert caught > 0.9 * len(places)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [True, False])
def test_a_shard_under_the_name_of_another_is_named(data, capsys, swapped):
    first, second = shard_file(data, 0), shard_file(data, 1)
    assert first.stat().st_size == second.stat().st_size  # so that the sizes do not reveal it
    theirs = second.read_bytes()
    if swapped:
        shutil.copy(first, second)
    first.write_bytes(theirs)
    dataset = HiddenStatesDataset(data)
    with pytest.raises(DatasetError, match=r"00000\.arrow: row 0 .*damaged, swapped"):
        dataset[0]
    assert dataset[8]["source"] == "tiny"
    assert verify(data=str(data), device="cpu") == 1
    assert "unit-00000.arrow: row 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shards/unit-00001.arrow", "index.arrow", "manifest.json"])
def test_a_file_of_another_dataset_is_refused(data, whole, tmp_path, name):
    """Another target's dataset of the same documents: every size and name is the same."""
    rows = HiddenStatesDataset(whole)[:]
    turns = [[tuple(t.values()) for t in document] for document in rows["turns"]]
    ids, masks = ([v.int().tolist() for v in rows[name]] for name in ("input_ids", "loss_mask"))
    documents = list(zip(ids, masks, turns, strict=True))
    other = tiny_dataset(tmp_path / "other", documents=documents, docs_per_shard=4, seed=1)
    shutil.copy(other / name, data / name)
    with pytest.raises(DatasetError, match=r"of another dataset|its checksum is not the manifest"):
        read_all(data)


@pytest.mark.parametrize("shift", [1, -(10**12)])
def test_wrong_bounds_are_an_error_even_without_checksums(data, shift, unchecked):
    (batch,) = pa.ipc.open_stream(pa.py_buffer(raw := shard_file(data, 0).read_bytes()))
    place = batch.column("hidden.L0").buffers()[1].address - pa.py_buffer(raw).address
    changed = bytearray(raw)
    bound = np.frombuffer(changed, "<i8", 1, place + 16)
    bound += shift
    shard_file(data, 0).write_bytes(changed)
    with pytest.raises(DatasetError, match=r"row 1 .*column hidden\.L0: -?\d+ tokens, the index"):
        HiddenStatesDataset(data)[0]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden.L0", 0x7FC0, r"damaged \(ZSTD"),
        ("hidden.L0.escape_index", 10_000, "not ascending rows"),
        ("hidden.L0.escape_index", -1, "not ascending rows"),
    ],
)
def test_what_would_decode_to_garbage_is_an_error_without_checksums(
    mixed, tmp_path, field, value, said, unchecked
):
    data = Path(shutil.copytree(mixed, tmp_path / "data"))
    rows = range(HiddenStatesDataset(data).manifest.shards[0].rows)
    row, (start, _) = next(
        (i, place) for i in rows if (place := place_of(data, 0, field, i))[1] > place[0]
    )
    raw = bytearray(shard_file(data, 0).read_bytes())
    raw[start : start + 4] = int(value).to_bytes(4, "little", signed=value < 0)
    shard_file(data, 0).write_bytes(raw)
    with pytest.raises(DatasetError, match=rf"row {row} .*column {field}: {said}"):
        HiddenStatesDataset(data)[row]
