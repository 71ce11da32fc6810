"""Other versions and edited manifests: nothing switches the checks off."""

import json

import pytest

from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.shards import integrity_tools
from tests.spec_data.shards.integrity_tools import change_manifest

whole, data = integrity_tools.whole, integrity_tools.data


@pytest.mark.parametrize("version", ["1.1", "2.0", "0.9", 1.0, None])
def test_other_versions_are_refused(data, version):
    change_manifest(data, format_version=version)
    with pytest.raises(DatasetError, match=rf"format version {version}, this release reads 1\.0"):
        HiddenStatesDataset(data)


def test_a_manifest_without_fingerprint_is_refused(data):
    raw = json.loads((data / "manifest.json").read_text())
    del raw["fingerprint"]
    (data / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(DatasetError, match="own fingerprint"):
        HiddenStatesDataset(data)


def test_shards_in_another_order_than_the_index_are_refused(data):
    shards = json.loads((data / "manifest.json").read_text())["shards"]
    change_manifest(data, shards=shards[::-1])
    for row in (0, 8):
        with pytest.raises(DatasetError, match="swapped, renamed or copied"):
            HiddenStatesDataset(data)[row]
