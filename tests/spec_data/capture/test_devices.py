"""Targets on several devices: the CPU and the disk here, two processes of torchrun.

No test of this file has a second GPU; the code that moves states from block to block is the same.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from spec_data.capture.model import Target
from spec_data.capture.processes import leading
from spec_data.models import loading
from spec_data.models.target_options import Spread
from spec_data.shards.errors import ConfigError, SpecDataError, TargetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from tests.families import LAYERS, VOCAB, tiny_model
from tests.spec_data.capture.backend_contract import BackendContract
from tests.spec_data.runs import run, save_target, write_corpus
from tests.tolerance import close, network


def offloaded(head: str = "disk", embedding: str = "cpu") -> dict[str, str]:
    """Every other block on disk."""
    blocks = {f"model.layers.{k}": "cpu" if k % 2 else "disk" for k in range(LAYERS)}
    ends = {"model.embed_tokens": embedding, "model.norm": "disk", "lm_head": head}
    return ends | {"model.rotary_emb": "cpu"} | blocks


class TestOffloadedToDisk(BackendContract):
    """A target of which only a few parts are in memory at a time."""

    def open(self, path: Path, **changes: Any):
        """Open the backend with every other block on disk."""
        spread = Spread(device_map=offloaded())
        return super().open(path, **{"device": "auto", "spread": spread} | changes)

    def test_parts_of_it_are_on_disk(self, backend):
        weights = dict(backend.model.named_parameters())
        assert {str(w.device) for w in weights.values()} == {"cpu", "meta"}
        assert backend.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "place"), [("gemma3", "cpu"), ("gemma3", "disk"), ("qwen3_moe", "disk")]
)
def test_offloading_changes_no_bit(family, place, tmp_path):
    """gemma3 has a tied head and windows; experts are stored in another form than they run in."""
    tiny_model(family).save_pretrained(tmp_path)
    plain = Target.from_pretrained(tmp_path, (-1, 0, 3, 5), device="cpu")
    spread = Spread(device_map=offloaded(place, place))
    target = Target.from_pretrained(tmp_path, (-1, 0, 3, 5), spread=spread)
    assert target.head == plain.head
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))
    layout = torch.zeros_like(ids), torch.arange(30)[None]
    ours = target.forward(ids, *layout, None, full_logits=True)
    theirs = plain.forward(ids, *layout, None, full_logits=True)
    assert all(torch.equal(ours.layers[k], theirs.layers[k]) for k in plain.layers)
    assert torch.equal(ours.final, theirs.final) and torch.equal(ours.logits, theirs.logits)
    assert torch.equal(target.logits_of(ours.final), plain.logits_of(ours.final))


def test_a_generated_dataset_has_the_same_shards(tmp_path):
    target, corpus = save_target(tmp_path / "target"), write_corpus(tmp_path / "corpus.jsonl", 12)
    run(target, corpus, tmp_path / "plain")
    memory = json.dumps({"cpu": "100KB"})
    changes = {"device": "auto", "device_map": "auto", "max_memory": memory}
    run(target, corpus, tmp_path / "spread", **changes)
    for shard in sorted((tmp_path / "plain" / "shards").iterdir()):
        assert shard.read_bytes() == (tmp_path / "spread" / "shards" / shard.name).read_bytes()
    head = (tmp_path / "plain" / "target" / "head.safetensors").read_bytes()
    assert head == (tmp_path / "spread" / "target" / "head.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", {"": torch.device("cuda:1")}), ("cpu", None)]
)
def test_weights_are_read_to_their_device(device, expected, tmp_path, monkeypatch):
    """No copy of the whole model is made in memory: from_pretrained is told the device."""
    tiny_model("llama").save_pretrained(tmp_path)
    load = Mock(side_effect=OSError)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(loading, "use_device", torch.device)
    monkeypatch.setattr(loading, "check_devices", lambda *_: None)
    with pytest.raises(TargetError, match="cannot load"):
        loading.load_model(str(tmp_path), device=device)
    assert load.call_args.kwargs.get("device_map") == expected


def test_tensor_parallelism_asks_for_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with (
        pytest.raises(ConfigError, match="torchrun --nproc-per-node"),
        leading(Spread(tensor_parallel=True)),
    ):
        raise AssertionError("the command must not run")


@pytest.mark.long
def test_two_processes_capture_one_target(tmp_path):
    """--tp-plan: every layer in two shards, states of rank 0 equal to dtype noise."""
    target, corpus = save_target(tmp_path / "target", "qwen3"), tmp_path / "corpus.jsonl"
    write_corpus(corpus, 12)
    run(target, corpus, tmp_path / "alone")
    flags = {"layers": "0,2,4", "codec": "bf16", "tp-plan": "auto", "dtype": "float32"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "spec_data", "generate", "--quiet"]
    command += ["--target", str(target), "--corpus", str(corpus), "--out", str(tmp_path / "both")]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours, theirs = (HiddenStatesDataset(tmp_path / name) for name in ("both", "alone"))
    assert list(ours.doc_ids) == list(theirs.doc_ids)
    for row, other in zip(ours, theirs, strict=True):
        for name in ("hidden.L0", "hidden.L2", "hidden.L4", "hidden.final"):
            # stored in bf16: a difference of float32 may round to the next number of bf16
            terms = network(LAYERS)
            close(row[name].float(), other[name].float(), terms=terms, stored=torch.bfloat16)
    assert ours.manifest.head == theirs.manifest.head
    found = examine(data=str(tmp_path / "both"), target=str(target), samples=4)
    assert not found.failures


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model": "cpu", "lm_head": "disk"}, "name the same device for both"),
        ({"": "disk", "lm_head": "cpu"}, "weight is on the meta device"),
        ({"": "gpu7"}, "--device-map: gpu7: not usable on this machine"),
        ({"": 99}, "--device-map: cuda:99: not usable on this machine"),
    ],
)
def test_a_device_map_that_does_not_fit_is_an_error_for_users(device_map, message, tmp_path):
    """The first parts a tied head from its embedding; a KeyError would follow in a forward."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(SpecDataError, match=message):
        loading.load_model(str(tmp_path), spread=Spread(device_map=device_map))
