"""`scripts/bench/reader.py` reads data of any codec, and what it makes itself."""

import argparse
import sys
from pathlib import Path

from tests.spec_data.runs import run, save_target, write_corpus

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import reader


def test_every_layout_delivers_every_token(tmp_path, monkeypatch, capsys) -> None:
    target, corpus = save_target(tmp_path / "target"), write_corpus(tmp_path / "chats.jsonl", 8)
    run(target, corpus, tmp_path / "data", codec="default")
    timed, read = reader.timed, []
    monkeypatch.setattr(reader, "timed", lambda one: read.append(one.run()) or timed(one))
    given = {"data": [tmp_path / "data"], "size": 1e-3, "hidden": 16, "rounds": 1}
    reader.bench_passes(tmp_path / "bench", argparse.Namespace(**given))
    ours = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ours")]
    assert ["packed" in line for line in ours] == 4 * [False] + 4 * [True]
    made, given = read[0], read[5]
    assert read[:11] == [made] * 5 + [given] * 4 + [made] * 2
    assert made != given and 0 < read[11] <= made  # the last one is slow, and reads a part
