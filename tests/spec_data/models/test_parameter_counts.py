"""The size of a target from its configuration, counted again from a model with weights."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spec_data.models.loading import parameter_counts

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_counted_and_a_table_of_tokens_multiplies_nothing(tied):
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    assert parameter_counts(config, False) == {
        "parameters": total,
        "active_parameters": total - (0 if tied else 60 * 32),
    }


def test_a_token_has_some_of_the_experts():
    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=8, num_experts_per_tok=2)
    found = parameter_counts(config, False)
    experts = 2 * 8 * 3 * 32 * 48
    rest = found["parameters"] - experts
    assert found["active_parameters"] == rest - 60 * 32 + experts // 4


def test_a_family_that_cannot_be_built_is_not_counted():
    assert parameter_counts(PretrainedConfig(), False) == {}
