"""Targets whose decoder blocks output several residual streams are refused, before a capture."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spec_data.capture.model import Target
from spec_data.models.reading import residual_streams
from spec_data.shards.errors import TargetError
from tests.current_families import STREAMS, current_config
from tests.families import tiny_model
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import estimate_with, generate_with, options, write_corpus

REASON = r"{} residual streams per token \(hyper-connections\), not one state"


@pytest.mark.parametrize("family", STREAMS)
def test_a_forward_of_several_streams_is_refused_with_the_reason(family: str) -> None:
    """The real model: its block outputs are [B, T, streams, H]."""
    target = Target(tiny_model(family), (0, 1))
    count = residual_streams(target.config)
    ids = torch.arange(3, 3 + count)[None]  # as many tokens as streams: no shape alone tells
    with pytest.raises(TargetError, match="layer 0: .*" + REASON.format(count)):
        target.prove_head([ids[0]])


@pytest.mark.parametrize("family", STREAMS)
def test_generate_and_estimate_refuse_before_the_weights_are_loaded(family: str, tmp_path: Path):
    folder, corpus = tmp_path / "target", write_corpus(tmp_path / "chats.jsonl", 2)
    tiny_model(family).save_pretrained(folder)
    tokenizer("chatml").save_pretrained(folder)
    given = options(folder, corpus, tmp_path / "data", layers="0,1")
    reason = r"config\.json: .*" + REASON.format(residual_streams(current_config(family)))
    with pytest.raises(TargetError, match=reason):
        estimate_with(**given)
    with pytest.raises(TargetError, match=reason):
        generate_with(**given)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["glm5_next_text", "qwen4_exp_text", "gemma3n_text"])
def test_shipped_families_with_streams_are_known_by_their_config(kind: str) -> None:
    assert residual_streams(CONFIG_MAPPING[kind]()) > 1


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
