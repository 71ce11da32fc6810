"""Sizes and rope of a draft are those of its target, in every pack."""

import json
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, HunYuanDenseV1Config, LlamaConfig, Phi3Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError
from spec_train.drafts.eagle3.draft import Eagle3Config
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.layers import Rotary
from spec_train.drafts.slots import document_lengths, document_offsets
from tests.spec_train.drafts.any_draft import SHAPED
from tests.spec_train.drafts.cases import (
    DEFAULT_ROPE,
    case,
    lay_out,
    loss_of,
    make_documents,
    make_draft,
)
from tests.tolerance import close, network

# Cosines and sines of equal angles, times a factor; they depend on the place in a block.
ANGLES = {"terms": 4, "magnitude": 2.0}


def test_document_offsets_and_lengths() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1]])
    assert document_offsets(ids).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert document_lengths(ids).tolist() == [[3, 3, 3, 1, 2, 2, 2, 2]]


def _config(target: dict[str, Any]) -> Eagle3Config:
    named = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 9}
    return Eagle3Config.from_target(
        target | {name: target.get(name) or value for name, value in named.items()},
        layers=(1, 2),
        vocab_size=64,
        draft_vocab_size=64,
        options=Eagle3Options(),
    )


def test_shapes_come_from_the_targets_text_config() -> None:
    text = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,  # not 48 / 6
        "intermediate_size": 100,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "dtype": "float16",
        "eos_token_id": [3, 4],
        "num_hidden_layers": 9,
        "architectures": ["LlamaForCausalLM"],
    }
    nested = ["Gemma3ForConditionalGeneration"]
    for target in (text, {"text_config": text, "architectures": nested, "hidden_size": 7}):
        config = _config(target)
        assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (48, 16, 2)
        assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-3, 4096)
        assert config.dtype == "float16" and config.token_ids == {"eos_token_id": [3, 4]}
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(DraftError, match="hidden_size"):
        _config({"num_attention_heads": 2})
    with pytest.raises(DraftError, match="6 is not a multiple of num_key_value_heads = 4"):
        _config(text | {"num_key_value_heads": 4})


_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 8.0]}
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
            "beta_fast": 8.0,
        }
    },
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 150.0, "factor": 2.0}},
]


@pytest.mark.parametrize("rope", _ROPES, ids=lambda r: str(r)[:40])
def test_rope_is_the_targets(rope: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    target = LlamaConfig(**json.loads(json.dumps(shape | rope)))
    positions = torch.tensor([[0, 1, 31, 32, 100, 127], [5, 4, 3, 2, 1, 0]])
    expected = LlamaRotaryEmbedding(target)(torch.zeros(1), positions)
    for raw in (shape | rope, target.to_dict()):  # an older file, and a file of transformers 5
        config = _config(raw | {"num_key_value_heads": 4})
        for found, wanted in zip(Rotary(config)(positions), expected, strict=True):
            close(found, wanted, **ANGLES)
        # An engine that reads the draft's config.json gets the same frequencies.
        saved = json.loads(json.dumps(config.to_json(Eagle3Options())))
        reader = LlamaRotaryEmbedding(LlamaConfig.from_dict(saved))
        close(reader(torch.zeros(1), positions)[0], expected[0], **ANGLES)


def test_dynamic_rope_with_alpha_is_a_larger_theta() -> None:
    """As HunYuan's; readers of the draft need not know alpha."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    sizes: dict[str, Any] = shape | {"num_key_value_heads": 4, "head_dim": 8}
    theirs = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(**sizes, rope_parameters=rope))
    positions = torch.arange(64)[None]
    for raw in (sizes | {"rope_parameters": rope}, shape | {"rope_scaling": rope}):
        config = _config(raw | {"num_key_value_heads": 4})
        assert config.rope_parameters["rope_type"] == "default"
        expected = theirs(torch.zeros(1), positions)
        for found, wanted in zip(Rotary(config)(positions), expected, strict=True):
            close(found, wanted, **ANGLES)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_longrope_and_partial_rope_are_those_of_phi3(partial: float) -> None:
    count = int(4 * partial)
    factors = {k: v[:count] for k, v in _FACTORS.items()}
    target = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        partial_rotary_factor=partial,
        rope_scaling={"type": "longrope", **factors},
        pad_token_id=0,
    )
    rotary, theirs = Rotary(_config(target.to_dict())), Phi3RotaryEmbedding(target)
    short, long = torch.arange(32)[None], torch.arange(33)[None]
    for positions in (short, long):
        for found, wanted in zip(rotary(positions), theirs(torch.zeros(1), positions), strict=True):
            assert found.shape[-1] == 8 * partial
            close(found, wanted, **ANGLES)
    # In a batch, every document has the same factors as alone.
    both = rotary(torch.cat([long, short.new_zeros(1, 33)]))[0]
    close(both[0], rotary(long)[0][0], **ANGLES)
    lengths = torch.tensor([[32, 33]])
    mixed = rotary(torch.tensor([[7, 7]]), lengths)[0][0]
    close(mixed[0], rotary(short)[0][0, 7], **ANGLES)
    close(mixed[1], rotary(long)[0][0, 7], **ANGLES)
    assert (mixed[0] - mixed[1]).abs().max() > 1e-3


def test_per_layer_type_settings_give_those_of_full_attention() -> None:
    raw = Gemma3TextConfig(num_hidden_layers=6).to_dict()
    found = rope_parameters(raw)
    assert found == raw["rope_parameters"]["full_attention"]
    assert found["rope_theta"] == 1_000_000.0
    with pytest.raises(DraftError, match="full_attention"):
        rope_parameters({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}})
    with pytest.raises(DraftError, match="mrope"):
        rope_parameters({"rope_scaling": {"type": "mrope"}})


@pytest.mark.parametrize("kind", SHAPED)
def test_packed_documents_keep_their_own_rope(kind: str) -> None:
    """Each document has the factors of its own length, so the pack does not matter."""
    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0]}
    rope = DEFAULT_ROPE | {"rope_type": "longrope", "original_max_position_embeddings": 12}
    made = case(kind, rope=rope | factors, **({"cod_ratio": 1.0} if kind == "peagle" else {}))
    draft, documents = make_draft(made), make_documents(made, [[1] * n for n in (9, 16, 4)])
    together = loss_of(made, draft, **lay_out(made, documents, [[0, 1, 2]])).sums
    alone = [loss_of(made, draft, **lay_out(made, [d], [[0]])).sums for d in documents]
    for name, value in together.items():
        close(sum(sums[name] for sums in alone), value, terms=network(4), name=name)
