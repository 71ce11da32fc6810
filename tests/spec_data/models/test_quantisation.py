"""Quantised checkpoints: recorded, named by fit and verify, refused by name where a package lacks.

The checkpoint that runs here has fp8 weights in blocks with a scale each, as DeepSeek-V3 and the
FP8 releases of Qwen3 have. A CPU has no kernel for it, so transformers multiplies the weights out.
"""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.capture.hooks import check_head
from spec_data.capture.model import Target
from spec_data.generation import setup as generation_setup
from spec_data.models.loading import load_model
from spec_data.shards.errors import TargetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Quantised
from spec_data.verification.run import examine
from tests.families import VOCAB
from tests.spec_data.runs import generate_with, options, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.fitted import edit

BLOCK = 16
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to fp8, a scale per block; plain loops over the blocks."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[part].abs().max() / LARGEST
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def times_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """What a checkpoint in fp8 means, float32."""
    wide = codes.float().clone()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            wide[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scales[i, j]
    return wide


def quantise(folder: Path) -> dict[str, Tensor]:
    """Store the blocks of a saved target in fp8; return their weights multiplied out."""
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "layers" in name and weight.dim() == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(weight)
            meant[name] = times_scales(tensors[name], tensors[f"{name}_scale_inv"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    edit(folder / "config.json", quantization_config=fp8)
    return meant


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = save_target(tmp_path_factory.mktemp("fp8") / "target")
    return folder, quantise(folder)


def test_the_states_are_those_of_the_weights_multiplied_out(fp8):
    folder, meant = fp8
    target = Target.from_pretrained(folder, (0, 3), dtype="float32", device="cpu")
    assert target.quantisation == Quantised(method="fp8", dequantised=True)
    loaded = dict(target.model.named_parameters())
    for name, weight in meant.items():
        assert torch.equal(loaded[name], weight), name
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    captured = target.forward(ids, torch.zeros_like(ids), torch.arange(9)[None], None)
    plain = target.model(ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(captured.layers[3], plain.hidden_states[4])


def test_datasets_verify_and_fit_say_that_the_target_was_quantised(fp8, tmp_path, caplog):
    folder, _ = fp8
    corpus = write_corpus(tmp_path / "corpus.jsonl", 12)
    given = options(folder, corpus, tmp_path / "data", dtype="float32", layers="0,2,4")
    manifest = generate_with(**given)
    assert manifest is not None
    said = "fp8, dequantised when it was loaded"
    assert str(manifest.target.quantised_as) == said
    assert manifest.identity["quantization"]["quant_method"] == "fp8"
    found = examine(data=str(tmp_path / "data"), target=str(folder), samples=3)
    assert not found.failures and f"captured quantised: {said}" in found.details()
    caplog.set_level(logging.INFO)
    flat.fit(*("eagle3", tmp_path / "data", tmp_path / "run"), steps=1, seq_len=64, device="cpu")
    assert f"the target was quantised: {said}" in caplog.text
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config["spec_train"]["origin"]["quantization"]["quant_method"] == "fp8"
    assert len(HiddenStatesDataset(tmp_path / "data")) == manifest.documents.stored


def test_a_missing_package_is_named_before_the_corpus_is_read(tmp_path, monkeypatch):
    if importlib.util.find_spec("optimum") is not None:
        pytest.skip("optimum is installed")
    folder = save_target(tmp_path / "target")
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})

    def reads(*_arguments: object) -> None:
        raise AssertionError("the corpus is read")

    monkeypatch.setattr(generation_setup, "make_plan", reads)
    given = options(folder, write_corpus(tmp_path / "corpus.jsonl", 4), tmp_path / "out")
    with pytest.raises(TargetError, match=r"quantised \(gptq.*optimum") as caught:
        generate_with(**given)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(TargetError, match="optimum"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_head_is_refused(dtype):
    head = torch.nn.Linear(4, 8, bias=False)
    head.weight = torch.nn.Parameter(head.weight.to(dtype), requires_grad=False)
    with pytest.raises(TargetError, match="without lm_head"):
        check_head(head)
