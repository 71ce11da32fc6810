"""SafeAILab's EAGLE-3: one name for all its drafts, pytorch_model.bin, no embedding, no layer ids.

Source: SafeAILab/EAGLE, `eagle/model/cnets.py` and `eagle/traineagle3/config.json`.
"""

from pathlib import Path

import pytest
import torch

from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD

CONFIG = {name: value for name, value in tiny.SIZES.items() if name != "head_dim"} | {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "draft_vocab_size": VD,
}


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_eagle3_has_the_logits_of_its_own_class(tmp_path: Path, weights: str) -> None:
    torch.manual_seed(11)
    facts, ids = tiny.target(), tiny.some_ids("by frequency")
    tensors = tiny.eagle3_tensors() | tiny.maps(ids)
    tokens, aux = tiny.rows_of()
    want, carried = tiny.eagle3_logits(tensors, "midlayer.", tokens, aux, facts.embedding)
    folder = tiny.write(tmp_path / "draft", CONFIG, tensors, weights)
    draft, found, state = tiny.served(folder, facts, tokens, aux)
    assert draft.name == "eagle3"
    assert draft.config.layers == (1, 5, 8)  # the inputs of blocks 2, L/2 and L-3
    tiny.assert_same(tiny.by_token(found, draft.draft_ids), tiny.by_token(want, ids))
    tiny.assert_same(state, carried)
