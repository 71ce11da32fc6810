"""`--init-from` a draft whose target was fine-tuned: what is the target's follows it."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_data.shards.errors import DraftError
from spec_data.shards.identity import OWN_HEAD
from spec_train.drafts import load_draft
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.training.test_start_draft import SHAPES, foreign, run

TOKENS = {"tokenizer_hash": "1a", "tokenizer.model": "BPE 2b"}
KINDS = {**SHAPES, "mtp": {}, "dspark-whole": {"block_size": 4, "num_layers": 1}}
STILL = {"lr": 1e-30}  # the run changes nothing that it does not replace


def tuned(move: float, seed: int = 0, **changes):
    """The target of `data`, each weight moved by `move` of the size of its tensor."""
    model = tiny_llama(seed=seed, **changes)
    torch.manual_seed(99)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) * weight.square().mean().sqrt() * move
    return model


def data_of(folder: Path, model=None, **facts: str) -> str:
    facts = {"weights_hash": folder.name, **TOKENS} | facts
    return str(tiny_dataset(folder, n_docs=20, model=model, mtp=True, identity=facts))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return data_of(tmp_path_factory.mktemp("tune") / "first")


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> str:
    return data_of(tmp_path_factory.mktemp("tune") / "moved", tuned(0.1))


def head_of(data: str) -> dict[str, torch.Tensor]:
    tensors = load_file(Path(data) / "target" / "head.safetensors")
    return {"lm_head": tensors["embed_tokens"]} | tensors


def differing(old: torch.Tensor, new: torch.Tensor) -> float:
    """The size of the difference as a share of `old`: plain loops in float64."""
    above = below = 0.0
    for before, after in zip(old.double().tolist(), new.double().tolist(), strict=True):
        for a, b in zip(before, after, strict=True):
            above, below = above + (a - b) ** 2, below + a * a
    return math.sqrt(above / below)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "warning[init-from]" in line]


@pytest.mark.parametrize("name", KINDS)
def test_the_draft_goes_on_with_the_frozen_weights_of_the_fine_tune(
    name, data, moved, tmp_path, caplog
):
    kind, shape = name.removesuffix("-whole"), KINDS[name]
    run(kind, data, tmp_path / "old", **shape)
    caplog.clear()
    run(kind, moved, tmp_path / "new", init_from=str(tmp_path / "old"), **STILL)
    old, new = (load_draft(tmp_path / out / "last") for out in ("old", "new"))
    before, after = head_of(data), head_of(moved)
    expected = old.state_dict() | {"embed_tokens.weight": after["embed_tokens"]}
    if "lm_head.weight" in expected:
        expected["lm_head.weight"] = after["lm_head"][old.draft_ids]
    found = new.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.allclose(tensor.float(), expected[key].float(), atol=1e-6), key
    said = f"{differing(before['embed_tokens'], after['embed_tokens']):.2%} (100.00% of the rows)"
    (line,) = (line for line in lines(caplog.text) if "embedding" in line)
    assert "another checkpoint of the draft's own" in line and said in line
    assert "weights_hash" not in caplog.text and "warning[lm-head]" not in caplog.text
    assert new.config.origin["weights_hash"] == "moved" and OWN_HEAD not in new.config.origin
    run(kind, moved, tmp_path / "more", init_from=str(tmp_path / "new"), **STILL)  # its own now
    assert run(kind, moved, tmp_path / "new", init_from=str(tmp_path / "old"), **STILL).finished


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_the_head_of_a_draft_without_an_origin(name, tied, tmp_path, caplog):
    """That of a tied target is seen to be its own. Else nobody knows: it stays, and is told."""
    models = [tuned(move) for move in (0.0, 0.1)]
    for model in models if tied else []:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    first, second = (
        data_of(tmp_path / part, model) for part, model in zip("ab", models, strict=True)
    )
    run(name, first, tmp_path / "old", **SHAPES[name])
    start = foreign(tmp_path / "old" / "last", tmp_path / "foreign")
    for out in ("new", "again"):
        caplog.clear()
        run(name, second, tmp_path / out, init_from=str(start), **STILL)
        draft, start = load_draft(tmp_path / out / "last"), tmp_path / out
        whose = head_of(second if tied else first)["lm_head"]
        assert torch.equal(draft.lm_head.weight, whose[draft.draft_ids])
        assert ("warning[lm-head]" not in caplog.text) == tied
        assert draft.config.origin.get(OWN_HEAD, False) is not tied


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_a_head_that_was_trained_stays_the_drafts_own(name, data, moved, tmp_path, caplog):
    """Also in a run after it that does not train it: the origin remembers."""
    run(name, data, tmp_path / "a", **SHAPES[name], train_head=True)
    own = load_draft(tmp_path / "a" / "last").lm_head.weight
    run(name, data, tmp_path / "b", init_from=str(tmp_path / "a"), **STILL)
    for out, start in (("c", "a"), ("d", "b"), ("e", "d")):
        run(name, moved, tmp_path / out, init_from=str(tmp_path / start), **STILL)
        draft = load_draft(tmp_path / out / "last")
        assert torch.equal(draft.lm_head.weight, own)
        assert torch.equal(draft.embed_tokens.weight, head_of(moved)["embed_tokens"])
        assert draft.config.origin[OWN_HEAD] is True


def test_a_head_alone_may_have_moved(data, tmp_path, caplog):
    """A fine-tune that leaves the embedding as it is, as most adapters do."""
    model = tuned(0.0)
    with torch.no_grad():
        model.lm_head.weight *= 1.05
    second = data_of(tmp_path / "second", model)
    run("eagle3", data, tmp_path / "old", **SHAPES["eagle3"])
    caplog.clear()
    run("eagle3", second, tmp_path / "new", init_from=str(tmp_path / "old"), **STILL)
    draft = load_draft(tmp_path / "new" / "last")
    assert torch.equal(draft.lm_head.weight, head_of(second)["lm_head"][draft.draft_ids])
    (line,) = (line for line in lines(caplog.text) if "other weights" in line)
    assert "weights_hash" in line and "warning[lm-head]" not in caplog.text


def test_a_trained_embedding_stays_the_drafts_own(data, moved, tmp_path, caplog):
    run("eagle3", data, tmp_path / "old", **SHAPES["eagle3"], train_embeddings=True)
    run("eagle3", moved, tmp_path / "new", init_from=str(tmp_path / "old"), **STILL)
    old, new = (load_draft(tmp_path / out / "last") for out in ("old", "new"))
    assert torch.equal(old.embed_tokens.weight, new.embed_tokens.weight)
    assert torch.equal(new.lm_head.weight, head_of(moved)["lm_head"][new.draft_ids])
    assert any("weights_hash" in line for line in lines(caplog.text))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, None),
        ({"tokenizer_hash": "other special tokens"}, None),
        ({"tokenizer.model": "BPE other merges"}, "and other tokens; start a new draft"),
    ],
    ids=["same tokenizer", "more special tokens", "other merges"],
)
def test_an_unrelated_target_is_named_and_other_tokens_are_refused(
    facts, said, data, tmp_path, caplog
):
    other = data_of(tmp_path / "other", tuned(0.0, seed=7), **facts)
    run("eagle3", data, tmp_path / "old", **SHAPES["eagle3"])
    caplog.clear()
    again = dict(init_from=str(tmp_path / "old"), **STILL)
    if said is not None:
        with pytest.raises(DraftError, match=said):
            run("eagle3", other, tmp_path / "new", **again)
        return
    run("eagle3", other, tmp_path / "new", **again)
    (line,) = (line for line in lines(caplog.text) if "embedding" in line)
    assert "another model than the draft's own, with the same tokens" in line
    (share,) = re.findall(r"differs by ([0-9.]+)%", line)
    assert float(share) > 100
    new = load_draft(tmp_path / "new" / "last")
    assert torch.equal(new.embed_tokens.weight, head_of(other)["embed_tokens"])


def test_a_fine_tune_with_more_tokens_is_refused(data, tmp_path):
    """Its embedding has more rows: another shape."""
    other = str(tiny_dataset(tmp_path / "wider", vocab=72, identity=TOKENS))
    run("eagle3", data, tmp_path / "old", **SHAPES["eagle3"])
    with pytest.raises(DraftError, match=r"(?s)another shape or target.*vocab_size"):
        run("eagle3", other, tmp_path / "new", init_from=str(tmp_path / "old"))
