"""Every reader of a JSON file of a stranger refuses what is deep, twice, large or no text."""

from pathlib import Path

import pytest

from spec_data.shards.errors import ConfigError, DatasetError, DraftError, SpecDataError
from spec_data.shards.files import read_object
from spec_data.shards.json_texts import parse_json, read_json_text
from spec_data.shards.path_kinds import Kind, what_is
from spec_data.terminal.types import read_json as read_option
from spec_train.formats.draft_files import read_config_file
from spec_train.reports.results import read_json as read_report

DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
READERS = ((read_object, DatasetError), (read_config_file, DraftError), (read_report, ConfigError))


@pytest.mark.parametrize("content", [DEEP, b"\xff\xfe{", b"{", b"", b"{} {}"], ids=range(5))
def test_what_is_no_json_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for read, kind in READERS:
        with pytest.raises(SpecDataError) as refused:
            read(file)  # type: ignore[operator]
        assert isinstance(refused.value, kind) and str(file) in str(refused.value)
    with pytest.raises(ValueError):
        read_option(content)
    assert what_is(tmp_path) is Kind.MODEL  # who reads it says what is wrong


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1, "a": 2}')
    assert read_json_text(file, 16) == {"a": 2}
    with pytest.raises(ValueError, match="more than 15 bytes"):
        read_json_text(file, 15)
    with pytest.raises(ValueError, match="too many brackets"):
        parse_json(DEEP)
    with pytest.raises(ValueError, match="'a' is there twice"):
        read_option(file.read_bytes())
