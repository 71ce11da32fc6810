"""A target with an MTP block, as a user meets it: generate, fit, eval, export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import spec_train
from spec_data.models.mtp import MTP, mtp_tensors, own_tensors
from spec_data.models.weight_files import weights_hash
from spec_data.shards.errors import ConfigError, DatasetError, DraftError, MissingError
from spec_train.drafts import load_draft
from spec_train.drafts.mtp.draft import MtpConfig
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.options.training import Training
from tests.factory import tiny_dataset
from tests.spec_data.runs import run, write_corpus
from tests.spec_train.drafts.mtp.targets import BLOCKS, config_of, write_target
from tests.spec_train.evaluation.tools import run_eval

RECURRENT = ("qwen3_next", "qwen3_5")  # `eval` refuses them
FITTED = [
    "glm",
    "mimo",
    *(pytest.param(n, marks=pytest.mark.long) for n in ("deepseek", *RECURRENT)),
]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=FITTED)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a dataset of it, and a draft of four steps."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_target(folder / "target", request.param)
    write_corpus(folder / "c.jsonl", 8)
    run(folder / "target", folder / "c.jsonl", folder / "data", layers="0")
    fitted(folder, "run")
    return folder


def fitted(folder: Path, out: str, **more: Any) -> Any:
    settings = {"steps": 4, "seq_len": 128, "device": "cpu", "validation": 0.2, "lr": 1e-2} | more
    config = Training(data=str(folder / "data"), out=str(folder / out), **settings)
    return spec_train.fit(config, MtpOptions(depth=2, norm_output=True))


def test_generate_copies_the_block_and_fit_starts_from_it(place: Path) -> None:
    stored, target = load_file(place / "data" / MTP), load_file(place / "target" / WEIGHTS)
    assert all(torch.equal(value, target[name]) for name, value in stored.items())
    assert not any("shared_head.head" in name or "embed_tokens" in name for name in stored)
    fitted(place, "still", lr=1e-30, steps=1)
    own = load_draft(place / "still" / "last").state_dict()
    whole = sum(value.numel() for value in stored.values())
    assert whole == sum(v.numel() for n, v in own.items() if "embed_tokens" not in n)
    name = next(
        n for n in stored if n.endswith(("eh_proj.weight", "input_proj.weight", "mtp.fc.weight"))
    )
    assert torch.allclose(own["fc.weight"], stored[name], atol=1e-6)
    trained = load_draft(place / "run" / "last")
    assert trained.config.states_first == ("input_proj" in name)
    assert not torch.equal(trained.fc.weight, own["fc.weight"])


def test_eval_decodes_losslessly_and_a_draft_goes_on(place: Path) -> None:
    if place.name.startswith(RECURRENT):
        pytest.skip("a recurrent target")
    settings = {"data": str(place / "data"), "target": str(place / "target"), "split": "all"}
    prompts = {"prompts": str(place / "c.jsonl"), "limit": 2, "device": "cpu"}
    report = run_eval({"draft": str(place / "run"), "max_new_tokens": 6, **settings, **prompts})
    assert report["identical"] + report["ties"] == report["responses"] == 2
    assert report["acceptance_length"] >= 1
    assert fitted(place, "further", steps=1, init_from=str(place / "run")).finished


def test_export_writes_the_block_into_a_copy_of_the_target(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "sharded"  # in two files and an index, as checkpoints are
    shutil.copytree(place / "target", target)
    tensors = load_file(target / WEIGHTS)
    (target / WEIGHTS).unlink()
    first = {n for n in tensors if n.startswith(("model.embed", "model.layers.0", "model.norm"))}
    files = {n: f"model-0000{1 + (n not in first)}-of-00002.safetensors" for n in tensors}
    for file in set(files.values()):
        part = {n: v for n, v in tensors.items() if files[n] == file}
        save_file(part, target / file, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    out = tmp_path / "served"
    given = {"draft": str(place / "run" / "last"), "format": "target", "target": str(target)}
    result = spec_train.export(**given, out=str(out))
    (line,) = result.servings[0].lines
    assert "spec-train eval" not in result.card, "no draft directory"
    assert line.startswith(f"vllm serve {out}") and '"method": "mtp"' in line
    others = {serving.engine.split()[0]: serving.lines for serving in result.servings}
    if place.name.startswith("glm"):
        words = " ".join(others["SGLang"][0].split())
        assert (
            f"--model-path {out} --speculative-algorithm NEXTN --speculative-num-steps 2" in words
        )
        assert "--speculative-draft-model-path" not in words, "the block is in the target's files"
        assert others["llama.cpp"][-1].endswith("--spec-type draft-mtp --spec-draft-n-max 2")
    changed = {**load_file(out / files["lm_head.weight"])}
    assert (out / files["model.norm.weight"]).is_symlink() and (out / "config.json").is_symlink()
    assert changed.keys() == tensors.keys() - first
    block = load_file(place / "data" / MTP).keys()
    differs = {n for n in changed if not torch.equal(changed[n], tensors[n])}
    assert differs <= block and len(differs) > len(block) / 2
    model = AutoModelForCausalLM.from_pretrained(out)  # the index and the links are whole
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    own, _ = own_tensors(mtp_tensors(out, BLOCKS), BLOCKS)
    trained = load_draft(place / "run" / "last").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in own.items())
    assert weights_hash(out) == weights_hash(target), "it computes what the target computes"
    again = tmp_path / "again"
    shutil.copytree(out, again)  # with other weights, it is no copy of that target any more
    changed["lm_head.weight"][0] += 1
    save_file(changed, again / files["lm_head.weight"], metadata={"format": "pt"})
    assert weights_hash(again) != weights_hash(target)
    words = " ".join(spec_train.export(draft=given["draft"]).next_command)
    assert words == (
        f"spec-train export --draft {given['draft']} --format target --out {place / 'run'}-target "
        "--target MODEL"
    ), "not into the run, which deletes what it does not know"
    with pytest.raises(ConfigError, match="pass --target"):
        spec_train.export(
            draft=str(place / "run" / "last"), format="target", out=str(tmp_path / "x")
        )
    (target / files["lm_head.weight"]).unlink()
    with pytest.raises(MissingError, match=r"no such file, but model\.safetensors\.index\.json"):
        spec_train.export(**given, out=str(tmp_path / "y"))
    with pytest.raises(DraftError, match=r"in the files of its target: --format target"):
        spec_train.export(draft=str(place / "run" / "last"), format="vllm", out=str(tmp_path / "z"))


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite"])
def test_a_block_that_engines_feed_otherwise_must_be_for_one_of_them(kind: str) -> None:
    """SGLang, llama.cpp: after the norm; vLLM: before it. A block of one step is right in all."""
    table = config_of("glm", 14).to_dict() | {"model_type": kind}

    def config(**options: Any) -> MtpConfig:
        given = {"options": MtpOptions(**options), "vocab_size": 14}
        return MtpConfig.from_target(table, **given)

    for given in ({}, {"depth": 2}, {"norm_output": None}):
        with pytest.raises(
            DraftError, match=r"disagree .*--norm-output for SGLang.*vLLM; or --depth 1"
        ):
            config(**given)
    assert config(depth=1).norm_output and config(norm_output=True).norm_output
    assert not config(norm_output=False).norm_output
    table = config_of("deepseek", 14).to_dict()
    assert config().norm_output


def test_a_dataset_without_the_block_is_refused_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is said about the run."""
    tiny_dataset(tmp_path / "data", n_docs=6)
    caplog.set_level("INFO")
    with pytest.raises(DatasetError, match=r"holds no target/mtp\.safetensors: .*fit eagle3"):
        fitted(tmp_path, "run")
    assert "hidden size" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_a_quantised_block_is_not_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    write_target(tmp_path / "target", "mimo")
    tensors = load_file(tmp_path / "target" / WEIGHTS)
    name = "model.mtp_layers.0.input_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "target" / WEIGHTS, metadata={"format": "pt"})
    write_corpus(tmp_path / "c.jsonl", 4)
    manifest = run(tmp_path / "target", tmp_path / "c.jsonl", tmp_path / "data", layers="0")
    assert MTP not in manifest.files
    assert f"warning[mtp]: the target's MTP block is quantised ({dtype})" in caplog.text
