"""The EAGLE-1/2 draft: its files, its data, training, decoding.

The loss itself is compared with slow loops in `test_reference`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts.eagle.draft import EagleDraft, eagle_loss
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.options.draft_options import EagleOptions
from tests.families import VOCAB as FAMILY_VOCAB
from tests.families import tiny_model
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.spec_train.drafts.eagle import tools as eagle_tools
from tests.spec_train.drafts.eagle.tools import make_eagle
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import LIMIT
from tests.spec_train.training import tools as trainer_tools
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head
target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained_eagle = eagle_tools.trained_eagle
data, config = trainer_tools.data, trainer_tools.config

FORWARD = {"terms": network(4), "dtype": torch.float32}  # up to four steps; sums are float64

# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_the_files_are_what_engines_read(dataset, head, tmp_path: Path, layers: int) -> None:
    """vLLM's llama_eagle.py fails on any other name. Its first layer has no norm parameter."""
    build_draft("eagle", dataset, head, num_layers=layers).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = ["post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo")]
    layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    names = {"fc.weight", "embed_tokens.weight"}
    names |= {f"layers.{i}.{name}.weight" for i in range(layers) for name in layer}
    names |= {f"layers.{i}.input_layernorm.weight" for i in range(1, layers)}
    assert set(tensors) == names
    assert tensors["fc.weight"].shape == (32, 64)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight)  # bit for bit
    text = (tmp_path / "config.json").read_text()
    raw = json.loads(text)
    expected = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "bias": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: raw[key] for key in expected} == expected
    assert "null" not in text


# --- data ----------------------------------------------------------------------------------------


def test_datasets_without_every_final_state_are_refused(dataset: HiddenStatesDataset) -> None:
    raw = dataset.manifest.to_json()

    def check(**changes: Any) -> None:
        EagleDraft.check_data(EagleOptions(), Manifest.of(raw | changes))

    check()
    with pytest.raises(DatasetError, match=r"--final supervised does not keep.*--final all"):
        check(final="supervised")
    others = [c for c in raw["columns"] if c["name"] != "hidden.final"]
    with pytest.raises(DatasetError, match=r"--supervision logits .*final-hidden"):
        check(columns=others, supervision="logits")


# --- training ------------------------------------------------------------------------------------


def test_noise_is_in_training_alone_and_can_be_passed_in(dataset, head) -> None:
    draft, batch = build_draft("eagle", dataset, head), packed(dataset)
    states = batch.hidden["hidden.final"]
    plain = {
        "final_hidden": states,
        "input_ids": batch.input_ids,
        "loss_mask": batch.loss_mask,
        "target_argmax": batch.target_argmax,
        "document_ids": batch.document_ids,
        "position_ids": batch.position_ids,
        "head": head,
    }
    torch.manual_seed(7)
    drawn = draft.loss(batch, head, draft.slot_counts(batch)).loss
    torch.manual_seed(7)
    noise = (torch.rand(states.shape) * 2 - 1) * 0.1
    given = eagle_loss(draft, **plain, noise=noise).loss
    close(drawn, given, **FORWARD)
    draft.eval()
    quiet = draft.loss(batch, head, draft.slot_counts(batch))
    close(quiet.loss, eagle_loss(draft, **plain).loss, **FORWARD)
    assert abs(float((quiet.loss - drawn).detach())) > 1e-4
    figures = EagleDraft.summarise(quiet.sums)
    assert "accept_rate/4" in figures and "accept_rate/5" not in figures
    parts = 1.0 * figures["smooth_l1"] + 0.1 * figures["cross_entropy"]
    close(figures["loss"], float(quiet.loss.detach()), **FORWARD)
    close(figures["loss"], parts, **FORWARD)


# --- decoding ------------------------------------------------------------------------------------


def speculate(model: Any, draft: EagleDraft, prompt: list[int], **changes: Any) -> Any:
    settings: dict[str, Any] = dict(sampler=Greedy(), limit=LIMIT, draft_tokens=4) | changes
    drafter = draft.drafter(TargetHead.from_model(model))
    draft_tokens, request = settings.pop("draft_tokens"), Request(prompt, **settings)
    return decode_speculative(model, drafter, draft.state_columns, request, draft_tokens)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "gpt2", "mistral-sliding"])
def test_decoding_is_lossless_with_heads_and_windows_of_all_kinds(family: str) -> None:
    model = tiny_model(family)
    draft = make_eagle(model, FAMILY_VOCAB, num_layers=2)
    prompt = torch.randint(FAMILY_VOCAB, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = decode_plain(model, Request(prompt, Greedy(), LIMIT))
    assert speculate(model, draft, prompt, draft_tokens=3).tokens == plain.tokens
