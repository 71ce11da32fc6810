"""EAGLE-3 checkpoints: the files, and the shapes and rope taken from the target."""

import json
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError
from spec_data.shards.packing import row_layout
from spec_train.drafts.eagle3.draft import Eagle3Config, Eagle3Draft
from spec_train.drafts.layers import Rotary
from spec_train.drafts.slots import document_lengths, document_offsets
from spec_train.drafts.unroll import Unroll
from spec_train.options.draft_options import Eagle3Options
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import close, network

LENGTHS = (9, 23, 4, 1, 12, 17)

dataset, head = any_draft.dataset, any_draft.head

# --- files ---------------------------------------------------------------------------------------


def test_options_that_the_dataset_cannot_serve_are_refused(dataset, head):
    for changes, message in (
        ({"layers": "0,7"}, r"no layer \[7\]"),
        ({"layers": "0;1"}, "commas"),
        ({"ttt_steps": 0}, "ttt-steps"),
    ):
        with pytest.raises(DraftError, match=message):
            build_draft("eagle3", dataset, head, **changes)
    assert build_draft("eagle3", dataset, head, layers="2,0,2").config.layers == (0, 2)


# Cosines and sines of equal angles, times a factor; they depend on the place in a block.
ANGLES = {"terms": 4, "magnitude": 2.0}

# --- shapes and rope from the target -------------------------------------------------------------


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


@pytest.mark.parametrize("longrope", [False, True])
def test_packed_documents_keep_their_own_rope(longrope: bool) -> None:
    """The unroll uses each document's own length, so the batch does not matter."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 50.0}
    if longrope:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 12, **_FACTORS}
    settings = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    draft = Eagle3Draft(_config(settings | {"rope_parameters": rope}))
    document_ids, position_ids = row_layout([LENGTHS], sum(LENGTHS))
    aux, tokens = torch.randn(1, sum(LENGTHS), 32), torch.randint(0, 64, (1, sum(LENGTHS)))
    every = torch.arange(sum(LENGTHS))[None]
    with torch.no_grad():
        packed = Unroll(draft, aux, tokens, document_ids, position_ids, every).advance(tokens)
        for d, length in enumerate(LENGTHS):
            own = document_ids[0] == d
            alone = torch.arange(length)[None]
            state = Unroll(draft, aux[:, own], tokens[:, own], 0 * alone, alone, alone).advance(
                tokens[:, own]
            )
            close(packed[:, own], state, terms=network(1))
