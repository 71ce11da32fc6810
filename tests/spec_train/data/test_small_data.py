"""EAGLE-3 learns the same from smaller data and from other supervision, or refuses in words."""

import json

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.evaluation.on_dataset import read_pack
from spec_train.losses.head import TargetHead
from tests.spec_data.runs import run, save_target
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.evaluation.tools import run_eval
from tests.tolerance import close, close_in_norm, network


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Conversations that end in a turn of the user."""
    rows = []
    for i in range(12):
        turns = [("user", f"question {i}"), ("assistant", f"answer {i} " + "so " * (i % 5))]
        turns += [("user", "and"), ("assistant", f"that is {i}"), ("user", "thanks " * (i % 3))]
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    file = tmp_path_factory.mktemp("corpus") / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def both(target, corpus, tmp_path_factory):
    """Final states and logits, with the tokens after the last supervised one."""
    folder = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_data.generation.plan._supervised_length", len)
        for name in ("final-hidden", "logits"):
            run(target, corpus, folder / name, supervision=name, teacher="all")
    return HiddenStatesDataset(folder / "final-hidden"), HiddenStatesDataset(folder / "logits")


@pytest.mark.parametrize("draft_vocab_size", [0, 100])
def test_stored_logits_teach_what_final_states_and_head_teach(both, draft_vocab_size):
    """Loss, gradient and figures, to the rounding of states and logits to bfloat16."""
    found = []
    for number, dataset in enumerate(both):
        head = TargetHead.from_dataset(dataset.path)
        draft = build_draft("eagle3", dataset, head, ttt_steps=4, draft_vocab_size=draft_vocab_size)
        columns = draft.columns(dataset.manifest.supervision)
        assert ("logits" in columns, "hidden.final" in columns) == (number == 1, number == 0)
        batch = read_pack(dataset, [0, 5, 11], columns, torch.float32)
        out = draft.loss(batch, head, draft.slot_counts(batch))
        out.loss.backward()
        slots = int(out.sums["supervised"].sum())
        found.append((out.loss, draft.summarise(out.sums), draft.fc.weight.grad))
    (a, figures, grad), (b, others, other) = found
    # states and logits are rounded once each; the loss is a mean over the slots
    close(a, b, terms=2 / slots, dtype=torch.bfloat16)
    close_in_norm(grad, other, torch.bfloat16, terms=2)
    assert float(grad.abs().max()) > 0.02
    assert abs(figures["product_limit_length"] - others["product_limit_length"]) < 0.05  # ties


def test_fit_and_eval_run_on_logits(both, tmp_path):
    _, logits = both
    given = dict(steps=3, seq_len=128, validation=0.2, draft_vocab_size=0, ttt_steps=4)
    assert flat.fit("eagle3", logits.path, tmp_path / "run", device="cpu", **given).step == 3
    config = dict(draft=str(tmp_path / "run"), data=str(logits.path), device="cpu")
    report = run_eval(config)["data"]
    kept = json.loads((tmp_path / "run" / "best" / "validation.json").read_text())
    assert report["split"] == "validation"
    close(report["teacher_forced"]["loss"], kept["loss"], terms=network(4), dtype=torch.float32)
