"""A published draft in the commands as it is: eval on data and on the target, fit, export.

The draft has no embedding, a shuffled vocabulary map and pytorch_model.bin.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import read_target
from spec_train.losses.head import TargetHead
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.tools import same_weights
from tests.spec_train.training.tools import OPTIONS, Training, run

HIDDEN, VOCAB, SIZE, INNER = 32, 64, 40, 64  # of tiny_llama
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": SIZE,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, its target, and the draft of another trainer for it."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(6)
    data = HiddenStatesDataset(tiny_dataset(folder / "data", n_docs=20))
    draft = build_draft("eagle3", data, TargetHead.from_dataset(data.path))
    tensors = draft.checkpoint_tensors(torch.float32)
    del tensors["embed_tokens.weight"], tensors["t2d"]
    tensors["d2t"] = tiny.offsets(torch.randperm(VOCAB)[:SIZE])
    tiny.write(folder / "draft", CONFIG, tensors, "pytorch_model.bin")
    tiny_llama().save_pretrained(folder / "target")
    return folder


def test_eval_takes_what_it_lacks_from_the_target(place):
    draft: Any = load_draft(place / "draft", read_target(place / "target"))
    embedding = tiny.read_tensors(place / "target")["model.embed_tokens.weight"]
    assert torch.equal(draft.embed_tokens.weight, embedding)


def test_fit_goes_on_from_it(place, tmp_path):
    given = {"data": str(place / "data"), "out": str(tmp_path / "run")}
    config = Training(**given, steps=0, seq_len=48, init_from=str(place / "draft"))
    assert run(config, OPTIONS).finished
    new = load_draft(tmp_path / "run" / "last")
    old = load_draft(place / "draft", read_target(place / "target"))
    assert same_weights(old, new)


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_export_writes_it_for_an_engine(place, tmp_path, form):
    out, target = tmp_path / form, str(place / "target")
    checked = spec_train.export(place / "draft", out, form, target)
    assert "refuse" not in [finding.level for finding in checked.findings[form]]
    tensors = tiny.read_tensors(out)
    ids = tensors["d2t"] + torch.arange(SIZE)
    assert torch.equal(ids, ids.sort().values) and torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
