"""`generate --backend served`: states of a running engine are proven, and every mix-up is named."""

import itertools
import json
import socket
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_data
from spec_data.capture.backend import BackendOptions, open_backend
from spec_data.capture.state_server import IDS, KEY, PORT, STATES, StateServer, fetch_states
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from tests.spec_data.conversion.stand_in_engine import StandIn
from tests.spec_data.exchange.wire import answering, page, request, told
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
            *("tokens", RunError, "token ids of shape .* some are missing"),
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


def asked_of(target, server, states_dir=None):
    """The states of one document."""
    options = BackendOptions(
        path=target, layers=(1, 4), device="cpu", server=server.url, states_dir=states_dir
    )
    return open_backend("served", options)._answers([torch.arange(5, 25)])


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/v1/completions"])
def test_the_key_goes_to_no_other_server(tmp_path, target, monkeypatch, path):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    came = []
    with answering(lambda head: iter([came.append(head) or page(b"{}")])) as other:

        def moved(head):
            place = head.split()[1].decode()
            pages = {"/version": {"version": "0"}, "/v1/models": {"data": [{"id": "tiny"}]}}
            if place == path:
                yield page(b"", "307 Moved", Location=f"{other}{path}")
            else:
                yield page(json.dumps(pages[place]).encode())

        with (
            answering(moved) as url,
            pytest.raises(ConfigError, match=rf"{path}: 307 it sends requests on to {other}"),
        ):
            asked_of(target, types.SimpleNamespace(url=url))
    assert not came


@pytest.mark.parametrize(
    "given",
    [
        {"choices": []},
        {"choices": [{"token_ids": []}]},
        {"choices": [{"token_ids": ["1"]}]},
        {"choices": [{"token_ids": [1], "prompt_token_ids": [0.5]}]},
        {"kv_transfer_params": {PORT: 99_999, KEY: "a"}},
        {"kv_transfer_params": {PORT: 1, KEY: 5}},
        {"kv_transfer_params": []},
        {"kv_transfer_params": {"hidden_states_path": 7}},
        [],
    ],
)
def test_answers_of_another_form_than_vllms_are_named(tmp_path, target, given):
    with StandIn(target) as server:
        whole = server.answer
        server.answer = lambda asked: whole(asked) | given if given else given
        with pytest.raises(RunError, match="/v1/completions: an answer has not the form of vLLM's"):
            asked_of(target, server)


@pytest.mark.parametrize("key", ["../target", "a/b", "", "x" * 300, "a b", "a\r\nX: y"])
def test_a_key_of_states_is_no_path(tmp_path, target, key):
    with StandIn(target) as server:
        whole = server.answer
        server.answer = lambda asked: (
            whole(asked) | {"kv_transfer_params": {KEY: key, PORT: server.states.port}}
        )
        with pytest.raises(RunError, match=r"did not arrive .no port and key of states"):
            asked_of(target, server)


def test_a_token_that_the_target_lacks_is_named(tmp_path, target):
    with StandIn(target) as server:
        whole = server.answer
        server.answer = lambda asked: whole(asked) | {"choices": [{"token_ids": [-3]}]}
        with pytest.raises(RunError, match="chose token -3, which the target lacks"):
            asked_of(target, server)


# -- files of other connectors ---------------------------------------------------------------------


class FP8Transfer:
    """That of hs-connectors, for plain files."""

    def __init__(self, file, _dtype):
        self.file = file

    def get_generated(self, where):
        return load_file(where["hidden_states_path"])

    def delete(self, handle):
        Path(handle).unlink()


@pytest.fixture
def files(tmp_path, target, monkeypatch):
    """A server that writes the states of each request into `states`, beside `precious`."""
    monkeypatch.setitem(
        sys.modules, "hs_connectors", types.SimpleNamespace(FP8Transfer=FP8Transfer)
    )
    (tmp_path / "states").mkdir()
    with StandIn(target) as server:
        whole, numbers = server.answer, itertools.count()

        def to_file(asked):
            reply = whole(asked)
            with server.lock:
                states, _ = server.run(torch.tensor(asked["prompt"]))
            file = tmp_path / "states" / f"{next(numbers)}.safetensors"
            ids = torch.tensor(asked["prompt"]) + (server.lose == "ids")
            save_file({STATES: states, IDS: ids}, file)
            named = server.named(file) if server.named else str(file)
            return reply | {"kv_transfer_params": {"hidden_states_path": named}}

        server.answer, server.named = to_file, None
        yield server


def test_files_in_the_named_directory_are_read_and_deleted(tmp_path, target, corpus, files):
    given = {"states_dir": str(tmp_path / "states")}
    run(target, corpus, tmp_path / "set", files, **given)
    assert len(HiddenStatesDataset(tmp_path / "set")) == 12
    assert not list((tmp_path / "states").iterdir())


def test_without_a_named_directory_no_file_is_read(tmp_path, target, files):
    with pytest.raises(ConfigError, match=r"writes files of states .*give --states-dir DIR"):
        asked_of(target, files)
    with pytest.raises(ConfigError, match="--states-dir goes with --backend served"):
        CaptureOptions(states_dir="states").check()


@pytest.mark.parametrize("how", ["plain", "dots", "link", "linked folder", "other", "none", "nul"])
def test_a_file_elsewhere_is_neither_read_nor_deleted(tmp_path, target, files, how):
    kept = tmp_path / "weights" / "model.safetensors"
    kept.parent.mkdir()

    def named(file):
        kept.write_bytes(file.read_bytes())  # it would be taken
        link = file.with_name("link.safetensors")
        if how == "link":
            link.unlink(missing_ok=True)
            link.symlink_to(kept)
            return str(link)
        if how == "linked folder":
            (file.parent / "in").unlink(missing_ok=True)
            (file.parent / "in").symlink_to(kept.parent)
            return f"{file.parent}/in/{kept.name}"
        return {
            "plain": str(kept),
            "dots": f"{file.parent}/../weights/{kept.name}",
            "other": str(file.rename(file.with_suffix(".bin"))) if how == "other" else "",
            "none": f"{file.parent}/none.safetensors",
            "nul": f"{file.parent}/a\0b.safetensors",
        }[how]

    files.named = named
    with pytest.raises(ConfigError, match="it was neither read nor deleted"):
        asked_of(target, files, tmp_path / "states")
    assert kept.exists()


def test_a_file_of_other_states_is_not_deleted(tmp_path, target, files):
    files.lose = "ids"
    with pytest.raises(RunError, match="states of other tokens"):
        asked_of(target, files, tmp_path / "states")
    assert list((tmp_path / "states").iterdir())


# -- the hand-over ---------------------------------------------------------------------------------


def test_a_get_takes_no_states_and_an_answer_that_is_cut_can_be_asked_for_again():
    server = StateServer("127.0.0.1", 0)
    try:
        server.put("a", {"x": torch.arange(4_000_000.0)})
        assert told(server.port, request(server, "/states/a"))[0] == 405
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request(server, "/states/a", "POST", b""))
            sock.recv(10)
        fetched = fetch_states("127.0.0.1", server.port, "a")
        assert torch.equal(fetched["x"], torch.arange(4_000_000.0))
    finally:
        server.close()


def test_states_are_copies_and_wait_for_those_who_come_late():
    server = StateServer("127.0.0.1", 0)
    try:
        values = torch.zeros(5)
        timer = threading.Timer(0.2, lambda: server.put("late", {"x": values}))
        server.put("early", {"x": values})
        values += 1  # the engine uses its memory again
        timer.start()
        assert torch.equal(fetch_states("127.0.0.1", server.port, "late")["x"], torch.ones(5))
        assert torch.equal(fetch_states("127.0.0.1", server.port, "early")["x"], torch.zeros(5))
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        fetch_states("127.0.0.1", server.port, "early", token="t" * 20)


def test_states_are_fetched_once_and_old_ones_are_dropped():
    server = StateServer("127.0.0.1", 0, most_bytes=4000)
    try:
        for name in "abc":
            server.put(name, {"x": torch.arange(400.0)})  # three do not fit
        assert torch.equal(fetch_states("127.0.0.1", server.port, "c")["x"], torch.arange(400.0))
        assert torch.equal(fetch_states("127.0.0.1", server.port, "b")["x"], torch.arange(400.0))
        server._patience = 0.0
        for name in "ac":
            with pytest.raises(OSError, match="404 no such states"):
                fetch_states("127.0.0.1", server.port, name)
    finally:
        server.close()
