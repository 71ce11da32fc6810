"""A plan on disk: its columns are those of plain lists, and damage is named."""

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
from tests.spec_data.shards.integrity_tools import flip


def test_documents_are_read_by_range_by_number_and_by_their_beginnings(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "_ROWS", 4)
    rng, writer, rows = random.Random(0), PlanWriter(tmp_path), []
    for number in range(23):
        ids = np.array(rng.choices(range(1000), k=rng.randint(2, 9)), np.int32)
        mask = np.array(rng.choices(range(2), k=len(ids)), np.uint8)
        turns = [("assistant", start, start + 1) for start in range(rng.randint(0, 3))]
        source, digest = rng.choice(["a.jsonl", "é.jsonl"]), number.to_bytes(16, "big")
        writer.add(
            TruncatedDocument(source, None, 0, 0, digest, bytes(ids), bytes(mask), tuple(turns))
        )
        rows.append((digest.hex(), source, turns, ids.tolist(), mask.tolist()))
    documents = writer.finish()
    assert writer.sha256 == sha256_file(tmp_path / "plan.arrow")
    assert documents.sources == [row[1] for row in rows]
    assert documents.text_bytes == sum(len((row[0] + row[1]).encode()) for row in rows)
    mask = np.concatenate([row[4] for row in rows])
    assert documents.predicting == predicts_supervised(mask, documents.offsets).sum()
    for _ in range(20):
        first = rng.randint(0, 22)
        last = rng.randint(first + 1, 23)
        some = rng.sample(range(23), rng.randint(1, 9))
        read, chosen = documents.read(first, last), documents.select(some)
        for unit, wanted in ((read, rows[first:last]), (chosen, [rows[d] for d in some])):
            assert list(zip(unit.doc_ids, unit.sources, unit.turns, strict=True)) == [
                row[:3] for row in wanted
            ]
            for name, column in (("input_ids", 3), ("loss_mask", 4)):
                parts = np.split(unit.tokens[name], unit.offsets[1:-1])
                assert [part.tolist() for part in parts] == [row[column] for row in wanted]
        offsets, tokens = documents.beginnings(some, 4)
        parts = np.split(tokens["input_ids"], offsets[1:-1])
        assert [part.tolist() for part in parts] == [rows[d][3][:4] for d in some]


@pytest.mark.parametrize("change", [{"units": [[0, "1"]]}, {"settings": None}])
def test_a_damaged_plan_is_refused_by_its_path(target, corpus, tmp_path, change):
    out, work = tmp_path / "data", tmp_path / "data" / ".generate"
    run(target, corpus, out, workers="0/2")
    whole = json.loads((work / "plan.json").read_text())
    (work / "plan.json").write_text(json.dumps(whole | change))
    with pytest.raises(DatasetError, match=rf"plan\.json: damaged .*\$\.{next(iter(change))}"):
        load_plan(work)
    (work / "plan.json").write_text(json.dumps(whole))
    flip(work / "plan.arrow")
    with pytest.raises(DatasetError, match=r"plan\.arrow: damaged"):
        run(target, corpus, out)
