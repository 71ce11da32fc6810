"""A damaged record of a unit is not trusted: the unit is captured again."""

import json

from spec_data.generation.units import finished_unit
from tests.spec_data.runs import digests, generate_with, options


def test_a_changed_digit_of_a_record_is_noticed(target, corpus, tmp_path):
    given = options(target, corpus, tmp_path / "data", workers="0/2", max_shard_size="20KB")
    generate_with(**given)
    file = tmp_path / "data" / ".generate" / "unit-00000.json"
    assert finished_unit(tmp_path / "data", 0)
    raw = json.loads(file.read_text())
    raw["agreement"]["sums"][0][1] += 1.0
    before = digests(tmp_path / "data" / "shards")
    for text in (json.dumps(raw), '{"record":'):
        file.write_text(text)
        assert finished_unit(tmp_path / "data", 0) is None
        generate_with(**given)
        assert digests(tmp_path / "data" / "shards") == before
