"""Published drafts in the commands as they are: eval on data, fit, export.

The EAGLE-3 has no embedding, a shuffled vocabulary map and pytorch_model.bin. The DFlash has the
layout of z-lab: no embedding, no head, the target's `tie_word_embeddings`, a window, and causal.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.evaluation.exporting import find_target
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.drafts.any_draft import SMALL, build_draft
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.tools import same_weights

VOCAB, SIZE = 64, 40
SHAPE: dict[str, Any] = {  # of tiny_llama
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
TYPES = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": SHAPE
    | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": SIZE,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    "dflash": SHAPE
    | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 4,
        "layer_types": TYPES,
        "sliding_window": 6,
        "use_sliding_window": True,
        "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [2, 0]},
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": SMALL["eagle3"],
    "dflash": SMALL["dflash"] | {"block_size": 4, "layers": "0,2"},
}
WINDOW = {"sliding_window": 6, "layer_types": ",".join(TYPES)}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, its target, and the drafts of other trainers for it."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(6)
    data = HiddenStatesDataset(tiny_dataset(folder / "data", n_docs=20))
    for kind, config in CONFIGS.items():
        draft = build_draft(kind, data, TargetHead.from_dataset(data.path), **OPTIONS[kind])
        tensors = draft.checkpoint_tensors(torch.float32)
        del tensors["embed_tokens.weight"]
        weights = "model.safetensors"
        if kind == "eagle3":
            del tensors["t2d"]
            tensors["d2t"] = tiny.offsets(torch.randperm(VOCAB)[:SIZE])
            weights = "pytorch_model.bin"
        tiny.write(folder / kind, config, tensors, weights)
    tiny_llama().save_pretrained(folder / "target")
    return folder


def read(place: Path, kind: str) -> Any:
    return load_draft(place / kind, find_target(str(place / "target")))


def test_eval_measures_it_on_a_dataset(place):
    config = dict(draft=str(place / "dflash"), data=str(place / "data"), device="cpu")
    assert run_eval(config)["acceptance_length"] >= 1


@KINDS
def test_fit_goes_on_from_it(place, tmp_path, kind):
    given = {"data": str(place / "data"), "out": str(tmp_path / "run"), "device": "cpu"}
    config = Training(**given, steps=0, seq_len=64, init_from=str(place / kind))
    options = OPTIONS[kind] | (WINDOW if kind == "dflash" else {})
    assert fit(kind, config, DRAFT_OPTIONS[kind](**options)).finished
    old, new = read(place, kind), load_draft(tmp_path / "run" / "last")
    assert new.config.layers == old.config.layers
    assert new.config.layer_types == old.config.layer_types
    assert same_weights(old, new)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("eagle3", form) for form in ("vllm", "sglang", "speculators")),
        *(("dflash", form) for form in ("vllm", "sglang")),
    ],
)
def test_export_writes_it_for_an_engine(place, tmp_path, kind, form):
    out, target = tmp_path / form, str(place / "target")
    checked = spec_train.export(place / kind, out, form, target)
    assert "refuse" not in [finding.level for finding in checked.findings[form]]
    assert same_weights(read(place, kind), load_draft(out, find_target(target)))
    for draft in (place / kind, out):
        diagnosis = spec_train.doctor(draft, target=target, documents=0, device="cpu")
        assert diagnosis.kind == kind and diagnosis.named("files").state == "ok"
    if kind == "eagle3":
        tensors = tiny.read_tensors(out)
        ids = tensors["d2t"] + torch.arange(SIZE)
        assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])  # ascending
    else:
        raw = tiny.read_config(out)
        assert raw["target_layer_ids"] == [0, 2] and raw["sliding_window"] == 6


def test_a_form_that_vllm_would_misread_is_refused(place, tmp_path):
    """vLLM makes every layer of a speculators file causal, or none."""
    draft, target = str(place / "dflash"), str(place / "target")
    with pytest.raises(DraftError, match="causal attention in the full layers"):
        spec_train.export(draft, tmp_path / "out", "speculators", target)
