"""A damaged record of a unit is not trusted: the unit is captured again."""

import json

import pytest

from spec_data.generation.units import finished_unit
from spec_data.shards.files import sha256_json
from spec_data.shards.likelihood import DocumentFigures
from tests.spec_data.runs import generate_with, options


@pytest.mark.parametrize(
    "change",
    [
        {"dropped": 5},
        {"dropped": {}},
        {"left_out": [0, 1]},
        {"agreement": DocumentFigures.zeros(1).to_json()},
        {"record": {"file": "../x"}},
    ],
)
def test_a_record_that_contradicts_itself_is_none(tmp_path, change):
    for name in ("shards", ".generate"):
        (tmp_path / name).mkdir()
    (tmp_path / "shards" / "unit-00000.arrow").write_bytes(b"xyz")
    digests = {"outline": "0" * 16}
    counts = {"rows": 2, "tokens": 4, "supervised": 2, "bytes": 3}
    whole = {
        "record": {"file": "shards/unit-00000.arrow", "sha256": "0" * 64, **counts, **digests},
        "dropped": {"broken": 1},
        "left_out": [2],
        "agreement": DocumentFigures.zeros(2).to_json(),
    }
    file = tmp_path / ".generate" / "unit-00000.json"
    file.write_text(json.dumps(whole | {"checksum": sha256_json(whole)}))
    assert finished_unit(tmp_path, 0)
    changed = whole | change
    file.write_text(json.dumps(changed | {"checksum": sha256_json(changed)}))
    assert finished_unit(tmp_path, 0) is None


def test_a_changed_digit_of_a_record_is_noticed(target, corpus, tmp_path):
    given = options(target, corpus, tmp_path / "data", workers="0/2", max_shard_size="20KB")
    generate_with(**given)
    file = tmp_path / "data" / ".generate" / "unit-00000.json"
    assert finished_unit(tmp_path / "data", 0)
    raw = json.loads(file.read_text())
    raw["agreement"]["sums"][0][1] += 1.0
    file.write_text(json.dumps(raw))
    assert finished_unit(tmp_path / "data", 0) is None
