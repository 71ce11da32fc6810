"""A published DFlash in the commands as it is: eval on data, fit, export. It slides and is causal.

The draft has z-lab's layout: no embedding, no head, and the target's `tie_word_embeddings`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.evaluation.exporting import find_target
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.tools import same_weights

HIDDEN, VOCAB, INNER, LAYERS, SIZE = 32, 64, 64, 2, 4  # of tiny_llama, and of the draft
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "num_target_layers": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "block_size": SIZE,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
    "tie_word_embeddings": True,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [2, 0]},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, its target, and the draft of another trainer for it."""
    folder = tmp_path_factory.mktemp("published")
    data = HiddenStatesDataset(tiny_dataset(folder / "data", n_docs=20))
    head = TargetHead.from_dataset(data.path)
    draft = build_draft("dflash", data, head, num_layers=LAYERS, block_size=SIZE, layers="0,2")
    tensors = draft.checkpoint_tensors(torch.float32)
    del tensors["embed_tokens.weight"]
    tiny.write(folder / "draft", CONFIG, tensors)
    tiny_llama().save_pretrained(folder / "target")
    return folder


def test_eval_measures_it_on_a_dataset(place):
    config = dict(draft=str(place / "draft"), data=str(place / "data"), device="cpu")
    assert run_eval(config)["acceptance_length"] >= 1


def test_fit_goes_on_from_it(place, tmp_path):
    given = {"data": str(place / "data"), "out": str(tmp_path / "run"), "device": "cpu"}
    config = Training(**given, steps=0, seq_len=64, init_from=str(place / "draft"))
    options = {"num_layers": LAYERS, "block_size": SIZE, "mask_token_id": 5}
    window = {"sliding_window": 6, "layer_types": ",".join(CONFIG["layer_types"])}
    fit("dflash", config, DRAFT_OPTIONS["dflash"](layers="0,2", **options, **window))
    new = load_draft(tmp_path / "run" / "last")
    old = load_draft(place / "draft", find_target(str(place / "target")))
    assert new.config.layers == (0, 2) and new.config.layer_types == old.config.layer_types
    assert same_weights(old, new)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_export_writes_it_for_an_engine(place, tmp_path, form):
    out, target = tmp_path / form, str(place / "target")
    checked = spec_train.export(place / "draft", out, form, target)
    assert "refuse" not in [finding.level for finding in checked.findings[form]]
    raw, facts = tiny.read_config(out), find_target(target)
    assert raw["target_layer_ids"] == [0, 2] and raw["sliding_window"] == 6
    old, new = load_draft(place / "draft", facts), load_draft(out, facts)
    assert same_weights(old, new)


def test_a_form_that_vllm_would_misread_is_refused(place, tmp_path):
    """vLLM makes every layer of a speculators file causal, or none."""
    draft, target = str(place / "draft"), str(place / "target")
    with pytest.raises(DraftError, match="causal attention in the full layers"):
        spec_train.export(draft, tmp_path / "out", "speculators", target)
