"""Answers of a local target in batches of left-padded prompts of similar length.

Groups of conversations are drawn at random from a window of the corpus, and the turns of a group
are answered in rounds: the first turn of every conversation, then the second, and so on. A round is
sorted by length and cut into batches, which are answered in random order: a run that is stopped
holds answers of every kind. All of it depends on the corpus and the seed alone: a resumed run
repeats the batch that a kill interrupted, with the same prompts, the same seed, and the same
answers. Each answer is kept when it ends, not when its batch does.

Padding is proven on the first batch that needs it: the logits after a padded prompt must be those
of the prompt alone. Where they are not (families whose state runs over the padding), only prompts
of one length share a batch.
"""

import hashlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import Conversation
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.regeneration.local_target import (
    LocalTarget,
    NoQuestion,
    Question,
    explained_memory,
    keep_answer,
    sampling_options,
)

logger = logging.getLogger(__name__)

_GROUP = 8  # batches of conversations in a group; more of them waste less on padding
_WINDOW = 4096  # conversations, at least, from which a group is drawn
_FLUSH_SECONDS = 1.0
# Root mean square of the difference of logits, as a share of their spread. Rounding stays below.
_PADDING_BOUND = {torch.float32: 1e-3, torch.float64: 1e-3}
_PADDING_BOUND_HALF = 0.05


class PaddedBatches:
    """Generates with `model`; the options are those of the run."""

    def __init__(self, model: Any, target: LocalTarget, config: RegenerateConfig) -> None:
        self._model = model
        self._target = target
        self._size = config.batch_size
        self._config = config
        self._padding: bool | None = None  # not proven yet
        self._flushed = 0.0
        model.generation_config = GenerationConfig()  # nothing but what this run asks for
        # The head gets the last position of each prompt as a slice. For one that is not contiguous,
        # torch copies the head's weight once per prompt: 5.7 GB for 100 prompts of a 135 M model.
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: (given[0].contiguous(), *given[1:])
        )

    def run(self, conversations: Iterable[Conversation], journal: Journal, ledger: Ledger) -> None:
        """Answer every turn of every conversation that the journal does not hold.

        Raises:
            RunError: the device is out of memory, or the disk is full.
        """
        for group in _groups(conversations, self._size * _GROUP, self._config.seed):
            if all(journal.count(c.id) == len(c.slots) for c in group):
                for _ in group:
                    ledger.complete(fresh=False)
                continue
            for turn in range(max(len(c.slots) for c in group)):
                self._round(group, turn, journal, ledger)

    def _round(
        self, group: Sequence[Conversation], turn: int, journal: Journal, ledger: Ledger
    ) -> None:
        """Answer one turn of the conversations of a group that have it."""
        questions = []
        for conversation in group:
            if len(conversation.slots) <= turn or ledger.lost(conversation):
                continue
            try:
                before = journal.read(conversation.id)[:turn]
                questions.append(self._target.question(conversation, before))
            except NoQuestion as error:
                ledger.skip(conversation, error.kind, str(error))
        for batch in self._batches(questions):
            fresh = [journal.count(q.conversation.id) <= turn for q in batch]

            def end(
                row: int,
                own: list[int],
                batch: list[Question] = batch,
                fresh: list[bool] = fresh,
            ) -> None:
                self._end(batch[row], own, fresh[row], journal, ledger)

            if any(fresh):
                self._generate(batch, end)
            else:
                for row in range(len(batch)):
                    end(row, [])
            journal.flush()

    def _end(
        self, question: Question, own: list[int], new: bool, journal: Journal, ledger: Ledger
    ) -> None:
        """Keep the answer of a question, unless an earlier run did, and count it."""
        conversation = question.conversation
        if new:
            keep_answer(self._target, question, own, journal, ledger)
        if len(conversation.slots) == question.turn + 1 and not ledger.lost(conversation):
            ledger.complete(new)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            journal.flush()
            self._flushed = time.monotonic()

    def _batches(self, questions: Sequence[Question]) -> list[list[Question]]:
        """Cut questions, sorted by length, into batches; of one length each if padding leaks."""
        ordered = sorted(questions, key=lambda q: -len(q.prompt))
        if self._padding is None and len({len(q.prompt) for q in ordered[: self._size]}) > 1:
            self._padding = self._padding_is_exact(ordered[: self._size])
        runs: Iterable[list[Question]] = [ordered]
        if self._padding is False:
            runs = (list(run) for _, run in itertools.groupby(ordered, lambda q: len(q.prompt)))
        batches = [run[i : i + self._size] for run in runs for i in range(0, len(run), self._size)]
        if batches:
            random.Random(_batch_seed(self._config.seed, batches[0])).shuffle(batches)
        return batches

    @torch.no_grad()
    def _padding_is_exact(self, batch: Sequence[Question]) -> bool:
        """Return whether a padded prompt has the logits that it has alone."""
        prompts = [batch[0].prompt, batch[-1].prompt]  # the longest and the shortest
        ids, mask = left_padded(prompts, self._pad, self._model.device)
        padded = self._first_logits(ids, mask)[-1]
        length = len(prompts[1])
        alone = self._first_logits(ids[-1:, -length:], mask[-1:, -length:])[-1]
        error = float((padded - alone).pow(2).mean().sqrt() / alone.std().clamp(min=1e-9))
        bound = _PADDING_BOUND.get(self._model.dtype, _PADDING_BOUND_HALF)
        if error <= bound:
            return True
        logger.warning(
            "warning: a padded prompt changes this target's logits (by %.2g of their spread, more "
            "than %.2g), so only prompts of one length share a batch, which is slower",
            *(error, bound),
        )
        return False

    def _first_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the logits after each prompt, float32 [B, V]; ids and mask are int64 [B, T]."""
        config = GenerationConfig(
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=self._pad,
            output_logits=True,
            return_dict_in_generate=True,
        )
        out = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return out.logits[0].float()

    @property
    def _pad(self) -> int:
        return self._target.stops[0] if self._target.stops else 0

    def _generate(self, batch: Sequence[Question], end: Callable[[int, list[int]], None]) -> None:
        """Call `end` with the row and the tokens of each answer, as soon as it has ended."""
        prompts = [q.prompt for q in batch]
        ids, mask = left_padded(prompts, self._pad, self._model.device)
        options = sampling_options(self._config) | {
            "max_new_tokens": min(q.limit for q in batch),
            "eos_token_id": list(self._target.stops) or None,
            "pad_token_id": self._pad,
        }
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), explained_memory(self._size):
            torch.manual_seed(_batch_seed(self._config.seed, batch))
            ends = _Ends(len(batch), ids.shape[1], self._target.stops, end)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(**options),
                stopping_criteria=[ends],
            )
        for row, own in enumerate(out.tolist()):
            if row not in ends.rows:
                end(row, own[ids.shape[1] :])


class _Ends(StoppingCriteria):
    """Tells of each row when its answer ends; it stops nothing that would not stop by itself.

    Attributes:
        rows: those that have ended.
    """

    def __init__(
        self, rows: int, start: int, stops: Sequence[int], end: Callable[[int, list[int]], None]
    ) -> None:
        self.rows: set[int] = set()
        self._start, self._stops, self._end = start, frozenset(stops), end
        self._never = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Look at the last token of each row of `input_ids` [B, T]; return [B] of False."""
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if token in self._stops and row not in self.rows:
                self.rows.add(row)
                self._end(row, input_ids[row, self._start :].tolist())
        return self._never.to(input_ids.device)


def left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of prompts with `pad` before the shorter ones, int64 [B, T]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _groups(
    conversations: Iterable[Conversation], size: int, seed: int
) -> Iterator[list[Conversation]]:
    """Yield groups that are drawn at random from a window that moves over the corpus."""
    source, window, rng = iter(conversations), list[Conversation](), random.Random(seed)
    while True:
        window += itertools.islice(source, max(_WINDOW, size) - len(window))
        if not window:
            return
        rng.shuffle(window)
        yield window[:size]
        del window[:size]


def _batch_seed(seed: int, batch: Sequence[Question]) -> int:
    """Return the seed of a batch: another one for each batch, and the same in a resumed run."""
    text = f"{seed} {batch[0].conversation.id} {batch[0].turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
