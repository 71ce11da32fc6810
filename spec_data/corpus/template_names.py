"""Which names a chat template reads: a keyword argument that it does not read has no effect.

A misspelt `enable_thinking` renders without an error, and every document is then another than
serving's. So template kwargs are compared with the names that the parsed template looks up.
"""

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from typing import Any

import jinja2.meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from spec_data.corpus.limits import limited_call

RESERVED = {  # arguments of apply_chat_template that rendering sets; users cannot set them
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
_CLOCK, _DATE = "strftime_now", "date_string"
_DATES = ("date", "today", "time")  # parts of the names of kwargs that fix a date


def names_read(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the names that the tokenizer's chat templates look up; None if that is not known.

    With several named templates, return the names of all of them. The names are not known if a
    template has a syntax error, or if the tokenizer renders in Python code of its own. A template
    that prints the date (`strftime_now`) reads `date_string` at least through `fixed_date`.
    """
    own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    templates = tokenizer.chat_template or {}
    if own:
        return None
    texts = tuple(templates.values()) if isinstance(templates, dict) else (templates,)
    return _names_of(texts)


@functools.lru_cache(maxsize=64)
def _names_of(texts: tuple[str, ...]) -> frozenset[str] | None:
    """Return the names that templates look up; None if one has a syntax error.

    Jinja computes constants such as `10**10**9` even here, so this is done under limits.
    """
    found: frozenset[str] | None = limited_call(_undeclared, texts)
    return found


def _undeclared(texts: Iterable[str]) -> frozenset[str] | None:
    found: set[str] = set()
    for text in texts:
        try:
            environment = _compile_jinja_template(text).environment
            found |= jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError:
            return None  # rendering a record reports the error
    return frozenset(found | ({_DATE} if _CLOCK in str(texts) else set()))


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
def on_date(template: str, fixed: date | None) -> Iterator[None]:
    """Let a template render as on a date; None: today."""
    if fixed is None:
        yield
        return
    names = _compile_jinja_template(template).globals
    clock = names[_CLOCK]
    names[_CLOCK] = fixed.strftime
    try:
        yield
    finally:
        names[_CLOCK] = clock


def refused_kwargs(kwargs: Iterable[str], read: frozenset[str] | None) -> str | None:
    """Return why template kwargs cannot be used, or None if they can.

    `kwargs` are their names, `read` the result of `names_read`.
    """
    given = set(kwargs)
    if reserved := sorted(RESERVED & given):
        return f"{', '.join(reserved)} cannot be set here"
    unread = sorted(given - read) if read is not None else []
    if read is None or not unread:
        return None
    settable = sorted(read - RESERVED)
    known = f"it reads {', '.join(settable)}" if settable else "it reads none"
    near = [n for name in unread for n in difflib.get_close_matches(name, settable, n=1)]
    near = list(dict.fromkeys(near))
    advice = f"did you mean {' or '.join(near)}?" if near else "remove it where it is set"
    return f"the chat template does not read {', '.join(unread)} ({known}); {advice}"


def prints_the_date(
    tokenizer: PreTrainedTokenizerBase, read: frozenset[str] | None, kwargs: Mapping[str, Any]
) -> bool:
    """Return whether the template prints today's date.

    It does not where `kwargs` has a date that the template reads.
    """
    fixed = [name for name in date_kwargs(read) if name in kwargs]
    return _CLOCK in str(tokenizer.chat_template) and not fixed


def date_kwargs(read: frozenset[str] | None) -> list[str]:
    """Return the names of template kwargs that fix the date (Llama's `date_string`)."""
    if read is None:
        return [_DATE]
    return sorted(n for n in read if any(d in n.lower() for d in _DATES))
