"""`eval --server`: what an engine counts, read from each engine's real form of metrics."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import spec_train
from spec_data.cli import main as data_main
from spec_data.regeneration import servers
from spec_data.shards.errors import ConfigError, RunError
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.evaluation import on_server
from spec_train.simulation import intervals
from spec_train.training.run_directory import resolve_draft_dir
from tests.spec_data.regeneration.chat_server import ChatServer, Handler, completion, slow, status
from tests.spec_data.regeneration.test_server import fast_and_here
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.test_docs import anchors

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace
nearby = fast_and_here

DEPTH = 4
PAGE = Path(__file__).parents[3] / "docs" / "low-acceptance.md"


def rounds_of(messages: list[dict[str, Any]]) -> list[int]:
    """How many drafted tokens each verification of an answer accepts: a function of the chat."""
    rng = random.Random(json.dumps(messages, sort_keys=True))
    return [rng.choice([0, 0, 1, 2, DEPTH]) for _ in range(rng.randint(3, 9))]


class Engine(ChatServer):
    """A server that counts as an engine does; `others` are foreign tokens beside some answers."""

    def __init__(self, engine: str, *faults: Any, **changes: Any) -> None:
        super().__init__(*faults)
        self.RequestHandlerClass = EngineHandler
        self.engine, self.rounds_of = engine, changes.get("rounds_of", rounds_of)
        self.metrics, self.draft = changes.get("metrics", 200), changes.get("draft", True)
        self.others, self.lag = changes.get("others", lambda number: 0), changes.get("lag", 0)
        self.prompt_tokens = changes.get("prompt_tokens", lambda messages: 0)
        self.counts, self.shown, self.looks = Counter(tokens=7, requests=1), "", 0
        self.busy: list[int] = []  # statuses of the next looks at the metrics
        self.restarted = changes.get("restarted", 0)  # after so many answers

    def page(self) -> str:
        """The metrics, after `lag` looks at the old ones."""
        self.looks += 1
        if not self.shown or self.looks > self.lag:
            self.shown, self.looks = FORMS[self.engine](self.counts, self.draft), 0
        return self.shown

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Count an answer; return its body."""
        if len(self.requests) == self.restarted:
            self.counts = Counter()
        rounds = self.rounds_of(messages) if self.draft else []
        tokens = 1 + sum(accepted + 1 for accepted in rounds) if rounds else 9
        more = self.others(len(self.requests))
        self.counts += Counter(tokens=tokens + more, requests=1 + bool(more), rounds=len(rounds))
        for accepted in rounds:
            self.counts += Counter({"drafted": DEPTH, "accepted": accepted})
            self.counts += Counter(dict.fromkeys(range(accepted), 1))
        usage = {"completion_tokens": tokens, "prompt_tokens": self.prompt_tokens(messages)}
        timings = {"predicted_n": tokens}
        if rounds:
            timings |= {"draft_n": DEPTH * len(rounds), "draft_n_accepted": sum(rounds)}
        own = {"timings": timings} if self.engine == "llama.cpp" else {}
        return completion(messages, usage=usage, **own)


class EngineHandler(Handler):
    server: Engine

    def do_GET(self) -> None:
        if self.path != "/metrics":
            super().do_GET()
        elif self.server.busy:
            self.send(self.server.busy.pop(), {"error": {"message": "busy"}}, {"retry-after": "0"})
        elif self.server.metrics == 200:
            self.send(200, self.server.page().encode(), {"Content-Type": "text/plain"})
        else:
            self.send(self.server.metrics, {"error": {"message": "no metrics"}})

    def send(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        if isinstance(body, dict) and "choices" in body:
            body = self.server.answer(self.server.requests[-1]["messages"])
        super().send(code, body, headers)


def vllm(counts: Counter, draft: bool) -> str:
    """vLLM 0.32: a series per engine of the process, and one per position."""
    of = 'engine="0",model_name="tiny"'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        f"vllm:num_requests_running{{{of}}} 0.0",
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total{{{of}}} {float(counts['tokens'] - 2)}",
        'vllm:generation_tokens_total{engine="1",model_name="tiny"} 2.0',
        f"vllm:generation_tokens_created{{{of}}} 1.7641e+09",
        f'vllm:request_success_total{{{of},finished_reason="stop"}} {float(counts["requests"])}',
        f'vllm:request_success_total{{{of},finished_reason="length"}} 0.0',
    ]
    if draft:
        name = "vllm:spec_decode_num"
        lines += [
            f"{name}_drafts_total{{{of}}} {float(counts['rounds'])}",
            f"{name}_drafts_created{{{of}}} 1.7641e+09",
            f"{name}_draft_tokens_total{{{of}}} {float(counts['drafted'])}",
            f"{name}_accepted_tokens_total{{{of}}} {float(counts['accepted'])}",
        ]
        for position in range(DEPTH):
            at, count = f'{of},position="{position}"', float(counts[position])
            lines.append(f"{name}_accepted_tokens_per_pos_total{{{at}}} {count}")
            lines.append(f"{name}_accepted_tokens_per_pos_created{{{at}}} 1.7641e+09")
    return "\n".join(lines)


def llama_cpp(counts: Counter, draft: bool) -> str:
    """llama.cpp: no labels but the position, which is there from the first draft on."""
    names = {"tokens_predicted": "tokens", "spec_decode_num_draft_tokens": "drafted"}
    names |= {"spec_decode_num_accepted_tokens": "accepted", "spec_decode_num_drafts": "rounds"}
    lines = [f"llamacpp:{name}_total {counts[key]}" for name, key in names.items()]
    if counts["rounds"]:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} {counts[i]}' for i in range(DEPTH)]
    return "\n".join(["# TYPE llamacpp:tokens_predicted_total counter", *lines])


def sglang(counts: Counter, draft: bool) -> str:
    """SGLang: a series appears with its first count."""
    of = 'model_name="tiny"'
    lines = [f"sglang:num_requests_total{{{of}}} {float(counts['requests'])}"]
    lines.append(f"sglang:generation_tokens_total{{{of}}} {float(counts['tokens'])}")
    lines.append(f"sglang:spec_accept_length{{{of}}} 99.0")
    if counts["rounds"]:
        lines.append(f"sglang:spec_verify_calls_total{{{of}}} {float(counts['rounds'])}")
    return "\n".join(lines)


FORMS = {"vLLM": vllm, "llama.cpp": llama_cpp, "SGLang": sglang}


@pytest.fixture
def chats(tmp_path) -> Path:
    rows = [{"prompt": f"w{i} w9", "category": "ab"[i % 2]} for i in range(10, 20)]
    rows += [{"turns": ["w9 w10", "w11"]}, {"text": "no chat"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def counted(server: Engine, chats: Path, **options: Any) -> dict[str, Any]:
    return spec_train.evaluate(server=server.url, prompts=chats, **options).figures


def expected(server: Engine) -> tuple[float, list[float]]:
    """Length, and the share accepted by depth, by loops over every verification."""
    emitted = verified = 0
    reached, taken = [0] * DEPTH, [0] * DEPTH
    for request in server.requests:
        for accepted in server.rounds_of(request["messages"]):
            verified, emitted = verified + 1, emitted + accepted + 1
            for depth in range(DEPTH):
                if accepted >= depth:
                    reached[depth] += 1
                    taken[depth] += accepted > depth
    return emitted / verified, [a / b for a, b in zip(taken, reached, strict=True)]


@pytest.mark.parametrize("engine", FORMS)
def test_each_engines_counters_are_the_verifications_that_ran(engine, chats):
    with Engine(engine) as server:
        result = spec_train.evaluate(server=server.url, prompts=chats)
        length, rates = expected(server)
    figures, shown = result.figures, " ".join(str(result).split())
    found = figures["server"]
    assert json.loads(json.dumps(figures)) == figures
    assert found["engine"] == engine and found["model"] == "tiny"
    assert (found["answers"], found["prompts"], found["bad_prompts"]) == (12, 11, 1)
    assert figures["acceptance_length"] == found["acceptance_length"] == pytest.approx(length)
    assert found["accept_rate"] == pytest.approx([] if engine == "SGLang" else rates)
    assert found["interval"][0] < length < found["interval"][1]
    assert found["draft_tokens"] == (None if engine == "SGLang" else DEPTH)
    names = [one["set"] for one in found["by_set"]]
    assert sorted(names) == ["chats.jsonl", "chats.jsonl: a", "chats.jsonl: b"]
    assert figures["warnings"] == [] and len(found["per_prompt"]) == 11
    assert f"deployed length {length:.3f}" in shown and f"counted by {engine} in 12" in shown


def test_a_prompt_of_two_sets_is_measured_in_both(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "w9 w10"}\n')
    with Engine("vLLM") as server:
        found = counted(server, f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}")["server"]
    assert (found["prompts"], found["answers"]) == (1, 2)
    assert [one["set"] for one in found["by_set"]] == ["a.jsonl", "b.jsonl"]


def test_llama_cpp_without_metrics_is_counted_by_its_timings(chats):
    with Engine("llama.cpp", metrics=501) as server:
        found = counted(server, chats)["server"]
        length, _ = expected(server)
    assert found["acceptance_length"] == pytest.approx(length) and found["accept_rate"] == []
    assert found["draft_tokens"] == DEPTH


def test_counters_that_come_after_the_answer_are_waited_for(chats, monkeypatch):
    monkeypatch.setattr(on_server, "_PAUSE", 0.001)
    with Engine("vLLM", lag=3) as server:
        found = counted(server, chats)["server"]
        assert found["acceptance_length"] == pytest.approx(expected(server)[0])


def test_other_traffic_is_left_out_and_said(chats):
    with Engine("vLLM", others=lambda number: 5 * (number in (2, 7))) as server:
        figures = counted(server, chats)
        kept = [r for n, r in enumerate(server.requests, 1) if n not in (2, 7)]
        server.requests = kept
        length, _ = expected(server)
    assert figures["server"]["acceptance_length"] == pytest.approx(length)
    assert "2 of 12 answers ran beside other requests" in figures["warnings"][0]
    with (
        Engine("llama.cpp", others=lambda number: 1) as server,
        pytest.raises(RunError, match="other requests ran during every answer"),
    ):
        counted(server, chats)


def test_a_server_that_fails_and_recovers_is_counted(chats):
    def fault(handler, body):
        if body["try"] == 1:
            status(503)(handler, body)
        return body["try"] == 1

    with Engine("vLLM", fault) as server:
        found = counted(server, chats)["server"]
        server.requests = server.requests[::2]  # the first try of each was not answered
        assert found["acceptance_length"] == pytest.approx(expected(server)[0])
        assert found["failed"] == 0


def test_a_server_that_starts_again_loses_one_answer(chats):
    with Engine("vLLM", restarted=6) as server:
        figures = counted(server, chats)
        server.requests = [r for n, r in enumerate(server.requests, 1) if n != 6]
        assert figures["server"]["acceptance_length"] == pytest.approx(expected(server)[0])
        assert "1 of 12 answers ran beside other requests" in figures["warnings"][0]


def test_metrics_that_are_busy_are_asked_again_and_a_login_is_not_recorded(chats):
    with Engine("vLLM") as server:
        server.busy = [503, 429, 503]
        url = server.url.replace("://", "://bob:secret@")
        found = spec_train.evaluate(server=url, prompts=chats)
        assert not server.busy
        assert found.facts()["server"]["acceptance_length"] == pytest.approx(expected(server)[0])
        assert "secret" not in json.dumps(found.facts(), default=str)


def test_a_counter_that_is_no_number_is_left_out():
    assert on_server.read_counters("vllm:generation_tokens_total NaN") == Counter()


@pytest.mark.long
def test_what_cannot_be_measured_is_said(chats, monkeypatch, capsys):
    def refused(kind, match, *faults, engine="vLLM", options=None, **changes):
        with Engine(engine, *faults, **changes) as server, pytest.raises(kind, match=match):
            counted(server, chats, **(options or {}))

    monkeypatch.setattr(on_server, "_SETTLED", 0.1)
    refused(ConfigError, "vLLM verified no draft in 11 answers.*--speculative-config", draft=False)
    refused(ConfigError, "verified no draft", engine="llama.cpp", metrics=501, draft=False)
    refused(ConfigError, "counts nothing.*--enable-metrics.*--metrics", metrics=404)
    refused(ConfigError, "no model 'big'; it has tiny", options={"server_model": "big"})
    refused(RunError, "moved by 0: another process answered", lag=10**9)
    refused(ConfigError, "refuses the key: HTTP 401", lambda h, b: status(401)(h, b) or True)
    monkeypatch.setattr(on_server, "_TRIES", 0)
    refused(RunError, "/metrics does not answer", metrics=500)
    refused(ConfigError, "/metrics refuses the key", metrics=401)
    monkeypatch.setattr(servers, "_SECONDS", 0.2)
    monkeypatch.setattr(servers, "_SLOWEST", 1e9)
    refused(RunError, "no prompt was answered.*no answer in", lambda h, b: slow(1)(h, b) or True)
    with pytest.raises(RunError, match="does not respond"):
        spec_train.evaluate(server="http://127.0.0.1:9", prompts=chats)
    chats.write_text('{"text": "no chat"}\n', encoding="utf-8")
    refused(ConfigError, "chats.jsonl: no chat; .*plain text")
    for words, reason in (
        (["--server", "localhost:8000", "--prompts", str(chats)], "expected a URL"),
        (["--server", "http://[::1", "--prompts", str(chats)], "expected a URL"),
        (["--server", "http://x:y", "--prompts", str(chats)], "expected a URL"),
        (["--server", "http://x"], "--server needs --prompts"),
        (["--server", "http://x", "--draft", "d"], "no such draft"),
        ([], "which draft"),
        (["--server-model", "m"], "names a model of --server"),
    ):
        assert main(["eval", *words]) == 2
        assert reason in capsys.readouterr().err, words
    assert data_main(["regenerate", "--server", "x", "--corpus", str(chats), "--out", "o"]) == 2


# --- beside what is predicted ---


def short(workplace: Path) -> dict[str, Any]:
    return evaluate_tools.config_of(workplace, limit=7, max_new_tokens=12)


def beside(workplace: Path, server: Engine, **more: Any) -> dict[str, Any]:
    return evaluate_tools.run_eval({**short(workplace), "server": server.url, **more})


@pytest.mark.long
def test_predicted_and_deployed_stand_side_by_side(workplace, capsys, monkeypatch):
    """A server that accepts as the decoder here is no surprise; one that accepts nothing is one."""
    monkeypatch.setattr(intervals, "FEWEST", 7)  # there are no more prompts
    plain = spec_train.evaluate(**short(workplace)).figures
    mean = round(plain["acceptance_length"] - 1)
    with Engine("vLLM", rounds_of=lambda m: [mean, mean + 1, max(mean - 1, 0)] * 3) as server:
        alike = beside(workplace, server)
    assert alike["acceptance_length"] == pytest.approx(plain["acceptance_length"])
    assert alike["draft_tokens"] == DEPTH
    shown = capsys.readouterr().out
    assert shown.index("deployed length") < shown.index("acceptance length")
    with Engine("vLLM", rounds_of=lambda m: [0] * 19 + [1]) as server:
        apart = beside(workplace, server)
    (warning,) = apart["warnings"]
    assert "vLLM accepts 1.05 tokens" in warning and "real decoding here" in warning
    with Engine("vLLM", rounds_of=lambda m: [DEPTH] * 20) as server:
        (warning,) = beside(workplace, server)["warnings"]
    assert "are the prompts, the template and the draft the same?" in warning
    with Engine("vLLM", rounds_of=lambda m: [0] * 19 + [1]) as server:
        assert not beside(workplace, server, draft_tokens=DEPTH - 1)["warnings"]
    (warning,) = apart["warnings"]
    section = warning.partition("section ")[2].strip('"')
    assert section.lower().replace(" ", "-").replace(",", "") in anchors(PAGE)


def test_sampled_drafts_are_named_where_an_engines_greedy_ones_part_from_them():
    """vLLM's draft_sample_method is greedy at every temperature, unless it is set."""
    served = {"engine": "vLLM", "draft_tokens": 4, "acceptance_length": 1.5, "interval": [1.4, 1.6]}
    here = {"target": "T", "tree_tokens": 0, "draft_tokens": 4, "acceptance_length": 2.0}
    for temperature, words in ((0.0, "low-acceptance.md"), (1.0, "sampled here, and often greedy")):
        report = here | {"interval": [1.9, 2.1], "server": served | {"temperature": temperature}}
        (warning,) = on_server._parted(report)
        assert words in warning and "accepts 1.50 tokens" in warning


def test_a_draft_beside_a_server_needs_what_predicts(workplace):
    given = {name: short(workplace)[name] for name in ("draft", "prompts")}
    with pytest.raises(ConfigError, match=r"needs --data or --target, .* leave --draft out"):
        spec_train.evaluate(server="http://x", **given)


def test_what_the_server_counted_survives_a_failure_here(workplace, monkeypatch, caplog):
    """Planted: memory ends while the target answers, after the server has."""

    def fails(*given: Any, **options: Any) -> None:
        raise RunError("no memory")

    monkeypatch.setattr("spec_train.evaluation.evaluate.measure", fails)
    options = evaluate_tools.config_of(workplace)
    with Engine("vLLM") as server, pytest.raises(RunError, match="no memory"):
        spec_train.evaluate(**{**options, "server": server.url, "limit": 7})
    assert "warning[server]: the server alone was measured: deployed length" in caplog.text


def test_a_chat_template_that_differs_on_the_server_is_said(workplace):
    with Engine("vLLM", prompt_tokens=lambda messages: 30) as server:
        warnings = beside(workplace, server)["warnings"]
    assert any("7 of 7 prompts have another length on the server" in text for text in warnings)


def test_what_serving_adds_to_the_prompts_is_named_as_in_real_decoding(chats, workplace):
    """Shares of template kwargs, system messages; sampling of the engine; the end of an answer."""
    trained = {
        "template_kwargs_used": {'{"enable_thinking": false}': 9},
        "system_messages": {"You are a pirate.": 9},
        "tools_used": {"": 9},
        "generation_defaults": {"repetition_penalty": 1.2, "top_k": 20, "temperature": 0.6},
    }
    given = {"prompts": str(chats), "trained": trained}
    with Engine("vLLM") as server:
        kwargs = {"enable_thinking": True}
        serving = on_server.Serving(server=server.url, chat_template_kwargs=kwargs, **given)
        warnings = on_server.measure_server(serving)["warnings"]
        same = on_server.measure_server(
            on_server.Serving(server=server.url, prompts=str(chats), chat_template_kwargs=kwargs)
        )
    said = "\n".join(warnings)
    assert "chat_template_kwargs: the draft was fitted with" in said
    assert "system message: the draft was fitted with 'You are a pirate.'" in said
    assert "generation_config.json sets repetition_penalty 1.2, which an engine applies" in said
    assert "top_k" not in said, "it changes nothing in greedy decoding"
    assert not same["warnings"], "of nothing known, nothing is said"
    folder = Path(shutil.copytree(short(workplace)["target"], chats.parent / "deaf"))
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        config = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(config | {"eos_token_id": 3}))
    template = folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}a b c{% endfor %}")
    with Engine("vLLM") as server:
        serving = on_server.Serving(server=server.url, **given)
        warnings = on_server.measure_server(serving, target=str(folder))["warnings"]
    assert any("at which generation does not stop" in text for text in warnings)


def test_a_server_is_asked_with_the_template_kwargs_of_the_training(workplace, tmp_path):
    """As what is decoded here: else deployed and predicted lengths are of other prompts."""
    options = short(workplace)
    target = Path(shutil.copytree(options["target"], tmp_path / "target"))
    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is defined %}{% endif %}")
    draft = load_draft(resolve_draft_dir(options["draft"]))
    kwargs = {"enable_thinking": False}
    recorded = {json.dumps(kwargs | {"unread": 1}): 9}
    draft.update_config(origin={"template_kwargs_used": recorded})
    draft.save_pretrained(tmp_path / "draft")
    options |= {"draft": str(tmp_path / "draft"), "target": str(target)}
    for given, asked in ((None, kwargs), ({"enable_thinking": True}, {"enable_thinking": True})):
        with Engine("vLLM") as server:
            more = {"server": server.url, "chat_template_kwargs": given}
            evaluate_tools.run_eval({**options, **more})
        assert server.requests and all(r["chat_template_kwargs"] == asked for r in server.requests)
