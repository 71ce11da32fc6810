"""Answers of a target that is loaded here, by `model.generate` of transformers.

Prompts come from the code that renders documents for `generate`, so they are the same tokens.

Groups of conversations are drawn at random from a window of the corpus, and the turns of a group
are answered in order: the first turn of every conversation, then the second, and so on. A turn is
sorted by length and cut into batches of left-padded prompts, which are answered in random order: a
run that is stopped holds answers of every kind. All of it depends on the corpus and the seed alone,
and the answers of a batch enter the journal together. So a resumed run repeats the batch that a
kill interrupted, with the same prompts, the same seed, and the same answers.

Padding is proven on the first batch that needs it: the logits after a padded prompt must be those
of the prompt alone. Where they are not (families whose state runs over the padding), only prompts
of one length share a batch.
"""

import hashlib
import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from spec_data.corpus.documents import RenderError
from spec_data.corpus.template import EndTokens, Template
from spec_data.generation.plan import end_token_ids
from spec_data.generation.setup import context_length
from spec_data.models.identify import read_target
from spec_data.models.loading import load_model
from spec_data.models.reading import text_config
from spec_data.regeneration.conversations import (
    TRUNCATED,
    Answer,
    Conversation,
    Progress,
    Sampling,
    Unanswerable,
)
from spec_data.regeneration.journal import Journal
from spec_data.shards.errors import RunError

logger = logging.getLogger(__name__)

_HALF_CHARACTER = "\ufffd"
_GROUP = 8  # batches of conversations in a group; more of them waste less on padding
_WINDOW = 4096  # conversations, at least, from which a group is drawn
# Root mean square of the difference of logits, as a share of their spread. Rounding stays below.
_PADDING_BOUND = {torch.float32: 1e-3, torch.float64: 1e-3}
_PADDING_BOUND_HALF = 0.05


class ChatTarget:
    """The prompts of a target, of which only config and tokenizer are loaded.

    Args:
        name: a directory or a Hub id; `revision` is one of the Hub.
        template_kwargs: of the chat template.
        weights: the weights are needed too.

    Attributes:
        directory: the model directory.
        tokenizer: its tokenizer.
        stops: the ids that end an answer, as serving ends it.
        facts: what identifies it, for the record.

    Raises:
        MissingError, TargetError, ConfigError: there is no such model, or it cannot be used.
    """

    def __init__(
        self,
        name: str,
        revision: str | None,
        template_kwargs: Mapping[str, Any],
        trust_remote_code: bool,
        *,
        weights: bool,
    ) -> None:
        kwargs = dict(template_kwargs)
        files = read_target(name, revision, kwargs, trust_remote_code, weights=weights)
        self.directory, self.tokenizer = files.model_dir, files.tokenizer
        self._template = Template(self.tokenizer, template_kwargs)
        self._template.warn_of_the_date()
        self.stops = tuple(sorted(EndTokens(self._template, end_token_ids(self.directory)).stops))
        self._context = context_length(text_config(files.model_config))
        self.facts = {"target": files.target, "tokenizer": files.tokenizer_id}

    def prompt(
        self, conversation: Conversation, answers: Sequence[Answer], limit: int
    ) -> tuple[list[int], int]:
        """Return the prompt of the turn after `answers`, and the most tokens of its answer.

        `limit` bounds the answer, and so does the context of the target.

        Raises:
            Unanswerable: the template cannot render it, or it leaves no room for an answer.
        """
        messages = conversation.before(answers)
        try:
            prompt = self._template.chat(conversation.record, messages).prompt(len(messages))
        except RenderError as error:
            raise Unanswerable(error.reason, str(error)) from None
        room = self._context - len(prompt) if self._context else limit
        if room < 1:
            raise Unanswerable(
                "prompt-too-long",
                f"{conversation.record.where}: the prompt has {len(prompt):,} tokens, and the "
                f"context of the target {self._context:,}",
            )
        return prompt, min(room, limit)


@dataclass(frozen=True)
class Request:
    """A turn of a conversation to be answered: its prompt, and the most tokens of the answer."""

    conversation: Conversation
    turn: int
    prompt: list[int]
    limit: int


class LocalBackend:
    """The answers of a target on this machine. Its weights are loaded by `run`.

    `batch_size` conversations are answered at once; `dtype` and `device` are as `load_model` takes
    them.
    """

    def __init__(
        self,
        target: ChatTarget,
        sampling: Sampling,
        batch_size: int,
        dtype: str,
        device: str,
        trust_remote_code: bool,
    ) -> None:
        self._target, self._sampling, self._size = target, sampling, batch_size
        self._load: dict[str, Any] = {"dtype": dtype, "device": device, "trust": trust_remote_code}
        self._model: Any = None
        self._pad = target.stops[0] if target.stops else 0
        self._padding_exact: bool | None = None  # not proven yet

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        target = dict(self._target.facts["target"])
        name, tokenizer = target.pop("name"), self._target.facts["tokenizer"]
        facts = {"target": target, "target_name": name, "tokenizer": tokenizer}
        return {"backend": "local", **facts, "dtype": self._load["dtype"]}

    def run(
        self, conversations: Iterable[Conversation], journal: Journal, progress: Progress
    ) -> None:
        """Answer every turn that the journal does not hold.

        Raises:
            RunError: the device is out of memory. FileError: the disk is full.
        """
        self._model = load_model(str(self._target.directory), **self._load)
        self._model.generation_config = GenerationConfig()  # nothing but what this run asks for
        # The head gets the last position of each prompt as a slice. For one that is not contiguous,
        # torch copies the head's weight once per prompt: 5.7 GB for 100 prompts of a 135 M model.
        self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: (given[0].contiguous(), *given[1:])
        )
        for group in _groups(conversations, self._size * _GROUP, self._sampling.seed):
            if all(journal.count(c.id) == len(c.slots) for c in group):
                for _ in group:
                    progress.complete(resumed=True)
                continue
            for turn in range(max(len(c.slots) for c in group)):
                for batch in self._batches(self._requests(group, turn, journal, progress)):
                    self._answer_batch(batch, turn, journal, progress)

    def _requests(
        self, group: Sequence[Conversation], turn: int, journal: Journal, progress: Progress
    ) -> list[Request]:
        """Return one turn of the conversations of a group that have it."""
        requests, most = [], self._sampling.max_new_tokens
        for conversation in group:
            if len(conversation.slots) <= turn or conversation.id in progress.failures:
                continue
            try:
                before = journal.read(conversation.id)[:turn]
                prompt = self._target.prompt(conversation, before, most)
                requests.append(Request(conversation, turn, *prompt))
            except Unanswerable as error:
                progress.fail(conversation, error)
        return requests

    def _answer_batch(
        self, batch: Sequence[Request], turn: int, journal: Journal, progress: Progress
    ) -> None:
        """Answer a batch with any turn to answer as a whole, as a run without an interruption."""
        missing = [journal.count(request.conversation.id) <= turn for request in batch]
        if any(missing):
            answers = map(self._answer, batch, self._generate(batch))
            new = list(itertools.compress(zip(batch, answers, strict=True), missing))
            journal.add((request.conversation.id, turn, answer) for request, answer in new)
            for _, answer in new:
                progress.answered(answer)
        for request, was_missing in zip(batch, missing, strict=True):
            if len(request.conversation.slots) == turn + 1:
                progress.complete(resumed=not was_missing)

    def _batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Cut requests, sorted by length, into batches; of one length each if padding leaks."""
        ordered = sorted(requests, key=lambda request: -len(request.prompt))
        if self._padding_exact is None and len({len(r.prompt) for r in ordered[: self._size]}) > 1:
            self._padding_exact = self._padding_is_exact(ordered[: self._size])
        runs: Iterable[list[Request]] = [ordered]
        if self._padding_exact is False:
            runs = (list(run) for _, run in itertools.groupby(ordered, lambda r: len(r.prompt)))
        batches = [run[i : i + self._size] for run in runs for i in range(0, len(run), self._size)]
        if batches:
            random.Random(_batch_seed(self._sampling.seed, batches[0])).shuffle(batches)
        return batches

    def _answer(self, request: Request, tokens: Sequence[int]) -> Answer:
        """Return the answer that generated tokens are; tokens after an end-of-turn are ignored.

        Of a character that the limit cut in two (at most 3 of its bytes), nothing is kept.
        """
        end = next((i for i, t in enumerate(tokens) if t in self._target.stops), None)
        ids = list(tokens[:end])[: request.limit]
        ended = end is not None and end < request.limit
        decode, options = self._target.tokenizer.decode, {"clean_up_tokenization_spaces": False}
        text = str(decode(ids, **options))
        for cut in range(1, min(3, len(ids)) + 1):
            if ended or not text.endswith(_HALF_CHARACTER):
                break
            text = str(decode(ids[:-cut], **options))
        return Answer(
            message={"content": text},
            finish="stop" if ended else TRUNCATED,
            tokens=len(ids) + ended,
            prompt_tokens=len(request.prompt),
        )

    def _generate(self, batch: Sequence[Request]) -> list[list[int]]:
        """Return the tokens of the answers of a batch; what follows an end-of-turn is padding."""
        ids, mask = left_padded([r.prompt for r in batch], self._pad, self._model.device)
        sampling = self._sampling
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {"do_sample": True, "temperature": sampling.temperature}
            options |= {"top_p": sampling.top_p, "top_k": sampling.top_k or 0}
        config = GenerationConfig(
            max_new_tokens=min(request.limit for request in batch),
            eos_token_id=list(self._target.stops) or None,
            pad_token_id=self._pad,
            **options,
        )
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(_batch_seed(sampling.seed, batch))
            try:
                out = self._model.generate(
                    input_ids=ids, attention_mask=mask, generation_config=config
                )
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"out of device memory ({str(error).splitlines()[0]}). The answers so far are "
                    f"kept; run the same command again with a --batch-size below {self._size}"
                ) from None
        return [row[ids.shape[1] :] for row in out.tolist()]

    @torch.no_grad()
    def _padding_is_exact(self, batch: Sequence[Request]) -> bool:
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


def _batch_seed(seed: int, batch: Sequence[Request]) -> int:
    """Return the seed of a batch: another one for each, and the same in a resumed run."""
    text = f"{seed} {batch[0].conversation.id} {batch[0].turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of prompts with `pad` before the shorter ones, int64 [B, T]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
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
