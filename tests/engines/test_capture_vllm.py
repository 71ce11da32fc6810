"""`--backend vllm` on a CPU: the states of transformers, proven, and every mix-up refused."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from spec_data import open_dataset
from spec_data.capture import vllm_backend, vllm_worker
from spec_data.capture.backend import BackendOptions, open_backend, vllm_version
from spec_data.capture.mask_forms import REQUESTS, SINGLE
from spec_data.models.target_options import EngineOptions
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.verification.run import examine
from tests.engines.engine_tools import _SHAPE, CONFIGS, needs
from tests.spec_data.capture.backend_contract import (
    BAD_TOKEN,
    LENGTHS,
    BackendContract,
    captured,
    documents_of,
)
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import generate_with, options, write_corpus
from tests.tolerance import close_in_norm, network, roundings

pytestmark = [*needs("vllm"), pytest.mark.long]

_HALF = ["sliding_attention", "full_attention"] * 3
FAMILIES = CONFIGS | {
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=8, layer_types=_HALF, query_pre_attn_scalar=32
    ),
    "granite": lambda: GraniteConfig(
        **_SHAPE, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=8),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
"""vLLM's attention on CPUs takes heads of 32 dimensions and more."""


class TestVLLM(BackendContract):
    """The contract of all backends."""

    name = "vllm"

    def make_model(self) -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(FAMILIES["llama"]()).float()

    def open(self, path: Path, **changes: Any) -> Any:
        return super().open(path, **({"longest": 64, "batch_tokens": 128} | changes))

    def test_requests_that_share_a_forward_are_proven(self, backend, documents):
        proof = backend.prove(documents, 48)
        assert proof.form == REQUESTS and proof.differences[REQUESTS] <= proof.tolerance
        assert max(backend.describe()["state_proof"].values()) < 1e-4

    def test_a_document_after_one_that_is_not_finite_is_untouched(self, model, tmp_path_factory):
        """vLLM leaves what is not finite in its cache, where attention of others meets it."""
        path = tmp_path_factory.mktemp("broken")
        embedding = model.get_input_embeddings().weight
        kept = embedding.data[BAD_TOKEN].clone()
        good = documents_of(LENGTHS, model.config.vocab_size)
        bad = [ids.clone() for ids in good]
        bad[1][5] = BAD_TOKEN
        embedding.data[BAD_TOKEN] = torch.nan
        model.save_pretrained(path)
        embedding.data[BAD_TOKEN] = kept
        backend = self.open(path)
        expected = captured(backend, good, SINGLE)
        for form in (REQUESTS, SINGLE, REQUESTS):
            for d, states in enumerate(captured(backend, bad, form)):
                if d != 1:
                    self.close_to(states.final, expected[d].final, f"{form}, document {d}")
        backend.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite", "mistral", "qwen3_moe"])
def test_families_are_proven(family, tmp_path):
    """Windows, scaled embeddings, residuals and logits, tied heads, experts."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.initializer_range = 0.1  # small differences stay small
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path)
    place = BackendOptions(
        path=tmp_path, layers=(-1, 0, 3, 5), device="cpu", longest=64, batch_tokens=128
    )
    documents = documents_of(LENGTHS, model.config.vocab_size)
    plain = open_backend("hf", place)
    with closing(open_backend("vllm", place)) as backend:
        assert backend.prove(documents, 48).form == REQUESTS
        assert backend.prove_head(documents) < 1e-5
        assert backend.positions(64).record() == plain.positions(64).record()
        found = captured(backend, documents, REQUESTS)
    for own, other in zip(found, captured(plain, documents, SINGLE), strict=True):
        for k in place.layers:
            close_in_norm(own.layers[k], other.layers[k], torch.float32, network(6))
        close_in_norm(own.final, other.final, torch.float32, network(6))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a tokenizer, and a corpus."""
    folder, tok = tmp_path_factory.mktemp("place"), tokenizer("chatml")
    torch.manual_seed(0)
    config = FAMILIES["qwen3"]()
    config.initializer_range = 0.05  # a target that is sure of nothing could have said anything
    model = AutoModelForCausalLM.from_config(config).float()
    model.resize_token_embeddings(len(tok), mean_resizing=False)
    model.config.eos_token_id = tok.eos_token_id
    model.save_pretrained(folder / "target")
    tok.save_pretrained(folder / "target")
    return folder / "target", write_corpus(folder / "chats.jsonl")


def run(place: tuple[Path, Path], out: Path, **changes: Any) -> Any:
    """Generate a dataset; it takes the last block too."""
    return generate_with(**options(*place, out, layers="-1,0,3,5", **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dataset_is_that_of_transformers(place, tmp_path, dtype):
    run(place, tmp_path / "vllm", backend="vllm", dtype=dtype)
    run(place, tmp_path / "hf", dtype=dtype)
    own, other = open_dataset(tmp_path / "vllm"), open_dataset(tmp_path / "hf")
    assert len(own) == len(other) > 20
    computed = getattr(torch, dtype)
    for d in range(len(own)):
        a, b = own[d], other[d]
        assert a.keys() == b.keys() and torch.equal(a["input_ids"], b["input_ids"])
        for name in a:
            if name.startswith("hidden."):  # stored in bfloat16, which rounds once more
                stored = torch.float32 if computed == torch.float32 else torch.bfloat16
                terms = roundings(6) if stored == torch.bfloat16 else (2**-8 / 2**-23) ** 2
                close_in_norm(a[name], b[name], stored, terms)
    made, plain = own.manifest, other.manifest
    assert made.packing.form == REQUESTS
    assert made.positions == plain.positions
    assert made.head == plain.head
    assert made.target.backend == "vllm" and made.target.dtype == dtype
    assert made.target.backend_version == vllm_version()
    proof = made.target.state_proof
    assert proof.keys() == {"embedding", "final", "layer 0", "layer 3", "layer 5"}
    assert max(proof.values()) < (1e-4 if dtype == "float32" else 0.1)
    for backend in ("hf", "vllm"):
        report = examine(
                data=str(tmp_path / "vllm"), target=str(place[0]), samples=6,
                running=EngineOptions(device="cpu", backend=backend),
            )  # fmt: skip
        assert not report.failures, report.failures


def test_two_runs_have_the_same_bytes_and_another_backend_may_not_resume(place, tmp_path):
    run(place, tmp_path / "a", backend="vllm")
    run(place, tmp_path / "b", backend="vllm")
    for file in sorted((tmp_path / "a").rglob("*.*")):
        if file.is_file():
            twin = tmp_path / "b" / file.relative_to(tmp_path / "a")
            assert file.read_bytes() == twin.read_bytes(), file.name
    with pytest.raises(ConfigError, match="backend: 'vllm' -> 'hf'"):
        run(place, tmp_path / "a")


def _next_block(self: Any, model: Any, layers: tuple[int, ...]) -> None:
    """A recorder that names the output of block k + 1 "k"."""
    shift = {min(k + 1, 5) if k >= 0 else k: k for k in layers}
    _RECORDER(self, model, tuple(shift))
    keep = self._finish

    def finish(*args: Any) -> None:
        keep(*args)
        last = self.forwards[-1]
        last["layers"] = {k: last["layers"][min(k + 1, 5) if k >= 0 else k] for k in layers}

    self._handles[0].remove()
    self._handles[0] = model.register_forward_hook(finish, with_kwargs=True)


_RECORDER = vllm_worker.Recorder.__init__


def _without_residual(output: Any) -> torch.Tensor:
    """A block's output without the residual that the next block adds."""
    return output[0].clone()


def _before_the_norm(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """States of the last block, which the final norm has not seen."""
    return hidden / model.model.norm.weight.mean() * torch.rand(len(hidden), 1).exp() * 2


_HEAD = r"head\(final hidden\) is not vLLM's logits"


@pytest.mark.parametrize(
    ("name", "planted", "supervision", "words"),
    [
        ("Recorder.__init__", _next_block, "final-hidden", "layer 0 is not the output of that"),
        ("block_output", _without_residual, "final-hidden", "not the final norm of its last block"),
        ("head_input", _before_the_norm, "final-hidden", _HEAD),
        ("head_input", _before_the_norm, "logits", "not the final norm of its last block"),
    ],
)
def test_planted_mistakes_are_refused(
    place, tmp_path, monkeypatch, name, planted, supervision, words
):
    monkeypatch.setattr(f"spec_data.capture.vllm_worker.{name}", planted)
    with pytest.raises(SpecDataError, match=words):
        run(place, tmp_path / "data", backend="vllm", supervision=supervision)
    assert not list((tmp_path / "data").glob("shards/*.arrow"))


@pytest.mark.parametrize(
    "changes",
    [{"enable_prefix_caching": True}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}],
    ids=["prefix caching", "chunked prefill"],
)
def test_an_engine_that_skips_or_splits_documents_is_refused(place, monkeypatch, changes):
    import vllm

    def altered(**arguments: Any) -> Any:
        return vllm.LLM(**arguments | changes)

    real = vllm_backend._import
    monkeypatch.setattr(vllm_backend, "_import", lambda device: (altered, real(device)[1]))
    wanted = BackendOptions(path=place[0], layers=(1,), device="cpu", longest=300)
    backend = open_backend("vllm", wanted)
    (document,) = documents_of((260,), 96)
    with pytest.raises(RunError, match="prefix caching or chunked prefill is on"):
        for _ in range(2):
            captured(backend, [document], SINGLE)
    backend.close()


def test_two_workers_that_share_each_layer_capture_the_same_states(place, tmp_path):
    """Tensor parallelism of two processes, each bound to a core."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core")
    run(place, tmp_path / "one", backend="vllm", dtype="float32")
    changed = options(*place, tmp_path / "two", layers="-1,0,3,5", dtype="float32")
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, json.dumps(changed)],
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "two")
    assert two.manifest.target.devices == "2 cpu"
    for d in range(len(one)):
        for name, value in one[d].items():
            if name.startswith("hidden."):
                close_in_norm(two[d][name], value, torch.bfloat16, 1)


_GENERATE = """
import json, sys
if __name__ == "__main__":
    from tests.spec_data.runs import generate_with
    options = json.loads(sys.argv[1]) | {"backend": "vllm", "vllm_tensor_parallel": 2}
    options["corpus"] = tuple(options["corpus"])
    generate_with(**options)
"""
