"""Numbers of a config.json: what a family has by itself is no wrong number."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from spec_data.models.config_values import wrong_value


def test_no_family_of_transformers_is_refused_for_its_own_values():
    kinds = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    tried = 0
    for kind in sorted(kinds):
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # parts of it have no defaults, or need a library
            continue
        tried += 1
        assert wrong_value(config) is None, kind
    assert tried > 100


@pytest.mark.parametrize("name", ["head_dim", "qk_rope_head_dim"])
def test_a_head_without_a_size_is_refused_unless_another_part_has_one(name):
    assert f"{name} is 0" in str(wrong_value({name: 0}))
    assert wrong_value({name: 0, "qk_nope_head_dim": 64}) is None
