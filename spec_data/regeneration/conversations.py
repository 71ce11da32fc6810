"""Conversations whose assistant turns are to be written again, and the answers to them.

A conversation has one id: the hash of everything that decides its answers beside the settings, that
is its messages without the answers that are replaced, its tools and its template kwargs. Two rows
with one id have the same questions; the second one is a duplicate.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spec_data.corpus.documents import RenderError
from spec_data.corpus.facts import PLAIN, Layout, columns
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import Message, Record, holds_answer, parse_prompt, parse_row
from spec_data.corpus.sampling_record import DIGEST, answers_digest
from spec_data.corpus.template import render_error
from spec_data.shards.serving import system_of

TRUNCATED = "length"
"""The finish reason of an answer that reached the limit of tokens."""
RAN_ON = "answers cut at the limit, where the end that the template writes stops no generation"
"""The note of a cut answer of a target that does not stop where its template ends an answer."""
_QUESTIONS = ("turns", *columns("question"))  # columns of rows without an answer


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: the options of `regenerate` of the same names."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    seed: int
    chat_template_kwargs: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the target wrote in one turn.

    Attributes:
        message: the keys of the message beside its role: `content`, and where a server returns
            them `reasoning_content` and `tool_calls`.
        finish: why it ended: "stop", "length" (the limit of tokens), "tool_calls", ...
        tokens: tokens that were generated, with the end-of-turn token.
        prompt_tokens: tokens of the prompt; 0 if a server does not tell.
        ids: the tokens of both; empty for an answer of a server.
        note: what is counted of it, in words.
    """

    message: Message
    finish: str
    tokens: int
    prompt_tokens: int
    ids: list[int] = []
    note: str = ""


class Unanswerable(Exception):
    """A turn has no answer; `kind` is a short slug under which its conversation is counted.

    With `retry` it may have one when the command is run again.
    """

    def __init__(self, kind: str, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.retry = kind, retry


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation; `slots` are the indices of the messages that are to be answered."""

    id: str
    record: Record
    messages: list[Message]
    slots: tuple[int, ...]

    def before(self, answers: Sequence[Answer]) -> list[Message]:
        """Return the messages that ask for the next answer, given those of the first turns."""
        return self.answered(answers)[: self.slots[len(answers)]]

    def answered(self, answers: Sequence[Answer]) -> list[Message]:
        """Return the messages with the answers of the first turns in their slots."""
        messages = list(self.messages)
        for slot, answer in zip(self.slots, answers, strict=False):
            messages[slot] = {"role": "assistant", **answer.message, "finish_reason": answer.finish}
        return messages

    def row(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the row of the output: what `generate` needs to render the same prompts."""
        row: dict[str, Any] = {"messages": self.answered(answers), "id": self.id}
        if self.record.tools:
            row["tools"] = self.record.tools
        if self.record.template_kwargs:
            row["chat_template_kwargs"] = self.record.template_kwargs
        return row | {DIGEST: answers_digest(row), "source": self.record.source}

    def token_rows(self, answers: Sequence[Answer], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a row for each answer: the tokens of its prompt, and those that it has itself.

        What else rendered them, as `generate` counts it, stands beside them; `kwargs` are those of
        the template.
        """
        beside: dict[str, Any] = {"system": system_of(self.messages)}
        if self.record.tools:
            beside["tools"] = self.record.tools
        if kwargs:
            beside["chat_template_kwargs"] = kwargs
        rows = []
        for answer in answers:
            mask = [0] * answer.prompt_tokens + [1] * answer.tokens
            row = {"input_ids": answer.ids, "loss_mask": mask, "id": self.id} | beside
            rows.append(row | {DIGEST: answers_digest(row), "source": self.record.source})
        return rows


def parse_question(row: Any, *, layout: Layout = PLAIN, **where: Any) -> Record:
    """Return the record of a row of conversations, or of questions alone; see `parse_row`."""
    read = layout.renamed(row)
    alone = isinstance(read, dict) and not holds_answer(read)
    question = alone and any(read.get(name) is not None for name in _QUESTIONS)
    return (parse_prompt if question else parse_row)(row, layout=layout, **where)


def conversations(reader: CorpusReader, turns: str) -> Iterator[Conversation]:
    """Yield the conversations of a corpus; count those that are left out in `reader.refused`.

    The reader has `parse_question`. Of the assistant turns, "all" or the "last" are answered again.
    """
    digests: set[bytes] = set()
    for record in reader:
        try:
            conversation = conversation_of(record, turns)
        except RenderError as error:
            reader.refuse(error)
            continue
        digest = bytes.fromhex(conversation.id)
        if digest in digests:
            reader.refused["duplicate"] += 1
            continue
        digests.add(digest)
        yield conversation


def conversation_of(record: Record, turns: str) -> Conversation:
    """Return the conversation of a record, or raise a RenderError.

    A question at the end and each follow-up get an answer. Answers of weight 0 are context, and so
    is one that opens the conversation; an answer that stays gets weight 0.
    """
    if not record.messages:
        raise render_error(record, "no-assistant-turn", "plain text or token ids, no conversation")
    messages, stored = list(record.messages), len(record.messages)
    if messages[-1]["role"] in ("user", "tool"):
        messages.append({"role": "assistant"})
    for text in record.follow_ups:
        messages += [{"role": "user", "content": text}, {"role": "assistant"}]
    answers = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
    slots = [i for i in answers if messages[i].get("weight", 1)]
    if turns == "last":  # and those without a stored answer
        slots = [i for i in slots if i >= min(stored, slots[-1])]
    if not slots:
        raise render_error(record, "no-assistant-turn", "no assistant message answers anything")
    for i in answers:
        messages[i] = {"role": "assistant"} if i in slots else messages[i] | {"weight": 0}
    facts = [messages, record.tools, record.template_kwargs]
    try:
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise render_error(record, "not-json", f"cannot be written as JSON: {error}") from None
    identity = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Conversation(id=identity, record=record, messages=messages, slots=tuple(slots))
