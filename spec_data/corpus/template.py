"""Render the beginnings of one conversation with one chat template, each at most once.

Every text comes from the tokenizer's own `apply_chat_template`, and so does every token, but that a
beginning of the conversation takes tokens of the whole where these are the same (`tokens.py`). A
template is a program that strangers wrote: any exception it raises becomes a `RenderError` of the
record. `spec-train eval` renders its prompts through the same code.
"""

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple, TypeVar

import jinja2.meta
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from spec_data.corpus.documents import RenderError
from spec_data.corpus.images import in_order, marked, parts_of
from spec_data.corpus.left_out import TOOL_LISTS, left_out, reasoning_of
from spec_data.corpus.message_forms import MessageForms, find_forms
from spec_data.corpus.records import REASONING, Message, Record
from spec_data.corpus.tokens import TokenisedText, Tokens, common
from spec_data.models.trial import check_in_child
from spec_data.models.vision import Vision
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.prompt_keys import PromptKeys
from spec_data.shards.thoughts import (
    BLOCK,
    CLOSE,
    ENDS_EMPTY,
    OPEN,
    STARTS_CLOSED,
    STARTS_OPEN,
    TAGS,
    THOUGHT_CLOSED,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# -- template kwargs -------------------------------------------------------------------------------
# A misspelt `enable_thinking` renders without an error, and every document is then another than
# serving's. So template kwargs are compared with the names that the parsed template looks up.

RESERVED = {  # arguments of apply_chat_template that rendering sets; users cannot set them
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
_CLOCK, _DATE = "strftime_now", "date_string"
_DATES = ("date", "today", "time")  # parts of the names of kwargs that fix a date


def of_templates(
    tokenizer: PreTrainedTokenizerBase, find: Callable[[nodes.Template], T]
) -> list[T] | None:
    """Return what `find` finds in each of the tokenizer's chat templates, once parsed.

    None: a template cannot be read, or the tokenizer renders in Python code of its own.
    """
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    templates = tokenizer.chat_template or {}
    texts = templates.values() if isinstance(templates, dict) else [templates]
    try:
        return [find(_compile_jinja_template(text).environment.parse(text)) for text in texts]
    except MemoryError:
        raise
    except Exception:  # a wrong syntax, or more brackets in one another than Python reads
        return None  # rendering a record reports the error


def names_read(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the names that any of the tokenizer's chat templates looks up; None: not known.

    A template that prints the date (`strftime_now`) reads `date_string` at least through
    `fixed_date`.
    """
    found = of_templates(tokenizer, jinja2.meta.find_undeclared_variables)
    clock = {_DATE} if _CLOCK in str(tokenizer.chat_template) else set()
    return None if found is None else frozenset(clock.union(*found))


def refused_kwargs(kwargs: Iterable[str], read: frozenset[str] | None) -> str | None:
    """Return why template kwargs of these names cannot be used, or None; `read`: `names_read`."""
    given = set(kwargs)
    if reserved := sorted(RESERVED & given):
        return f"{', '.join(reserved)} cannot be set here"
    if read is None or given <= read:
        return None
    return (
        f"the chat template does not read {', '.join(sorted(given - read))} (it reads "
        f"{', '.join(sorted(read - RESERVED)) or 'none'}); correct it where it is set"
    )


def fixed_date(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> date | None:
    """Return the date of `date_string` (2025-06-28) in kwargs, for a template that reads the clock
    alone, as gpt-oss's does; None if it reads `date_string` itself, or there is none.

    Raises:
        ValueError: it is no date of this form.
    """
    template = str(tokenizer.chat_template)
    if _DATE not in kwargs or _DATE in template or _CLOCK not in template:
        return None
    try:
        return date.fromisoformat(kwargs[_DATE])
    except (ValueError, TypeError):
        raise ValueError(
            f"{_DATE} = {kwargs[_DATE]!r}: this template prints the date in a form of its own; "
            "write the date as 2025-06-28"
        ) from None


@contextlib.contextmanager
def _on_date(template: str, fixed: date) -> Iterator[None]:
    """Let a template render as on a date."""
    names = _compile_jinja_template(template).globals
    clock = names[_CLOCK]
    names[_CLOCK] = fixed.strftime
    try:
        yield
    finally:
        names[_CLOCK] = clock


# -- template --------------------------------------------------------------------------------------

_PROBE, _QUESTION = "Qzv7probe", "Qzv7question"  # contents that no template contains
_TRIED: list[Message] = [
    {"role": "user", "content": f"{_QUESTION} 1"},
    {"role": "assistant", "content": f"{_PROBE}, two"},
]
_LONG = 1000  # characters that a template writes for each one of a chat, and without any
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Template:
    """The chat template of a tokenizer, with the kwargs of a run; those of a record override them.

    `names` are those that the template reads (None: not known), `tokens` tokenises rendered texts.

    Raises:
        ConfigError: a kwarg that cannot be set, or that the template does not read.
        TargetError: the tokenizer makes other tokens of a chat than of its text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        *,
        tried: bool = False,
        vision: Vision | None = None,
    ) -> None:
        if not tried:  # its probes, in a child process
            name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
            check_in_child(lambda: _probe(tokenizer, kwargs), name)
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        self.names = names_read(tokenizer)
        self.tokens = Tokens(tokenizer)
        self.vision = vision
        self._forms: dict[bool, MessageForms] = {}  # with tools
        reason = refused_kwargs(self.kwargs, self.names)
        try:
            fixed_date(tokenizer, self.kwargs)
        except ValueError as error:
            reason = reason or str(error)
        if reason:
            raise ConfigError(f"chat template kwargs: {reason}")
        self._control = _control_tokens(tokenizer)
        self.compared = False
        self.trials = 0  # chats that were tried in a child process
        for messages in (_TRIED[:1], _TRIED):
            try:
                self.compare_tokens(messages, None, self.kwargs)
            except (TargetError, MemoryError):
                raise
            except Exception:  # there is no template, or it needs more: the first chat is compared
                continue

    def warn_of_the_date(self) -> None:
        """Log a warning if the template prints today's date, and no kwarg fixes it."""
        names = [_DATE] if self.names is None else sorted(self.names)
        names = [name for name in names if any(word in name.lower() for word in _DATES)]
        if _CLOCK in str(self.tokenizer.chat_template) and not self.kwargs.keys() & set(names):
            logger.warning(
                "warning[template-date]: the chat template prints today's date, so documents "
                "rendered on another day differ; set a fixed date with the template kwarg %s",
                " or ".join(names),
            )

    def controls_in(self, message: Message) -> set[str]:
        """Return the control tokens that the texts of a message hold.

        Those are the special tokens, and the added ones that the template writes itself. An answer
        may hold tags of thoughts and calls: the template reads them.
        """
        if self._control is None:
            return set()
        special, any_of = self._control
        answered = message["role"] == "assistant"
        found: set[str] = set()
        for text in _texts(message):
            text = TAGS.sub("", text) if answered else text
            found.update((special if answered else any_of).findall(text))
        return found

    def is_special(self, token: int) -> bool:
        """Return whether a token id is one of the special tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return token in added and bool(added[token].special)

    def compare_tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]
    ) -> None:
        """Prove that the tokens of a chat are those of its text, by which turns are found.

        A chat that ends with a question is rendered as a prompt. `compared` is True once one was.

        Raises:
            TargetError: `apply_chat_template` returns other tokens.
        """
        asked = messages[-1]["role"] != "assistant"
        given = {**kwargs, "add_generation_prompt": asked}
        text = str(self.apply(messages, tools, given, tokenize=False))
        applied = list(self.apply(messages, tools, given, return_dict=True)["input_ids"])
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.compared = True
        for found in (ids, self.tokens.tokenise(text).ids if self.tokens.direct else ids):
            if found != applied:
                raise TargetError(self._other_tokens(applied, found))

    def _other_tokens(self, applied: list[int], found: list[int]) -> str:
        at = common(applied, found)
        parts = (ids[max(0, at - 1) : at + 4] for ids in (applied, found))
        of_chat, of_text = (
            f"{ids} ({', '.join(repr(self.tokenizer.decode([i])) for i in ids)})" for ids in parts
        )
        return (
            f"the tokenizer ({type(self.tokenizer).__name__}) makes other tokens of a chat than of "
            f"its text: apply_chat_template(tokenize=True) has {of_chat} at token {at}, the text "
            f"{of_text}. Turns cannot be found in it; use the model's tokenizer.json with its "
            "tokenizer_config.json and chat_template.jinja"
        )

    def forms(self, tools: bool) -> MessageForms:
        """Return the form of messages that the template reads, for chats with or without tools."""
        several = isinstance(self.tokenizer.chat_template, dict)
        tools = tools and several
        if tools not in self._forms:

            def render(messages: Sequence[Message], given: Sequence[Any] | None) -> str:
                given = list(given) if given else None
                return str(self._applied(messages, given, self.kwargs, {"tokenize": False}))

            calls = "tool_calls" in str(self.tokenizer.chat_template)
            self._forms[tools] = find_forms(render, calls, tools if several else None)
        return self._forms[tools]

    def kwargs_of(self, record: Record) -> dict[str, Any]:
        """Return the kwargs that render a record: those of the run, overridden by its own.

        Some corpora have every kwarg of their own template in each row. An empty one that this
        template does not read is left out.
        """
        return self.kwargs | {
            name: value
            for name, value in record.template_kwargs.items()
            if self.names is None or name in self.names or value not in (None, "", [], {})
        }

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
        **options: Any,
    ) -> Any:
        """Return what `apply_chat_template` returns; a template can raise any exception."""
        given = list(tools) if tools else None
        forms = self.forms(given is not None)
        return self._applied(list(map(forms.of, messages)), given, kwargs, options)

    def _applied(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Return what `apply_chat_template` returns of messages in the forms that it reads."""
        with contextlib.ExitStack() as stack:
            if (fixed := fixed_date(self.tokenizer, kwargs)) is not None:
                text = self.tokenizer.get_chat_template(None, tools)
                stack.enter_context(_on_date(text, fixed))
            chat = [_with_parts(_with_reasoning(message)) for message in messages]
            made = self.tokenizer.apply_chat_template(chat, tools=tools, **kwargs, **options)
        if isinstance(made, str) and len(made) > _LONG:
            given = len(json.dumps([chat, tools, kwargs], default=str))
            if len(made) > _LONG * given:
                raise ValueError(f"it writes {len(made):,} characters of a chat of {given:,}")
        return made


def _probe(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None) -> None:
    """Render all that is rendered before the first row."""
    EndTokens(Template(tokenizer, kwargs, tried=True), ())
    PromptKeys(tokenizer)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], ...] | None:
    """Return patterns of the special tokens, and of all control tokens; None: there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    written = str(tokenizer.chat_template)
    named = [t for t in added if t.content.strip() and (t.special or t.content in written)]
    lists = [[t.content for t in named if t.special], [t.content for t in named]]
    if not tokenizer.chat_template or not named:
        return None
    # The longest one first, as the tokenizer finds them; "(?!)" finds nothing.
    texts = (sorted(names, key=len, reverse=True) for names in lists)
    return tuple(re.compile("|".join(map(re.escape, names)) or "(?!)") for names in texts)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in the values of a message, nested ones too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _with_parts(message: Message) -> Message:
    """Return a message with an image part for each mark of an image in its text."""
    content = message.get("content")
    if isinstance(content, str) and marked(content):
        return {**message, "content": list(parts_of(content))}
    if isinstance(content, list) and any(marked(part.get("text", "")) for part in content):
        parts = [new for part in content for new in parts_of(part.get("text", ""))]
        return {**message, "content": parts}
    return message


def _with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under the names that templates read.

    transformers does so since 5.21.
    """
    if (reasoning := reasoning_of(message)) is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


# -- conversations ---------------------------------------------------------------------------------


_SHOWN = 30  # characters of texts that differ, before and behind


_TRIALS = 2  # chats
_KEPT = 64  # renders of a chat, of thousands that one of thousands of turns takes


class Rendered(NamedTuple):
    """The token ids of one render, and 1 at tokens inside generation tags (None without tags)."""

    ids: list[int]
    tags: list[int] | None


class Chat:
    """The renders of the beginnings of one conversation.

    `tagged` is True if the template marks what the target generates with `{% generation %}`.

    Raises:
        RenderError: the tokenizer has no template for it, or a kwarg of the row is refused. So do
            all renders, if the template or the tokenizer fails.
    """

    def __init__(self, template: Template, record: Record, messages: Sequence[Message]) -> None:
        self.record = record
        self._template = template
        self._tokenizer = template.tokenizer
        self.messages = messages
        self._kwargs = template.kwargs_of(record)
        self._rendered: dict[tuple[int, bool], Rendered] = {}  # by end, with generation prompt
        self._texts: dict[tuple[int, bool], str] = {}
        self._whole: TokenisedText | None = None  # the first text that was tokenised
        if reason := refused_kwargs(self._kwargs, template.names):
            raise render_error(record, "bad-template-kwargs", f"chat_template_kwargs: {reason}")
        try:
            text = self._tokenizer.get_chat_template(None, record.tools)
        except ValueError as error:
            raise render_error(
                record,
                "no-chat-template",
                "the target's tokenizer has no chat template for it; add one (chat_template.jinja "
                f"in its directory), or use a corpus of text or input_ids ({error})",
            ) from error
        self.tagged = bool(_GENERATION_TAG.search(text)) and self._tokenizer.is_fast
        self._expansions: dict[str, str] = {}
        if any(marked(text) for message in messages for text in _texts(message)):
            self._check_images()
        if template.trials < _TRIALS:
            template.trials += 1
            check_in_child(self._try, record.where)
        if not template.compared and not self._expansions:
            try:
                template.compare_tokens(messages, record.tools, self._kwargs)
            except (TargetError, MemoryError):
                raise
            except Exception as error:
                raise self._failed(error) from error

    def _try(self) -> None:
        """Render and tokenise all of it; a stranger's template may do anything with a real chat."""
        text = self._text_of(self.messages, add_generation_prompt=True)
        self._tokenizer(text, add_special_tokens=False)

    def _check_images(self) -> None:
        """Find the texts that stand for the images, or raise RenderError."""
        pictures, vision = self.record.pictures, self._template.vision
        named = [d for message in self.messages for text in _texts(message) for d in marked(text)]
        if vision is None or named != in_order(self.messages, pictures):
            raise render_error(
                self.record, "images", "an image stands where none can: beside a content, say"
            )
        if self.tagged:
            raise render_error(
                self.record,
                "images",
                "the chat template marks answers with {% generation %}, which is not supported "
                "with images; use a template without these tags",
            )
        try:
            for digest in named:
                if digest not in self._expansions:
                    self._expansions[digest] = vision.expansion(digest, pictures[digest].data)
        except MemoryError:
            raise
        except Exception as error:  # of a processor that comes with the model
            raise self._not_processed(error) from error

    def _not_processed(self, error: Exception) -> RenderError:
        text = " ".join(str(error).split())[:200]
        message = f"the image processor fails: {type(error).__name__}: {text}"
        return render_error(self.record, "images", message)

    def _expanded(self, text: str, messages: Sequence[Message]) -> str:
        """Return a render in which each placeholder is all that stands for its image."""
        if not self._expansions:
            return text
        vision, digests = self._template.vision, in_order(messages, self.record.pictures)
        assert vision is not None
        pieces = text.split(vision.token)
        if len(pieces) != len(digests) + 1:
            raise render_error(
                self.record,
                "images",
                f"the chat template writes {len(pieces) - 1} of {vision.token} for {len(digests)} "
                "images; a text that holds this token itself, or a template of texts alone?",
            )
        pairs = zip(digests, pieces[1:], strict=True)
        texts = (self._expansions[digest] + piece for digest, piece in pairs)
        return pieces[0] + "".join(texts)

    def check_processor(self, end: int, add_generation_prompt: bool) -> None:
        """Compare the tokens of `messages[:end]` with what the target's processor makes of them.

        Raises:
            RenderError: they differ.
        """
        vision, messages = self._template.vision, self.messages[:end]
        digests = in_order(messages, self.record.pictures)
        if not digests or vision is None:
            return
        text = self._apply(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        try:
            made = vision.ids(str(text), [self.record.pictures[d].data for d in digests])
        except MemoryError:
            raise
        except Exception as error:
            raise self._not_processed(error) from error
        if (ids := self._ids(end, add_generation_prompt).ids) != made:
            at = common(ids, made)
            raise render_error(
                self.record,
                "images",
                f"the image processor makes other tokens than are rendered here, from token {at} "
                f"on ({made[at : at + 4]}, here {ids[at : at + 4]})",
            )

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._template.apply(messages, self.record.tools, self._kwargs, **options)
        except MemoryError:  # says nothing about the template
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> RenderError:
        message = f"the chat template fails: {type(error).__name__}: {error}"
        return render_error(self.record, "template-error", message)

    def prompt(self, k: int) -> list[int]:
        """Return the token ids that serving sends to get message k."""
        return self._ids(k, add_generation_prompt=True).ids

    def through(self, k: int) -> Rendered:
        """Return the render of the conversation up to and including message k."""
        return self._ids(k + 1)

    def _ids(self, end: int, add_generation_prompt: bool = False) -> Rendered:
        key = end, add_generation_prompt
        if key not in self._rendered:
            tagged = self.tagged and not add_generation_prompt
            ids = None if tagged else self._direct(end, add_generation_prompt)
            if ids is not None:
                self._rendered[key] = Rendered(ids, None)
            else:
                options = {"return_dict": True, "return_assistant_tokens_mask": tagged}
                if self._expansions:
                    text = self._text(end, add_generation_prompt)
                    made = self._tokenizer(text, add_special_tokens=False)
                else:
                    made = self._apply(
                        self.messages[:end], add_generation_prompt=add_generation_prompt, **options
                    )
                tags = list(made["assistant_masks"]) if tagged else None
                self._rendered[key] = Rendered(list(made["input_ids"]), tags)
            _forget(self._rendered)
        return self._rendered[key]

    def _direct(self, end: int, add_generation_prompt: bool) -> list[int] | None:
        """Return the token ids of the render of `messages[:end]`, if `tokens` can find them."""
        tokens = self._template.tokens
        if not tokens.direct:
            return None
        text = self._text(end, add_generation_prompt)
        try:
            ids = tokens.beginning(self._whole, text) if self._whole else None
            if ids is None:
                tokenised = tokens.tokenise(text)
                self._whole, ids = self._whole or tokenised, tokenised.ids
            return ids
        except Exception:  # of the tokenizer; the plain way makes it the error of this record
            self._whole = None
            return None

    def token_after(self, k: int) -> int | None:
        """Return the token that follows answer k, here or where one goes on; None: it is unclear.

        What goes on is a user, or what a tool answers. Where that changes the history (GLM drops
        thoughts then), it follows another answer.
        """
        called = bool(self.messages[k].get("tool_calls"))
        asked = [{"role": "user", "content": "?"}]
        more = [{"role": "tool", "content": "?"}] if called else asked
        other = [*asked, {"role": "assistant", "content": _PROBE}]
        so_far = self.messages[: k + 1]
        for before, after in (so_far, self.messages[k + 1 : k + 2]), (so_far, more), (other, more):
            try:
                begun, ids = (
                    list(self._apply(part, return_dict=True)["input_ids"])
                    for part in (before, [*before, *after])
                )
            except RenderError:
                continue
            if len(ids) > len(begun) and ids[: len(begun)] == begun:
                return ids[len(begun)]
        return None

    def spliced(self, k: int) -> list[int]:
        """Return prompt_k, then the tokens of the rest of the text of through_k, tokenised alone.

        Without thinking, some prompts end with an empty thought that no rendered answer has
        (Gemma 4, Nemotron), or of which they have the closing tag (DeepSeek-V3.2): an answer
        without a thought follows it. Others rewrite what is before the last question (Mistral moves
        the system message, gpt-oss drops the thoughts of calls once there is a final answer): there
        the answer follows the same end of the question. Return [] if the text continues no prompt,
        or the tokens decode to another one.
        """
        prompt, through = self._text(k, True), self._text(k + 1)
        begun = prompt if through.startswith(prompt) else ENDS_EMPTY.sub("", prompt)
        before = begun if through.startswith(begun) else self._before_answer(k)
        rest = through.removeprefix(before)
        if begun != prompt and (closed := THOUGHT_CLOSED.match(rest)):
            blanks = prompt[len(prompt.rstrip()) :]
            rest = rest[closed.end(1) :].removeprefix(blanks)
        if rest == through:
            begun, rest = prompt, self._behind_question(k)
        if not rest or (begun != prompt and STARTS_OPEN.match(rest)):
            return []
        decode, sent = self._tokenizer.decode, self.prompt(k)
        ids = sent + list(self._tokenizer(rest, add_special_tokens=False)["input_ids"])
        wanted = decode(self.through(k).ids) if before == prompt else decode(sent) + rest
        return ids if decode(ids) == wanted else []

    def _behind_question(self, k: int) -> str:
        """Return what the template writes of answer k behind all that ends its prompt; "": unclear.

        A mark in the last message before it shows where that ends, in the prompt and with the
        answer. The rest must end the real text too.
        """
        asked = [*self.messages[: k - 1], {**self.messages[k - 1], "content": _QUESTION}]
        try:
            sent = self._text_of(asked, True).partition(_QUESTION)[2]
            written = self._text_of([*asked, self.messages[k]]).partition(_QUESTION)[2]
        except RenderError:
            return ""
        rest = written.removeprefix(sent) if sent else written
        return rest if rest != written and self._text(k + 1).endswith(written) else ""

    def difference(self, k: int) -> str:
        """Return in words where the texts of prompt_k and through_k part; "" if they do not."""
        prompt, through = self._text(k, True), self._text(k + 1)
        at = common(prompt, through)
        if at == len(prompt):
            return ""
        shown = slice(max(0, at - _SHOWN), at + _SHOWN)
        return f": the prompt has {prompt[shown]!r}, the conversation {through[shown]!r}"

    def _before_answer(self, k: int) -> str:
        """Return what the template writes before answer k, if it writes the same behind the last
        question as the prompt has, but for an empty thought; else "".
        """
        answer = {"role": "assistant", "content": _PROBE}
        asked = [*self.messages[: k - 1], {**self.messages[k - 1], "content": _QUESTION}]
        try:
            sent = self._text_of(asked, True).partition(_QUESTION)[2]
            header = self._text_of([*asked, answer]).partition(_QUESTION)[2].partition(_PROBE)[0]
            before, found, _ = self._text_of([*self.messages[:k], answer]).partition(_PROBE)
        except RenderError:
            return ""
        return before if found and header and header == ENDS_EMPTY.sub("", sent) else ""

    def thought(self, k: int) -> list[int] | None:
        """Return prompt_k and the tokens of answer k, whose thought the template loses.

        The prompt opens the thought, and the template drops it from answers (DeepSeek-R1), or
        writes its opening tag again (Nemotron). Calls are as the template writes them, with the
        token that ends them; any other answer has none. None: the template writes it as the target
        does; []: the row has no thought.
        """
        if not self._tokenizer.decode(self.prompt(k)[-BLOCK:]).rstrip().endswith(OPEN):
            return None
        message, prompt, through = self.messages[k], self._text(k, True), self._text(k + 1)
        rest = through.removeprefix(prompt)
        if rest != through and CLOSE in rest and not rest.lstrip().startswith(OPEN):
            return None
        content, reasoning = message.get("content") or "", (reasoning_of(message) or "").strip()
        before = prompt.rstrip().removesuffix(OPEN)
        written = through.removeprefix(before)
        # Some templates end the thought that they drop (DeepSeek-V3.1): blanks are as they have it.
        closed, line, gap = STARTS_CLOSED.match(written), "\n", "\n\n"
        if closed and written != through:
            line, gap = "\n" if prompt.endswith("\n") else "", closed[1]
        if message.get("tool_calls"):
            thought = reasoning or content.rpartition(CLOSE)[0].replace(OPEN, "").strip()
            _, found, after = written.partition(CLOSE)
            after = (after if found else written.lstrip().removeprefix(OPEN)).lstrip()
            whole = thought and written != through and self._writes_calls(k)
            text = f"{thought}{line}{CLOSE}{gap}{after}" if whole else ""
        else:
            if CLOSE not in content:
                content = f"{OPEN}{line}{reasoning}{line}{CLOSE}{gap}{content.lstrip()}"
            text = content
            if content.lstrip().startswith(OPEN):
                text = content.partition(OPEN)[2]
                text = text.removeprefix("\n") if prompt.endswith("\n") else text
        if not text.partition(CLOSE)[0].strip():
            return []
        return self.prompt(k) + list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _writes_calls(self, k: int) -> bool:
        """Return whether the template writes the tool calls of answer k."""
        named = {"type": "function", "function": {"name": _PROBE, "arguments": {}}}
        message = {**self.messages[k], "tool_calls": [named]}
        try:
            return _PROBE in self._text_of([*self.messages[:k], message])
        except RenderError:
            return False

    def behind_reasoning(self, k: int) -> str:
        """Return what the template writes behind the reasoning of answer k; "" if it is unclear."""
        message = self.messages[k]
        if reasoning_of(message) is not None:
            marked = message | {name: _PROBE for name in REASONING if message.get(name) is not None}
        else:
            _, found, rest = (message.get("content") or "").partition(CLOSE)
            if not found:
                return ""
            marked = message | {"content": f"{OPEN}{_PROBE}{CLOSE}{rest}"}
        try:
            text = self._text_of([*self.messages[:k], marked])
        except RenderError:
            return ""
        return text.rpartition(_PROBE)[2] if _PROBE in text else ""

    def unclosed(self, k: int) -> list[int] | None:
        """Return prompt_k and the tokens of a cut answer whose thought only the template closes.

        It takes the thought for the answer and puts an empty one before it, or ends what the target
        had not ended, by a tag or by the channel of an answer (gpt-oss). None: it writes nothing
        that the answer has not.
        """
        message, prompt, through = self.messages[k], self._text(k, True), self._text(k + 1)
        content, reasoning = message.get("content") or "", reasoning_of(message) or ""
        rest = through.removeprefix(prompt)
        if message.get("tool_calls") or CLOSE in content or rest == through:
            return None
        if reasoning.strip():
            reasoning = reasoning if reasoning in rest else reasoning.strip()
            before, found, _ = rest.partition(reasoning)
            text = None if content.strip() or not found else before + found
        elif CLOSE not in rest:
            return None
        elif prompt.rstrip().endswith(OPEN):
            text = content.removeprefix(f"{OPEN}\n")
        else:
            text = content if content.lstrip().startswith(OPEN) else None
        if text is None:
            return None
        return self.prompt(k) + list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def left_out(self, answers: Sequence[int], alone: bool) -> Counter[str]:
        """Count what is in none of the documents, by kind; they end with `answers`, ascending.

        With `alone`, each one is a prompt and an answer, which may not be a render.
        """

        def text(messages: Sequence[Message]) -> str:
            prompt = self._text_of(messages[:-1], True) if alone else ""
            return prompt + self._text_of(messages)

        ends = [k + 1 for k in answers]
        counts = left_out(self.messages[: ends[-1]], ends, text)
        names = self._template.names
        if self.record.tools and names is not None and "tools" not in names:
            counts[TOOL_LISTS] += 1
        return counts

    def _text(self, end: int, add_generation_prompt: bool = False) -> str:
        """Return the render of `messages[:end]`."""
        key = end, add_generation_prompt
        if key not in self._texts:
            self._texts[key] = self._text_of(self.messages[:end], add_generation_prompt)
            _forget(self._texts)
        return self._texts[key]

    def _text_of(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        text = self._apply(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        return self._expanded(str(text), messages)


def _forget(renders: dict[tuple[int, bool], Any]) -> None:
    """Forget the oldest of many renders: the tokens of all beginnings grow with their square."""
    if len(renders) > _KEPT:
        del renders[next(iter(renders))]


def text_ids(tokenizer: PreTrainedTokenizerBase, record: Record, text: str) -> list[int]:
    """Return the token ids of plain text, with the tokens that the tokenizer adds.

    Raises:
        RenderError: the tokenizer fails, the text has no tokens, or it has the first token twice.
    """
    try:
        ids = list(tokenizer(text)["input_ids"])
    except Exception as error:
        raise render_error(record, "tokenizer-error", f"{type(error).__name__}: {error}") from error
    if not ids:
        raise render_error(record, "empty", "the text has no tokens")
    first = tokenizer.bos_token_id
    if first is not None and ids[:2] == [first, first]:
        raise render_error(
            record,
            "doubled-bos",
            f"the text begins with {tokenizer.bos_token}, and the tokenizer puts another one "
            "first; remove it from the text",
        )
    return ids


def render_error(record: Record, reason: str, message: str) -> RenderError:
    """Return a RenderError whose message names the record."""
    return RenderError(reason, f"{record.where}: {message}")


# -- end tokens ------------------------------------------------------------------------------------

_USUAL = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "</s>"),
    *("<|return|>", "<|call|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>"),
    "<|end_of_text|>",
)


class EndTokens:
    """The end-of-turn tokens of a target.

    Attributes:
        generation: the ids that end generation (`generation_config.eos_token_id`), in their order.
        stops: the ids at which serving stops: `generation` and the tokenizer's eos.
        closing: the one that this template writes after an answer; None: not known.
        all: `stops`, usual end-of-turn tokens, and `closing`. A template may write them inside a
            turn too (gpt-oss ends each channel with <|end|>).
    """

    def __init__(self, template: Template, generation: Sequence[int]) -> None:
        tokenizer = template.tokenizer
        eos = tokenizer.eos_token_id
        self.generation = tuple(generation)
        self.stops: frozenset[int] = frozenset([*generation, *([] if eos is None else [eos])])
        added = {str(t): i for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        usual = {added[name] for name in _USUAL if name in added}
        self.closing = _probed(template, set(added.values()))
        self.all = self.stops | usual | ({self.closing} if self.closing is not None else set())
        self._tokenizer = tokenizer

    def turn_end(self, ids: Sequence[int], start: int) -> int:
        """Return the index after the end-of-turn token of the last turn of `ids`.

        That turn begins at `start`. Without an end-of-turn token, return the length of `ids`.
        """
        end = at = len(ids)
        while at > start:
            at -= 1
            if ids[at] in self.all:
                end = at + 1
            elif self._tokenizer.decode([ids[at]]).strip():
                break
        last = end  # Command writes another token before the one that ends generation
        while last < len(ids) and ids[last] in self.all:
            last += 1
        # A stop that the content quotes: the target would end there.
        return next((i + 1 for i in range(start, last) if ids[i] in self.stops), end)


def _probed(template: Template, added: set[int]) -> int | None:
    """Return the special token that the template writes after an answer, if it is known."""
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = template.apply(probe, None, template.kwargs, tokenize=False)
    except Exception:  # there is none, or it needs more: the error of a real record names it
        return None
    if text.count(_PROBE) != 1:
        return None
    tail = template.tokenizer(text.partition(_PROBE)[2], add_special_tokens=False)["input_ids"]
    return next((token for token in tail if token in added), None)
