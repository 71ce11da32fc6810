"""A plan on disk: its columns are those of plain lists, and damage is named."""

import itertools
import json
import random

import numpy as np
import pytest

from spec_data.generation import plan
from spec_data.generation.plan import PlanWriter, TruncatedDocument, load_plan
from spec_data.shards.errors import DatasetError
from spec_data.shards.files import sha256_file
from spec_data.shards.schema import predicts_supervised
from tests.spec_data.runs import run


def truncated(rng, number):
    length = rng.randint(2, 9)
    ids = np.array([rng.randrange(1000) for _ in range(length)], np.int32)
    mask = np.array([rng.randint(0, 1) for _ in range(length)], np.uint8)
    turns = tuple(("assistant", start, start + 1) for start in range(rng.randint(0, 3)))
    digest = number.to_bytes(16, "big")
    source = rng.choice(["a.jsonl", "é.jsonl"])
    return TruncatedDocument(source, None, 0, 0, digest, ids.tobytes(), mask.tobytes(), turns)


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_columns_are_those_of_plain_lists(monkeypatch, tmp_path, rows):
    monkeypatch.setattr(plan, "_ROWS", rows)
    rng = random.Random(rows)
    documents = [truncated(rng, i) for i in range(23)]
    writer = PlanWriter(tmp_path)
    for document in [*documents, documents[3]]:
        writer.add(document)
    found = writer.finish()
    assert writer.dropped == {"duplicate": 1} and writer.counts["rendered"] == 24
    ids = [np.frombuffer(d.ids, np.int32).tolist() for d in documents]
    masks = [np.frombuffer(d.mask, np.uint8).tolist() for d in documents]
    doc_ids, sources = [d.digest.hex() for d in documents], [d.source for d in documents]
    assert found.offsets.tolist() == [sum(map(len, ids[:d])) for d in range(24)]
    assert found.ids.to_pylist() == doc_ids and found.sources == sources
    for _ in range(20):
        a = rng.randint(0, 22)
        b = rng.randint(a + 1, 23)
        some = rng.sample(range(23), rng.randint(1, 9))
        for unit, numbers in ((found.read(a, b), range(a, b)), (found.select(some), some)):
            assert unit.doc_ids == [doc_ids[d] for d in numbers]
            assert unit.sources == [sources[d] for d in numbers]
            assert unit.turns == [list(documents[d].turns) for d in numbers]
            assert np.diff(unit.offsets).tolist() == [len(ids[d]) for d in numbers]
            assert unit.tokens["input_ids"].tolist() == joined(ids[d] for d in numbers)
            assert unit.tokens["loss_mask"].tolist() == joined(masks[d] for d in numbers)
        offsets, tokens = found.beginnings(some, 4)
        assert tokens["input_ids"].tolist() == joined(ids[d][:4] for d in some)
        assert np.diff(offsets).tolist() == [len(ids[d][:4]) for d in some]
    mask = np.array(joined(masks), np.uint8)
    found.tokens(0, 23)["input_ids"][:] = 0  # a copy: the file is not written to
    assert writer.sha256 == sha256_file(tmp_path / "plan.arrow")
    assert found.supervised.sum() == mask.sum()
    assert found.predicting == predicts_supervised(mask, found.offsets).sum()
    assert found.text_bytes == sum(len(text.encode()) for text in doc_ids + sources)


@pytest.mark.parametrize(
    "change",
    [{"units": [[0, "1"]]}, {"settings": None}],
)
def test_a_damaged_plan_is_refused_by_its_path(target, corpus, tmp_path, change):
    out, work = tmp_path / "data", tmp_path / "data" / ".generate"
    run(target, corpus, out, workers="0/2")
    whole = json.loads((work / "plan.json").read_text())
    (work / "plan.json").write_text(json.dumps(whole | change))
    with pytest.raises(DatasetError, match=rf"plan\.json: damaged .*\$\.{next(iter(change))}"):
        load_plan(work)
    (work / "plan.json").write_text(json.dumps(whole))
    data = bytearray((work / "plan.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (work / "plan.arrow").write_bytes(data)
    with pytest.raises(DatasetError, match=r"plan\.arrow: damaged"):
        run(target, corpus, out)
