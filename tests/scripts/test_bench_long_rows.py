"""`scripts/bench/long_rows.py` reads what it writes: good rows beside one that is far too long."""

import sys
from pathlib import Path

from tests.spec_data.corpus.templates import tokenizer

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import long_rows


def test_every_file_has_two_good_rows_or_a_chat(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(long_rows, "load_tokenizer", lambda _: tokenizer("chatml"))
    monkeypatch.setattr(long_rows, "PIECE", 1 << 10)
    *files, chat = long_rows.write(tmp_path, 9_000_000, 40)
    for file in files:
        found = long_rows.read(file, None)
        assert (found["rows"], found["bad"]) == (3, 1), file
    assert long_rows.read(chat, "any")["documents"] > 0
