"""Render records to token ids, turns and loss mask, checked against the chat template itself.

Serving sends `apply_chat_template(messages before the answer, add_generation_prompt=True)`, and the
target then generates up to an end-of-turn token. So three renders of the template decide about each
assistant message k. Header text is never searched for, because a user may quote it:

    prompt_k  = render(messages[:k], add_generation_prompt=True)
    through_k = render(messages[:k + 1])
    whole     = through_k of the last assistant message

The conversation is one document ("prefix boundaries") if, for every k, prompt_k is a
token-for-token prefix of through_k, and through_k up to its end-of-turn token is a prefix of whole.
The check fails where a template rewrites history (drops earlier thinking, moves tools to the last
turn) or where tokens merge across a boundary. Then every assistant turn becomes a document of its
own ("turn by turn"): its prompt is prompt_k, its response is the rest of through_k, and only that
turn is supervised. If through_k continues prompt_k as text but not as tokens, the rest of the text
is tokenised alone, as the target generates it, and the result must decode to the same text; so is
what through_k writes behind the last question, where it has another text before it (a system
message that is elsewhere, a thought that is dropped). A turn that does not continue its own prompt
is never stored; it is counted as "unprovable-boundaries", with the texts that differ.

Every choice follows what serving generates:
- A turn starts directly after the generation prompt, and after an empty think block. It ends with
  its end-of-turn token: the first token that ends generation, even in the middle of the content, or
  else the first one in the run of end-of-turn and blank tokens that closes through_k.
- Some templates close no turn (in GLM the next header ends it); then the next token of the whole is
  the end if it is an end-of-turn token. To the last turn of a document the token is appended that
  would follow if the user asked on, or else the first one of the generation config.
- An answer with `finish_reason` "length" was cut at a limit of tokens, so the end-of-turn token
  that the template writes is not supervised. If the limit cut a thought, which the template closes,
  or puts an empty one before, the answer is a document of its own: the prompt and what it wrote.
- So is an answer with a thought that the prompt opens and the template then drops (DeepSeek-R1):
  the target wrote the thought, its closing tag and the answer.
- An answer of `weight` 0, an empty one, one of which the template writes nothing (tool calls), one
  that opens the conversation, and messages after the last assistant turn are no data for a draft.
- `{% generation %}` tags select the turns that are supervised, and where in the turn supervision
  starts. The check above and the end of the turn stay the same.
- The policy "all" marks every token of every document, so turn by turn it repeats prompts.
- Text and `input_ids` rows are supervised as a whole, or by their own loss mask; each document of a
  pack is one.
"""

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from spec_data.corpus.documents import (
    CONTROL,
    CONTROL_TEXT,
    CUT_ANSWERS,
    EDITED,
    EMPTY_THOUGHTS,
    LEFT_OUT,
    UNENDED,
    UNLEARNED,
    UNPROVABLE,
    UNSUPERVISED,
    Document,
    RenderError,
    Rendering,
    Turn,
    loss_mask_from_turns,
)
from spec_data.corpus.images import in_order
from spec_data.corpus.left_out import REASONING_TEXTS, is_empty, reasoning_of
from spec_data.corpus.records import Message, Record
from spec_data.corpus.template import Chat, EndTokens, Template, render_error, text_ids
from spec_data.corpus.tokens import common
from spec_data.models.trial import is_panic
from spec_data.models.vision import Vision
from spec_data.shards.errors import CorpusError, TargetError
from spec_data.shards.packing import runs
from spec_data.shards.pictures import Placed
from spec_data.shards.prompt_keys import PromptKeys, answer_start
from spec_data.shards.serving import prompt_facts
from spec_data.shards.thoughts import (
    BLOCK,
    CLOSE,
    EMPTY_THOUGHT,
    STARTS_OPEN,
    THOUGHT_CLOSED,
    THOUGHT_CLOSES,
    THOUGHT_OPENED,
)
from spec_data.shards.turn_masks import WITHOUT_REASONING

__all__ = ["Document", "RenderError", "Renderer", "Turn", "loss_mask_from_turns"]


_MANY = 64  # answers of a chat: of more, those behind the tokens that are kept are passed over
_EMPTY_ANSWERS = "empty answers, not supervised"
_REASONING_ALONE = "answers of reasoning alone, not supervised"
_THINKING = ("enable_thinking", "thinking")  # template kwargs that turn it on or off


class Renderer:
    """Render records with one tokenizer.

    Args:
        tokenizer: of the target; its chat template is used unchanged.
        mask: "assistant" (every turn is supervised), "last-turn", "without-reasoning" (every turn,
            from behind its thought), or "all" (every token).
        template_kwargs: passed to the template (`enable_thinking`, ...); those of a record override
            them.
        eot_token_ids: `generation_config.eos_token_id`; the tokenizer's and the template's
            end-of-turn tokens are added.
        vocab_size: every token id must be below it. Default: the size of the tokenizer.
        longest: tokens of a document that are kept. Of a chat of many answers, those that begin
            behind it are no documents of their own, and only the last one is looked at.
        vision: the image processor of the target; None: it takes no images.

    Raises:
        ConfigError: an unknown `mask`, or a template kwarg that cannot be set or is not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask: str = "assistant",
        template_kwargs: dict[str, Any] | None = None,
        eot_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        longest: int | None = None,
        vision: Vision | None = None,
    ) -> None:
        loss_mask_from_turns(0, (), mask)
        self.tokenizer = tokenizer
        self.mask = mask
        self.template = Template(tokenizer, template_kwargs, vision=vision)
        self.vocab_size = vocab_size or len(tokenizer)
        self.longest = longest
        self.ends = EndTokens(self.template, eot_token_ids)
        self.prompt_keys = PromptKeys(tokenizer)

    def render(self, record: Record) -> Rendering:
        """Return the documents of one record, one or one per assistant turn, and its counts.

        Raises:
            RenderError: the record cannot be rendered. Any other exception is one with the reason
                "unforeseen".
        """
        try:
            result = self._rendered(record)
        except (CorpusError, TargetError, MemoryError):
            raise
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            message = f"{type(error).__name__}: {error}"
            raise render_error(record, "unforeseen", message) from error
        if record.edited:
            result.counts[EDITED], result.edited = 1, record.where
        result.counts, result.dropped = +result.counts, +result.dropped
        if record.messages is not None:
            kwargs = self.template.kwargs_of(record)
            result.prompt = prompt_facts(kwargs, record.messages, record.tools)
        elif record.rendered_with is not None:  # token ids
            result.prompt = prompt_facts(record.template_kwargs, record.rendered_with, record.tools)
        return result

    def _rendered(self, record: Record) -> Rendering:
        if not record.learned:
            raise render_error(
                record, "nothing-supervised", "a flag of the row says that nothing of it is learned"
            )
        if record.messages is not None:
            return self._conversation(record)
        if record.input_ids is not None:
            return self._given(record)
        ids = text_ids(self.tokenizer, record, record.text or "")
        document = self._document(record, ids, [(0, len(ids))], record.where, role="text")
        result = Rendering("text", [document])
        text = (record.text or "").removesuffix(self.tokenizer.eos_token or "")
        for name in self.template.controls_in({"role": "user", "content": text}):
            result.counts[f"{CONTROL_TEXT}{name}"] = 1
        return result

    def _conversation(self, record: Record) -> Rendering:
        messages = record.messages or []
        answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i > 0]
        if not answers:
            raise render_error(record, "no-assistant-turn", "no assistant message answers anything")
        if record.pictures and self.mask == "all":
            raise render_error(
                record,
                "images",
                "--mask all would supervise the tokens of images, which no target generates; leave "
                "it out",
            )
        chat = Chat(self.template, record, messages)
        result = Rendering("generation tags" if chat.tagged else "prefix boundaries")
        answers = self._supervisable(record, answers, result)
        result.counts["trailing messages left out"] = len(messages) - 1 - answers[-1]
        whole, counted = [answers[-1]], result.counts.copy()
        kept = self._kept_answers(chat, answers)
        spans = self._spans_of_whole(chat, [*kept, *answers[-1:]], result)
        if spans is not None:
            chat.check_processor(answers[-1] + 1, False)
            ids = self._closed(chat, answers[-1], chat.through(answers[-1]).ids, spans, result)
            result.documents = [self._document(record, ids, spans, record.where)]
        else:
            result.method = "turn by turn"
            result.counts = counted
            if self.mask == "all":  # also of prompts, of which each document has another
                kept = answers
            whole = answers[-1:] if self.mask == "last-turn" else kept
            if len(kept) < len(answers) and self.mask != "last-turn":
                result.dropped[UNSUPERVISED] += len(answers) - len(kept)
            for k in whole:
                self._single_turn(chat, k, result)
        result.documents = [d for d in result.documents if d.turns]
        passed_over = result.dropped[UNSUPERVISED]  # they may have documents
        if not result.documents and not passed_over and result.dropped[UNPROVABLE]:
            raise render_error(
                record,
                UNPROVABLE,
                "the template renders no assistant turn as a continuation of its generation prompt"
                + self._advice(chat, answers[-1]),
            )
        if not result.documents and not passed_over:
            raise render_error(
                record,
                "nothing-supervised",
                "every answer is outside generation tags, cut before its first token, or left out "
                "by the template or by --mask",
            )
        for message in messages[: answers[-1] + 1]:
            for name in self.template.controls_in(message):
                result.counts[f"{CONTROL}{name}"] += 1
        ends = [d.input_ids[turn.end - 1] for d in result.documents for turn in d.turns]
        result.counts[UNENDED] = sum(token not in self.ends.all for token in ends)
        for kind, count in chat.left_out(whole, spans is None).items():
            result.counts[f"{LEFT_OUT}{kind}"] += count
        return result

    def _supervisable(self, record: Record, answers: list[int], result: Rendering) -> list[int]:
        """Return the answers (indices of messages) that are no mere context; count the others."""
        messages, full = record.messages or [], []
        for k in answers:
            weight = messages[k].get("weight", 1)
            if not weight:
                result.counts[UNLEARNED] += 1
                continue
            if is_empty(messages[k]):
                result.counts[_EMPTY_ANSWERS] += 1
                continue
            result.counts[CUT_ANSWERS] += _is_truncated(messages[k])
            full.append(k)
        if not full:
            raise render_error(
                record, "nothing-supervised", "every assistant message is empty or has weight 0"
            )
        return full

    def _kept_answers(self, chat: Chat, answers: list[int]) -> list[int]:
        """Return the answers that begin within `longest` tokens, and the first one behind them.

        All of a chat of few, or where the last prompt is within it, as of a template that renders
        the last messages alone. Each answer takes two renders of all before it.
        """
        most = self.longest
        if most is None or len(answers) <= _MANY or len(chat.prompt(answers[-1])) < most:
            return answers
        first = bisect.bisect_left(answers, most, key=lambda k: len(chat.prompt(k)))
        return answers[: first + 1]

    def _spans_of_whole(
        self, chat: Chat, answers: list[int], result: Rendering
    ) -> list["_Span"] | None:
        """Return the span of every answer in the tokens of the whole, or None if a check fails."""
        whole = chat.through(answers[-1])
        spans = []
        for k in dict.fromkeys(answers):
            prompt, ids = chat.prompt(k), chat.through(k).ids
            start = len(prompt)
            if ids[:start] != prompt or self._written(chat, k) is not None:
                return None
            end = self.ends.turn_end(ids, start)
            if end == start or whole.ids[:end] != ids[:end]:
                return None
            if self._is_empty(ids, start, end, result):
                continue
            start = self._after_empty_thought(ids, start, end, result)
            start = self._after_reasoning(chat, k, ids, start, end, result)
            closed = ids[end - 1] in self.ends.all
            if _is_truncated(chat.messages[k]):
                end = self._cut(ids, start, end)
            elif end == len(ids) and not closed and self.ends.all & {*whole.ids[end : end + 1]}:
                end += 1
            spans += _tagged(whole.tags, start, end)
        return spans

    def _single_turn(self, chat: Chat, k: int, result: Rendering) -> None:
        """Add the document of answer k alone, as serving produces it, or count it in `dropped`."""
        chat.check_processor(k, True)
        prompt, through = chat.prompt(k), chat.through(k)
        ids, start, tags = through.ids, len(prompt), through.tags
        written = self._written(chat, k)
        if written is not None or ids[:start] != prompt:
            ids = chat.spliced(k) if written is None else written
            if tags is not None:  # they index through_k; all that counts is whether any is set
                supervised = any(tags[common(through.ids, prompt) :])
                tags = [int(supervised)] * len(ids)
        end = self.ends.turn_end(ids, start)
        if end <= start:
            result.dropped[UNPROVABLE] += 1
            result.causes.append(
                f"{chat.record.where} (message {k}): the template does not write it as a "
                f"continuation of its generation prompt{self._advice(chat, k)}"
            )
            return
        if self._is_empty(ids, start, end, result):
            return
        if written and not _is_truncated(chat.messages[k]):
            result.counts[f"{LEFT_OUT}{REASONING_TEXTS}"] -= 1  # the template's loss
        start = self._after_empty_thought(ids, start, end, result)
        start = self._after_reasoning(chat, k, ids, start, end, result)
        if _is_truncated(chat.messages[k]):
            end = self._cut(ids, start, end)
        where, spans = f"{chat.record.where} (message {k})", _tagged(tags, start, end)
        ids = self._closed(chat, k, ids, spans, result)
        result.documents.append(self._document(chat.record, ids, spans, where))

    def _written(self, chat: Chat, k: int) -> list[int] | None:
        """Return the tokens of prompt_k and answer k where the template does not write them."""
        if _is_truncated(chat.messages[k]):
            return chat.unclosed(k)
        ids, end = chat.thought(k), self.ends.closing
        if not ids or end is None or self.ends.turn_end(ids, len(chat.prompt(k))) < len(ids):
            return ids
        return ids if ids[-1] in self.ends.all else [*ids, end]

    def _is_empty(self, ids: list[int], start: int, end: int, result: Rendering) -> bool:
        """Return whether the template writes nothing of an answer but its end, and count it."""
        end = self._cut(ids, start, end)
        empty = end - start <= BLOCK and not self.tokenizer.decode(ids[start:end]).strip()
        result.counts[_EMPTY_ANSWERS] += empty
        return empty

    def _cut(self, ids: list[int], start: int, end: int) -> int:
        """Return the end of a turn without the tokens that end it."""
        while end > start and ids[end - 1] in self.ends.all:
            end -= 1
        return end

    def _advice(self, chat: Chat, k: int) -> str:
        """Return how answer k, which does not continue its prompt, can be made data."""
        prompt = self.tokenizer.decode(chat.prompt(k)[-BLOCK:])
        opened = THOUGHT_OPENED.search(prompt)
        if not opened and not (EMPTY_THOUGHT.search(prompt) or prompt.rstrip().endswith(CLOSE)):
            return f"{chat.difference(k)}; store such rows as input_ids"
        names = self.template.names or ()
        given = [n for n in _THINKING if n in self.template.kwargs_of(chat.record)]
        name = next((n for n in (*given, *_THINKING) if n in names), "")
        value = "false" if opened else "true"
        kwargs = f", or pass --chat-template-kwargs '{{\"{name}\": {value}}}'" if name else ""
        if opened and chat.messages[k].get("tool_calls") and reasoning_of(chat.messages[k]):
            return ", which opens a thought, and writes no tool calls; store such rows as input_ids"
        if opened:
            return f", which opens a thought: give them one (reasoning_content){kwargs}"
        return f", which ends a thought: give them none{kwargs}"

    def _closed(
        self, chat: Chat, k: int, ids: list[int], spans: list["_Span"], result: Rendering
    ) -> list[int]:
        """Return the tokens of a document with an end-of-turn token after its last turn, answer k.

        Serving ends it with one even where the template writes none; the span grows with it.
        """
        ended = not spans or spans[-1][1] < len(ids) or ids[-1] in self.ends.all
        if ended or _is_truncated(chat.messages[k]) or not self.ends.generation:
            return ids
        first, after = self.ends.generation[0], chat.token_after(k)
        token = after if after is not None and after in self.ends.all else first
        spans[-1] = (spans[-1][0], len(ids) + 1)
        result.counts["end-of-turn tokens appended"] += 1
        return [*ids, token]

    def _after_empty_thought(self, ids: list[int], start: int, end: int, result: Rendering) -> int:
        """Return the index after an empty think block at the start of a turn, and count it.

        A template writes it before an answer without reasoning, or what of it the prompt has not.
        Serving never generates it: with thinking there is text in the block, and without it the
        block is in the prompt.
        """
        opened = THOUGHT_OPENED.search(self.tokenizer.decode(ids[max(0, start - BLOCK) : start]))
        head = self.tokenizer.decode(ids[start : min(end, start + BLOCK)])
        if not opened and not head.lstrip().startswith("<"):
            return start
        after, block = start, THOUGHT_CLOSED if opened else EMPTY_THOUGHT
        for stop in range(start + 1, min(end, start + BLOCK) + 1):
            if block.fullmatch(self.tokenizer.decode(ids[start:stop])):
                after = stop
            elif after > start:
                break
        result.counts[EMPTY_THOUGHTS] += after > start
        return after if after < end else start

    def _after_reasoning(
        self, chat: Chat, k: int, ids: list[int], start: int, end: int, result: Rendering
    ) -> int:
        """Return the index after the thought of answer k, with the mask that leaves it out.

        A tag ends it, or the token that ends a channel (gpt-oss). A thought that nothing ends is
        all of the turn.
        """
        if self.mask != WITHOUT_REASONING:
            return start
        message, decode = chat.messages[k], self.tokenizer.decode
        said = (message.get("content") or "").strip() or message.get("tool_calls")
        if reasoning_of(message) and not said:
            result.counts[_REASONING_ALONE] += 1
            return end
        prompt, text = decode(ids[max(0, start - BLOCK) : start]), decode(ids[start:end])
        opened = THOUGHT_OPENED.search(prompt) or STARTS_OPEN.match(text)
        if not opened and CLOSE not in (message.get("content") or "") and not reasoning_of(message):
            return start
        closed = THOUGHT_CLOSES.search(text) if opened else None
        if opened and closed is None:
            result.counts[_REASONING_ALONE] += 1
            return end
        whole = decode(ids[start:])
        rest = whole[closed.end() :] if closed else chat.behind_reasoning(k)
        if not rest or not whole.endswith(rest):
            return start
        count = len(whole) - len(rest)
        tokens = range(start, end)
        at = start + bisect.bisect_left(tokens, count, key=lambda i: len(decode(ids[start:i])))
        if not closed and ids[at : at + 1] and self.template.is_special(ids[at]):
            at += 1
        while at < end and not decode([ids[at]]).strip():
            at += 1
        if self._cut(ids, at, end) > at:
            return at
        result.counts[_REASONING_ALONE] += 1
        return end

    def _given(self, record: Record) -> Rendering:
        """Return the document of given ids, or those of a pack that have something to learn."""
        ids = record.input_ids or []
        mask = record.loss_mask if record.loss_mask is not None else [1] * len(ids)
        if len(mask) != len(ids):
            raise render_error(
                record, "bad-loss-mask", f"{len(mask)} loss mask entries for {len(ids)} tokens"
            )
        if set(mask) - {0, 1}:
            raise render_error(record, "bad-loss-mask", "the loss mask holds more than 0 and 1")
        if not any(mask) and self.mask != "all":
            raise render_error(record, "nothing-supervised", "the loss mask is zero everywhere")
        result, start = Rendering("input_ids", unmasked=record.loss_mask is None), 0
        for number, length in enumerate(record.lengths or (len(ids),)):
            part, start = slice(start, start + length), start + length
            spans = [(a, b) for a, b in runs(np.array(mask[part])).tolist()]
            if not spans and self.mask != "all":
                result.dropped["nothing-supervised"] += 1
                continue
            where = f"{record.where} (document {number})" if record.lengths else record.where
            result.documents.append(self._document(record, ids[part], spans, where, role="given"))
        return result

    def _document(
        self,
        record: Record,
        ids: list[int],
        spans: list["_Span"],
        where: str,
        role: str = "assistant",
    ) -> Document:
        # A tokenizer can have more tokens than the target has rows of its embedding and head.
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocab_size:
                raise render_error(
                    record,
                    "bad-token-id",
                    f"token id {token} is not in 0..{self.vocab_size - 1}, the rows of the LM head",
                )
        turns = tuple(Turn(role=role, start=start, end=end) for start, end in spans)
        mask = loss_mask_from_turns(len(ids), turns, self.mask)
        return Document(
            input_ids=ids,
            loss_mask=mask,
            turns=turns,
            source=record.source,
            where=where,
            prompt=self._prompt(record, ids, turns),
            images=self._images(record, ids),
            files={digest: picture.data for digest, picture in record.pictures.items()},
        )

    def _images(self, record: Record, ids: list[int]) -> tuple[Placed, ...]:
        """Return the images of a document, and which of its tokens stand for each."""
        vision = self.template.vision
        if not record.pictures or vision is None:
            return ()
        places = np.flatnonzero(vision.types(ids)).tolist()
        images, taken = [], 0
        for digest in in_order(record.messages or [], record.pictures):
            if taken == len(places):
                break  # it is in a later turn
            picture = record.pictures[digest]
            text = vision.expansion(digest, picture.data)
            count = sum(vision.types(self.tokenizer(text, add_special_tokens=False)["input_ids"]))
            own = places[taken : taken + count]
            if not count or len(own) < count:
                raise render_error(record, "images", "the tokens of its images cannot be told")
            taken += count
            images.append(
                Placed(digest, picture.width, picture.height, picture.path, own[0], own[-1] + 1)
            )
        if taken != len(places):
            raise render_error(record, "images", "more tokens stand for images than it has images")
        return tuple(images)

    def _prompt(self, record: Record, ids: list[int], turns: tuple[Turn, ...]) -> int:
        """Return the number of the prompt of a document."""
        if record.messages is not None:
            return self.prompt_keys.of_messages(record.messages)
        if record.text is not None:
            return self.prompt_keys.of_text(record.text)
        return self.prompt_keys.of_tokens(ids, answer_start(turns, len(ids)))


_Span = tuple[int, int]


def _is_truncated(answer: Message) -> bool:
    return bool(answer.get("finish_reason") == "length")


def _tagged(tags: list[int] | None, start: int, end: int) -> list[_Span]:
    """Return the span from the first tagged token, without tags all of it; [] if it is empty."""
    if tags is None:
        return [(start, end)] if start < end else []
    first = next((i for i in range(start, min(end, len(tags))) if tags[i]), None)
    return [] if first is None else [(first, end)]
