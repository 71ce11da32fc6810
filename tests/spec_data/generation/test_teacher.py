"""`--teacher`: the columns made from logits, at every token or only where a draft reads them."""

import pytest
import torch
from msgspec import structs

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import TEACHERS
from tests.spec_data.runs import run, verify, with_teacher
from tests.tolerance import close, network

FORWARD = {"terms": network(6), "dtype": torch.float32}  # the six layers of the tiny targets


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
    figures = [structs.asdict(m.agreement.total) for m in (some, every)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert verify(data=str(tmp_path / "some"), target=str(target), device="cpu") == 0
