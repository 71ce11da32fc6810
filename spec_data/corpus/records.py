"""Turn one corpus row (a JSON object, a Parquet row) into one `Record`; no files are read here.

The format of a row is recognised by its columns. The first entry of `FORMATS` whose columns are
present and not null wins, so a row with both `messages` and a ready-made `text` is a conversation.
`parse_prompt` reads the same rows as prompts, and rows that hold a question alone.
A row that is not understood raises `BadRow` with the reason. Nothing is guessed and nothing is
dropped: an image part or an unknown role makes the row bad, not shorter.

Rows are normalised, so that the same template call renders every source in the same way:
- ShareGPT speakers become OpenAI roles; content made of text parts is joined without a separator.
- A string `prompt` / `completion` (or `response`; `question` / `answer`; Alpaca's `instruction`,
  `input`, `output`) becomes a user turn and an assistant turn, because a draft serves chats and not
  raw text. Alpaca's `input` follows its instruction after a blank line; `history` pairs and a
  `system` column come first.
- OpenAI tool calls have `arguments` as a JSON string; it is parsed, as vLLM and SGLang do before
  they apply the template. Null fields are left out (`apply_chat_template` does the same). In Arrow
  sources this is done at every depth, because an Arrow struct has every key that any row has.
- Columnar files often store nested columns as JSON text: `messages`, `conversations`, `tools` and
  `chat_template_kwargs` are parsed if they are strings.
- The `weight` of an assistant message is a number; answers of weight 0 are not supervised.
- Logs of APIs have `finish_reason` (or `stop_reason`) beside the messages: it is that of the last
  answer. What engines and providers write for "cut at a limit of tokens" becomes "length".
- A `system` column is not used if the conversation has another system message. Such columns, and
  those that the format does not use, are in `Record.unused`; the reader names them per source.
"""

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.corpus.bad_rows import BadRow, UnforeseenRow
from spec_data.corpus.json_values import (
    check_depth,
    check_text,
    is_text,
    json_problem,
    parse_json,
)

FORMATS = (
    *("messages", "conversations", "prompt+completion", "prompt+response", "question+answer"),
    *("instruction", "input_ids", "text"),
)
_NEEDS = {name: tuple(name.split("+")) for name in FORMATS} | {
    "instruction": ("instruction", "output")
}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_FINISH = ("finish_reason", "stop_reason")
_CUT = ("length", "max_tokens")  # in any case: OpenAI, vLLM, SGLang, TGI; Anthropic, Gemini
_OPTIONAL = (
    *(
        "input",
        "history",
        "system",
        "loss_mask",
        "tools",
        "chat_template_kwargs",
        *_FINISH,
        *_MEDIA,
    ),
)

COLUMNS = (*dict.fromkeys([c for needs in _NEEDS.values() for c in needs]), "turns", *_OPTIONAL)
"""Every column that is used; readers of columnar files read only these."""

_OF_CHATS = frozenset(("system", "tools", "chat_template_kwargs", *_FINISH, *_MEDIA))
_OTHERS: dict[str, frozenset[str]] = {
    "input_ids": frozenset(("loss_mask",)),
    "text": frozenset(),
    "instruction": _OF_CHATS | {"input", "history"},
    "prompt": _OF_CHATS | {"completion", "response"},
    "question": _OF_CHATS | {"answer"},
}

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning of a message, in the order in which `apply_chat_template` reads them."""

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
_SYSTEM = ("system", "developer")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One corpus row with a recognised format, not tokenised yet.

    Exactly one of `messages`, `text` and `input_ids` is set. `source` is the name of the file or
    dataset, as in its `SourceReport` and in the dataset. `where` names the row in messages:
    `path:line`, or `path row N` counted from 0, with the path as the user wrote it.
    """

    source: str
    where: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()  # of a prompt: user messages after the first answer
    kind: str = field(default="", compare=False)  # the format of the row
    unused: tuple[str, ...] = field(default=(), compare=False)  # columns that were not used


def recognise(row: dict[str, Any]) -> str | None:
    """Return the name of the row's format, or None if the row has no known set of columns."""
    return next(
        (name for name in FORMATS if all(row.get(c) is not None for c in _NEEDS[name])), None
    )


def foreseen(parse: Callable[..., tuple[str, Record]]) -> Callable[..., tuple[str, Record]]:
    """Decorate a parser of rows: any other exception than a BadRow becomes an UnforeseenRow."""

    @functools.wraps(parse)
    def guarded(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
        try:
            return parse(row, source=source, where=where, arrow=arrow)
        except (BadRow, MemoryError):
            raise
        except Exception as error:
            raise UnforeseenRow(f"{type(error).__name__}: {error}") from error

    return guarded


@foreseen
def parse_row(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
    """Return (format name, Record) of one row.

    Args:
        row: the parsed row; anything but a dict is a bad row.
        source: see `Record`.
        where: see `Record`.
        arrow: the row comes from an Arrow table, where a null inside a struct means "no such key".

    Raises:
        BadRow: the row has no known format, or is broken. Any other exception is an UnforeseenRow.
    """
    kind = recognise(row) if isinstance(row, dict) else None
    row = checked_row(row, kind, FORMATS, arrow)
    return str(kind), record_of(str(kind), row, source=source, where=where)


def checked_row(row: Any, kind: str | None, known: Sequence[str], arrow: bool) -> dict[str, Any]:
    """Return a row that may have a usable format.

    Args:
        row: the parsed row.
        kind: the name of its format, None if it was not recognised.
        known: the formats that the message of the error names.
        arrow: see `parse_row`.

    Raises:
        BadRow: the row is no object, has no known format, or has media.
    """
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with named columns, found {_kind(row)}")
    if not all(is_text(str(column)) for column in row):
        raise BadRow("the name of a column has half of a surrogate pair, which is no character")
    for column in COLUMNS:
        check_depth(row.get(column), column)
    if kind is None:
        raise unknown_columns((k for k, v in row.items() if v is not None), known)
    if arrow and kind not in ("text", "input_ids"):
        row = _without_none(row)
    for column in _MEDIA:
        if row.get(column):
            raise BadRow(f"the row has '{column}'; only text can be rendered")
    return row


def unknown_columns(columns: Iterable[str], known: Sequence[str] = FORMATS) -> BadRow:
    """Return the bad row of a row that has `columns` and no format of `known`."""
    found = tuple(sorted(columns))
    names = ", ".join(found) or "none"
    nearest = _nearest_format(found, tuple(known))
    advice = f"; nearest: {nearest}" if nearest else ""
    return BadRow(f"no known columns (found: {names}{advice}; known formats: {', '.join(known)})")


@functools.lru_cache
def _nearest_format(found: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Return the format that lacks the least, and what it lacks; "" if no column is like one."""
    best, nearest = 0.0, ""
    for name in known:
        needs = _NEEDS.get(name, (name,))
        near = {n: difflib.get_close_matches(n, found, n=1, cutoff=0.75) for n in needs}
        share = sum(n in found or 0.9 * bool(near[n]) for n in needs) / len(needs)
        if share > best:
            hints = {n: f" (rename {near[n][0]}?)" if near[n] else "" for n in needs}
            lacks = ", ".join(n + hint for n, hint in hints.items() if n not in found)
            best, nearest = share, f"{name}, which lacks {lacks}"
    return nearest


def record_of(kind: str, row: dict[str, Any], *, source: str, where: str) -> Record:
    """Return the record of a row of the format `kind`.

    Raises:
        BadRow: the row is broken.
    """
    used = set(kind.split("+")) | _OTHERS.get(kind, _OF_CHATS) | set(_NEEDS.get(kind, ()))
    unused = [c for c, v in row.items() if c not in used and v not in (None, "", [], {})]
    record = Record(source=source, where=where, kind=kind, unused=tuple(unused))
    if kind == "text":
        return replace(record, text=_given_text(row["text"]))
    if kind == "input_ids":
        ids, mask = _integers(row, "input_ids", (int,)), row.get("loss_mask")
        if mask is not None:
            mask = [int(v) for v in _integers(row, "loss_mask", (int, bool))]
        return replace(record, input_ids=ids, loss_mask=mask)
    messages, follow_ups = _conversation(kind, row)
    system, first = row.get("system"), messages[0]
    if system and first["role"] in _SYSTEM and first.get("content") != system:
        unused.append("system")
    finish = next((row[name] for name in _FINISH if isinstance(row.get(name), str)), None)
    record = replace(
        record,
        messages=_with_system(_with_finish(messages, finish), system),
        tools=_tools(row.get("tools")),
        template_kwargs=_template_kwargs(row.get("chat_template_kwargs")),
        follow_ups=follow_ups,
        unused=tuple(unused),
    )
    for name in ("messages", "tools", "template_kwargs", "follow_ups"):
        check_text(getattr(record, name), name)
    return record


def _conversation(kind: str, row: dict[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the messages of a row, and the user messages after the first answer of `turns`."""
    if kind == "prompt":
        return _side(row["prompt"], "prompt", "user"), ()
    if kind == "question":
        return _side(row["question"], "question", "user"), ()
    if "+" in kind:
        asked, answered = kind.split("+")
        return _side(row[asked], asked, "user") + _side(row[answered], answered, "assistant"), ()
    if kind == "instruction":
        return _alpaca(row), ()
    if kind == "turns":
        return _turns(row["turns"])
    return _messages(_from_json(row[kind], kind), kind), ()


def _turns(value: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    value = _from_json(value, "turns")
    if not isinstance(value, list) or not value:
        raise BadRow(f"turns is {_kind(value)}, not a list of user messages")
    texts = [_text(turn, f"turns[{i}] (a user message)") for i, turn in enumerate(value)]
    return [{"role": "user", "content": texts[0]}], tuple(texts[1:])


def _side(value: Any, column: str, role: str) -> list[dict[str, Any]]:
    """Return the messages of one side of a row of two columns, such as prompt+completion.

    `value` is a string, one message or a list of messages.
    """
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, column)}]
    return _messages([value] if isinstance(value, dict) else value, column)


def _alpaca(row: dict[str, Any]) -> list[dict[str, Any]]:
    instruction = _text(row["instruction"], "instruction")
    extra = _text("" if row.get("input") is None else row["input"], "input")
    question = "\n\n".join(part for part in (instruction, extra) if part)
    if not question:
        raise BadRow("instruction and input are both empty")
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow(f"history is {_kind(history)}, not a list of [question, answer] pairs")
    messages = []
    for pair in [*history, (question, row.get("output", ""))]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow("history is not a list of [question, answer] pairs")
        messages.append({"role": "user", "content": _text(pair[0], "history question")})
        messages.append({"role": "assistant", "content": _text(pair[1], "output")})
    return messages


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRow(f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        raise BadRow(f"{column} is empty")
    return [_message(message, f"{column}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return one message in OpenAI form: `role`, `content`, then every other key unchanged."""
    if not isinstance(message, dict):
        raise BadRow(f"{name} is {_kind(message)}, not a message")
    speaker = message.get("role", message.get("from"))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{name} has the unknown role {speaker!r}; known: {', '.join(_ROLES)}")
    content = message.get("content", message.get("value"))
    result: dict[str, Any] = {"role": role}
    if content is not None:
        result["content"] = _content(content, name)
    elif role != "assistant" or not any(message.get(n) for n in ("tool_calls", *REASONING)):
        raise BadRow(f"{name} ({role}) has no content")
    taken = ("role", "from", "content", "value")
    result.update({k: v for k, v in message.items() if k not in taken and v is not None})
    if not isinstance(result.get("weight", 1), (int, float)):
        raise BadRow(f"the weight of {name} is {_kind(result['weight'])}, not 0 or 1")
    if result.get("tool_calls"):
        result["tool_calls"] = _tool_calls(result["tool_calls"], name)
    return result


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return _text(content, name)
    if not isinstance(content, list):
        raise BadRow(f"the content of {name} is {_kind(content)}, not text")
    return "".join(_part(part, name) for part in content)


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return _text(part, name)
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise BadRow(f"{name} holds a part of type {kind!r}; only text parts can be rendered")
    return _text(part.get("text"), f"a text part of {name}")


def _tool_calls(calls: Any, name: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"tool_calls of {name} is not a list of objects")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return call  # not JSON: some templates print the string unchanged
    except (RecursionError, ValueError) as error:
        raise BadRow(f"tool call arguments: {json_problem(error)}") from None
    check_depth(parsed, "tool call arguments")
    return {**call, "arguments": parsed}


def _with_finish(messages: list[dict[str, Any]], finish: str | None) -> list[dict[str, Any]]:
    """Return messages whose cut answers have the finish reason "length".

    `finish` is the reason of the row: that of its last answer, unless this has one of its own.
    """
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    result = []
    for i, message in enumerate(messages):
        own = next((message[n] for n in _FINISH if isinstance(message.get(n), str)), None)
        reason = finish if own is None and i == last else own
        if message["role"] == "assistant" and reason is not None and reason.lower() in _CUT:
            message = {**message, "finish_reason": "length"}
        result.append(message)
    return result


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    if not system or messages[0]["role"] in _SYSTEM:
        return messages
    return [{"role": "system", "content": _text(system, "system")}, *messages]


def _tools(value: Any) -> list[Any] | None:
    value = _from_json(value, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools is not a list of tool descriptions")
    return value


def _template_kwargs(value: Any) -> dict[str, Any]:
    value = _from_json(value, "chat_template_kwargs")
    if value and not isinstance(value, dict):
        raise BadRow(f"chat_template_kwargs is {_kind(value)}, not a table")
    return value or {}


def _from_json(value: Any, column: str) -> Any:
    """Return a nested value, parsed if it is text; blank text counts as null."""
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_json(value) if value.strip() else None
    except BadRow as error:
        raise BadRow(f"{column} is a string but not JSON: {error}") from None
    check_depth(parsed, column)
    return parsed


def _given_text(value: Any) -> str:
    if not _text(value, "text").strip():
        raise BadRow("text is empty")
    return value


def _integers(row: dict[str, Any], column: str, kinds: tuple[type, ...]) -> list[int]:
    """Return a column of integers; the renderer checks lengths and ranges."""
    values = row[column]
    if not isinstance(values, list) or not all(type(v) in kinds for v in values):
        raise BadRow(f"{column} is not a list of integers")
    if not values:
        raise BadRow(f"{column} is empty")
    return values


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {_kind(value)}, not text")
    if not is_text(value):
        raise BadRow(f"{name} has half of a surrogate pair, which is no character")
    return value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


# -- prompt rows -----------------------------------------------------------------------------------
# Turn one row of prompts into a `Record` that ends where the target is to answer.
#
# `spec-train eval` reads its prompts here, with the code that reads a corpus: a prompt that is read
# in another way is rendered in another way, and acceptance falls without an error. Rows may hold a
# question alone: `prompt` or `question` (a string or messages), or `turns`, the user messages of
# MT-bench, which are sent one after the other, each after the answer to the one before. Messages of
# the user alone are such turns too: that is how SPEED-Bench is written by its own script.
#
# SPEED-Bench on the Hub has a notice in place of questions that it may not redistribute. Such a row
# is bad: the target would answer the notice.


_NOTICE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # of SPEED-Bench

PROMPT_FORMATS = (
    *("messages", "conversations", "turns", "prompt", "question", "instruction", "input_ids"),
    "text",
)


@foreseen
def parse_prompt(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
    """Return (format name, Record) of one row of prompts; the arguments are those of `parse_row`.

    Answers at the end of the messages are dropped. Several messages, all of the user, are turns:
    the first one is the prompt, the others follow its answer. Of `input_ids` the tokens before the
    first supervised one remain, or all if there is none before it. A row with a string as `prompt`
    or `question` is of kind "prompt" and has one user message.

    Raises:
        BadRow: the row has no known format, is broken, asks nothing, or has SPEED-Bench's notice.
    """
    kind = None
    if isinstance(row, dict):
        kind = next((name for name in PROMPT_FORMATS if row.get(name) is not None), None)
    row = checked_row(row, kind, PROMPT_FORMATS, arrow)
    record = record_of(str(kind), row, source=source, where=where)
    if record.messages is not None:
        if kind in ("messages", "conversations"):
            record = _in_turns(record)
        elif kind in ("prompt", "question"):
            kind = "prompt" if isinstance(row[kind], str) else "messages"
        record = replace(record, messages=_asked(record.messages or []), kind=str(kind))
        _refuse_notice(record)
    elif record.input_ids is not None:
        mask = record.loss_mask or []
        end = mask.index(1) if 1 in mask else 0
        record = replace(record, input_ids=record.input_ids[: end or None], loss_mask=None)
    return str(kind), record


def _in_turns(record: Record) -> Record:
    """Return a record of user messages alone as the first one, with the others as follow-ups.

    A row with an answer stays as it is: its document has no answers between those messages.
    """
    messages = record.messages or []
    texts = [m["content"] for m in messages if m["role"] == "user"]
    if len(texts) < 2 or len(texts) < len(messages):
        return record
    return replace(record, messages=messages[:1], follow_ups=tuple(texts[1:]))


def _refuse_notice(record: Record) -> None:
    asked = [*(m.get("content") or "" for m in record.messages or ()), *record.follow_ups]
    if any(_NOTICE in text for text in asked):
        raise BadRow(
            "a notice of SPEED-Bench in place of the question; NVIDIA's prepare_data.py "
            "(Model-Optimizer, examples/specdec_bench) writes a file with all questions"
        )


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages before the answers at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    last = messages[end - 1]["role"] if end else "nothing"
    if last not in ("user", "tool"):
        raise BadRow(f"the last message before the answer must be of a user or a tool, not {last}")
    return messages[:end]
