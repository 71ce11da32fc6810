"""The target on this machine: its identity, its prompts, and from generated tokens to an answer.

Prompts come from the code that renders documents for `generate`, so they are the same tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spec_data.corpus.documents import RenderError
from spec_data.corpus.template import Chat, EndTokens, Template
from spec_data.generation.plan import end_token_ids
from spec_data.generation.setup import context_length
from spec_data.models.identify import identify, target_table, tokenizer_table
from spec_data.models.reading import load_config, load_tokenizer, text_config
from spec_data.models.resolve import resolve_model
from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import TRUNCATED, Answer, Conversation
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.shards.errors import RunError

OTHER_TOKENS = "answers whose text becomes other tokens"
EMPTY = "empty answers"
_HALF_CHARACTER = "�"


@dataclass(frozen=True)
class Question:
    """One turn that is to be answered.

    Attributes:
        conversation, turn: whose it is.
        answers: those of the turns before it.
        prompt: its token ids.
        limit: the most tokens of its answer; the context of the target ends there.
    """

    conversation: Conversation
    turn: int
    answers: tuple[Answer, ...]
    prompt: list[int]
    limit: int


class NoQuestion(Exception):
    """A turn cannot be asked or answered; `kind` is a slug, the message says why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LocalTarget:
    """A target of which only config and tokenizer are loaded.

    Attributes:
        directory: the model directory.
        tokenizer: its tokenizer.
        stops: the ids that end an answer, as serving ends it.
        context: positions of the target; 0 if its config does not tell.
        facts: what identifies it, for the record.

    Raises:
        MissingError, TargetError, ConfigError: there is no such model, or it cannot be used.
    """

    def __init__(self, config: RegenerateConfig, weights: bool = True) -> None:
        name = str(config.target)
        self.directory, commit = resolve_model(name, config.revision, weights)
        model_config = load_config(self.directory, config.trust_remote_code)
        self.tokenizer = load_tokenizer(self.directory, config.trust_remote_code)
        self.template = Template(self.tokenizer, config.template_kwargs, apart=True)
        self.template.warn_of_the_date()
        ends = EndTokens(self.template, end_token_ids(self.directory))
        self.stops = tuple(sorted(ends.stops))
        self.context = context_length(text_config(model_config))
        identity = identify(
            self.directory,
            config=model_config,
            tokenizer=self.tokenizer,
            template_kwargs=config.template_kwargs,
            weights=weights,
        )
        table = target_table(name, self.directory, commit, model_config, identity)
        self.facts = {
            "target": table,
            "tokenizer": tokenizer_table(self.tokenizer, identity),
        }
        self._limit = config.max_new_tokens

    def question(self, conversation: Conversation, answers: Sequence[Answer]) -> Question:
        """Return the question of the turn after `answers`.

        Raises:
            NoQuestion: the template cannot render it, or it leaves no room for an answer.
        """
        messages = conversation.before(answers)
        try:
            prompt = self._chat(conversation, messages).prompt(len(messages))
        except RenderError as error:
            raise NoQuestion(error.reason, str(error)) from None
        room = self.context - len(prompt) if self.context else self._limit
        if room < 1:
            raise NoQuestion(
                "prompt-too-long",
                f"{conversation.record.where}: the prompt has {len(prompt):,} tokens, and the "
                f"context of the target {self.context:,}",
            )
        return Question(conversation, len(answers), tuple(answers), prompt, min(room, self._limit))

    def _chat(self, conversation: Conversation, messages: list[dict[str, Any]]) -> Chat:
        return self.template.chat(conversation.record, messages)

    def answer(self, question: Question, tokens: Sequence[int]) -> Answer:
        """Return the answer that generated tokens are; tokens after an end-of-turn are ignored.

        Raises:
            NoQuestion: the template cannot render the answer.
        """
        end = next((i for i, t in enumerate(tokens) if t in self.stops), None)
        own = list(tokens[:end])[: question.limit]
        ended = end is not None and end < question.limit
        message = {"content": self._text(own, ended)}
        found = Answer(
            message=message,
            finish="stop" if ended else TRUNCATED,
            tokens=len(own) + ended,
            prompt_tokens=len(question.prompt),
        )
        notes = () if message["content"].strip() else (EMPTY,)
        if not notes and not self._renders_alike(question, found, own):
            notes = (OTHER_TOKENS,)
        return Answer(**vars(found) | {"notes": notes})

    def _text(self, tokens: list[int], ended: bool) -> str:
        """Return the text of an answer; a character that the limit cut in two is left out."""
        text = self._decoded(tokens)
        for _ in range(3):  # bytes of a character without its last one
            if ended or not tokens or not text.endswith(_HALF_CHARACTER):
                break
            tokens = tokens[:-1]
            text = self._decoded(tokens)
        return text

    def _decoded(self, tokens: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _renders_alike(self, question: Question, answer: Answer, tokens: list[int]) -> bool:
        """Return whether `generate` will see the tokens that the target wrote."""
        conversation = question.conversation
        slot = conversation.slots[question.turn]
        messages = conversation.answered([*question.answers, answer])
        try:
            through = self._chat(conversation, messages).through(slot).ids
        except RenderError as error:
            raise NoQuestion(error.reason, f"the answer cannot be rendered: {error}") from None
        ids = [*question.prompt, *tokens]
        return through[: len(ids)] == ids


def keep_answer(
    target: LocalTarget,
    question: Question,
    tokens: Sequence[int],
    journal: Journal,
    ledger: Ledger,
) -> None:
    """Put the generated tokens of a question into the journal, or skip its conversation."""
    conversation = question.conversation
    try:
        answer = target.answer(question, tokens)
    except NoQuestion as error:
        ledger.skip(conversation, error.kind, str(error))
        return
    journal.add(conversation.id, question.turn, answer)
    ledger.answered(answer)


def sampling_options(config: RegenerateConfig) -> dict[str, Any]:
    """Return how tokens are chosen, as arguments of transformers' GenerationConfig."""
    if config.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or 0,
    }


@contextmanager
def explained_memory(batch_size: int) -> Iterator[None]:
    """Turn full device memory into a RunError with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of device memory ({str(error).splitlines()[0]}). The answers so far are kept; "
            f"run the same command again with a --batch-size below {batch_size}"
        ) from None
