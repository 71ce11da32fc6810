"""Prompts for decoding: from lines of a JSONL file to the token ids that serving would use.

A line holds `messages` (a chat; trailing assistant answers are dropped), `prompt` (a string, or a
chat) or `turns` (user messages sent one after the other, with each answer added to the chat, as in
MT-bench). Chats are rendered only by the tokenizer's own template with its generation prompt: a
prompt written by hand could differ from serving by a token and silently lower acceptance. A bad
line raises an error with its number and is never skipped, so a benchmark cannot shrink unnoticed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, CorpusError, MissingError

Message = dict[str, Any]
_KINDS = ("messages", "turns", "prompt")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `where` is file:line; exactly one of `text` and `messages` is not None."""

    where: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    follow_ups: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def read_prompts(path: Path, limit: int = 0) -> list[Prompt]:
    """Read the first `limit` prompts (0: all) of a JSONL file.

    Raises:
        MissingError: the file does not exist.
        CorpusError: a line is not a JSON object with messages, prompt or turns, or the file has
            no line.
    """
    if not path.is_file():
        raise MissingError(f"--prompts {path}: no such file")
    prompts: list[Prompt] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit and len(prompts) == limit:
                break
            if line.strip():
                prompts.append(_parse(line, f"{path}:{number}"))
    if not prompts:
        raise CorpusError(f"--prompts {path}: empty; expected one JSON object per line")
    return prompts


def _parse(line: bytes, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{where}: not valid JSON ({error}); expected one object per line"
        ) from None
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: expected a JSON object, found a {type(record).__name__}")
    kind = next((k for k in _KINDS if record.get(k) is not None), None)
    if kind is None:
        found = ", ".join(map(repr, record)) or "no keys"
        raise CorpusError(f"{where}: a line needs messages, prompt or turns; found {found}")
    tools = record.get("tools") or ()
    if not isinstance(tools, (list, tuple)):
        raise CorpusError(f"{where}: tools must be a list, found a {type(tools).__name__}")
    value = record[kind]
    if kind == "prompt" and isinstance(value, str):
        return Prompt(where=where, text=value, tools=tuple(tools))
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{where}: {kind} must be a non-empty list, found {value!r}")
    if kind == "turns":
        return _turns(value, where, tuple(tools))
    return Prompt(where=where, messages=_question(value, where), tools=tuple(tools))


def _turns(turns: list[Any], where: str, tools: tuple[dict[str, Any], ...]) -> Prompt:
    for index, turn in enumerate(turns):
        if not isinstance(turn, str):
            kind = type(turn).__name__
            raise CorpusError(
                f"{where}: turns[{index}] must be a string (a user message), found a {kind}"
            )
    first = ({"role": "user", "content": turns[0]},)
    return Prompt(where=where, messages=first, follow_ups=tuple(turns[1:]), tools=tools)


def _question(messages: list[Any], where: str) -> tuple[Message, ...]:
    """Return the chat without its trailing assistant messages: the input of the target."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CorpusError(f"{where}: messages[{index}] must be an object with a role")
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] not in ("user", "tool"):
        last = messages[end - 1]["role"] if end else "nothing"
        raise CorpusError(
            f"{where}: the last message before the answer must have the role user or tool, found "
            f"{last}"
        )
    return tuple(messages[:end])


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Read the JSON object of `--chat-template-kwargs`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--chat-template-kwargs {text!r}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--chat-template-kwargs {text!r}: expected a JSON object")
    return value


def opening(prompt: Prompt, tokenizer: Any) -> tuple[Message, ...] | None:
    """Return the chat to render first; None if the prompt is raw text.

    A string is one user message if the tokenizer has a chat template, otherwise text to continue.

    Raises:
        CorpusError: the prompt is a chat and the tokenizer has no chat template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt.messages is None:
        return ({"role": "user", "content": prompt.text},) if has_template else None
    if not has_template:
        raise CorpusError(
            f"{prompt.where}: this is a chat, but the target's tokenizer has no chat template; use "
            "lines with prompt (raw text), or a tokenizer with a template"
        )
    return prompt.messages


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] = (),
    where: str = "prompt",
) -> list[int]:
    """Return the token ids of a chat with the generation prompt, exactly as serving renders it."""
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template_kwargs,
        )
    except Exception as error:  # a template can raise any exception
        raise CorpusError(f"{where}: the chat template rejects this chat: {error}") from error
    return _checked_ids(encoded["input_ids"], where)


def render_text(text: str, tokenizer: Any, where: str = "prompt") -> list[int]:
    """Return the token ids of raw text, with the special tokens that the tokenizer adds."""
    return _checked_ids(tokenizer(text)["input_ids"], where)


def _checked_ids(ids: Sequence[int], where: str) -> list[int]:
    if not len(ids):
        raise CorpusError(f"{where}: renders to no tokens; remove the line")
    return [int(i) for i in ids]
