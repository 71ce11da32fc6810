"""`eval --server` on real servers: vLLM counts, prompt for prompt, what our decoder does."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import spec_train
from spec_data.shards.errors import ConfigError
from tests.engines.engine_tools import needs
from tests.factory import tiny_llama
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.formats.tools import export

pytestmark = [*needs("vllm"), pytest.mark.long]
prompts = evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace

PORT, SECONDS = 8773, 500
"""The server's port, and the time that it has to start."""


@pytest.fixture(scope="module")
def target() -> Any:
    """With heads that vLLM's attention has on CPUs."""
    return tiny_llama(evaluate_tools.VOCAB, head_dim=32).requires_grad_(False)


@contextmanager
def vllm(model: Path, *more: str) -> Iterator[str]:
    """The address of a vLLM that serves a model, until the end of the block."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    program = "vllm.entrypoints.openai.api_server"
    words = ["--host", "127.0.0.1", "--port", str(PORT), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "128", "--max-num-seqs", "2", "--served-model-name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", program, "--model", str(model), *words, *more],
        env=os.environ | settings,
    )
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "vLLM did not start"
                time.sleep(1)
        yield f"http://127.0.0.1:{PORT}/v1"
    finally:
        process.terminate()
        process.wait(60)


def test_vllm_counts_what_our_decoder_does(workplace, tmp_path):
    out = export(workplace / "draft", "vllm", tmp_path / "exported", workplace / "target")
    how = f'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 4}}'
    options = evaluate_tools.config_of(workplace)
    with vllm(workplace / "target", "--speculative-config", how) as url:
        report = spec_train.evaluate(**options, server=url).figures
    served = report["server"]
    assert served["engine"] == "vLLM" and served["draft_tokens"] == report["draft_tokens"] == 4
    assert served["beside_others"] == 0 and report["warnings"] == []
    rows = [(one["rounds"], one["drafted"]) for one in served["per_prompt"]]
    assert rows == [(one["rounds"], 4 * one["rounds"]) for one in report["per_prompt"]]
    cut = [one["rounds"] + one["accepted"] for one in served["per_prompt"]]
    for counted, ours in zip(cut, report["per_prompt"], strict=True):
        assert 0 <= counted - ours["emitted"] <= 2 * 4  # drafts past the end, of both turns


def test_a_server_without_a_draft_is_refused(workplace):
    with (
        vllm(workplace / "target") as url,
        pytest.raises(ConfigError, match=r"vLLM verified no draft.*--speculative-config"),
    ):
        spec_train.evaluate(server=url, prompts=workplace / "prompts.jsonl", max_new_tokens=8)
