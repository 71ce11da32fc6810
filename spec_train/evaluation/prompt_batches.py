"""Answer the prompts after the timed pairs in batches, and count them as if one by one.

The turns of all chats go in waves: every first turn, then every second one. A wave is decoded in
batches without the draft, where that response is not known, and with it. Then the responses are
counted in the order of the prompts, so every figure and every saved response is that of decoding
one by one. Times are not counted: responses of a batch share them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_data.corpus.documents import RenderError
from spec_train.decoding.batches import Drafting, decode_batch, why_alone
from spec_train.decoding.chains import Generation, decoder_config
from spec_train.evaluation import paired_decoding
from spec_train.evaluation.paired_decoding import SEED, Bench, Decoding
from spec_train.evaluation.prompts import Message, Prompt, Prompts

log = logging.getLogger(__name__)

_WIDTH = 8
"""Prompts per batch where --batch-prompts does not say."""
_AT_ONCE = 16  # batches of prompts in memory before they are counted


def batch_width(decoding: Decoding, model: Any, prompts: Prompts) -> int:
    """Return how many prompts share a forward; 1: they are decoded one by one.

    Half precision has many near-ties, which another batch shape may decide otherwise. So batches
    are the default in float32 alone.
    """
    exact = model.dtype in (torch.float32, torch.float64)
    width = decoding.batch_prompts or (_WIDTH if exact and not decoding.tree_tokens else 1)
    if width == 1 or len(prompts) <= paired_decoding.TIMED_PAIRS:
        return 1
    chats = any(prompt.record.follow_ups for prompt in prompts)
    if decoding.temperature and chats:
        # the seed of a response is its number, which depends on the chats before it
        reason: str | None = "the samples of chats with several turns depend on their order"
    else:
        context = getattr(decoder_config(model), "max_position_embeddings", None) or 1 << 62
        longest = max(len(prompt.ids) for prompt in prompts) + decoding.max_new_tokens
        reason = why_alone(model, None if chats else min(longest, context))
    if reason is None:
        return width
    log.log(
        logging.WARNING if decoding.batch_prompts else logging.INFO,
        "prompts are decoded one by one: %s",
        reason,
    )
    return 1


@dataclass
class _Chat:
    """A prompt under way: what is asked next, and the turns that were answered."""

    prompt: Prompt
    ids: list[int]
    messages: list[Message]
    turns: list[tuple[list[int], list[int] | None, Generation]] = field(default_factory=list)
    ended: bool = False
    too_long: bool = False
    error: RenderError | None = None


def answer_in_batches(
    bench: Bench, prompts: Prompts, rest: Sequence[Prompt], width: int, bar: Any
) -> None:
    """Answer the prompts `rest` of `prompts`, `width` at a time, and count them in `bench`.

    `bar` counts the prompts that have ended.
    """
    size = width * _AT_ONCE
    for first in range(0, len(rest), size):
        chats = [_Chat(p, p.ids, list(p.record.messages or ())) for p in rest[first : first + size]]
        while waiting := [chat for chat in chats if not chat.ended]:
            _wave(bench, prompts, waiting, width, bar)
        for chat in chats:
            _count(bench, chat)


def _wave(bench: Bench, prompts: Prompts, chats: Sequence[_Chat], width: int, bar: Any) -> None:
    """Answer the next turn of every chat."""
    asked = []
    for chat in chats:
        if bench.room(chat.ids) >= 1:
            asked.append(chat)
        else:
            chat.too_long = chat.ended = True
            bar.update(1)
    plain = _plain(bench, asked, width, bar)
    first = SEED + bench.tally.responses

    def done(number: int, generation: Generation) -> None:
        chat = asked[number]
        chat.turns.append((chat.ids, plain[number], generation))
        _go_on(bench, prompts, chat, generation.tokens)
        bar.update(chat.ended)

    requests = [
        bench.request(chat.ids, bench.room(chat.ids), first + number)
        for number, chat in enumerate(asked)
    ]
    drafting = Drafting(
        make=lambda: bench.draft.drafter(bench.head),
        columns=bench.draft.state_columns,
        draft_tokens=bench.depth,
    )
    bar.set_postfix_str(f"batches of {width}", refresh=False)
    decode_batch(bench.model, requests, width, drafting, done)


def _plain(
    bench: Bench, asked: Sequence[_Chat], width: int, bar: Any
) -> dict[int, list[int] | None]:
    """Return the greedy response of the target alone to every chat, None if it is not needed."""
    found: dict[int, list[int] | None] = dict.fromkeys(range(len(asked)))
    if not bench.greedy:
        return found
    unknown: dict[tuple[int, ...], int] = {}  # of equal prompts the first one is decoded
    repeated = []
    for number, chat in enumerate(asked):
        if tuple(chat.ids) in unknown:
            repeated.append(number)
            continue
        found[number] = bench.known.find(chat.ids, bench.room(chat.ids))
        if found[number] is None:
            unknown[tuple(chat.ids)] = number
    numbers = list(unknown.values())
    requests = [bench.request(asked[n].ids, bench.room(asked[n].ids), SEED) for n in numbers]
    ended = 0

    def done(number: int, generation: Generation) -> None:
        nonlocal ended
        ended += 1
        bar.set_postfix_str(f"the target alone: {ended}/{len(numbers)}")
        chat, tokens = asked[numbers[number]], generation.tokens
        found[numbers[number]] = tokens
        bench.known.keep(chat.ids, bench.room(chat.ids), tokens)

    decode_batch(bench.model, requests, width, done=done)
    for number in repeated:
        found[number] = bench.known.find(asked[number].ids, bench.room(asked[number].ids))
    return found


def _go_on(bench: Bench, prompts: Prompts, chat: _Chat, response: list[int]) -> None:
    """Make the prompt of a chat's next turn, or end the chat."""
    follow_ups = chat.prompt.record.follow_ups
    if len(chat.turns) > len(follow_ups):
        chat.ended = True
        return
    follow_up = follow_ups[len(chat.turns) - 1]
    try:
        chat.ids = bench.next_turn(chat.prompt, prompts, chat.messages, response, follow_up)
    except RenderError as error:
        chat.error, chat.ended = error, True


def _count(bench: Bench, chat: _Chat) -> None:
    """Count a chat as `Bench.converse` does."""
    where = chat.prompt.where
    for ids, plain, generation in chat.turns:
        bench.record(ids, where, plain, generation, alone=False)
    if chat.too_long:
        bench.skip(chat.ids, where)
    if chat.error is not None:
        bench.fail(chat.error)
