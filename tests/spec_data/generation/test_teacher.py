"""`--teacher`: the columns made from logits, at every token or only where a draft reads them."""

import json

import pytest
import torch

from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import TEACHERS
from tests.spec_data.runs import (
    digests,
    run,
    save_target,
    verify,
    with_teacher,
    write_corpus,
)
from tests.tolerance import close, network

FORWARD = {"terms": network(6), "dtype": torch.float32}  # the six layers of the tiny targets


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 12)


@pytest.mark.parametrize("supervision", ["final-hidden", "topk:5", "logits"])
def test_a_teacher_at_every_token_agrees_with_one_where_it_is_read(
    target, corpus, tmp_path, supervision
):
    given = {"supervision": supervision}
    some = run(target, corpus, tmp_path / "some", **given)
    every = run(target, corpus, tmp_path / "every", teacher="all", **given)
    assert [m.teacher for m in (some, every)] == ["supervised", "all"]
    few, many = HiddenStatesDataset(tmp_path / "some"), HiddenStatesDataset(tmp_path / "every")
    for index in range(len(few)):
        a, b = few[index], many[index]
        kept = with_teacher(a)
        assert kept.any() and not kept.all()
        for name in few.columns:
            if name in TEACHERS:
                assert not a[name][~kept].any()
                assert b[name][~kept].any()
            if name in TEACHERS and a[name].is_floating_point():  # other rows share a product
                stored = torch.bfloat16 if name == "logits" else torch.float32
                close(a[name][kept].float(), b[name][kept].float(), **FORWARD, stored=stored)
            else:
                there = kept if name in TEACHERS else slice(None)
                assert torch.equal(a[name][there], b[name][there])
    figures = [m.raw["agreement"]["total"] for m in (some, every)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert verify(VerifyConfig(data=str(tmp_path / "some"), target=str(target), device="cpu")) == 0


def test_a_run_of_an_older_release_goes_on_with_the_teacher_at_every_token(
    target, corpus, tmp_path
):
    """Its settings do not name the teacher."""
    run(target, corpus, tmp_path / "whole", teacher="all", max_shard_size="40KB")
    out = tmp_path / "data"
    assert run(target, corpus, out, teacher="all", workers="0/2", max_shard_size="40KB") is None
    for name in ("plan.json", "target.json"):
        file = out / ".generate" / name
        raw = json.loads(file.read_text())
        del raw["settings"]["teacher"]
        file.write_text(json.dumps(raw))
    run(target, corpus, out, max_shard_size="40KB")
    whole, before = digests(tmp_path / "whole"), digests(out)
    shards = [name for name in whole if name.startswith("shards/")]
    assert len(shards) > 1 and all(whole[name] == before[name] for name in shards)
    run(target, corpus, out, max_shard_size="40KB")  # and once it is complete
    assert digests(out) == before
