"""Hostile requests to our servers and hostile answers to our clients: each is refused, in words."""

import collections
import json
import socket
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from spec_data import RemoteTarget, Target, TargetServer
from spec_data.capture.state_server import STATES, StateServer, fetch_states
from spec_data.exchange.frames import CHECKSUM_HEADER, checksum
from spec_data.shards.errors import SpecDataError
from tests.factory import tiny_llama
from tests.faults.answers import edits
from tests.faults.tools import report, trials
from tests.spec_data.exchange.wire import answering, page, request, told

LAYERS, VOCABULARY = (0, 1, 2), torch.arange(1, 64, 3)
IDS = torch.arange(24).view(2, 12) % 60
MASK = torch.ones_like(IDS)
MASK[:, 9:] = 0
LENGTHS = [[5, 4], [9]]
SUPERVISIONS = ("final-hidden", "logits", "target-probs")
LONG = pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def server():
    with TargetServer(Target(tiny_llama(), LAYERS), port=0, max_tokens=500) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def given(supervision):
    probs = supervision == "target-probs"
    return {"supervision": supervision, "draft_vocabulary": VOCABULARY if probs else None}


def asked_of(url, supervision, server):
    """The batch of a server at `url` that has the token of `server`."""
    remote = RemoteTarget(url, LAYERS, token=server.token, **given(supervision))
    return remote.generate_batch(IDS, MASK, MASK, LENGTHS)


class Between:
    """Hands requests on to a server, and its answers back once `edit` has changed them."""

    def __init__(self, server):
        self.server, self.edit = server, lambda sent: sent

    def __call__(self, asked):
        with socket.create_connection(("127.0.0.1", self.server.port)) as sock:
            sock.sendall(asked)
            found = b""
            while piece := sock.recv(1 << 16):
                found += piece
        yield self.edit(found) if asked.startswith(b"POST") else found


@pytest.mark.parametrize("supervision", SUPERVISIONS)
def test_no_draft_is_trained_on_an_edited_answer(server, supervision):
    """Whole, well-formed and with its checksum: what it says is compared with what was asked."""
    own = asked_of(server.url, supervision, server)
    outcomes = collections.Counter()
    between = Between(server)
    with answering(between) as url:
        for name, edit in edits(own.plain() | own.hidden).items():

            def forge(sent, edit=edit):
                table = load(sent.partition(b"\r\n\r\n")[2])
                edit(table)
                body = save(table)
                return page(body, **{CHECKSUM_HEADER: checksum([body])})

            between.edit = forge
            try:
                asked_of(url, supervision, server)
            except SpecDataError:
                outcomes["refused"] += 1
            else:
                outcomes[f"trained on: {name}"] += 1
    report(f"edited answers, {supervision}", outcomes)
    assert set(outcomes) == {"refused"} and outcomes["refused"] > 40


@LONG
def test_answers_with_random_damage_are_refused_or_the_same(server, times):
    """Bits, cuts and inserted bytes anywhere in an answer of HTTP."""
    own = asked_of(server.url, "final-hidden", server)
    wanted = own.plain() | own.hidden
    outcomes = collections.Counter()
    between = Between(server)
    with answering(between) as url:
        for _, random in trials("damaged answers", 60 * times):
            between.edit = lambda sent, random=random: damaged(sent, random)
            try:
                batch = asked_of(url, "final-hidden", server)
            except SpecDataError as error:
                assert str(error).isprintable()
                outcomes[type(error).__name__] += 1
            else:
                found = batch.plain() | batch.hidden
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
                outcomes["the same"] += 1
    report("damaged answers", outcomes)


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """Some bytes, with one thing done to them: near their beginning as often as elsewhere."""
    end = len(data) if random.random() < 0.5 else min(len(data), 700)
    at = int(random.integers(end))
    match int(random.integers(5)):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + random.bytes(int(random.integers(1, 40))) + data[at:]
        case 2:
            return data[:at] + data[at + int(random.integers(1, 40)) :]
        case 3:
            return data[:at] + bytes([data[at] ^ 1 << int(random.integers(8))]) + data[at + 1 :]
    digits = [n for n, byte in enumerate(data[:700]) if chr(byte).isdigit()]
    at = digits[int(random.integers(len(digits)))]
    return data[:at] + str(int(random.integers(10**9))).encode() + data[at + 1 :]


@LONG
def test_damaged_requests_leave_a_server_as_it_was(server, times):
    """No request ends in 500, and good ones are answered as before."""
    with StateServer("127.0.0.1", 0) as states:
        states._patience = 0.01
        states.put("kept", {STATES: torch.arange(6.0)})
        tensors = {"input_ids": IDS, "attention_mask": MASK.bool(), "loss_mask": MASK.bool()}
        good = {
            server: request(server, "/batch/final-hidden", "POST", save(tensors)),
            states: request(states, "/states/other", "POST", b""),
        }
        outcomes = collections.Counter()
        for trial, random in trials("damaged requests", 150 * times):
            one = (server, states)[trial % 2]
            status, _ = told(one.port, damaged(good[one], random))
            outcomes[f"{status}" if status else "no answer"] += 1
            assert status != 500
        report("damaged requests", outcomes)
        assert told(server.port, good[server])[0] == 200
        assert torch.equal(
            fetch_states("127.0.0.1", states.port, "kept")[STATES], torch.arange(6.0)
        )
        states.close()


@LONG
def test_wrong_tensors_are_refused_and_right_ones_answered(server, times):
    """What is answered is what a slow look at it finds right."""
    outcomes = collections.Counter()
    for _, random in trials("wrong requests", 120 * times):
        tensors = odd_request(random)
        supervision = SUPERVISIONS[int(random.integers(3))]
        data = request(server, f"/batch/{supervision}", "POST", save(tensors))
        status, text = told(server.port, data)
        wanted = 200 if is_right(tensors, supervision) else 400
        assert status == wanted, (tensors, supervision, text)
        outcomes[str(status)] += 1
    report("wrong requests", outcomes)
    assert outcomes.keys() == {"200", "400"}


def odd_request(random: np.random.Generator) -> dict[str, torch.Tensor]:
    """A request with nothing, one or two things wrong."""
    tensors = {"input_ids": IDS.clone(), "attention_mask": MASK.bool(), "loss_mask": MASK.bool()}
    if random.random() < 0.5:
        tensors["draft_vocabulary"] = VOCABULARY.clone()
    if random.random() < 0.5:
        tensors["seq_lens"] = torch.tensor([[5, 4], [9, 0]])
    for _ in range(int(random.integers(3))):
        name = list(tensors)[int(random.integers(len(tensors)))]
        values = tensors[name].clone()
        match int(random.integers(9)):
            case 0:
                del tensors[name]
                if not tensors:
                    tensors["x"] = torch.zeros(1)
                continue
            case 1:
                values = values.to([torch.int32, torch.float64, torch.uint8][random.integers(3)])
            case 2:
                values = values[:-1]
            case 3:
                values = values.transpose(0, -1)
            case 4:
                values = torch.cat([values, values])
            case 5:
                values = values[..., None]
            case 6:
                values = values.flip(-1)
            case _ if values.numel() and values.dtype != torch.bool:
                values.view(-1)[random.integers(values.numel())] = int(random.integers(-3, 80))
            case _ if values.numel():
                values.view(-1)[random.integers(values.numel())] ^= True
        tensors[name] = values.contiguous()
    return tensors


def is_right(tensors: dict[str, torch.Tensor], supervision: str) -> bool:
    """Whether a request can be answered, by plain loops."""
    names = ("input_ids", "attention_mask", "loss_mask")
    dtypes = dict(zip(names, (torch.int64, torch.bool, torch.bool), strict=True))
    dtypes |= {"seq_lens": torch.int64, "draft_vocabulary": torch.int64}
    if not set(names) <= set(tensors) <= set(dtypes):
        return False
    if any(values.dtype != dtypes[name] for name, values in tensors.items()):
        return False
    if len({tuple(tensors[name].shape) for name in names}) != 1 or tensors[names[0]].ndim != 2:
        return False
    rows = tensors["input_ids"].tolist()
    if not rows or not rows[0] or any(not 0 <= x < 64 for row in rows for x in row):
        return False
    used = []
    for row in tensors["attention_mask"].tolist():
        used.append(sum(row))
        if row != [True] * sum(row) + [False] * (len(row) - sum(row)):
            return False
    if (lengths := tensors.get("seq_lens")) is not None:
        if lengths.ndim != 2 or lengths.shape[1] > len(rows[0]) or (lengths < 0).any():
            return False
        if [sum(row) for row in lengths.tolist()] != used:
            return False
    if (supervision == "target-probs") != ("draft_vocabulary" in tensors):
        return False
    if (ids := tensors.get("draft_vocabulary")) is not None:
        if ids.ndim != 1 or not len(ids) or ids.tolist() != sorted(set(ids.tolist())):
            return False
        return int(ids[0]) >= 0 and int(ids[-1]) < 64
    return True


def test_a_description_with_random_damage_is_refused_or_the_same(server):
    whole = json.dumps(
        {"layers": [0, 1, 2], "hidden_size": 32, "vocab_size": 64, "dtype": "float32",
         "max_tokens": 500}
    ).encode()  # fmt: skip
    outcomes = collections.Counter()
    sent = [b""]
    with answering(lambda _: iter([page(sent[0])])) as url:
        for _, random in trials("descriptions", 80):
            sent[0] = damaged(whole, random)
            try:
                remote = RemoteTarget(url, LAYERS, token=server.token)
            except SpecDataError:
                outcomes["refused"] += 1
            else:
                assert remote._there.max_tokens > 0
                outcomes["read"] += 1
    report("descriptions", outcomes)
