"""P-EAGLE checkpoints: the files and the mask token; and a whole run from fit to eval."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from spec_train.options.draft_options import PeagleOptions
from spec_train.training.fit import fit
from tests.draft_tools import reseal, write_json
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import change, masters
from tests.tolerance import close_weights

dataset, head = any_draft.dataset, any_draft.head
data, config = trainer_tools.data, trainer_tools.config

OPTIONS = PeagleOptions(depths=3, num_layers=2, draft_vocab_size=40)


# --- files ---------------------------------------------------------------------------------------


def test_tensor_names_and_shapes_are_those_the_engine_reads(dataset, head, tmp_path):
    draft = build_draft("peagle", dataset, head)
    assert abs(float(draft.mask_hidden.detach().std()) - 1) < 0.2
    draft.save_pretrained(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{x}_proj" for x in "qkvo"]
    parts += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    names = ["fc", "norm", "lm_head", "embed_tokens", "layers.0.hidden_norm"]
    names += [f"layers.{i}.{part}" for i in range(2) for part in parts]
    assert set(tensors) == {f"{name}.weight" for name in names} | {"mask_hidden", "d2t", "t2d"}
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight.bfloat16())


def test_the_config_is_the_flat_form_of_parallel_drafting(dataset, head, tmp_path):
    build_draft("peagle", dataset, head, layers="0,2", mask_token_id=7).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3LlamaForCausalLM"] and raw["model_type"] == "llama"
    expected = {
        "num_hidden_layers": 2,
        "mask_token_id": 7,
        "ptd_token_id": 7,
        "draft_vocab_size": 40,
        "vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "norm_before_residual": False,
        "norm_output": False,
        "tie_word_embeddings": False,
    }
    assert {key: raw[key] for key in expected} == expected
    assert raw["spec_train"]["draft"] == "peagle" and raw["spec_train"]["layers"] == [0, 2]
    assert "null" not in (tmp_path / "config.json").read_text()
    del raw["mask_token_id"]
    write_json(tmp_path, raw)
    reseal(tmp_path)
    with pytest.raises(DraftError, match="lacks mask_token_id"):
        load_draft(tmp_path)


def test_segments_and_recomputing_change_no_run(config: Any, tmp_path: Path) -> None:
    runs = []
    for number, changes in enumerate(({}, {"segments": 3}, {"gradient_checkpointing": True})):
        options = dataclasses.replace(OPTIONS, **changes)
        out = str(tmp_path / str(number))
        fit("peagle", change(config, out=out, steps=3), options)
        runs.append(masters(out))
    for other in runs[1:]:
        close_weights(other, runs[0], config.lr, steps=3)
