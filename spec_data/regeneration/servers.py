"""Answers of OpenAI-compatible servers: many conversations in flight, and every kind of failure.

Each of `concurrency` tasks takes the next conversation and asks its turns one after the other;
requests go round the servers. What passes (a dropped connection, 408, 409, 429, 5xx) is tried again
by the client of `openai`, with growing pauses and the server's Retry-After. A server that then
refuses connections rests, twice as long each time, and is asked again; one that is away for minutes
is left out. Where it cuts a connection, another server is asked, if there is one. A body
that is no answer is asked for again. Another refusal concerns its conversation alone. A wrong key
stops the run, and so do many conversations in a row that are forbidden or without an answer.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from spec_data.corpus.bad_rows import stored
from spec_data.corpus.records import REASONING, Message, is_text, parse_row
from spec_data.regeneration.bounded import async_client, client, is_cut, most_bytes
from spec_data.regeneration.conversations import (
    RAN_ON,
    TRUNCATED,
    Answer,
    Conversation,
    Sampling,
    Unanswerable,
)
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.local import ChatTarget
from spec_data.shards.errors import ConfigError, RunError

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

OTHER_PROMPT = "answers to a prompt of another length than the target's template renders"
NO_ANSWER, FORBIDDEN = "no-answer", "forbidden"
_RETRIES = 8  # of the client
_SECONDS = 600.0  # for one answer, at least
_SLOWEST = 10  # tokens a second of an answer that is waited for
_LIST_SECONDS = 30.0  # for the list of models, and for a connection
_REST, _LONGEST_REST = 1.0, 60.0  # seconds without requests to a server that is away
_AWAY = 300.0  # seconds after which it is left out, as it may not come back
_TRIES = 5  # bodies that are no answer, or servers that are left out
_IN_A_ROW = 16  # conversations without an answer after which no server is thought to work
_SENT = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)


@dataclass
class Away:
    """A server that refuses connections: since when, until when it rests, and how often it did."""

    since: float
    until: float = 0.0
    rests: int = 0


class MalformedBody(ValueError):
    """The body of a response is not an answer; another try may have one."""


class ServerBackend:
    """The answers of servers.

    `concurrency` conversations are in flight. `model` None is the first one that they list. The
    prompts of the servers are compared with those of the template of `target`.

    Raises:
        ConfigError: the openai library is not installed, a server refuses the key, or has no such
            model. RunError: a server does not respond.
    """

    advice = "The answers so far are kept; run the same command again to resume"

    def __init__(
        self,
        urls: Sequence[str],
        model: str | None,
        sampling: Sampling,
        concurrency: int,
        target: ChatTarget | None,
    ) -> None:
        self._key = os.environ.get("OPENAI_API_KEY") or "none"
        self._urls = list(dict.fromkeys(urls))
        self._model = self._check_model(model)
        self._sampling, self._concurrency, self._target = sampling, concurrency, target
        self._clients: dict[str, openai.AsyncOpenAI] = {}  # those that are asked, by URL
        self._away: dict[str, Away] = {}  # those that rest, by URL
        self._turns = itertools.count()
        self._without_answer = 0  # conversations in a row
        self._refused, self._answered = 0, False

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        settings: dict[str, Any] = {"backend": "server", "server_model": self._model}
        if self._target is not None:
            facts = self._target.facts
            settings |= {"target_name": facts["target_name"], "tokenizer": facts["tokenizer"]}
        return settings

    def rows(self, conversation: Conversation, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Return what is written of a conversation: its row."""
        return [conversation.row(answers)]

    def _check_model(self, wanted: str | None) -> str:
        """Return the model's name; check that each server responds and has it."""
        try:
            import openai
        except ImportError:
            raise ConfigError("--server needs the openai library: pip install openai") from None
        for url in self._urls:
            patience = {"timeout": _LIST_SECONDS, "http_client": client()}
            try:
                with openai.OpenAI(base_url=base_url(url), api_key=self._key, **patience) as asked:
                    listed = asked.models.list().data
                names = [m.id for m in listed if isinstance(m.id, str) and is_text(m.id)]
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                raise RunError(f"--server {url} does not respond: {_reason(error)}") from None
            except openai.APIStatusError as error:
                if 300 <= error.status_code < 400:
                    raise _refusal(url, error) from None
                continue  # it responds, but has no such list
            except (openai.APIError, ValueError, TypeError, AttributeError):
                continue  # it responds, but has no such list
            wanted = wanted or (names[0] if names else None)
            if names and wanted not in names:
                raise ConfigError(
                    f"--server {url} has no model {wanted!r}; it has {', '.join(names)}"
                )
        if wanted is None:
            raise ConfigError(
                "the servers list no model: check OPENAI_API_KEY, or pass --server-model"
            )
        return wanted

    def run(self, conversations: Iterable[Conversation], journal: Journal) -> None:
        """Answer every turn that the journal does not hold.

        Raises:
            ConfigError: a server refuses the key, or does not have the model.
            RunError: no server answers any more. FileError: the disk is full.
        """
        from anyio.from_thread import start_blocking_portal  # comes with openai

        with start_blocking_portal() as portal:  # a notebook runs an event loop in this thread
            portal.call(self._answer_all, iter(conversations), journal)

    async def _answer_all(self, conversations: Iterator[Conversation], journal: Journal) -> None:
        import openai

        patience = openai.Timeout(None, connect=_LIST_SECONDS)  # `ask` counts the seconds
        options: dict[str, Any] = {"timeout": patience, "max_retries": _RETRIES}
        work = (self._work(conversations, journal) for _ in range(self._concurrency))
        async with AsyncExitStack() as stack:
            for url in self._urls:
                options["http_client"] = async_client()
                asked = openai.AsyncOpenAI(base_url=base_url(url), api_key=self._key, **options)
                self._clients[url] = await stack.enter_async_context(asked)
            tasks = [asyncio.create_task(coroutine) for coroutine in work]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _work(self, conversations: Iterator[Conversation], journal: Journal) -> None:
        """Answer conversations until there are no more."""
        for conversation in conversations:
            answers = journal.read(conversation.id)
            resumed = len(answers) == len(conversation.slots)
            self._answered |= bool(answers)
            try:
                while len(answers) < len(conversation.slots):
                    answer = await self.ask(conversation, answers)
                    journal.add([(conversation.id, len(answers), answer)])
                    answers.append(answer)
                    self._answered = True
                journal.complete(resumed=resumed)
                self._without_answer = 0
            except Unanswerable as error:
                journal.fail(conversation, error)
                if not error.retry:  # it was not asked
                    continue
                # a refusal is a response: such conversations may be all that is left of a run
                refused = error.kind != NO_ANSWER
                self._without_answer = 0 if refused else self._without_answer + 1
                self._refused += refused
                if self._refused == _IN_A_ROW and not self._answered:
                    if error.kind == FORBIDDEN:
                        raise ConfigError(
                            f"the first {_IN_A_ROW} conversations were refused; the last: {error}. "
                            "Check OPENAI_API_KEY, --server-model and the URL"
                        ) from None
                    logger.warning(
                        "warning[server]: the first %d conversations were refused; the last: %s",
                        *(_IN_A_ROW, error),
                    )
                if self._without_answer >= max(_IN_A_ROW, self._concurrency):
                    raise RunError(
                        f"the last {self._without_answer} conversations have no answer; the last "
                        f"reason: {error}\n{self.advice}"
                    ) from None

    async def ask(self, conversation: Conversation, answers: Sequence[Answer]) -> Answer:
        """Return the answer to the turn after `answers`."""
        import openai

        request, expected = self._request(conversation, answers), 0
        if self._target is not None:
            prompt, request["max_tokens"] = self._target.prompt(conversation, answers)
            expected = len(prompt)
        seconds = max(_SECONDS, request["max_tokens"] / _SLOWEST)
        reason, failed = "", set[str]()
        tries = 0
        while tries < _TRIES:
            if not self._clients:
                raise RunError(
                    f"no server responds any more; the last one: {reason}\n{self.advice}"
                )
            urls = [url for url in self._clients if url not in failed]
            if not urls:
                break
            awake = [url for url in urls if self._rest_of(url) <= 0]
            if not awake:  # the conversation waits with them
                await asyncio.sleep(min(map(self._rest_of, urls)))
                continue
            url, tries = awake[next(self._turns) % len(awake)], tries + 1
            try:
                completions = self._clients[url].chat.completions.with_raw_response
                async with asyncio.timeout(seconds):
                    response = await completions.create(**request)
                if is_cut(response.http_response):
                    most = most_bytes(request["max_tokens"])
                    raise MalformedBody(f"more than {most:,} bytes, or packed otherwise than asked")
                answer = self.read(response.content)
            except MalformedBody as error:
                reason = stored(f"{url}: malformed body: {error}")
            except openai.APIStatusError as error:
                raise _refusal(url, error) from None
            except TimeoutError:
                reason = f"{url}: no answer in {seconds:,.0f} seconds"
                failed.add(url)
            except openai.APIConnectionError as error:
                reason = stored(f"{url}: {_reason(error)}")
                # of httpx, under the name that its release has
                if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):
                    self._note_away(url, reason)
                    tries -= 1  # it was not asked
                else:
                    failed.add(url)
            else:
                if self._away.pop(url, None):
                    logger.info("%s answers again", url)
                if expected and answer.prompt_tokens not in (0, expected):
                    return msgspec.structs.replace(answer, note=OTHER_PROMPT)
                if self._target and self._target.unstopped and answer.finish == TRUNCATED:
                    return msgspec.structs.replace(answer, note=RAN_ON)
                return answer
        raise Unanswerable(NO_ANSWER, reason, retry=True)

    def _rest_of(self, url: str) -> float:
        """Return the seconds for which a server still rests."""
        away = self._away.get(url)
        return away.until - time.monotonic() if away else 0.0

    def _note_away(self, url: str, reason: str) -> None:
        """Let a server rest that refuses connections; leave it out if it did for minutes."""
        now, away = time.monotonic(), self._away.get(url)
        if url not in self._clients:
            return
        if away is None:
            away = self._away[url] = Away(since=now)
            logger.warning(
                "warning[server]: this server rests, and is asked again for %.0f seconds: %s",
                *(_AWAY, reason),
            )
        elif away.until > now:  # requests that were in flight together count once
            return
        if now - away.since >= _AWAY:
            del self._clients[url]
            logger.warning("warning[server]: this server is left out: %s", reason)
            return
        away.until = now + min(_REST * 2**away.rests, _LONGEST_REST)
        away.rests += 1

    def read(self, body: bytes) -> Answer:
        """Return the answer in a body; a subclass may read more of it."""
        return read_answer(body)

    def _request(self, conversation: Conversation, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the arguments of a chat completion for the turn after `answers`.

        Options that not every server knows (top_k, chat_template_kwargs) are sent only where set.
        """
        record, sampling = conversation.record, self._sampling
        text = f"{sampling.seed} {conversation.id} {len(answers)}"
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [_sent(message) for message in conversation.before(answers)],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1,
        }
        if record.tools:
            request["tools"] = record.tools
        extra: dict[str, Any] = {}
        if sampling.top_k is not None:
            extra["top_k"] = sampling.top_k or -1  # vLLM and SGLang: -1 is all of them
        if kwargs := {**sampling.chat_template_kwargs, **record.template_kwargs}:
            extra["chat_template_kwargs"] = kwargs
        return request | ({"extra_body": extra} if extra else {})


def _refusal(url: str, error: "openai.APIStatusError") -> Exception:
    """Return what a status other than 200 means for the run."""
    code = error.status_code
    if 300 <= code < 400:
        there = stored(error.response.headers.get("location", "another address"))
        return ConfigError(
            f"--server {url} sends requests on to {there}. Prompts and the key go to no other "
            "server than the one that you name: give that one"
        )
    text = stored(f"HTTP {code}: {' '.join(str(error.message).split())[:300]}")
    if code == 401:
        return ConfigError(f"--server {url} refuses the key: {text}. Check OPENAI_API_KEY")
    kind = NO_ANSWER if code in (408, 409, 429) or code >= 500 else "refused"
    kind = FORBIDDEN if code in (403, 404) else kind
    return Unanswerable(kind, f"{url}: {text}", retry=True)


def _reason(error: "openai.APIError") -> str:
    return str(error.__cause__ or "") or str(error)


def base_url(url: str) -> str:
    """Return the address under which a server has /chat/completions."""
    plain = url.rstrip("/").removesuffix("/chat/completions")
    return plain if urlsplit(plain).path.strip("/") else f"{plain}/v1"


# -- messages --------------------------------------------------------------------------------------


def _sent(message: Message) -> Message:
    """Return a message as servers take it: known keys, and arguments of calls as JSON text."""
    sent = {"content": "", **{name: message[name] for name in _SENT if name in message}}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [_call(call) for call in calls]
    return sent


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return dict(call)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        function = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", **call, "function": function}


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Usage(msgspec.Struct):
    completion_tokens: _Tokens | None = None
    prompt_tokens: _Tokens | None = None


class _Completion(msgspec.Struct):
    """What is read of the body of a chat completion."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


def read_answer(body: bytes) -> Answer:
    """Return the answer in the body of a chat completion, if a row of a corpus may hold it.

    Raises:
        MalformedBody: the body is not JSON, or not the completion of an answer.
        Unanswerable: the server stopped the answer, such as its content filter.
    """
    try:
        completion = msgspec.json.decode(body, type=_Completion)
        choice, usage = completion.choices[0], completion.usage or _Usage()
        message: Message = {"content": choice.message.content or ""}
        for name in (*REASONING, "tool_calls"):
            if value := getattr(choice.message, name):
                message[name] = value
        question = {"role": "user", "content": ""}
        row = {"messages": [question, {"role": "assistant", **message}]}
        read = parse_row(row, source="", where="").messages or []
        # arguments of calls as templates render them: not as text
        message = {name: value for name, value in read[-1].items() if name != "role"}
    except (ValueError, RecursionError) as error:  # of msgspec, or a BadRow
        start = body[:80].decode("utf-8", "replace") + "..." * (len(body) > 80)
        raise MalformedBody(f"{error}: {start!r}") from None
    if choice.finish_reason == "content_filter":
        reason = "the server's content filter stopped the answer"
        raise Unanswerable("refused", reason, retry=True)
    if choice.message.refusal and not choice.message.content:
        reason = f"the server refused to answer: {choice.message.refusal[:80]}"
        raise Unanswerable("refused", reason, retry=True)
    return Answer(
        message=message,
        finish=choice.finish_reason,
        tokens=usage.completion_tokens or 0,
        prompt_tokens=usage.prompt_tokens or 0,
    )
