"""OpenAI-compatible servers write the answers: every fault of theirs, and what is sent to them."""

import asyncio
import copy
import json
import multiprocessing as mp
import os
import random
import threading
import time

import pytest

from spec_data.cli import main
from spec_data.commands.regenerate import regenerate
from spec_data.corpus.records import parse_json, parse_row
from spec_data.regeneration import servers
from spec_data.regeneration.conversations import Unanswerable
from spec_data.regeneration.journal import journal_path
from spec_data.regeneration.servers import MalformedBody, read_answer
from spec_data.shards.errors import ConfigError, RunError
from tests.spec_data.exchange.wire import answering, page
from tests.spec_data.regeneration.chat_server import (
    ChatServer,
    answer_to,
    body,
    completion,
    first_tries,
    slow,
    status,
)
from tests.spec_data.regeneration.tools import answered, contents, given, rows, words, write_rows
from tests.spec_data.runs import save_target, write_corpus

ROWS, TURNS = 16, 22
AT_ONCE = {"batch_size": 8}


@pytest.fixture(autouse=True)
def fast_and_here(monkeypatch):
    pytest.importorskip("openai", reason="openai is not installed: '.[server]'")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    monkeypatch.setattr(servers, "_REST", 0.01)
    monkeypatch.setattr(servers, "_AWAY", 0.0)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "chats.jsonl", ROWS)


def wanted(corpus) -> list[list[str]]:
    """Return the answers of every row, by a plain loop over its messages."""
    found = []
    for row in rows(corpus):
        so_far, texts = [], []
        for message in row["messages"]:
            if message["role"] == "assistant":
                texts.append(answer_to(so_far))
                so_far.append({"role": "assistant", "content": texts[-1]})
            else:
                so_far.append(message)
        found.append(texts)
    return found


def check(out, corpus, record) -> None:
    """Check that every answer is there once, in the order of the corpus."""
    assert [contents(r) for r in rows(out)] == wanted(corpus)
    counts = record["counts"]
    assert (counts["written"], counts["failed"], counts["answers"]) == (ROWS, 0, TURNS)
    assert not journal_path(out).exists()


FAULTS = {
    "of the connection": [
        *(status(500), status(502), status(503), status(429, Retry_After="0.01"), status(429)),
        lambda h, b: h.drop(),
        lambda h, b: h.drop(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"),
    ],
    "not JSON, and JSON of other shapes": [
        body(b'{"choices": [{"mess'),
        body([]),
        body({"choices": []}),
        body({"choices": [{"message": None, "finish_reason": "stop"}]}),
    ],
    "wrong content type, no finish, no text": [
        body(b"<html>proxy error</html>", "text/html"),
        body(completion([], finish=None)),
        body(completion([], message={"content": 3})),
        body(completion([], message={"content": "\ud800"})),
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_pass_cost_no_answer(corpus, tmp_path, name):
    out = tmp_path / "a.jsonl"
    with ChatServer(first_tries(*FAULTS[name])) as server:
        record = answered(corpus, out, server=[server.url], **AT_ONCE)
    check(out, corpus, record)
    assert set(server.answered.values()) == {1}
    assert set(server.asked.values()) == {len(FAULTS[name]) + 1}


def test_a_slow_answer_is_asked_of_another_server(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_SECONDS", 0.3)
    out = tmp_path / "a.jsonl"
    with ChatServer(first_tries(slow(0.6))) as bad, ChatServer() as good:
        record = answered(corpus, out, server=[bad.url, good.url], **AT_ONCE)
    check(out, corpus, record)


def test_one_of_two_servers_dies_in_the_middle(corpus, tmp_path, caplog):
    out = tmp_path / "a.jsonl"
    with ChatServer(dies_after=5) as bad, ChatServer() as good:
        record = answered(corpus, out, server=[bad.url, good.url], **AT_ONCE)
    check(out, corpus, record)
    assert sum(bad.answered.values()) == 5 and len(good.requests) >= TURNS // 4
    assert "warning[server]: this server is left out" in caplog.text


def cut(handler, request):
    """A proxy that cuts the connection during one answer, whenever it is asked for."""
    wanted = request["messages"][0]["content"] == "question 3"
    if wanted:
        handler.drop(b"HTTP/1.1 200 OK\r\n")
    return wanted


def test_a_server_that_comes_back_is_asked_again(corpus, tmp_path, monkeypatch, caplog):
    """It started again, say: nothing is lost, and the run goes on by itself."""
    monkeypatch.setattr(servers, "_AWAY", 60.0)
    monkeypatch.setattr(servers, "_LONGEST_REST", 0.1)
    out, again = tmp_path / "a.jsonl", []

    def come_back(port):
        end = time.monotonic() + 60  # however slow this machine is, it is missed before
        while "this server rests" not in caplog.text and time.monotonic() < end:
            time.sleep(0.05)
        again.append(ChatServer(port=port).__enter__())

    with ChatServer(dies_after=5) as server:
        port, gone, once = server.server_address[1], server.__exit__, threading.Lock()

        def leave(*_):
            if once.acquire(blocking=False):
                gone()
                come_back(port)

        server.__exit__ = leave
        record = answered(corpus, out, server=[server.url], **AT_ONCE)
    again[0].__exit__()
    check(out, corpus, record)
    assert "warning[server]: this server rests" in caplog.text
    assert "left out" not in caplog.text
    assert sum(server.answered.values()) == 5 and sum(again[0].answered.values()) == TURNS - 5


def test_a_connection_that_is_cut_concerns_its_conversation_alone(corpus, tmp_path, caplog):
    with ChatServer(cut) as proxy:
        record = answered(corpus, tmp_path / "a.jsonl", server=[proxy.url], **AT_ONCE)
        assert (record["counts"]["written"], record["counts"]["failed"]) == (ROWS - 1, 1)
        assert proxy.url in record["failed"][0]["reason"]
        with ChatServer() as other:
            both = answered(corpus, tmp_path / "b.jsonl", server=[proxy.url, other.url], **AT_ONCE)
    check(tmp_path / "b.jsonl", corpus, both)
    assert "left out" not in caplog.text


def test_an_answer_that_never_ends_is_asked_for_once(corpus, tmp_path, monkeypatch):
    """Not once more for each retry of the client, in each of which it takes as long."""
    monkeypatch.setattr(servers, "_SECONDS", 0.3)
    late = lambda h, b: b["messages"][0]["content"] == "question 3" and not slow(1)(h, b)  # noqa: E731
    with ChatServer(late) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE)
    assert "no answer in" in record["failed"][0]["reason"] and record["counts"]["failed"] == 1
    assert max(server.asked.values()) == 1


def test_a_request_that_is_refused_concerns_its_conversation_alone(corpus, tmp_path, capsys):
    out = tmp_path / "a.jsonl"
    too_long = (400, {"error": {"message": "longer than the context"}})
    with ChatServer(to_question({3: too_long})) as server:
        assert main(words(corpus, out, server=[server.url], **AT_ONCE)) == 1
        shown = capsys.readouterr()
        assert "16 read = 15 written + 1 failed + 0 skipped" in shown.out
        assert "retry:  spec-data regenerate" in shown.err and "HTTP Request" not in shown.err
        assert len(rows(out)) == ROWS - 1
        (failure,) = json.loads((tmp_path / "a.jsonl.sampling").read_text())["failed"]
        assert failure["where"] == f"{corpus}:4" and "longer than the context" in failure["reason"]
        server.faults = ()
        before = len(server.requests)
        record = answered(corpus, out, server=[server.url], **AT_ONCE)
    check(out, corpus, record)
    assert len(server.requests) - before == 2  # the two turns of that conversation


def test_any_number_of_refused_requests_in_a_row_ends_no_run(tmp_path, caplog):
    corpus = write_corpus(tmp_path / "chats.jsonl", 60)
    too_long = (400, {"error": {"message": "longer than the context"}})
    with ChatServer(to_question(dict.fromkeys(range(50), too_long))) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[server.url], batch_size=2)
    assert record["counts"]["failed"] == 50 and record["counts"]["written"] == 10
    assert "warning[server]: the first 16 conversations were refused; the last: " in caplog.text


@pytest.mark.long
def test_conversations_that_are_not_asked_do_not_hide_a_server_that_never_answers(tmp_path):
    target = save_target(tmp_path / "target")
    context = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    texts = ["a" * context * (n % 8 == 7) + str(n) for n in range(90)]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    corpus = write_rows(tmp_path / "c.jsonl", chats)
    given = {"target": str(target), "batch_size": 1}
    with (
        ChatServer(first_tries(*[status(500)] * 10_000)) as server,
        pytest.raises(RunError, match="conversations have no answer"),
    ):
        answered(corpus, tmp_path / "a.jsonl", server=[server.url], **given)


def to_question(responses):
    """Return a fault: questions with these numbers get these responses."""

    def fault(handler, request):
        number = int(request["messages"][0]["content"].rpartition(" ")[2])
        if number in responses:
            handler.send(*responses[number])
        return number in responses

    return fault


HOSTILE = [
    (200, b"[" * 100_000),
    (400, b"[" * 900 + b"]" * 900),
    (400, b'{"error": {"message": "\\ud800"}}'),
    (429, b"", {"Retry-After": "Fri, 31 Dec 9999999 23:59:59 GMT"}),
]


def test_no_answer_of_a_server_ends_the_run(corpus, tmp_path):
    out = tmp_path / "a.jsonl"
    with ChatServer(to_question(dict(enumerate(HOSTILE)))) as server:
        record = answered(corpus, out, server=[server.url], **AT_ONCE)
    counts = record["counts"]
    assert (counts["written"], counts["failed"]) == (ROWS - len(HOSTILE), len(HOSTILE))
    assert json.loads((tmp_path / "a.jsonl.sampling").read_text()) == record


def mutated(value, rng):
    """Return a JSON value with one part replaced by a value that may not belong there."""
    strange = [
        *(None, True, -1, 0.5, 1e308, float("nan"), float("inf"), 10**400, "", "\ud800", [], {}),
        *([[]], {"\udfff": 1}, json.loads("[" * 50 + "]" * 50)),
    ]
    if not value or not isinstance(value, (dict, list)) or rng.random() < 0.2:
        return rng.choice(strange)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key, found = rng.choice(keys), copy.copy(value)
    found[key] = mutated(value[key], rng)
    return found


def test_a_body_is_an_answer_that_a_corpus_can_hold_or_it_is_malformed():
    rng, kept = random.Random(0), 0
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"a": 1}'}}
    sound = completion([], message={"reasoning_content": "hm", "tool_calls": [call]})
    for _ in range(1000):
        found = mutated(sound, rng)
        for _ in range(rng.randrange(3)):
            found = mutated(found, rng)
        data = json.dumps(found).encode()
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        try:
            answer = read_answer(data)
        except (MalformedBody, Unanswerable):
            continue
        kept += 1
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", **answer.message}]
        line = json.dumps({"messages": messages}, allow_nan=False, ensure_ascii=False).encode()
        parse_row(parse_json(line), source="", where="")
        assert 0 <= answer.tokens < 2**31 and 0 <= answer.prompt_tokens < 2**31
    assert 100 < kept < 900


def test_refusals_empty_answers_and_unknown_tokens_are_said(corpus, tmp_path):
    empty = completion([], message={"content": ""}) | {"usage": None}
    refused = completion([], message={"content": None, "refusal": "I cannot"})
    responses = {0: (200, refused), **dict.fromkeys(range(1, ROWS), (200, empty))}
    with ChatServer(to_question(responses)) as server:
        options = given(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE)
        found = regenerate(**options)
    assert (found.written, found.failed) == (ROWS - 1, 1)
    assert "the server refused to answer: I cannot" in found.failures[0]["reason"]
    text = str(found)
    assert "tokens not told by the server" in text
    assert f"{found.answers} empty answers" in text


def test_no_server_answers_any_more(corpus, tmp_path):
    with ChatServer(first_tries(*[status(500)] * 100)) as server:
        urls = {"server": [server.url]}
        with pytest.raises(RunError, match=r"the last 16 conversations.*HTTP 500: .*no 500"):
            answered(corpus, tmp_path / "a.jsonl", **urls, **AT_ONCE)
        few = write_corpus(tmp_path / "few.jsonl", 2)
        with pytest.raises(RunError, match="no conversation has an answer"):
            answered(few, tmp_path / "b.jsonl", **urls, **AT_ONCE)
    with ChatServer() as up, pytest.raises(RunError, match=r"server http://127.* not respond"):
        answered(corpus, tmp_path / "c.jsonl", server=[up.url, server.url], **AT_ONCE)
    with (
        ChatServer(dies_after=5) as server,
        pytest.raises(RunError, match="no server responds any more"),
    ):
        answered(corpus, tmp_path / "d.jsonl", server=[server.url], **AT_ONCE)


def test_a_wrong_key_or_model_stops_the_run(corpus, tmp_path):
    for code, reason in ((401, "refuses the key: HTTP 401"), (404, "the first 16 conv.*HTTP 404")):
        with (
            ChatServer(first_tries(status(code))) as server,
            pytest.raises(ConfigError, match=reason),
        ):
            answered(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE)


def test_no_prompt_and_no_key_follows_a_redirect(corpus, tmp_path):
    with ChatServer() as other:

        def redirect(handler, _body):
            handler.send(307, {}, {"Location": f"{other.url}/v1/chat/completions"})
            return True

        with (
            ChatServer(redirect) as server,
            pytest.raises(ConfigError, match=rf"sends requests on to {other.url}.*give that one"),
        ):
            answered(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE)
        assert server.requests and not other.requests


def test_a_list_of_models_that_is_elsewhere_is_named(corpus, tmp_path):
    moved = page(b"", "301 Moved", Location="http://elsewhere.invalid/v1/models")
    with (
        answering(lambda _: iter([moved])) as url,
        pytest.raises(ConfigError, match=r"sends requests on to http://elsewhere\.invalid"),
    ):
        answered(corpus, tmp_path / "a.jsonl", server=[url], **AT_ONCE)


def test_what_a_gateway_forbids_concerns_its_conversation_alone(corpus, tmp_path):
    """Moderation answers 403, first of all or when a run with answers resumes."""
    forbidden = dict.fromkeys(range(4), (403, {"error": {"message": "moderated"}}))
    with ChatServer(to_question(forbidden)) as server:
        options = {"server": [server.url], **AT_ONCE}
        for _ in range(2):
            record = answered(corpus, tmp_path / "a.jsonl", **options)
            assert (record["counts"]["written"], record["counts"]["failed"]) == (ROWS - 4, 4)
    assert "403 - moderated" in record["failed"][0]["reason"]


def test_the_model_is_the_first_listed_or_the_named_one(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ChatServer(models=("\ud800", 5, None, "big", "tiny")) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[f"{server.url}/v1"], **AT_ONCE)
        assert record["settings"]["server_model"] == "big"
        assert {r["model"] for r in server.requests} == {"big"}
        assert set(server.keys) == {"Bearer secret"}
        with pytest.raises(ConfigError, match="has no model 'small'; it has big, tiny"):
            given = {"server": [server.url], "server_model": "small", **AT_ONCE}
            answered(corpus, tmp_path / "b.jsonl", **given)
    assert "secret" not in (tmp_path / "a.jsonl.sampling").read_text()


def test_what_is_sent(tmp_path):
    call = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q", "note": "not for servers"},
        {"role": "assistant", "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "sun"},
    ]
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": {"b": 2}}
    corpus = write_rows(tmp_path / "c.jsonl", [row])
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "chat_template_kwargs": {"a": 1}}
    with ChatServer() as server:
        answered(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE | options)
        answered(corpus, tmp_path / "b.jsonl", server=[server.url], **AT_ONCE)
    sent, plain = server.requests
    assert sent["messages"][:2] == [messages[0], {"role": "user", "content": "q"}]
    (found,) = sent["messages"][2]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"city": "Paris"}
    assert sent["messages"][2].keys() == {"role", "content", "tool_calls"}
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.9, -1)
    assert sent["max_tokens"] == 6 and sent["tools"] == tools
    assert sent["chat_template_kwargs"] == {"a": 1, "b": 2}
    assert "top_k" not in plain and sent["seed"] == plain["seed"]


def test_reasoning_calls_and_ends_are_kept(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 1)
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}

    def calling(handler, request):
        handler.send(200, completion([], message=message, finish="tool_calls"))
        return True

    with ChatServer(calling) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[server.url], **AT_ONCE)
    assert record["counts"]["finish_reasons"] == {"tool_calls": 2}
    found = rows(tmp_path / "a.jsonl")[0]["messages"][1]
    read = call | {"function": call["function"] | {"arguments": {}}}  # as templates render it
    assert found == {
        "role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [read],
        "finish_reason": "tool_calls",
    }  # fmt: skip


def test_prompts_of_another_template_are_counted(corpus, tmp_path):
    """The server says that its prompts have 10 tokens; those of the target are longer."""
    target = save_target(tmp_path / "target")
    with ChatServer() as server:
        given = {"server": [server.url], "target": str(target), **AT_ONCE}
        record = answered(corpus, tmp_path / "a.jsonl", **given)
    notes = record["counts"]["notes"]
    assert notes == {
        "answers to a prompt of another length than the target's template renders": TURNS
    }


def test_a_kill_in_the_middle_asks_no_answered_turn_again(corpus, tmp_path):
    out = tmp_path / "a.jsonl"
    pause = lambda h, b: time.sleep(0.02)  # noqa: E731
    with ChatServer(pause) as server:
        line = words(corpus, out, server=[server.url], batch_size=2)
        for answers in (3, 9, 1000):
            process = mp.get_context("fork").Process(
                target=lambda: os._exit(main([*line, "--quiet"]))
            )
            process.start()
            while process.exitcode is None and sum(server.answered.values()) < answers:
                time.sleep(0.005)
            if process.exitcode is None:
                process.kill()
            process.join()
        assert process.exitcode == 0
        record = answered(corpus, out, server=[server.url], batch_size=2)
    check(out, corpus, record)
    assert TURNS <= sum(server.answered.values()) <= TURNS + 2 * 2  # those in flight at the kills


def test_a_running_event_loop_is_no_obstacle(corpus, tmp_path):
    out = tmp_path / "a.jsonl"

    async def notebook(url):
        return answered(corpus, out, server=[url], **AT_ONCE)

    with ChatServer() as server:
        check(out, corpus, asyncio.run(notebook(server.url)))
