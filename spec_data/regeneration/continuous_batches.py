"""Answers of a local target with the continuous batching of transformers.

A request that ends makes room for the next one at once, so long answers hold nothing up. Finished
answers arrive in any order; the journal keeps each one as it comes. Which requests share a forward
depends on time, so near-ties of logits may be decided otherwise in another run.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import Conversation
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.regeneration.local_target import (
    LocalTarget,
    NoQuestion,
    Question,
    keep_answer,
    sampling_options,
)
from spec_data.shards.errors import RunError

logger = logging.getLogger(__name__)

_WAITING = 4  # requests in the queue, as a multiple of those that run at once
_FLUSH_SECONDS = 1.0
_PAGE = 256  # tokens of a page of the cache
_CPU_POSITIONS = 4096  # of a request whose target does not tell its context


class ContinuousBatchingError(RunError):
    """Continuous batching does not work for this target or on this device."""


class ContinuousBatches:
    """Generates with `model`; the options are those of the run."""

    def __init__(self, model: Any, target: LocalTarget, config: RegenerateConfig) -> None:
        self._model = model
        self._target = target
        self._config = config

    def run(self, conversations: Iterable[Conversation], journal: Journal, ledger: Ledger) -> None:
        """Answer every turn of every conversation that the journal does not hold.

        Raises:
            ContinuousBatchingError: the manager of transformers fails.
            RunError: the disk is full.
        """
        source = iter(conversations)
        flushed = time.monotonic()
        running: dict[str, Question] = {}
        with self._manager() as manager:
            while True:
                self._fill(manager, running, source, journal, ledger)
                if not running:
                    break
                for question, tokens in self._finished(manager, running):
                    keep_answer(self._target, question, tokens, journal, ledger)
                    self._ask(manager, running, question.conversation, journal, ledger)
                if time.monotonic() - flushed > _FLUSH_SECONDS:
                    journal.flush()
                    flushed = time.monotonic()

    def _fill(
        self,
        manager: Any,
        running: dict[str, Question],
        source: Iterator[Conversation],
        journal: Journal,
        ledger: Ledger,
    ) -> None:
        """Ask questions of further conversations while there is room in the queue."""
        while len(running) < self._config.batch_size * _WAITING:
            conversation = next(source, None)
            if conversation is None:
                return
            if journal.count(conversation.id) == len(conversation.slots):
                ledger.complete(fresh=False)
                continue
            self._ask(manager, running, conversation, journal, ledger)

    def _ask(
        self,
        manager: Any,
        running: dict[str, Question],
        conversation: Conversation,
        journal: Journal,
        ledger: Ledger,
    ) -> None:
        """Ask the next turn of a conversation, if it has one."""
        if ledger.lost(conversation):
            return
        answers = journal.read(conversation.id)
        if len(answers) == len(conversation.slots):
            ledger.complete()
            return
        try:
            question = self._target.question(conversation, answers)
        except NoQuestion as error:
            ledger.skip(conversation, error.kind, str(error))
            return
        name = f"{conversation.id}:{question.turn}"
        running[name] = question
        manager.add_request(
            input_ids=question.prompt,
            request_id=name,
            max_new_tokens=question.limit,
            eos_token_id=list(self._target.stops),
        )

    def _finished(
        self, manager: Any, running: dict[str, Question]
    ) -> list[tuple[Question, list[int]]]:
        """Return answers that are there, waiting up to a second for the first; ([] for none)."""
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise ContinuousBatchingError(
                    "continuous batching stopped; see its message above. Use --batching padded"
                )
            return []
        if not result.is_finished() or result.request_id not in running:
            return []
        if result.error is not None:
            raise ContinuousBatchingError(
                f"continuous batching failed: {result.error}. Use --batching padded"
            )
        return [(running.pop(result.request_id), result.generated_tokens)]

    @contextmanager
    def _manager(self) -> Iterator[Any]:
        options: dict[str, Any] = {
            "seed": self._config.seed,
            "auto_switch_to_flash": False,  # the attention is the one that was asked for
            "max_requests_per_batch": self._config.batch_size,
        }
        if self._model.device.type != "cuda":  # on a GPU the free memory decides
            most = self._target.context or _CPU_POSITIONS
            pages = -(-most // _PAGE) * self._config.batch_size
            options |= {"num_blocks": pages, "max_batch_tokens": max(512, self._config.batch_size)}
        generation = GenerationConfig(
            **sampling_options(self._config),
            max_new_tokens=self._config.max_new_tokens,
            eos_token_id=list(self._target.stops),
            pad_token_id=self._target.stops[0] if self._target.stops else 0,
        )
        self._model.generation_config = generation
        try:
            with self._model.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=ContinuousBatchingConfig(**options),
                block=True,
                timeout=5,
            ) as manager:
                yield manager
        except (ValueError, AttributeError, ImportError, MemoryError) as error:
            raise ContinuousBatchingError(
                f"continuous batching does not work here ({type(error).__name__}: {error}); use "
                "--batching padded"
            ) from error
