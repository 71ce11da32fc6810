"""Targets whose decoder blocks output several residual streams: one state of them, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spec_data.capture.hooks import decoder_layers, prove_streams
from spec_data.capture.model import Target
from spec_data.capture.skeleton import SkeletonTarget
from spec_data.models.reading import text_config
from spec_data.models.streams import streams_of
from spec_data.shards.errors import TargetError
from spec_data.shards.identity import compare
from spec_data.shards.reader import HiddenStatesDataset
from tests.current_families import CONTRACTED, STREAMS, VOCAB, current_config
from tests.families import tiny_model
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import estimate_with, generate_with, options, write_corpus
from tests.tolerance import LAYER, tolerance

REASON = r"{} residual streams per token \(hyper-connections\), not one state"
LAYERS = (-1, 0, 1, 3)


def saved(family: str, folder: Path) -> Any:
    """A tiny model of the family with the vocabulary of the tests' tokenizer, in `folder`."""
    config = current_config(family)
    text_config(config).vocab_size = 512
    torch.manual_seed(0)
    nested = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.rpartition(".")[2] in ("hc_fn", "hc_base", "fn", "base"):
                nn.init.normal_(weight, std=0.3)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer("chatml").save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", CONTRACTED)
def test_a_captured_state_is_the_mean_of_the_streams(family: str) -> None:
    """Against plain hooks of torch: each block outputs [B, T, 4, H], and the streams differ."""
    model = tiny_model(family)
    ids = torch.randint(3, VOCAB - 2, (30,), generator=torch.Generator().manual_seed(1))
    raw: dict[int, torch.Tensor] = {}
    for number, block in enumerate(decoder_layers(model)):
        block.register_forward_hook(
            lambda _m, _a, out, k=number: raw.__setitem__(
                k, out[0] if isinstance(out, tuple) else out
            )
        )
    target = Target(model, LAYERS)
    layout = torch.zeros_like(ids)[None], torch.arange(len(ids))[None]
    states = target.forward(ids[None], *layout, None, full_logits=True)
    for layer in (0, 1, 3):
        assert raw[layer].shape == (1, 30, 4, 32)
        streams = raw[layer].double()
        expected = sum(streams[:, :, n] for n in range(4)) / 4
        torch.testing.assert_close(states.layers[layer].double(), expected, rtol=0, atol=1e-6)
        assert float((streams[:, :, 0] - expected).norm() / expected.norm()) > 0.05
    embedded = model.get_input_embeddings()(ids[None])
    torch.testing.assert_close(states.layers[-1], embedded, rtol=1e-6, atol=0)
    assert target.prove_head([ids]) < tolerance(torch.float32, LAYER)
    prove_streams(model, ids)


@pytest.mark.parametrize("family", CONTRACTED)
def test_a_dataset_says_what_its_states_are(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "target")
    corpus = write_corpus(tmp_path / "chats.jsonl", 3)
    generate_with(**options(tmp_path / "target", corpus, tmp_path / "data", layers="0,1,2"))
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["target"]["streams"] == manifest["identity"]["streams"] == "mean of 4"
    document = HiddenStatesDataset(tmp_path / "data")[0]
    ids = torch.as_tensor(document["input_ids"]).long()[None]
    with torch.no_grad():
        streams = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer in (0, 1, 2):
        stored = torch.as_tensor(document[f"hidden.L{layer}"]).float()
        expected = streams[layer + 1][0].mean(1)
        assert float((stored - expected).norm() / expected.norm()) < 0.02


def test_another_contraction_is_named_when_it_is_compared() -> None:
    words = {"of_recorded": "the draft was fitted with", "of_current": "this target has"}
    said = compare({"streams": "first of 4"}, {"streams": "mean of 4"}, **words)
    assert "streams: the draft was fitted with 'first of 4', this target has 'mean" in said.texts[0]
    mixed = compare({"streams": "first of 4"}, {"streams": "mean of 4"}, **words, states=True)
    assert mixed.refused


class Drifting(nn.Module):
    """A contraction that makes something else of the same streams each time."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.calls = own, 0

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.own(streams) + self.calls


@pytest.mark.parametrize("family", CONTRACTED)
def test_other_streams_than_expected_are_refused_before_the_first_shard(
    family: str, monkeypatch
) -> None:
    ids = [torch.arange(3, 40)]
    model = tiny_model(family)
    inner = model.model if hasattr(model.model, "hc_head") else model.model.language_model
    inner.hc_head = Drifting(inner.hc_head)
    with pytest.raises(TargetError, match="last block do not become the final state"):
        Target(model, (0, 1)).prove(ids, 64)
    inner.hc_head = inner.hc_head.own
    twice = decoder_layers(model)[0].register_forward_pre_hook(
        lambda _m, args: (args[0] * 2, *args[1:])
    )
    with pytest.raises(TargetError, match="into block 0 are not the embedding output"):
        Target(model, (0, 1)).prove(ids, 64)
    twice.remove()
    prove_streams(model, ids[0])
    monkeypatch.setattr("spec_data.capture.hooks._CONTRACTING", ("model.elsewhere",))
    with pytest.raises(TargetError, match="contracts the residual streams elsewhere"):
        Target(model, (0, 1)).prove(ids, 64)


def test_states_of_another_program_are_refused(tmp_path: Path) -> None:
    """Of served and converted states, nothing proves the contraction."""
    saved("deepseek_v4", tmp_path / "target")
    with pytest.raises(TargetError, match="another program cannot prove it"):
        SkeletonTarget(tmp_path / "target", (0,), "float32", False)


@pytest.mark.parametrize("family", STREAMS)
def test_a_forward_of_several_streams_is_refused_with_the_reason(family: str) -> None:
    """The real model: its block outputs are [B, T, streams, H]."""
    target = Target(tiny_model(family), (0, 1))
    count = streams_of(text_config(target.config)).count
    ids = torch.arange(3, 3 + count)[None]  # as many tokens as streams: no shape alone tells
    with pytest.raises(TargetError, match="layer 0: .*" + REASON.format(count)):
        target.prove_head([ids[0]])


@pytest.mark.parametrize("family", STREAMS)
def test_generate_and_estimate_refuse_before_the_weights_are_loaded(family: str, tmp_path: Path):
    folder, corpus = tmp_path / "target", write_corpus(tmp_path / "chats.jsonl", 2)
    tiny_model(family).save_pretrained(folder)
    tokenizer("chatml").save_pretrained(folder)
    given = options(folder, corpus, tmp_path / "data", layers="0,1")
    count = streams_of(text_config(current_config(family))).count
    reason = r"config\.json: .*" + REASON.format(count) + ".* hand no states of its blocks"
    with pytest.raises(TargetError, match=reason):
        estimate_with(**given)
    with pytest.raises(TargetError, match=reason):
        generate_with(**given)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("kind", "contraction"),
    [("glm5_next_text", "mean"), ("qwen4_exp_text", None), ("gemma3n_text", None)],
)
def test_shipped_families_with_streams_are_known_by_their_config(kind, contraction) -> None:
    streams = streams_of(CONFIG_MAPPING[kind]())
    assert streams.count > 1 and streams.contraction == contraction


class Wider(nn.Module):
    """A block whose output is not of the hidden size."""

    def forward(self, hidden_states, **_):
        return torch.cat([hidden_states, hidden_states], -1)


def test_states_of_another_size_are_refused() -> None:
    target = Target(tiny_model("llama"), (5,))
    target.model.model.layers[5] = Wider()
    target.model.model.norm = nn.Linear(64, 32)
    with pytest.raises(TargetError, match=r"layer 5 has shape \(1, 6, 64\).*\(1, 6, 32\)"):
        target.prove_head([torch.arange(3, 9)])
