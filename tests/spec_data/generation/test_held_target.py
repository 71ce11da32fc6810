"""A loaded model and its tokenizer are a target: the files that hold it are found, or saved."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_data
from spec_data.capture.model import Target
from spec_data.generation import held_target
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.terminal import memory_models
from tests.spec_data.runs import save_target

ROWS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": word}]}
    for i, word in enumerate(("yes", "no, never", "perhaps so"))
]


def options(**more):
    return CaptureOptions(
        layers="0", allow_high_nll=True, **({"codec": "bf16", "num_proc": 1} | more)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("held") / "target")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    yield
    assert not any(p.is_file() for p in (tmp_path / "cache").rglob("*")), "copies stay"


@pytest.fixture
def held(saved):
    return AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)


def files_of(path: Path, left_out: tuple[str, ...] = ()) -> dict[str, bytes]:
    files = (p for p in path.rglob("*") if p.is_file() and ".generate" not in p.parts)
    return {str(p.relative_to(path)): p.read_bytes() for p in files if p.name not in left_out}


def test_a_loaded_model_gives_the_bytes_of_its_directory(tmp_path, saved, held):
    model, _ = held
    model.train()
    model.lm_head.eval()
    model.model.norm.weight.requires_grad_(False)
    model.model.embed_tokens.weight.grad = torch.ones_like(model.model.embed_tokens.weight)
    spec_data.generate(saved, ROWS, tmp_path / "files", options(device="cpu"))
    made = spec_data.generate(held, ROWS, tmp_path / "held", options())
    assert files_of(tmp_path / "held") == files_of(tmp_path / "files")
    assert made.next_command[-2:] == ("--target", str(saved))
    assert not made.warnings or "unsaved" not in str(made.warnings)
    # as it was found
    assert model.training and not model.lm_head.training and model.model.layers[0].training
    learned = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert learned == {"model.norm.weight"}
    assert bool((model.model.embed_tokens.weight.grad == 1).all())
    assert not any(module._forward_hooks for module in model.modules())
    assert not memory_models._kept, "the model is kept while the command runs"
    # and the directory goes on with what the model began
    assert spec_data.generate(saved, ROWS, tmp_path / "held", options(device="cpu")).sealed


def test_changed_weights_are_named_by_the_hash_of_what_is_saved(tmp_path, saved, held, caplog):
    model, tokenizer = held
    begun = spec_data.generate(held, ROWS, tmp_path / "before", options())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with caplog.at_level(logging.WARNING):
        made = spec_data.generate(held, ROWS, tmp_path / "after", options())
    assert "warning[unsaved-target]" in caplog.text
    assert "model.layers.1.mlp.up_proj.weight is not as in target" in caplog.text
    assert "--target" not in made.next_command
    assert made.fingerprint != begun.fingerprint
    for part in held:
        part.save_pretrained(tmp_path / "copy" / "target")
    report = spec_data.verify(tmp_path / "after", target=tmp_path / "copy" / "target", samples=3)
    assert report.ok, report.failures
    spec_data.generate(
        tmp_path / "copy" / "target", ROWS, tmp_path / "files", options(device="cpu")
    )
    assert files_of(tmp_path / "after") == files_of(tmp_path / "files")
    assert not spec_data.verify(tmp_path / "after", target=saved, samples=1).ok
    with pytest.raises(ConfigError, match=r"target\.weights_hash"):  # no resume with other weights
        spec_data.generate((model, tokenizer), ROWS, tmp_path / "before", options())


def test_another_dtype_attention_and_tokenizer_are_those_of_the_model(tmp_path, saved, held):
    model = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.bfloat16, attn_implementation="eager"
    )
    tokenizer = held[1]
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    spec_data.generate((model, tokenizer), ROWS, tmp_path / "held", options())
    given = options(device="cpu", dtype="bfloat16", attn="eager")
    spec_data.generate(saved, ROWS, tmp_path / "files", given)
    manifests = [
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("held", "files")
    ]
    one, other = ({k: v for k, v in m.items() if k != "identity"} for m in manifests)
    assert one["settings"].pop("tokenizer") != other["settings"].pop("tokenizer")
    assert one["settings"] == other["settings"]
    assert one["target"] == other["target"]
    identities = [m["identity"] for m in manifests]
    different = {k for k, v in identities[0].items() if v != identities[1].get(k)}
    assert different == {"chat_template_hash"}


def test_workers_share_out_a_run_of_equal_models(tmp_path, saved, held):
    half = options(max_shard_size="4KB")
    for worker in ("0/2", "1/2"):
        made = spec_data.generate(held, ROWS, tmp_path / "held", half, workers=worker)
    assert made.sealed and made.documents == len(ROWS)


class Odd(torch.nn.Module):
    """A model that is none of transformers, or hides one."""

    def __init__(self, inside=None):
        super().__init__()
        if inside is not None:
            self.module = inside


def quantised(model):
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda module, given, output: output * 1.1)
    return model


def on_meta(model):
    return model.to("meta")


@pytest.mark.parametrize(
    "changed, message",
    [
        (Odd, "an Odd in memory: pass the model inside"),
        (lambda model: Odd(), "no model of transformers"),
        (lambda model: model.model, "no LM head"),
        (quantised, "quantised in memory; pass the directory"),
        (lambda model: model.double(), "torch.float64 weights; convert it"),
        (on_meta, "only a part of its weights is in memory"),
        pytest.param(torch.compile, "the one inside: model._orig_mod", marks=pytest.mark.long),
        (hooked, r"is another model \(its logits differ .* changed in this process"),
    ],
)
def test_models_that_cannot_be_captured_from_say_why(tmp_path, held, changed, message):
    model = held[0].train()
    with pytest.raises(TargetError, match=message):
        spec_data.generate((changed(model), held[1]), ROWS, tmp_path / "out", options())
    assert not (tmp_path / "out").exists()
    assert model.training and model.model.norm.weight.requires_grad


@pytest.mark.parametrize(
    "stated, more, message",
    [
        ({"dtype": "bfloat16"}, {}, "--dtype bfloat16: the loaded model has float32"),
        ({"attn": "eager"}, {}, "--attn eager: the loaded model has sdpa"),
        ({"device": "cuda:1"}, {}, "--device cuda:1: the loaded model has cpu"),
        ({"device_map": "auto"}, {}, "--device-map: the target is loaded already"),
        ({"revision": "main"}, {}, "--revision: the target is loaded already"),
        ({"context_parallel": 2}, {}, "--context-parallel: the target is loaded already"),
        ({"backend": "vllm"}, {}, "--backend vllm loads the target itself"),
        ({}, {"engine": "ray"}, "--engine ray loads the target itself"),
    ],
)
def test_options_that_contradict_a_loaded_model_are_refused(tmp_path, held, stated, more, message):
    with pytest.raises(ConfigError, match=message):
        spec_data.generate(held, ROWS, tmp_path / "out", options(**stated), **more)
    assert options(dtype="float32", attn="sdpa", device="cpu").given  # what agrees is no error
    agreeing = options(dtype="float32", attn="sdpa", device="cpu", limit=1)
    if not more and "dtype" in stated:
        assert spec_data.generate(held, ROWS, tmp_path / "out", agreeing).documents == 1


def test_a_model_without_its_tokenizer_and_other_commands_are_refused(tmp_path, held):
    with pytest.raises(ConfigError, match="without its tokenizer"):
        spec_data.generate(held[0], ROWS, tmp_path / "out", options())
    with pytest.raises(ConfigError, match="only `generate` takes one"):
        spec_data.estimate(held, ROWS, tmp_path / "out", options())
    assert not memory_models._kept


def test_an_error_in_the_capture_leaves_the_model_as_it_was(tmp_path, held, monkeypatch):
    model = held[0].train()

    def broken(self, batch, form, **more):
        original(self, batch, form, **more)
        raise RunError("the disk is gone")

    original = Target.capture
    monkeypatch.setattr(Target, "capture", broken)
    with pytest.raises(RunError, match="the disk is gone"):
        spec_data.generate(held, ROWS, tmp_path / "out", options())
    assert all(module.training for module in model.modules())
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_no_room_for_the_copy_is_said_before_it_is_written(tmp_path, held, monkeypatch):
    model = held[0]
    model.model.norm.weight.data.add_(1)

    class Full:
        free = 0

    monkeypatch.setattr(held_target.shutil, "disk_usage", lambda path: Full)
    with pytest.raises(RunError, match="SPEC_DATA_CACHE"):
        spec_data.generate(held, ROWS, tmp_path / "out", options())


def test_a_model_of_this_program_alone_is_saved_for_a_while(tmp_path, saved, held, caplog):
    model = held[0]
    model.config._name_or_path = ""
    model.name_or_path = ""
    made = spec_data.generate(held, ROWS, tmp_path / "out", options())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["target"]["name"] == "LlamaForCausalLM"
    assert "nothing says which files it was loaded from" in caplog.text
    assert made.documents == len(ROWS)


MORE = ("gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize(
    "family", ["phi3-longrope", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_families_with_state_of_their_own_give_the_same_bytes_and_come_back(tmp_path, family):
    path = save_target(tmp_path / "target", family)
    model = AutoModelForCausalLM.from_pretrained(path)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    pair = model, AutoTokenizer.from_pretrained(path)
    spec_data.generate(pair, ROWS, tmp_path / "held", options())
    spec_data.generate(path, ROWS, tmp_path / "files", options(device="cpu"))
    assert files_of(tmp_path / "held") == files_of(tmp_path / "files")
    assert [getattr(module, "rope_type", None) for module in model.modules()] == kinds
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
