"""Deployed acceptance: what a live engine counts of its draft while it answers the prompts.

Prompts are sent one after the other, and the counters are read around each, so that every prompt
has its own counts. They are those of `/metrics`:
    vLLM: `vllm:spec_decode_*` (docs.vllm.ai, v1/spec_decode/metrics.py)
    llama.cpp with --metrics: the same under `llamacpp:` (tools/server/server-task.cpp)
    SGLang with --enable-metrics: `sglang:spec_verify_calls_total`, counted when a request ends
        (srt/observability/metrics_collector.py); it has nothing by position
and without /metrics the `timings` of llama.cpp's answers (ggml-org/llama.cpp#12603).

A verification with drafts emits the accepted ones and a token of the target; the first token of an
answer comes from the prefill. Engines count drafts whole that the limit of tokens cuts off.
"""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from spec_data.corpus.documents import RenderError
from spec_data.corpus.template import Template
from spec_data.corpus.template_probes import unstopped_end
from spec_data.models.reading import end_token_ids
from spec_data.models.resolve import resolve_model
from spec_data.models.tokenizer import load_tokenizer
from spec_data.regeneration.bounded import client
from spec_data.regeneration.conversations import Answer, Conversation, Sampling, conversation_of
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.servers import ServerBackend, base_url
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.serving import GENERATION, read_sampling, usual_kwargs
from spec_data.terminal.console import without_logins
from spec_data.terminal.progress import progress
from spec_train.evaluation.prompts import read_prompts
from spec_train.evaluation.trained_prompts import (
    kwargs_for,
    rendered_otherwise,
    server_sampling_warnings,
)
from spec_train.simulation.intervals import length_interval

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

_SPEC = {
    "spec_decode_num_drafts_total": "rounds",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "spec_decode_num_accepted_tokens_per_pos_total": "position",
}
_NAMES = {
    **{f"{engine}:{name}": key for engine in ("vllm", "llamacpp") for name, key in _SPEC.items()},
    "vllm:generation_tokens_total": "tokens",
    "vllm:request_success_total": "requests",
    "llamacpp:tokens_predicted_total": "tokens",
    "sglang:spec_verify_calls_total": "rounds",
    "sglang:generation_tokens_total": "tokens",
    "sglang:num_requests_total": "requests",
}
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
_LINE = re.compile(r"^(\w+:\w+)(?:\{(.*)\})? ([-+.\w]+)", re.MULTILINE)
_TRIES = 5  # of a look at the counters
_SETTLED, _PAUSE = 10.0, 0.05
"""Seconds in which the counters must hold an answer that was sent, and between two looks."""
_START = (
    "vLLM: --speculative-config; SGLang: --speculative-algorithm and --enable-metrics; llama.cpp: "
    "-md and --metrics (`spec-train export` prints the command)"
)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A live server and what it is asked, as the options of `spec-train eval` say it.

    `trained` is the identity that the draft beside it was fitted to: its template kwargs are the
    default, as where it is decoded here.
    """

    server: str
    prompts: str
    server_model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    columns: str | dict[str, str] = ""
    trained: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    max_new_tokens: int = 256


@dataclass
class Counted:
    """Counts of the answers to one prompt: verifications, drafted and accepted, by position."""

    conversation: Conversation
    counts: Counter[str | int] = field(default_factory=Counter)
    answers: int = 0
    spoiled: int = 0
    prompt_tokens: int = 0


def read_counters(text: str) -> Counter[str | int]:
    """Return the counters in a page of metrics, summed over labels; positions by their number."""
    found: Counter[str | int] = Counter()
    for name, labels, value in _LINE.findall(text):
        key: str | int | None = _NAMES.get(name)
        if key == "position":
            key = int(re.findall(r'position="(\d+)"', labels)[0])
        if key is not None and math.isfinite(float(value)):
            found[key] += int(float(value))
    return found


class CountedServer(ServerBackend):
    """A server that answers one request after the other, with its counters around each.

    Raises:
        ConfigError, RunError: as `ServerBackend`, and where nothing is counted.
    """

    advice = "Nothing was measured"

    def __init__(self, url: str, model: str | None, sampling: Sampling) -> None:
        super().__init__([url], model, sampling, 1, None)
        self.url, self.engine = url, "llama.cpp"
        self.counted: dict[str, Counted] = {}
        self._timings: dict[str, Any] = {}
        self._metrics: openai.OpenAI

    def run(self, conversations: Iterable[Conversation], journal: Journal) -> None:
        """Answer every turn, with one connection to the metrics for all looks at them."""
        import openai

        root = base_url(self.url).rpartition("/")[0]
        options: dict[str, Any] = {"timeout": 30.0, "max_retries": _TRIES}
        options["http_client"] = client()
        with openai.OpenAI(base_url=root, api_key=self._key, **options) as self._metrics:
            super().run(conversations, journal)

    async def ask(self, conversation: Conversation, answers: Sequence[Answer]) -> Answer:
        """Return the answer to the turn after `answers`, and count what it took."""
        before = self._look()
        answer = await super().ask(conversation, answers)
        moved = self._of_timings() if before is None else self._settled(before, answer)
        one = self.counted.setdefault(conversation.id, Counted(conversation))
        one.prompt_tokens = one.prompt_tokens or answer.prompt_tokens
        beside = moved["tokens"] > (answer.tokens or moved["tokens"]) or moved["requests"] > 1
        if beside or moved["tokens"] < 0:  # it started again, and its counters with it
            one.spoiled += 1
            return answer
        if self.engine == "SGLang" and moved["rounds"]:
            moved["accepted"] = moved["tokens"] - 1 - moved["rounds"]
        one.answers += 1
        one.counts.update(moved)
        return answer

    def read(self, body: bytes) -> Answer:
        """Return the answer in a body, and keep its timings."""
        answer = super().read(body)
        self._timings = msgspec.json.decode(body).get("timings") or {}
        return answer

    def _look(self) -> Counter[str | int] | None:
        """Return the counters of now; None: the server has none that are known."""
        import openai

        try:
            text = self._metrics.get("/metrics", cast_to=str)
        except (openai.APIConnectionError, openai.APIStatusError) as error:
            status = getattr(error, "status_code", None)
            if status in (404, 405, 501):  # 501: llama.cpp without --metrics
                return None
            if status in (401, 403):
                raise ConfigError(
                    f"--server {self.url}: /metrics refuses the key ({status}); set OPENAI_API_KEY"
                ) from None
            raise RunError(f"--server {self.url}: /metrics does not answer: {error}") from None
        for prefix, engine in _ENGINES.items():
            if f"\n{prefix}:" in f"\n{text}":
                self.engine = engine
                return read_counters(text)
        return None

    def _settled(self, before: Counter[str | int], answer: Answer) -> Counter[str | int]:
        """Return by how much the counters moved, once they hold the answer; below 0: from 0 again.

        Raises:
            RunError: they never do.
        """
        deadline = time.monotonic() + _SETTLED
        while True:
            moved: Counter[str | int] = Counter(self._look() or before)
            moved.subtract(before)
            if moved["tokens"] >= max(answer.tokens, 1) or moved["tokens"] < 0:
                return moved
            if time.monotonic() > deadline:
                raise RunError(
                    f"--server {self.url}: an answer has {answer.tokens} tokens, but its metrics "
                    f"moved by {moved['tokens']}: another process answered. Name the engine "
                    "itself, not what stands before several of them"
                )
            time.sleep(_PAUSE)

    def _of_timings(self) -> Counter[str | int]:
        """Return the counts of llama.cpp's last answer."""
        times = self._timings
        if "predicted_n" not in times:
            raise ConfigError(
                f"--server {self.url} counts nothing: it has neither /metrics of vLLM, SGLang or "
                f"llama.cpp nor timings in its answers. Start it with a draft and metrics: {_START}"
            )
        accepted, tokens = times.get("draft_n_accepted", 0), times["predicted_n"]
        rounds = tokens - 1 - accepted if times.get("draft_n") else 0
        drafted = times.get("draft_n", 0)
        counts = {"tokens": tokens, "rounds": rounds, "drafted": drafted, "accepted": accepted}
        return Counter[str | int](counts)


def measure_server(
    serving: Serving, limit: int = 0, target: str | None = None, trust: bool = False
) -> dict[str, Any]:
    """Return the figures of the server's own counters, and `warnings`.

    `target` renders the prompts for a comparison of their lengths; `trust` its code.

    Raises:
        SpecDataError: no such prompts, server or model; nothing is counted or drafted; no answer.
    """
    kwargs, template = serving.chat_template_kwargs, None
    about: list[str] = []
    defaults = serving.trained.get(GENERATION) or {}
    if target is not None:
        directory = resolve_model(target)[0]
        tokenizer = load_tokenizer(directory, trust)
        kwargs, about = kwargs_for(kwargs, serving.trained, tokenizer)
        template = Template(tokenizer, kwargs)
        defaults = read_sampling(directory)
        ends = {*end_token_ids(directory), tokenizer.eos_token_id} - {None}
        end = unstopped_end(template, sorted(ends))
        about += [str(end)] if end else []
    elif kwargs is None:
        kwargs = usual_kwargs(serving.trained) or {}
    prompts = read_prompts(serving.prompts, template, limit, columns=serving.columns)
    about += rendered_otherwise(serving.trained, prompts, kwargs)
    chats: dict[str, Conversation] = {}
    ids: dict[str, int] = {}
    for prompt in prompts:
        try:
            chat = conversation_of(prompt.record, "all" if prompt.record.follow_ups else "last")
        except RenderError as error:
            prompts.left_out += 1
            prompts.examples.append(str(error))
            continue
        if chat.id in chats:  # the same prompt again, as in two sets
            chat = replace(chat, id=f"{chat.id} {len(chats)}")
        chats[chat.id], ids[chat.id] = chat, len(prompt.ids)
    if not chats:
        raise ConfigError(f"--prompts {serving.prompts}: no chat; {prompts.examples[0]}")
    top_k = 0 if serving.temperature else None  # all tokens, as in `eval --target`
    sampling = Sampling(serving.temperature, 1.0, top_k, serving.max_new_tokens, 0, kwargs)
    sent = {"temperature", "top_p"} | ({"top_k"} if serving.temperature else set())
    greedy = {"top_k", "min_p"} - sent if not serving.temperature else set()  # they change nothing
    about += server_sampling_warnings(defaults, sent | greedy)
    backend = CountedServer(serving.server, serving.server_model, sampling)
    with (
        progress(total=len(chats), unit="prompts", desc="server", leave=False) as bar,
        Journal(Path(":memory:"), {}, bar) as journal,
    ):
        backend.run(chats.values(), journal)
    counted = list(backend.counted.values())
    if not counted:
        raise RunError(
            f"no prompt was answered; the first reason: {next(iter(journal.failures.values()))}"
        )
    used = [one for one in counted if one.answers]
    if not used:
        raise RunError(
            f"--server {serving.server}: other requests ran during every answer, so its counters "
            "say nothing about these prompts. Try again when nothing else is served"
        )
    if not sum(one.counts["rounds"] for one in used):
        raise ConfigError(
            f"--server {serving.server}: {backend.engine} verified no draft in {len(used)} "
            "answers: it runs without speculation, or all were one token. Start it with a draft: "
            f"{_START}"
        )
    groups: dict[str, list[Counted]] = {}
    for one in used:
        groups.setdefault(prompts.groups[one.conversation.record.where], []).append(one)
    figures = {
        "server": without_logins(serving.server),
        **{name: getattr(serving, name) for name in ("temperature", "max_new_tokens")},
        "engine": backend.engine,
        "model": backend.settings()["server_model"],
        **_figures(used),
        "answers": sum(one.answers for one in used),
        "beside_others": sum(one.spoiled for one in counted),
        "failed": len(journal.failures),
        "bad_prompts": prompts.left_out,
        "by_set": [{"set": name, **_figures(some)} for name, some in groups.items()],
        "per_prompt": [
            {"where": one.conversation.record.where, "prompt_tokens": one.prompt_tokens}
            | {name: one.counts[name] for name in ("rounds", "drafted", "accepted")}
            for one in used
        ],
    }
    warnings = _warnings(figures, counted, ids if template else {})
    return figures | {"warnings": [*about, *warnings]}


def _figures(counted: Sequence[Counted]) -> dict[str, Any]:
    """Return length with interval, the share accepted by depth, and the depth; None: unknown."""
    total: Counter[str | int] = Counter()
    prompts: dict[str, Counter[str | int]] = {}  # answers to one prompt are not independent
    for one in counted:
        total.update(one.counts)
        # without the number of a prompt that is there again
        prompts.setdefault(one.conversation.id.split()[0], Counter()).update(one.counts)
    pairs = [(c["rounds"], c["rounds"] + c["accepted"]) for c in prompts.values()]
    rounds, drafted = total["rounds"], total["drafted"]
    positions = sorted(key for key in total if isinstance(key, int))
    depth = len(positions) or (-(-drafted // rounds) if rounds else 0)
    chain = [rounds, *(total[position] for position in positions)]
    interval = length_interval(np.array(pairs, dtype=np.int64))
    return {
        "acceptance_length": (rounds + total["accepted"]) / rounds if rounds else None,
        "interval": None if interval is None else list(interval),
        "accept_rate": [b / a if a else None for a, b in pairwise(chain)],
        "rounds": rounds,
        "drafted": drafted,
        "accepted": total["accepted"],
        "draft_tokens": depth or None,
        "prompts": len(pairs),
    }


def _warnings(
    figures: dict[str, Any], counted: Sequence[Counted], ids: dict[str, int]
) -> list[str]:
    """Return what makes the figures doubtful; `ids` are the prompts' own lengths, where known."""
    warnings = []
    if spoiled := figures["beside_others"]:
        warnings.append(
            f"{spoiled} of {spoiled + figures['answers']} answers ran beside other requests of the "
            "server, or it started again: their counts are left out. Measure when nothing else is "
            "served"
        )
    if failed := figures["failed"]:
        warnings.append(f"{failed} prompts have no answer, and are not measured")
    other = [
        (one, ids[one.conversation.id])
        for one in counted
        if one.prompt_tokens
        and one.prompt_tokens != ids.get(one.conversation.id, one.prompt_tokens)
    ]
    if other:
        one, here = other[0]
        warnings.append(
            f"{len(other)} of {len(counted)} prompts have another length on the server than the "
            f"target's template renders ({one.conversation.record.where}: {one.prompt_tokens} "
            f"tokens, here {here}): another chat template or system prompt"
        )
    return warnings


def compared_with(report: dict[str, Any] | None, served: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of `eval` with those of the server; None: it is all that was measured."""
    report = report or {
        "draft": None,
        "acceptance_length": served["acceptance_length"],
        "draft_tokens": served["draft_tokens"],
        "dtype": "",
        "device": served["server"],
        "warnings": [],
    }
    report["server"] = served
    more = [*served["warnings"], *_parted(report)]
    warnings = [text for text in more if text not in report["warnings"]]  # of the same prompts
    for warning in warnings:
        log.warning("warning[server]: %s", warning)
    return report | {"warnings": [*report["warnings"], *warnings]}


def _parted(report: dict[str, Any]) -> list[str]:
    """Return warnings where the deployed length and a predicted one part beyond both intervals.

    A prediction is compared if it is of the same drafting: as many tokens, no trees, and no greedy
    simulation beside sampled answers.
    """
    served, found = report["server"], []
    predicted: dict[str, Any] = {}
    if served["draft_tokens"] in (report["draft_tokens"], None):
        if "target" in report and not report["tree_tokens"]:
            predicted["real decoding here"] = report
        if "data" in report and not served["temperature"]:
            predicted["simulated decoding on --data"] = report["data"]["simulated"]
    for name, part in predicted.items():
        if None in (served["interval"], part["interval"]):
            continue
        (low, high), (least, most) = served["interval"], part["interval"]
        if high < least or most < low:
            advice = 'see docs/low-acceptance.md, section "Good here, low in the engine"'
            if most < low:
                advice = "are the prompts, the template and the draft the same?"
            if served["temperature"]:
                advice = "drafts are sampled here, and often greedy there: docs/evaluation.md"
            found.append(
                f"{served['engine']} accepts {served['acceptance_length']:.2f} tokens per "
                f"verification ({low:.2f} to {high:.2f}), {name} "
                f"{part['acceptance_length']:.2f} ({least:.2f} to {most:.2f}): {advice}"
            )
    return found
