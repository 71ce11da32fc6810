"""`generate --backend served`: states of a running engine are proven, and every mix-up is named."""

import json
import threading
import urllib.error

import pytest
import torch

import spec_data
from spec_data.capture.state_server import StateServer, fetch_states
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from tests.spec_data.conversion.stand_in_engine import StandIn
from tests.spec_data.runs import digests, verify, write_corpus
from tests.tolerance import close, network


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", rows=12)


def run(target, corpus, out, server=None, **changes):
    given = {"layers": "1,2,4", "codec": "bf16", "dtype": "float32", "device": "cpu", "num_proc": 1}
    given |= {"max_shard_size": "40KB", "allow_high_nll": True}
    given |= {"backend": "served", "server": server.url} if server else {}
    return spec_data.generate(str(target), str(corpus), str(out), CaptureOptions(**given | changes))


def test_the_dataset_is_that_of_transformers(tmp_path, target, corpus):
    with StandIn(target) as server:
        made = run(target, corpus, tmp_path / "served", server)
        assert server.hits > 0  # prompts began with cached ones
    run(target, corpus, tmp_path / "hf")
    ours, theirs = (HiddenStatesDataset(tmp_path / name) for name in ("served", "hf"))
    assert made.sealed and len(ours) == len(theirs) == 12 and len(ours.manifest.shards) > 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["target_argmax"], b["target_argmax"])
        for name in ("hidden.L1", "hidden.L2", "hidden.L4", "hidden.final"):
            close(a[name].float(), b[name].float(), terms=network(6), dtype=torch.bfloat16)
    record = Manifest.read(tmp_path / "served" / "manifest.json").target
    assert (record.backend, record.backend_version) == ("served", "vLLM 0")
    given = {"data": str(tmp_path / "served"), "target": str(target), "device": "cpu"}
    assert verify(**given, samples=4) == 0
    with pytest.raises(ConfigError, match="verify compares logits as well"):
        verify(**given, backend="served", server="http://localhost:1")


@pytest.mark.long
def test_layers_may_come_in_any_order_and_more_of_them(tmp_path, target, corpus):
    with StandIn(target, layers=(4, 0, 2, 1)) as server:
        run(target, corpus, tmp_path / "a", server)
    with StandIn(target) as server:
        server.lose = "norm"  # the last state is the one after the final norm
        run(target, corpus, tmp_path / "b", server)
    for a, b in zip(*(HiddenStatesDataset(tmp_path / n) for n in "ab"), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a if name.startswith("hidden.L"))
        close(a["hidden.final"].float(), b["hidden.final"].float(), terms=32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("lose", "error", "message"),
    [
        pytest.param(
            *("cached prefix", RunError, r"states of tokens 0 to \d+ are not those that"),
            marks=pytest.mark.long,
        ),
        ("first chunk", RunError, r"states of tokens 0 to \d+ are not those that the target"),
        ("shift", RunError, "output of block 1 of the previous token"),
        pytest.param(
            *("nan", RunError, "not those that the target|is no state of this target|unusable"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("tokens", RunError, "token ids with states of shape .* some are missing"),
            marks=pytest.mark.long,
        ),
        ("another request", RunError, "states of other tokens"),
        ("form", RunError, "has not the form of vLLM's"),
        ("head", TargetError, "is not the server's logits"),
        (
            "connector",
            ConfigError,
            "hands over no states. Start it so:\n  vllm serve .*ServedStates",
        ),
    ],
)
def test_what_an_engine_gets_wrong_is_named(tmp_path, target, corpus, lose, error, message):
    with StandIn(target, lose=lose) as server, pytest.raises(error, match=message):
        run(target, corpus, tmp_path / "set", server)
    assert not list((tmp_path / "set").glob("shards/*"))


def test_a_busy_server_is_asked_again(tmp_path, target, corpus, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with StandIn(target) as server:
        server.busy = [503, 429]
        run(target, corpus, tmp_path / "set", server)
        assert not server.busy
        server.busy = [503] * 1000
        with pytest.raises(RunError, match="/v1/completions: 503"):
            run(target, corpus, tmp_path / "other", server)


def test_a_server_that_comes_back_with_other_layers_is_proven_again(
    tmp_path, target, corpus, monkeypatch
):
    """Restarted while `generate` waits for it: the states are those of other blocks from then."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with StandIn(target) as server:
        run(target, corpus, tmp_path / "whole", server)
        answer, left = server.answer, [server.requests - 3]

        def restart(asked):
            left[0] -= 1
            if left[0] == 0:
                with server.lock:  # not while a request is computed
                    server.layers, server.cached = (4, 2, 1), {}
                raise BrokenPipeError
            return answer(asked)

        server.answer = restart
        run(target, corpus, tmp_path / "set", server)
        assert left[0] < 0 and server.keys == {"Bearer secret"}
    assert digests(tmp_path / "set" / "shards") == digests(tmp_path / "whole" / "shards")


def test_the_state_before_the_final_norm_is_the_last_block(tmp_path, target, corpus):
    with StandIn(target, layers=(2, 1)) as server:
        run(target, corpus, tmp_path / "served", server, layers="1,2,5")
    run(target, corpus, tmp_path / "hf", layers="1,2,5")
    ours, theirs = (HiddenStatesDataset(tmp_path / name) for name in ("served", "hf"))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("hidden.L1", "hidden.L5", "hidden.final"):
            close(a[name].float(), b[name].float(), terms=network(6), dtype=torch.bfloat16)


@pytest.mark.long
def test_a_wrong_layer_is_named(tmp_path, target, corpus):
    """Off by one, as by another count of layer ids: the layers are found, not asked for."""
    with StandIn(target, layers=(2, 3, 5)) as server, pytest.raises(ConfigError) as caught:
        run(target, corpus, tmp_path / "set", server)
    assert "outputs of blocks 2,3,5, and 1,4 of 1,2,4 are missing" in str(caught.value)
    with StandIn(target, layers=(1, 2, 3)) as server, pytest.raises(ConfigError) as caught:
        run(target, corpus, tmp_path / "set", server)
    assert "outputs of blocks 1,2,3, and 4 of 1,2,4 are missing" in str(caught.value)
    ids = json.dumps({"eagle_aux_hidden_state_layer_ids": [2, 3, 5, 6]})
    assert ids in str(caught.value)
    with pytest.raises(ConfigError, match="go together"):
        run(target, corpus, tmp_path / "set", backend="served")
    with pytest.raises(ConfigError, match="hands over no logits"):
        CaptureOptions(backend="served", server="http://x", supervision="logits").check()


@pytest.mark.long
def test_a_run_resumes_with_another_server_and_is_proven_again(tmp_path, target, corpus):
    out = tmp_path / "set"
    with StandIn(target) as server:
        run(target, corpus, tmp_path / "whole", server)
        answer, left = server.answer, [server.requests - 3]

        def die(asked):
            left[0] -= 1
            if left[0] < 0:
                raise BrokenPipeError
            return answer(asked)

        server.answer = die
        with pytest.raises(RunError, match=r"does not answer.*the same command resumes"):
            run(target, corpus, out, server)
    assert list(out.glob(".generate/unit-*.json")) and not (out / "manifest.json").exists()
    with pytest.raises(RunError, match="does not answer"):  # it has stopped
        run(target, corpus, out, server)
    with (
        StandIn(target, lose="first chunk") as server,
        pytest.raises(RunError, match="tokens 0 to"),
    ):
        run(target, corpus, out, server)
    with StandIn(target, layers=(4, 2, 1)) as server:
        run(target, corpus, out, server)
    assert digests(out).keys() == digests(tmp_path / "whole").keys()
    assert digests(out / "shards") == digests(tmp_path / "whole" / "shards")


@pytest.mark.long
def test_a_follower_reads_what_is_handed_over(tmp_path, target, corpus):
    out = tmp_path / "set"
    with StandIn(target) as server:
        thread = threading.Thread(target=run, args=(target, corpus, out, server))
        thread.start()
        followed = FollowedDataset(out, timeout=20.0, await_start=True)
        assert followed.wait_for(range(len(followed)), threading.Event())
        thread.join()
    assert len(followed) == len(HiddenStatesDataset(out)) == 12


def test_states_are_fetched_once_and_old_ones_are_dropped():
    server = StateServer("127.0.0.1", 0, most_bytes=4000)
    try:
        for name in "abc":
            server.put(name, {"x": torch.arange(400.0)})  # three do not fit
        assert torch.equal(fetch_states("127.0.0.1", server.port, "c")["x"], torch.arange(400.0))
        assert torch.equal(fetch_states("127.0.0.1", server.port, "b")["x"], torch.arange(400.0))
        server._patience = 0.0
        for name in "ac":
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch_states("127.0.0.1", server.port, name)
    finally:
        server.close()
