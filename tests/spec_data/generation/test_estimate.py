"""estimate: bytes of every file, from config and tokenizer alone, and the probe."""

import json

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import spec_data
from spec_data.cli import main
from spec_data.models import resolve
from spec_data.shards.errors import SpecDataError
from tests.factory import mtp_block
from tests.spec_data.runs import arguments, estimate_with, options, run, save_target


@pytest.mark.parametrize(
    ("family", "codec"), [("llama", "bf16"), ("gpt2", "default"), ("gemma3", "default")]
)
def test_every_file_is_counted_from_config_and_tokenizer_alone(family, codec, corpus, tmp_path):
    target = save_target(tmp_path / "target", family)
    given = options(target, corpus, tmp_path / "data", codec=codec, dtype="float32")
    run(target, corpus, tmp_path / "data", codec=codec, dtype="float32")
    (target / "model.safetensors").unlink()
    found = estimate_with(**given | {"out": str(tmp_path / "none")})
    head = (tmp_path / "data" / "target" / "head.safetensors").stat().st_size
    assert found.other_bytes["head"] == pytest.approx(head, abs=1024)
    index = (tmp_path / "data" / "index.arrow").stat().st_size
    assert found.other_bytes["index"] == pytest.approx(index, abs=2048)
    files = [p for p in (tmp_path / "data" / "target").iterdir() if p.name != "head.safetensors"]
    assert found.other_bytes["target"] == pytest.approx(
        sum(p.stat().st_size for p in files), abs=1024
    )
    written = sum(p.stat().st_size for p in (tmp_path / "data").rglob("*") if p.is_file())
    assert abs(found.bytes_needed - written) <= 0.01 * written + (64 << 10)


def test_an_mtp_block_is_counted(corpus, tmp_path):
    target = save_target(tmp_path / "target", "llama")
    file, block = (
        target / "model.safetensors",
        mtp_block(AutoModelForCausalLM.from_pretrained(target)),
    )
    save_file(load_file(file) | block, file, metadata={"format": "pt"})
    given = options(target, corpus, tmp_path / "data", dtype="float32")
    found = estimate_with(**given)
    run(target, corpus, tmp_path / "data", dtype="float32")
    stored = (tmp_path / "data/target/mtp.safetensors").stat().st_size
    files = [p for p in (tmp_path / "data/target").iterdir() if p.name != "head.safetensors"]
    assert stored > 10_000 and found.other_bytes["target"] == pytest.approx(
        sum(p.stat().st_size for p in files), abs=4096
    )


def test_a_hub_target_downloads_no_weights(corpus, tmp_path, monkeypatch, capsys):
    target = save_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    asked = []

    def download(name, revision=None, allow_patterns=(), ignore_patterns=()):
        asked.append(allow_patterns)
        return str(target)

    monkeypatch.setattr(resolve, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    command = ["estimate", "--target", "some/model", "--corpus", str(corpus), "--layers", "0,2"]
    assert main([*command, "--out", str(tmp_path / "data"), "--json"]) == 0
    assert not any("safetensors" in pattern for pattern in asked[0])
    facts = json.loads(capsys.readouterr().out)
    assert facts["probe"] is None
    assert facts["bytes_needed"] == facts["bytes"] + sum(facts["other_bytes"].values())
    with pytest.raises(SpecDataError):  # generate needs the weights
        spec_data.generate("some/model", corpus, tmp_path / "data")
    assert "*.safetensors" in asked[1]


def test_a_probe_measures_speed_time_and_memory(target, corpus, tmp_path):
    given = options(target, corpus, tmp_path / "data")
    found = spec_data.estimate(**arguments(given), probe=True)
    assert found.probe is not None
    assert found.probe.tokens_per_second > 0
    expected = found.tokens / found.probe.tokens_per_second
    assert found.probe.seconds == pytest.approx(expected, rel=1e-6)
    assert found.probe.memory_bytes > 10 << 20
    assert not (tmp_path / "data").exists()
    assert found.facts()["probe"]["device"] == "cpu"
