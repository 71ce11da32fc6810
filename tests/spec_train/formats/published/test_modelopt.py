"""NVIDIA ModelOpt's EAGLE-3: names `layers.N.`, d2t without t2d, no embedding, `eagle_config`.

Source: ModelOpt 0.47, `torch/export/plugins/hf_spec_export.py` and `hf_spec_configs.py`. Layer ids
are outputs of decoder blocks; the states are collected in the order of the blocks. The forward pass
is that of the engines, which norm the carried state once.
"""

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD, V

EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
CONFIG = tiny.PLAIN | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": None,
    "eos_token_id": 2,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "draft_vocab_size": VD,
    "rope_scaling": {"rope_type": "default", "rope_theta": tiny.THETA},
    "mlp_bias": False,
    "pretraining_tp": None,
    "eagle_config": EAGLE_CONFIG,
}


@pytest.mark.parametrize("order", [[1, 5, 8], [8, 1, 5]], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_eagle3_has_the_logits_of_the_engines(tmp_path, full, order):
    torch.manual_seed(21)
    facts, ids = tiny.target(), torch.arange(V) if full else tiny.some_ids("by frequency")
    tensors = tiny.eagle3_tensors("layers.0.", size=len(ids))
    if not full:
        tensors["d2t"] = tiny.offsets(ids)
    nested = EAGLE_CONFIG | {"eagle_aux_hidden_state_layer_ids": order}
    config = CONFIG | {"draft_vocab_size": len(ids), "eagle_config": nested}
    draft = tiny.eagle3_as_defined(tmp_path, config, tensors, facts, ids=ids)
    assert draft.config.layers == (1, 5, 8)


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"use_last_layernorm": False}, "use_last_layernorm = False"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm = True"),
        ({"use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer"),
        ({"parallel_draft_step": 4}, "parallel_draft_step = 4"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state = False"),
    ],
)
def test_another_arithmetic_is_refused(tmp_path, nested, message):
    tensors = tiny.eagle3_tensors("layers.0.") | {"d2t": torch.arange(VD)}
    config = CONFIG | {"eagle_config": EAGLE_CONFIG | nested}
    with pytest.raises(DraftError, match=f"eagle_config.{message}.* cannot be represented"):
        load_draft(tiny.write(tmp_path / "draft", config, tensors), tiny.target())
