"""A plan on disk: its columns are those of plain lists, and an older layout is resumed."""

import itertools
import json
import random

import numpy as np
import pytest

from spec_data.generation import plan_file
from spec_data.generation.plan import Seen, load_plan
from spec_data.generation.plan_file import (
    PLAN_COLUMNS,
    PlannedDocuments,
    PlanWriter,
    Prepared,
    Scratch,
)
from spec_data.shards.errors import DatasetError
from spec_data.shards.files import sha256_file
from spec_data.shards.schema import predicts_supervised
from spec_data.shards.writer import UnitData, write_shard
from tests.spec_data.runs import digests, run, save_target, write_corpus


def prepared(rng, number):
    length = rng.randint(2, 9)
    ids = np.array([rng.randrange(1000) for _ in range(length)], np.int32)
    mask = np.array([rng.randint(0, 1) for _ in range(length)], np.uint8)
    turns = tuple(("assistant", start, start + 1) for start in range(rng.randint(0, 3)))
    digest = number.to_bytes(16, "big")
    source = rng.choice(["a.jsonl", "é.jsonl"])
    return Prepared(source, None, 0, 0, digest, ids.tobytes(), mask.tobytes(), turns)


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_columns_are_those_of_plain_lists(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(plan_file, "_ROWS", rows)
    rng = random.Random(rows)
    documents = [prepared(rng, i) for i in range(23)]
    writer = PlanWriter(tmp_path / "plan.arrow")
    for document in documents:
        writer.add(document)
    assert not (tmp_path / "plan.arrow").exists(), "a half-written file has another name"
    record = writer.finish()
    found = PlannedDocuments(tmp_path / "plan.arrow", record.sha256)
    assert record.sha256 == sha256_file(tmp_path / "plan.arrow")
    ids = [np.frombuffer(d.ids, np.int32).tolist() for d in documents]
    masks = [np.frombuffer(d.mask, np.uint8).tolist() for d in documents]
    flat = {"input_ids": joined(ids), "loss_mask": joined(masks)}
    assert found.offsets.tolist() == [sum(map(len, ids[:d])) for d in range(24)]
    rowwise = {
        "doc_ids": [d.digest.hex() for d in documents],
        "sources": [d.source for d in documents],
        "turns": [list(d.turns) for d in documents],
    }
    for name, expected in rowwise.items():
        column = getattr(found, name)
        assert list(column) == expected and len(column) == 23
        assert column[7] == expected[7] and column[-1] == expected[-1]
        with pytest.raises(IndexError):
            column[23]
        for _ in range(20):
            a, b = rng.randint(-25, 25), rng.randint(-25, 25)
            assert column[a:b] == expected[a:b]
    for name, expected in flat.items():
        column = found.tokens[name]
        for _ in range(20):
            a, b = rng.randint(-200, 200), rng.randint(-200, 200)
            assert column[a:b].tolist() == expected[a:b]
            index = np.array([rng.randrange(len(expected)) for _ in range(6)])
            assert column[index].tolist() == [expected[i] for i in index]
        column[:][:] = 0  # a copy: the file is not written to
        assert column[:].tolist() == expected
    assert found.supervised == sum(flat["loss_mask"])
    mask = np.array(flat["loss_mask"], np.uint8)
    assert found.predicting == predicts_supervised(mask, found.offsets).sum()
    texts = rowwise["doc_ids"] + rowwise["sources"]
    assert found.text_bytes == sum(len(text.encode()) for text in texts)
    some = [3, 4, 20]
    unit = found.select(some)
    assert unit.tokens["input_ids"].tolist() == joined(ids[d] for d in some)
    assert unit.turns == [rowwise["turns"][d] for d in some]
    assert sha256_file(tmp_path / "plan.arrow") == record.sha256


def test_seen_digests_are_those_of_a_set():
    rng = random.Random(0)
    seen, plain = Seen(), set()
    for _ in range(60):
        some = [
            rng.choice([b"\0" * 16, b"\1" + b"\0" * 15, rng.randrange(900).to_bytes(16, "little")])
            for _ in range(rng.randint(1, 80))
        ]
        expected = []
        for digest in some:
            expected.append(digest not in plain)
            plain.add(digest)
        assert seen.add(some) == expected
        assert sum(map(len, seen._runs)) == len(plain)
    assert len(seen._runs) < 10


def test_scratch_is_removed_with_its_object(tmp_path):
    scratch = Scratch(tmp_path)
    (scratch.path / "file").touch()
    del scratch
    assert not list(tmp_path.iterdir())


def test_a_plan_of_an_older_release_is_resumed(tmp_path):
    """Its plan.arrow has other record batches; nothing else differs."""
    target = save_target(tmp_path / "target")
    corpus = write_corpus(tmp_path / "chats.jsonl", 20)
    run(target, corpus, tmp_path / "whole")
    out, work = tmp_path / "data", tmp_path / "data" / ".generate"
    run(target, corpus, out, workers="0/2")
    plan = load_plan(work)
    meta = json.loads((work / "plan.json").read_text())
    data = plan.documents
    unit = UnitData(
        list(data.doc_ids), list(data.sources), list(data.turns), data.offsets,
        {name: data.tokens[name][:] for name in ("input_ids", "loss_mask")},
    )  # fmt: skip
    before = (work / "plan.arrow").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_data.shards.writer.RECORD_BATCH_BYTES", 700)
        record = write_shard(work / "plan.arrow", unit, PLAN_COLUMNS)
    assert (work / "plan.arrow").read_bytes() != before
    with pytest.raises(DatasetError, match=r"plan\.arrow: damaged"):
        run(target, corpus, out)
    meta["documents_sha256"] = record.sha256
    (work / "plan.json").write_text(json.dumps(meta))
    run(target, corpus, out)
    assert digests(out) == digests(tmp_path / "whole")
