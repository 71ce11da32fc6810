"""A live vLLM on a CPU hands over states; the dataset is right, and `fit --follow` trains on it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import spec_data
from spec_data import open_dataset
from spec_data.capture.state_server import transfer_config
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError
from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts import load_draft
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.engines.engine_tools import CONFIGS, make_prompts, needs
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import write_corpus
from tests.tolerance import close_in_norm

pytestmark = [*needs("vllm"), pytest.mark.long]

PREFILL = 32  # tokens of a chunk: most prompts take several


def free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target, a corpus, and the URL of a vLLM that serves the target."""
    folder, tok = tmp_path_factory.mktemp("served"), tokenizer("chatml")
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.vocab_size, config.eos_token_id = len(tok), tok.eos_token_id
    config.initializer_range = 0.1
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "target")
    tok.save_pretrained(folder / "target")
    port, states_port = free_ports()
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5, 6]}}
    how = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    options = {
        "--model": str(folder / "target"),
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "256",
        "--max-num-batched-tokens": str(PREFILL),
        "--speculative-config": json.dumps(how | {"draft_model_config": draft}),
        "--kv-transfer-config": json.dumps(transfer_config(states_port)),
    }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "vllm.log").open("wb") as log:
        server = subprocess.Popen(
            [*words, *sum(options.items(), ())],
            env=os.environ | given,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 400
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < until, folder
                    time.sleep(1)
            yield folder / "target", write_corpus(folder / "chats.jsonl", rows=60), url
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def run(place: Any, out: Path, **changes: Any) -> Any:
    target, corpus, url = place
    given = {"layers": "1,2,4", "codec": "bf16", "dtype": "float32", "device": "cpu"}
    given |= {"backend": "served", "server": url, "max_shard_size": "40KB", "num_proc": 1}
    options = CaptureOptions(**given | {"allow_high_nll": True} | changes)
    return spec_data.generate(str(target), str(corpus), str(out), options)


def test_the_dataset_is_that_of_transformers(place, tmp_path):
    run(place, tmp_path / "served")
    run(place, tmp_path / "again")  # every prompt's prefix is in the cache
    run(place, tmp_path / "hf", backend="hf", server=None)
    names = ("hidden.L1", "hidden.L2", "hidden.L4", "hidden.final")
    parts = (open_dataset(tmp_path / name) for name in ("served", "again", "hf"))
    for served, again, plain in zip(*parts, strict=True):
        assert torch.equal(served["input_ids"], plain["input_ids"])
        for name in names:  # stored in bfloat16, which rounds once more
            for found in (served, again):
                close_in_norm(found[name], plain[name], torch.float32, (2**-8 / 2**-23) ** 2)
    with pytest.raises(ConfigError, match="blocks 1,2,4, and 0,3 of 0,3 are missing"):
        run(place, tmp_path / "other", layers="0,3")


def test_requests_of_users_are_not_kept(place):
    """No parameter asks for their states, so the answer tells of none."""
    body = {"model": str(place[0]), "prompt": [5, 6, 7], "max_tokens": 2}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{place[2]}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["kv_transfer_params"] is None


def test_fit_follows_a_live_engine_to_a_draft_that_decodes_losslessly(place, tmp_path):
    config = Training(
        data=str(tmp_path / "data"), out=str(tmp_path / "run"), follow=True, follow_timeout=200.0,
        steps=100, seq_len=128, batch_size=4, lr=4e-3, device="cpu",
    )  # fmt: skip
    model, errors = AutoModelForCausalLM.from_pretrained(place[0]).eval(), []
    with (tmp_path / "answers.jsonl").open("w", encoding="utf-8") as file:
        for prompt in make_prompts():  # the target's own answers, which a draft can learn
            answer = decode_plain(model, Request(prompt, Greedy(), 40)).tokens
            mask = [0] * len(prompt) + [1] * len(answer)
            row = {"input_ids": [*prompt, *answer], "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    own = (place[0], tmp_path / "answers.jsonl", place[2])

    def capture() -> None:
        try:
            run(own, tmp_path / "data")
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=capture)
    thread.start()
    fit("eagle3", config, DRAFT_OPTIONS["eagle3"](draft_vocab_size=128))
    thread.join()
    assert not errors
    draft = load_draft(tmp_path / "run" / "last").eval()
    drafter = draft.drafter(TargetHead.from_model(model))
    accepted = 0
    for document in list(open_dataset(tmp_path / "data"))[:6]:
        request = Request(document["input_ids"][:8].tolist(), Greedy(), 40)
        done = decode_speculative(model, drafter, draft.state_columns, request, 4)
        assert done.tokens == decode_plain(model, request).tokens
        accepted += sum(step.emitted - 1 for step in done.steps)
    assert accepted > 0
