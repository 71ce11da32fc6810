"""P-EAGLE and EAGLE-1/2: what engines read, and drafts of other trainers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS, load_draft
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from tests.factory import tiny_llama
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.formats.tools import ENGINES, export

dataset, head = eagle3_tools.dataset, eagle3_tools.head

PEAGLE = {"num_layers": 2, "depths": 4, "mask_token_id": 5, "draft_vocab_size": 40}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_llama().save_pretrained(folder)
    return folder


def saved(
    dataset: HiddenStatesDataset, head: TargetHead, folder: Path, kind: str, **options: Any
) -> Path:
    torch.manual_seed(3)
    draft = DRAFTS[kind].build(
        DRAFT_OPTIONS[kind](**options),
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size),
    )
    draft.save_pretrained(folder)
    return folder


def facts(head: TargetHead) -> TargetFacts:
    return TargetFacts(num_layers=4, embedding=head.embed_weight, head=head.head_weight)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_vllm_reads_a_peagle_draft_as_it_was_trained(dataset, head, tmp_path, target, form):
    own = saved(dataset, head, tmp_path / "own", "peagle", layers="0,2", fc_norm=True, **PEAGLE)
    raw, tensors = read(export(own, form, tmp_path / form, target))
    assert ENGINES["vllm"](raw, 4) == [1, 3]
    assert tensors["mask_hidden"].shape == (1, 1, 2 * 32)  # before fc
    assert raw["mask_token_id"] == 5
    seen = raw["transformer_layer_config"] if form == "speculators" else raw
    assert seen["fc_norm"] is True and seen["num_hidden_layers"] == 2
    if form == "vllm":
        assert raw["ptd_token_id"] == 5 and raw["norm_before_residual"] is False
        assert raw["architectures"] == ["Eagle3LlamaForCausalLM"]  # see formats/write.py
    else:
        assert seen["num_aux_hidden_states"] == 2
        (method,) = raw["speculators_config"]["proposal_methods"]
        assert method["speculative_tokens"] == 4


def test_a_published_peagle_draft_is_read_by_its_mask_states(dataset, head, tmp_path):
    """It has the architecture name of an EAGLE-3, and its mask states come in several shapes."""
    own = saved(dataset, head, tmp_path / "own", "peagle", **PEAGLE)
    raw, tensors = read(own)
    raw = {k: v for k, v in raw.items() if k not in ("spec_train", "mask_token_id", "eagle_config")}
    raw["architectures"] = ["LlamaForCausalLMEagle3"]
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    again = load_draft(rewrite(tmp_path / "theirs", raw, tensors))
    assert again.name == "peagle" and again.config.mask_token_id == 5
    assert again.config.layers == (0, 1, 2) and again.options.depths == 8
    for name, value in load_draft(own).state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    del raw["ptd_token_id"]
    with pytest.raises(DraftError, match="a mask token"):
        load_draft(rewrite(tmp_path / "maskless", raw, tensors))


def test_sglang_gets_the_bias_that_it_would_make_up(dataset, head, tmp_path, target):
    own = saved(dataset, head, tmp_path / "own", "eagle")
    raw, tensors = read(export(own, "sglang", tmp_path / "sglang", target))
    assert raw["architectures"] == ["LlamaForCausalLMEagle"]
    assert torch.equal(tensors["fc.bias"], torch.zeros(32))
    raw, tensors = read(export(own, "vllm", tmp_path / "vllm", target))
    assert raw["architectures"] == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors
    found = spec_train.export(draft=str(own)).findings
    assert "--format sglang" in found["sglang"][0].text
    assert found["llama.cpp"][0].level == "refuse"


def test_a_published_eagle_draft_is_read(dataset, head, tmp_path):
    own = saved(dataset, head, tmp_path / "own", "eagle")
    raw, tensors = read(own)
    raw = {k: v for k, v in raw.items() if k != "spec_train"} | {
        "architectures": ["LlamaForCausalLM"]
    }
    copy = tensors | {"lm_head.weight": head.head_weight.clone(), "fc.bias": torch.zeros(32)}
    del copy["embed_tokens.weight"]
    again = load_draft(rewrite(tmp_path / "theirs", raw, copy), facts(head))
    for name, value in load_draft(own).state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    other = copy | {"lm_head.weight": torch.ones(64, 32)}
    with pytest.raises(DraftError, match="lm_head is not the target's"):
        load_draft(rewrite(tmp_path / "other", raw, other), facts(head))
