"""Which names a chat template reads: a keyword argument that it does not read has no effect.

A misspelt `enable_thinking` renders without an error, and every document is then another than
serving's. So template kwargs are compared with the names that the parsed template looks up.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2.meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

RESERVED = {  # arguments of apply_chat_template that rendering sets; users cannot set them
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
_DATES = ("date", "today", "time")  # parts of the names of kwargs that fix a date


def names_read(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the names that the tokenizer's chat templates look up; None if that is not known.

    With several named templates, return the names of all of them. The names are not known if a
    template has a syntax error, or if the tokenizer renders in Python code of its own.
    """
    own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    templates = tokenizer.chat_template or {}
    if own:
        return None
    found: set[str] = set()
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            environment = _compile_jinja_template(text).environment
            found |= jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError:
            return None  # rendering a record reports the error
    return frozenset(found)


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
    return "strftime_now" in str(tokenizer.chat_template) and not fixed


def date_kwargs(read: frozenset[str] | None) -> list[str]:
    """Return the names of template kwargs that fix the date (Llama's `date_string`)."""
    if read is None:
        return ["date_string"]
    return sorted(n for n in read if n != "strftime_now" and any(d in n.lower() for d in _DATES))
