"""Let OpenAI-compatible servers answer: many conversations in flight, and every kind of failure.

Each of --concurrency workers takes the next conversation and asks its turns one after the other. A
timeout, a dropped connection, a 408, 409, 429 or 5xx and a malformed body are tried again, on any
server. Another refusal of a request concerns its conversation alone. A wrong key, or a model that
is not there, stops the run, and so do many conversations in a row without any answer.
"""

import asyncio
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

from spec_data.corpus.bad_rows import printable
from spec_data.corpus.json_values import is_text
from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import Answer, Conversation, Reading
from spec_data.regeneration.event_loop import run_to_end
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.regeneration.local_target import LocalTarget, NoQuestion
from spec_data.regeneration.server_messages import (
    MalformedBody,
    RefusedAnswer,
    read_answer,
    request_of,
)
from spec_data.regeneration.server_pool import Server, ServerPool, asked_wait
from spec_data.shards.errors import ConfigError, RunError

logger = logging.getLogger(__name__)

OTHER_PROMPT = "answers to a prompt of another length than the target's template renders"
_AGAIN = (408, 409, 425, 429)
_STOPS = (401, 403, 404)
_IN_A_ROW = 16  # conversations without an answer after which no server is thought to work
_LONGEST_PAUSE = 60.0  # seconds between two tries
_FLUSH_SECONDS = 1.0
_LOOK_UP = 64  # finished conversations that are passed by before other tasks run


class GaveUp(Exception):
    """No answer after all retries; the message has the last reason."""


class ServerAnswers:
    """The answers of servers; with --target, their prompts are compared with its template's.

    Raises:
        ConfigError: the openai library is not installed, or a server has no such model.
        MissingError, TargetError: there is no such target.
        RunError: no server responds.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config
        self._target = LocalTarget(config, weights=False) if config.target else None
        self._key = os.environ.get("OPENAI_API_KEY") or "none"
        self._model = run_to_end(self._find_model())
        self._given_up = 0  # conversations in a row

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        found: dict[str, Any] = {"backend": "server", "server_model": self._model}
        if self._target is not None:
            facts = self._target.facts
            found["target_name"] = facts["target"]["name"]
            found["tokenizer"] = facts["tokenizer"]
        return found

    def run(self, reading: Reading, journal: Journal, ledger: Ledger) -> None:
        """Answer every turn that the journal does not hold.

        Raises:
            ConfigError: a server refuses the key, or does not have the model.
            RunError: no server answers any more.
        """
        run_to_end(self._answer_all(reading, journal, ledger))

    def _pool(self) -> ServerPool:
        config = self._config
        return ServerPool(config.server, self._key, config.timeout, config.backoff)

    async def _find_model(self) -> str:
        """Return the model's name, and check that each server that responds has it."""
        wanted, silent = self._config.server_model, []
        async with self._pool() as pool:
            for server in pool.servers:
                try:
                    names = await _models(server)
                except GaveUp as error:
                    silent.append(f"{server.url}: {error}")
                    continue
                if names and wanted is None:
                    wanted = names[0]
                if names and wanted not in names:
                    raise ConfigError(
                        f"--server {server.url} has no model {wanted!r}; it has {', '.join(names)}"
                    )
        if len(silent) == len(pool.servers):
            raise RunError("no server responds:\n  " + "\n  ".join(silent))
        for line in silent:
            logger.warning("warning: this server does not respond, and others are used: %s", line)
        if wanted is None:
            raise ConfigError("the servers list no model; name it with --server-model")
        return wanted

    async def _answer_all(self, reading: Reading, journal: Journal, ledger: Ledger) -> None:
        source = iter(reading)
        async with self._pool() as pool:
            workers = [
                asyncio.create_task(self._work(pool, source, journal, ledger))
                for _ in range(self._config.concurrency)
            ]
            flusher = asyncio.create_task(_flush_often(journal))
            try:
                await asyncio.gather(*workers)
            finally:
                for task in (*workers, flusher):
                    task.cancel()
                await asyncio.gather(*workers, flusher, return_exceptions=True)

    async def _work(
        self, pool: ServerPool, source: Iterator[Conversation], journal: Journal, ledger: Ledger
    ) -> None:
        """Answer conversations until there are no more."""
        for passed, conversation in enumerate(source):
            if journal.count(conversation.id) == len(conversation.slots):
                ledger.complete(fresh=False)
                if passed % _LOOK_UP == 0:
                    await asyncio.sleep(0)
                continue
            try:
                await self._converse(pool, conversation, journal, ledger)
                ledger.complete()
                self._given_up = 0
            except NoQuestion as error:
                ledger.skip(conversation, error.kind, str(error))
            except (GaveUp, RefusedAnswer) as error:
                kind = "refused" if isinstance(error, RefusedAnswer) else "no-answer"
                reason = printable(str(error))
                ledger.fail(conversation, kind, reason)
                self._count_failure(reason)

    def _count_failure(self, reason: str) -> None:
        self._given_up += 1
        if self._given_up >= max(_IN_A_ROW, self._config.concurrency):
            raise RunError(
                f"the last {self._given_up} conversations have no answer; the last reason: {reason}"
                "\nThe answers so far are kept; run the same command again to resume"
            )

    async def _converse(
        self, pool: ServerPool, conversation: Conversation, journal: Journal, ledger: Ledger
    ) -> None:
        """Ask the turns of one conversation that have no answer yet."""
        answers = journal.read(conversation.id)
        while len(answers) < len(conversation.slots):
            expected = 0
            if self._target is not None:
                expected = len(self._target.question(conversation, answers).prompt)
            answer = await self._ask(pool, request_of(conversation, answers, self._config))
            if expected and answer.prompt_tokens and answer.prompt_tokens != expected:
                answer = Answer(**vars(answer) | {"notes": (*answer.notes, OTHER_PROMPT)})
            journal.add(conversation.id, len(answers), answer)
            answers.append(answer)
            ledger.answered(answer)

    async def _ask(self, pool: ServerPool, request: dict[str, Any]) -> Answer:
        """Return the answer to a request, trying again as often as --retries allows.

        Raises:
            GaveUp: no try was answered. RefusedAnswer: it will never be.
            ConfigError: a server refuses the key, or does not have the model.
        """
        reason = ""
        for attempt in range(self._config.retries + 1):
            if attempt:
                pause = min(self._config.backoff * 2 ** (attempt - 1), _LONGEST_PAUSE)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            server = await pool.next()
            server.flying += 1
            try:
                answer = await self._try(server, request)
                pool.succeeded(server)
                return answer
            except _TryAgain as error:
                reason = f"{server.url}: {error}"
                pool.failed(server, error.wait)
            finally:
                server.flying -= 1
        raise GaveUp(f"{reason} (after {self._config.retries + 1} tries)")

    async def _try(self, server: Server, request: dict[str, Any]) -> Answer:
        import openai

        try:
            completions = server.client.chat.completions.with_raw_response
            response = await completions.create(model=self._model, **request)
            return read_answer(response.content)
        except openai.APIStatusError as error:
            code = error.status_code
            text = printable(f"HTTP {code}: {' '.join(str(error.message).split())[:300]}")
            if code in _AGAIN or code >= 500:
                raise _TryAgain(text, asked_wait(error.response.headers)) from None
            if code in _STOPS:
                raise ConfigError(
                    f"--server {server.url} refuses all requests: {text}. Check OPENAI_API_KEY, "
                    "--server-model and the URL"
                ) from None
            raise RefusedAnswer(f"{server.url}: {text}") from None
        except openai.APIConnectionError as error:
            raise _TryAgain(str(error.__cause__ or error) or type(error).__name__) from None
        except MalformedBody as error:
            raise _TryAgain(f"malformed body: {error}") from None


class _TryAgain(Exception):
    """A try failed; `wait` are the seconds that the server asks for."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


async def _models(server: Server) -> list[str]:
    """Return the names of the models of a server; none where it does not list them.

    Raises:
        GaveUp: it does not respond. ConfigError: it refuses the key.
    """
    import openai

    try:
        listed = await server.client.with_options(timeout=30.0).models.list()
        names = [model.id for model in listed.data]
        return [name for name in names if isinstance(name, str) and is_text(name)]
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise ConfigError(
            f"--server {server.url} refuses the key (HTTP {error.status_code}); set OPENAI_API_KEY"
        ) from None
    except openai.APIConnectionError as error:
        raise GaveUp(str(error.__cause__ or error) or type(error).__name__) from None
    except openai.InternalServerError as error:
        raise GaveUp(f"HTTP {error.status_code}") from None
    except (openai.APIError, ValueError, TypeError, AttributeError, RecursionError):
        return []  # it responds, but has no such list


async def _flush_often(journal: Journal) -> None:
    while True:
        await asyncio.sleep(_FLUSH_SECONDS)
        journal.flush()
