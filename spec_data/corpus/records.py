"""Turn one corpus row (a JSON object, a Parquet row) into one `Record`; no files are read here.

The format of a row is recognised by its columns. The first entry of `FORMATS` whose columns are
present and not null wins, so a row with both `messages` and a ready-made `text` is a conversation.
`parse_prompt` reads the same rows as prompts, and rows that hold a question alone.
A row that is not understood raises `BadRow` with the reason. Nothing is guessed and nothing is
dropped: an image part or an unknown role makes the row bad, not shorter.

Rows are normalised, so that the same template call renders every source in the same way:
- ShareGPT speakers become OpenAI roles; content made of text parts is joined without a separator.
- Two strings (`prompt` and `completion`, Alpaca's columns, ...) become a user turn and an assistant
  turn, because a draft serves chats and not raw text.
- OpenAI tool calls have `arguments` as a JSON string; it is parsed, as vLLM and SGLang do before
  they apply the template, and kept for templates that write it; without any they are {}. Null
  fields of a message are left out, as `apply_chat_template` does, and an empty list of tool calls,
  which templates take for some.
- Columnar files often store nested columns as JSON text, which is parsed.
- A `system` column is not used if the conversation has another system message. It is then in
  `Record.unused`, with the columns that no format uses; the reader names them per source.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.corpus.bad_rows import BadRow

FORMATS = (
    *("messages", "conversations", "prompt+completion", "prompt+response", "question+answer"),
    *("instruction", "input_ids", "text"),
)
_NEEDS = {name: tuple(name.split("+")) for name in FORMATS} | {
    "instruction": ("instruction", "output")
}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_LEARNED = ("loss", "train", "training")  # false: as "weight" 0 (ms-swift, axolotl)
_FINISH = ("finish_reason", "stop_reason")
_CUT = ("length", "max_tokens")  # in any case: OpenAI, vLLM, SGLang, TGI; Anthropic, Gemini
COLUMNS = frozenset(
    {*(c for needs in _NEEDS.values() for c in needs), *_MEDIA, *_FINISH, "turns", "system"}
    | {"tools", "chat_template_kwargs", "input", "history", "loss_mask", "labels", "attention_mask"}
)
"""Every column that is used; readers of columnar files read only these."""

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

Message = dict[str, Any]


class Arguments(dict[str, Any]):
    """The arguments of a tool call; `written` is the text that they had in the row, if they had.

    Some templates write that text (`message_forms.py`).
    """

    def __init__(self, parsed: dict[str, Any], written: str | None = None) -> None:
        super().__init__(parsed)
        self.written = written


@dataclass(frozen=True, kw_only=True)
class Record:
    """One corpus row with a recognised format, not tokenised yet.

    Exactly one of `messages`, `text` and `input_ids` is set. `source` is the name of the file or
    dataset, as the dataset stores it. `where` names the row in messages:
    `path:line`, or `path row N` counted from 0, with the path as the user wrote it.
    """

    source: str
    where: str
    messages: list[Message] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()  # of a prompt: user messages after the first answer
    kind: str = field(default="", compare=False)  # the format of the row
    unused: tuple[str, ...] = field(default=(), compare=False)  # columns


def recognise(row: Any) -> str | None:
    """Return the name of the row's format, or None if the row has no known set of columns."""
    if not isinstance(row, dict):
        return None
    return next(
        (name for name in FORMATS if all(row.get(c) is not None for c in _NEEDS[name])), None
    )


def parse_row(row: Any, *, source: str, where: str) -> Record:
    """Return the record of one parsed row; `source` and `where` are those of `Record`.

    Raises:
        BadRow: the row has no known format, or is broken.
    """
    return _record(row, recognise(row), FORMATS, source, where)


def _record(row: Any, kind: str | None, formats: Sequence[str], source: str, where: str) -> Record:
    """Return the record of a row of the format `kind`; `formats` are named in errors."""
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with named columns, found {_kind(row)}")
    _check_text(list(row), "the name of a column")
    if kind is None:
        names = ", ".join(sorted(k for k, v in row.items() if v is not None)) or "none"
        raise BadRow(f"no known columns (found: {names}; known formats: {', '.join(formats)})")
    _check_media(row, "the row")
    used = COLUMNS if kind == "input_ids" else COLUMNS - {"labels", "attention_mask"}
    unused = [c for c, v in row.items() if c not in used and v not in (None, "", [], {})]
    facts: dict[str, Any]
    if kind == "text":
        facts = {"text": _text(row["text"], "text")}
        if not facts["text"].strip():
            raise BadRow("text is empty")
    elif kind == "input_ids":
        facts = _tokens(row)
    else:
        messages, follow_ups = _conversation(kind, row)
        system, first = row.get("system"), messages[0]
        if system and first["role"] in _SYSTEM:
            if first.get("content") != system:
                unused.append("system")
        elif system:
            messages = [{"role": "system", "content": _text(system, "system")}, *messages]
        facts = {
            "messages": _with_finish(messages, row),
            "tools": _tools(row.get("tools")),
            "template_kwargs": _template_kwargs(row.get("chat_template_kwargs")),
            "follow_ups": follow_ups,
        }
    for name, value in facts.items():
        if kind != "input_ids":
            _check_text(value, name)
    return Record(source=source, where=where, kind=kind, unused=tuple(unused), **facts)


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a row and its mask, which `labels` of transformers may stand for.

    They are -100 where nothing is learned. What `attention_mask` marks as padding is left out.
    """
    facts = {"input_ids": _integers(row, "input_ids", (int,))}
    if row.get("loss_mask") is not None:
        facts["loss_mask"] = list(map(int, _integers(row, "loss_mask", (int, bool))))
    elif isinstance(row.get("labels"), list):  # else of a classifier
        facts["labels"] = _integers(row, "labels", (int,))
    if row.get("attention_mask") is not None:
        real = _integers(row, "attention_mask", (int, bool))
        for name, values in facts.items():
            if len(values) != len(real):
                raise BadRow(f"{name} has {len(values)} values, attention_mask {len(real)}")
            facts[name] = [value for value, kept in zip(values, real, strict=True) if kept]
        if not facts["input_ids"]:
            raise BadRow("attention_mask is all zero")
    if (labels := facts.pop("labels", None)) is not None:
        if len(labels) != len(facts["input_ids"]) or any(
            label not in (-100, token)
            for label, token in zip(labels, facts["input_ids"], strict=True)
        ):
            raise BadRow("labels are neither -100 nor the tokens of input_ids; write a loss_mask")
        facts["loss_mask"] = [int(label != -100) for label in labels]
    return facts


# -- conversations ---------------------------------------------------------------------------------


def _conversation(kind: str, row: dict[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages of a row, and the user messages after the first answer of `turns`."""
    if kind == "turns":
        turns = _from_json(row["turns"], "turns")
        if not isinstance(turns, list) or not turns:
            raise BadRow(f"turns is {_kind(turns)}, not a list of user messages")
        texts = [_text(turn, f"turns[{i}] (a user message)") for i, turn in enumerate(turns)]
        return [{"role": "user", "content": texts[0]}], tuple(texts[1:])
    if kind == "instruction":
        return _alpaca(row), ()
    if kind in ("messages", "conversations"):
        return _messages(_from_json(row[kind], kind), kind), ()
    columns = zip(kind.split("+"), ("user", "assistant"), strict=False)
    return [m for column, role in columns for m in _side(row[column], column, role)], ()


def _side(value: Any, column: str, role: str) -> list[Message]:
    """Return the messages of one side of prompt+completion: a string, a message or a list."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages([value] if isinstance(value, dict) else value, column)


def _alpaca(row: dict[str, Any]) -> list[Message]:
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


def _messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, list):
        raise BadRow(f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        raise BadRow(f"{column} is empty")
    return [_message(message, f"{column}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, name: str) -> Message:
    """Return one message in OpenAI form: `role`, `content`, then every other key unchanged."""
    if not isinstance(message, dict):
        raise BadRow(f"{name} is {_kind(message)}, not a message")
    speaker = message.get("role", message.get("from"))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{name} has the unknown role {speaker!r}; known: {', '.join(_ROLES)}")
    _check_media(message, name)
    content = message.get("content", message.get("value"))
    result: Message = {"role": role}
    if isinstance(content, list):
        result["content"] = "".join(_part(part, name) for part in content)
    elif content is not None:
        result["content"] = _text(content, f"the content of {name}")
    elif role == "assistant" and any(message.get(n) for n in ("tool_calls", *REASONING)):
        result["content"] = ""  # many templates fail without it, and print null as "None"
    else:
        raise BadRow(f"{name} ({role}) has no content")
    taken = ("role", "from", "content", "value")
    result.update({k: v for k, v in message.items() if k not in taken and v is not None})
    if any(result.get(key) is False for key in _LEARNED):
        result["weight"] = 0
    if not isinstance(result.get("weight", 1), (int, float)):
        raise BadRow(f"the weight of {name} is {_kind(result['weight'])}, not 0 or 1")
    if calls := result.pop("tool_calls", None):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(f"tool_calls of {name} is not a list of objects")
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _check_media(table: dict[str, Any], name: str) -> None:
    """Refuse a row or a message beside whose text there are images, say."""
    for column in _MEDIA:
        if table.get(column):
            raise BadRow(f"{name} has '{column}'; only text can be rendered")


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise BadRow(f"{name} holds a part of type {kind!r}; only text parts can be rendered")
    return _text(part.get("text"), f"a text part of {name}")


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        return call
    text = (arguments or "").strip() or "{}"
    try:
        parsed = json.loads(text)
    except (RecursionError, ValueError):
        return call  # not JSON: some templates print the string unchanged
    return {**call, "arguments": Arguments(parsed, text) if type(parsed) is dict else parsed}


def _with_finish(messages: list[Message], row: dict[str, Any]) -> list[Message]:
    """Return messages whose answers that a limit of tokens cut have the finish reason "length".

    Logs of APIs have the reason of the last answer beside the messages.
    """
    reasons = [_finish(message) for message in messages]
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is not None:
        reasons[last] = reasons[last] or _finish(row)
    return [
        m | {"finish_reason": "length"} if m["role"] == "assistant" and reason in _CUT else m
        for m, reason in zip(messages, reasons, strict=True)
    ]


def _finish(table: dict[str, Any]) -> str:
    return next((table[n].lower() for n in _FINISH if isinstance(table.get(n), str)), "")


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


# -- values ----------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; bytes must be UTF-8. What Python cannot read is a BadRow."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error}") from None
    except (RecursionError, ValueError) as error:
        raise BadRow(f"not valid JSON: {error}") from None


def is_text(text: str) -> bool:
    """Return whether a string can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_text(value: Any, name: str) -> None:
    """Refuse half of a surrogate pair, in a text or a key of a nested value.

    It is no character; what is not UTF-8 in a CSV file becomes one.
    """
    if not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise BadRow(f"{name} has half of a surrogate pair, or is not UTF-8")


def _from_json(value: Any, column: str) -> Any:
    """Return a nested value, parsed if it is text; blank text counts as null."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except BadRow as error:
        raise BadRow(f"{column} is a string but not JSON: {error}") from None


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
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


# -- prompts ---------------------------------------------------------------------------------------

_NOTICE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""SPEED-Bench on the Hub has it in place of questions that it may not redistribute."""

PROMPT_FORMATS = (
    *("messages", "conversations", "turns", "prompt", "question", "instruction", "input_ids"),
    "text",
)


def parse_prompt(row: Any, *, source: str, where: str) -> Record:
    """Return the record of one row of prompts, which ends where the target is to answer.

    Rows may hold a question alone: `prompt` or `question` (a string or messages), or `turns`, the
    user messages of MT-bench, which are sent one after the other, each after the answer to the one
    before. Messages of the user alone are such turns too, as in SPEED-Bench.

    Answers at the end of the messages are dropped. Of `input_ids` the tokens before the first
    supervised one remain, or all if there is none before it. A row with a string as `prompt` or
    `question` is of kind "prompt" and has one user message. The arguments are those of `parse_row`.

    Raises:
        BadRow: the row has no known format, is broken, asks nothing, or has SPEED-Bench's notice.
    """
    kind = None
    if isinstance(row, dict):
        kind = next((name for name in PROMPT_FORMATS if row.get(name) is not None), None)
    record = _record(row, kind, PROMPT_FORMATS, source, where)
    if record.input_ids is not None:
        mask = record.loss_mask or []
        end = mask.index(1) if 1 in mask else 0
        return replace(record, input_ids=record.input_ids[: end or None], loss_mask=None)
    if record.messages is None:
        return record
    messages, follow_ups = record.messages, record.follow_ups
    if kind in ("messages", "conversations"):
        if all(m["role"] == "user" for m in messages):  # turns without answers between them
            follow_ups = tuple(m["content"] for m in messages[1:])
            messages = messages[:1]
    elif kind in ("prompt", "question"):
        kind = "prompt" if isinstance(row[kind], str) else "messages"
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    last = messages[-1]["role"] if messages else "nothing"
    if last not in ("user", "tool"):
        raise BadRow(f"the last message before the answer must be of a user or a tool, not {last}")
    if any(_NOTICE in text for text in (*(m.get("content", "") for m in messages), *follow_ups)):
        raise BadRow(
            "a notice of SPEED-Bench in place of the question; NVIDIA's prepare_data.py "
            "(Model-Optimizer, examples/specdec_bench) writes a file with all questions"
        )
    return replace(record, messages=messages, follow_ups=follow_ups, kind=str(kind))
