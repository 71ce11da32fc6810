"""Older formats, other versions and edited manifests: nothing switches the checks off."""

import json

import pyarrow as pa
import pytest

from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.runs import verify
from tests.spec_data.shards import integrity_tools
from tests.spec_data.shards.integrity_tools import (
    change_manifest,
    equal,
    flip,
    read_all,
    shard_file,
    to_first_format,
)

whole, data = integrity_tools.whole, integrity_tools.data


def test_datasets_of_the_first_format_still_open(data, whole, capsys):
    to_first_format(data)
    assert all(map(equal, read_all(data), read_all(whole)))
    assert verify(VerifyConfig(data=str(data), device="cpu")) == 0
    assert "checksums of every column" not in capsys.readouterr().out
    flip(data / "index.arrow", 900)
    with pytest.raises(DatasetError, match=r"index\.arrow: changed or damaged"):
        read_all(data)


@pytest.mark.parametrize("version", ["1.4", "2.0", "0.9", 1.1, None])
def test_other_versions_are_refused(data, version):
    change_manifest(data, format_version=version)
    with pytest.raises(DatasetError, match=rf"format version {version}, this release reads 1\.0"):
        HiddenStatesDataset(data)


def test_a_first_version_manifest_does_not_switch_checks_off(data):
    """Of a dataset with checksums, it is no manifest."""
    change_manifest(data, format_version="1.0")
    with pytest.raises(DatasetError):
        read_all(data)


def test_a_manifest_without_fingerprint_is_refused(data):
    raw = json.loads((data / "manifest.json").read_text())
    del raw["fingerprint"]
    (data / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(DatasetError, match="no fingerprint"):
        HiddenStatesDataset(data)


def test_shards_in_another_order_than_the_index_are_refused(data):
    shards = json.loads((data / "manifest.json").read_text())["shards"]
    change_manifest(data, shards=shards[::-1])
    for row in (0, 8):
        with pytest.raises(DatasetError, match="swapped, renamed or copied"):
            HiddenStatesDataset(data)[row]


@pytest.mark.parametrize("swap", [True, False])
def test_swapped_shards_of_the_first_format_are_named_by_their_documents(data, swap):
    to_first_format(data)
    files = [shard_file(data, i) for i in range(2)]
    whole = [file.read_bytes() for file in files]
    if swap:
        for file, content in zip(files, whole[::-1], strict=True):
            file.write_bytes(content)
    else:
        raw = pa.py_buffer(whole[0])
        (batch,) = pa.ipc.open_stream(raw)
        flip(files[0], batch.column("doc_id").buffers()[2].address - raw.address + 32 * 2 + 31)
    with pytest.raises(DatasetError, match=rf"row {0 if swap else 2} .*column doc_id: not the doc"):
        HiddenStatesDataset(data, check="never")[0]


def test_shards_of_the_first_format_are_checked_whole_before_their_first_use(data):
    """They have no checksums of chunks; a bit of a state would pass every other check."""
    to_first_format(data)
    place = (data / "shards" / "unit-00001.arrow").stat().st_size // 2
    flip(shard_file(data, 1), place)
    dataset = HiddenStatesDataset(data)
    dataset[0]
    for _ in range(2):  # not only the first time
        with pytest.raises(DatasetError, match=r"unit-00001\.arrow: damaged or replaced: its SHA-"):
            dataset[4]
    assert HiddenStatesDataset(data, check="never")[4]["source"] == "tiny"
