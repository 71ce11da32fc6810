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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from spec_data.corpus.chat import Renderer
from spec_data.corpus.documents import RenderError
from spec_data.corpus.in_order import in_time
from spec_data.corpus.template import Chat
from spec_data.corpus.template_probes import unstopped_end
from spec_data.generation.setup import context_length
from spec_data.models.devices import is_memory_error, memory_error_text
from spec_data.models.identify import read_target
from spec_data.models.loading import load_model
from spec_data.models.reading import end_token_ids, text_config
from spec_data.models.target_options import LoadOptions
from spec_data.regeneration.conversations import (
    RAN_ON,
    TRUNCATED,
    Answer,
    Conversation,
    Sampling,
    Unanswerable,
)
from spec_data.regeneration.journal import Journal
from spec_data.shards.errors import RunError

logger = logging.getLogger(__name__)

_HALF_CHARACTER = "\ufffd"
_GROUP = 8  # batches of conversations in a group; more of them waste less on padding
_WINDOW = 4096  # conversations, at least, from which a group is drawn
# Root mean square of the difference of logits, as a share of their spread. Rounding stays below: in
# bfloat16 SmolLM2-135M differs by up to 0.11, and without padding from float32 by up to 0.08.
_PADDING_BOUND, _PADDING_BOUND_HALF = 1e-3, 0.25


class ChatTarget:
    """The prompts of a target, of which only config and tokenizer are loaded.

    `weights`: they are needed too, and are downloaded. `stops` are the ids that end an answer, as
    serving ends it; `unstopped` says how the template ends one otherwise. `facts` identify the
    target in the record.

    Raises:
        MissingError, TargetError, ConfigError: there is no such model, or it cannot be used.
    """

    def __init__(
        self, name: str, sampling: Sampling, loading: LoadOptions, *, weights: bool
    ) -> None:
        kwargs, trust = sampling.chat_template_kwargs, loading.trust_remote_code
        files = read_target(name, loading.revision, kwargs, trust, weights=weights)
        self.directory, self.tokenizer = files.model_dir, files.tokenizer
        ends = end_token_ids(self.directory)
        self._renderer = Renderer(self.tokenizer, template_kwargs=kwargs, eot_token_ids=ends)
        self._renderer.template.warn_of_the_date()
        self.unstopped = unstopped_end(self._renderer.template, self._renderer.ends)
        if self.unstopped:
            logger.warning("warning[stop-token]: %s", self.unstopped)
        self.sampling, self.stops = sampling, tuple(sorted(self._renderer.ends.stops))
        self._context = context_length(text_config(files.model_config))
        self.facts = {
            "target": {k: v for k, v in files.target.items() if k != "name"},
            "target_name": files.target["name"],
            "tokenizer": files.tokenizer_id,
        }

    def prompt(
        self, conversation: Conversation, answers: Sequence[Answer]
    ) -> tuple[list[int], int]:
        """Return the prompt of the turn after `answers`, and the most tokens of its answer.

        Raises:
            Unanswerable: the template cannot render it, or it leaves no room for an answer.
        """
        messages, template = conversation.before(answers), self._renderer.template
        try:
            chat = Chat(template, conversation.record, messages)
            prompt = in_time(conversation.record.where, chat.prompt, len(messages))
        except RenderError as error:
            raise Unanswerable(error.reason, str(error)) from None
        limit = self.sampling.max_new_tokens
        room = self._context - len(prompt) if self._context else limit
        if room < 1:
            raise Unanswerable(
                "prompt-too-long",
                f"{conversation.record.where}: the prompt has {len(prompt):,} tokens, and the "
                f"context of the target {self._context:,}",
            )
        return prompt, min(room, limit)

    def kwargs_of(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template kwargs that render the prompts of a conversation."""
        return self._renderer.template.kwargs_of(conversation.record)

    def can_render(self, conversation: Conversation, answers: Sequence[Answer]) -> bool:
        """Return whether `generate` makes of the text of all answers the tokens that were written.

        Not if the template takes an answer in parts (gpt-oss), drops its thought (Gemma 4), or
        trims it (Llama 3), nor if the tokenizer spells its text in another way.
        """
        record = replace(conversation.record, messages=conversation.answered(answers))
        try:
            documents = self._renderer.render(record).documents
        except RenderError as error:
            return error.reason == "nothing-supervised"  # whatever its form
        rendered = [
            token for d in documents for token, m in zip(d.input_ids, d.loss_mask, strict=True) if m
        ]
        return rendered == [token for a in answers for token in a.ids[a.prompt_tokens :]]


class TurnRequest(NamedTuple):
    """A turn of a conversation: its prompt, the most tokens of its answer, and if it has none."""

    conversation: Conversation
    turn: int
    prompt: list[int]
    limit: int
    missing: bool


class LocalBackend:
    """The answers of a target on this machine. Its weights are loaded by `run`."""

    def __init__(self, target: ChatTarget, batch_size: int, loading: LoadOptions) -> None:
        self._target, self._size, self._loading = target, batch_size, loading
        self._seed = target.sampling.seed
        self._model: Any = None
        self._pad = target.stops[0] if target.stops else 0
        self._padding_exact: bool | None = None  # not proven yet

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        return {"backend": "local", **self._target.facts, "dtype": self._loading.dtype}

    def rows(self, conversation: Conversation, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Return what is written of a conversation: one row, or one of token ids for each answer.

        Those are written where the text would become other tokens than the target wrote.
        """
        if self._target.can_render(conversation, answers):
            return [conversation.row(answers)]
        kwargs = self._target.kwargs_of(conversation)
        return conversation.token_rows(answers, kwargs)

    def run(self, conversations: Iterable[Conversation], journal: Journal) -> None:
        """Answer every turn that the journal does not hold.

        Raises:
            RunError: the device is out of memory. FileError: the disk is full.
        """
        loading, directory = self._loading, str(self._target.directory)
        self._model = load_model(
            directory, dtype=loading.dtype, device=loading.device, trust=loading.trust_remote_code
        )
        self._model.generation_config = self._generation_config()
        # The head gets the last position of each prompt as a slice. For one that is not contiguous,
        # torch copies the head's weight once per prompt: 5.7 GB for 100 prompts of a 135 M model.
        self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: (given[0].contiguous(), *given[1:])
        )
        for group in _groups(conversations, self._size * _GROUP, self._seed):
            if all(len(journal.read(c.id)) == len(c.slots) for c in group):
                journal.complete(len(group), resumed=True)
                continue
            for turn in range(max(len(c.slots) for c in group)):
                for batch in self._batches(self._requests(group, turn, journal)):
                    missing = [request.missing for request in batch]
                    if any(missing):  # as a whole, as in a run without an interruption
                        answers = map(self._answer, batch, self._generate(batch))
                        rows = (
                            (r.conversation.id, turn, a)
                            for r, a in zip(batch, answers, strict=True)
                        )
                        journal.add(itertools.compress(rows, missing))
                    done = sum(len(r.conversation.slots) == turn + 1 for r in batch)
                    journal.complete(done, resumed=not any(missing))

    def _generation_config(self) -> GenerationConfig:
        """Return nothing but what this run asks for; `generate` adds the most tokens."""
        sampling, options = self._target.sampling, dict[str, Any]()
        if sampling.temperature > 0:
            options = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            options["top_k"] = sampling.top_k or 0
        ends = list(self._target.stops) or None
        return GenerationConfig(
            do_sample=bool(options), eos_token_id=ends, pad_token_id=self._pad, **options
        )

    def _requests(
        self, group: Sequence[Conversation], turn: int, journal: Journal
    ) -> list[TurnRequest]:
        """Return one turn of the conversations of a group that have it."""
        requests = []
        for conversation in group:
            if len(conversation.slots) <= turn or conversation.id in journal.failures:
                continue
            answers = journal.read(conversation.id)
            try:
                prompt, limit = self._target.prompt(conversation, answers[:turn])
            except Unanswerable as error:
                journal.fail(conversation, error)
                continue
            requests.append(TurnRequest(conversation, turn, prompt, limit, len(answers) <= turn))
        return requests

    def _batches(self, requests: Sequence[TurnRequest]) -> list[list[TurnRequest]]:
        """Cut requests, sorted by length, into batches; of one length each if padding leaks.

        Answers of a batch end at one limit: where the context leaves less room for one, the others
        must not be cut there too.
        """
        ordered = sorted(requests, key=lambda r: (-r.limit, -len(r.prompt)))
        some = sorted(ordered[: self._size], key=lambda r: -len(r.prompt))
        if self._padding_exact is None and len({len(r.prompt) for r in some}) > 1:
            self._padding_exact = self._padding_is_exact(some)

        def alike(request: TurnRequest) -> tuple[int, int]:
            return request.limit, len(request.prompt) if self._padding_exact is False else 0

        runs = (list(run) for _, run in itertools.groupby(ordered, alike))
        batches = [run[i : i + self._size] for run in runs for i in range(0, len(run), self._size)]
        if batches:
            random.Random(_batch_seed(self._seed, batches[0])).shuffle(batches)
        return batches

    def _answer(self, request: TurnRequest, tokens: Sequence[int]) -> Answer:
        """Return the answer that generated tokens are; tokens after an end-of-turn are ignored.

        Of a character that the limit cut in two (at most 3 of its bytes), nothing remains.
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
            ids=[*request.prompt, *tokens[: len(ids) + ended]],
            note=RAN_ON if self._target.unstopped and not ended else "",
        )

    def _generate(self, batch: Sequence[TurnRequest]) -> list[list[int]]:
        """Return the tokens of the answers of a batch; what follows an end-of-turn is padding."""
        ids, mask = self._padded(batch)
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(_batch_seed(self._seed, batch))
            try:
                out = self._model.generate(ids, attention_mask=mask, max_new_tokens=batch[0].limit)
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                raise RunError(
                    f"{memory_error_text(error)}. The answers so far are "
                    f"kept; run the same command again with a --batch-size below {self._size}"
                ) from None
        return [row[ids.shape[1] :] for row in out.tolist()]

    def _padded(self, batch: Sequence[TurnRequest]) -> tuple[Tensor, Tensor]:
        """Return the ids and the mask of left-padded prompts, int64 [B, T]."""
        ids = [torch.tensor(request.prompt) for request in batch]
        options: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        padded = pad_sequence(ids, padding_value=self._pad, **options)
        mask = pad_sequence([torch.ones_like(row) for row in ids], **options)
        return padded.to(self._model.device), mask.to(self._model.device)

    @torch.no_grad()
    def _padding_is_exact(self, batch: Sequence[TurnRequest]) -> bool:
        """Return whether a padded prompt has the logits that it has alone."""
        ids, mask = self._padded([batch[0], batch[-1]])  # the longest and the shortest
        padded = self._first_logits(ids, mask)[-1]
        length = len(batch[-1].prompt)
        alone = self._first_logits(ids[-1:, -length:], mask[-1:, -length:])[-1]
        error = float((padded - alone).pow(2).mean().sqrt() / alone.std().clamp(min=1e-9))
        bound = _PADDING_BOUND if self._model.dtype.itemsize > 2 else _PADDING_BOUND_HALF
        if error <= bound:
            return True
        logger.warning(
            "warning[padding]: a padded prompt changes this target's logits (by %.2g of their "
            "spread, more than %.2g), so only prompts of one length share a batch, which is slower",
            *(error, bound),
        )
        return False

    def _first_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the logits after each prompt, float32 [B, V]; ids and mask are int64 [B, T]."""
        options = {"output_logits": True, "return_dict_in_generate": True}
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=1, **options)
        return out.logits[0].float()


def _batch_seed(seed: int, batch: Sequence[TurnRequest]) -> int:
    """Return the seed of a batch: another one for each, and the same in a resumed run."""
    text = f"{seed} {batch[0].conversation.id} {batch[0].turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


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
