"""What `fit` says before its first step."""

import logging

import pytest
from transformers import AutoModelForCausalLM

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.options.draft_options import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.setup import fit
from tests.spec_train import fitted

place = fitted.place


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_size_of_the_draft_is_compared_with_its_target(place, tmp_path, caplog, kind):
    caplog.set_level(logging.INFO)
    config = Training(
        data=str(place / "data"), out=str(tmp_path / "run"), steps=1, seq_len=128, device="cpu"
    )
    fit(kind, config, DRAFT_OPTIONS[kind](draft_vocab_size=100))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("share")]
    target = AutoModelForCausalLM.from_pretrained(place / "target")
    draft = load_draft(tmp_path / "run" / "best")
    trained = sum(p.numel() for p in draft.trainable_parameters())
    whole = sum(p.numel() for p in target.parameters())
    assert HiddenStatesDataset(place / "data").manifest.target.parameters == whole
    assert f" are {100 * trained / whole:.1f} % of the target's" in line
    # what multiplies a token: no table of embeddings, and no vector of a norm
    tables = ("embed_tokens", "markov_w1")
    weights = {n: p for n, p in draft.named_parameters() if p.ndim == 2}
    own = sum(p.numel() for n, p in weights.items() if not any(t in n for t in tables))
    theirs = whole - target.get_input_embeddings().weight.numel() * (
        target.get_input_embeddings().weight is not target.get_output_embeddings().weight
    )
    assert f"costs {100 * own / theirs:.1f} % of the FLOPs" in line
