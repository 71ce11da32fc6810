"""Turn one corpus row (a JSON object, a Parquet row) into one `Record`; no files are read here.

The format of a row is recognised by its columns, whose names and meanings are in `facts.toml`. The
first entry of `FORMATS` whose columns are present and not null wins, so a row with both `messages`
and a ready-made `text` is a conversation; then come the other names of the table. `parse_prompt`
reads the same rows as prompts, and rows that hold a question alone. A row that is not understood
raises `BadRow` with the reason. Nothing is guessed and nothing is dropped: an image part or an
unknown role makes the row bad, not shorter. What the table and the chat template do not know is in
`Record.unread`.

Rows are normalised, so that the same template call renders every source in the same way:
- ShareGPT speakers become OpenAI roles; content made of text parts is joined without a separator.
- Two strings (`prompt` and `completion`, Alpaca's columns, ...) become a user turn and an assistant
  turn, because a draft serves chats and not raw text.
- OpenAI tool calls have `arguments` as a JSON string; it is parsed, as vLLM and SGLang do before
  they apply the template, and kept for templates that write it; without any they are {}. Null
  fields of a message are left out, as `apply_chat_template` does, and an empty list of tool calls,
  which templates take for some. Calls under other names (`function_call`, a speaker of that name)
  become `tool_calls`.
- Columnar files often store nested columns as JSON text, which is parsed.
- Arrow gives every object the keys of all of them, with nulls: see `_without_nulls`.
- A flag under any name of the table that says "not learned" becomes `weight` 0.
- A `system` column is not used if the conversation has another system message. It is then in
  `Record.unused`, with the columns that no format uses; the reader names them per source.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.corpus.api_forms import CHANNELS, TO_ALL, by_channel, tool_in_api
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.facts import (
    IGNORED,
    PLAIN,
    ROLES,
    Layout,
    advice,
    columns,
    filled,
    keys,
    meaning_of,
)
from spec_data.corpus.images import PARTS, SOURCES, Picture, RowImages, marked
from spec_data.corpus.sampling_record import is_edited
from spec_data.corpus.token_rows import token_facts
from spec_data.shards.errors import an

FORMATS = (
    *("messages", "conversations", "prompt+completion", "prompt+response", "question+answer"),
    *("instruction", "input_ids", "text"),
)
_NEEDS = {name: tuple(name.split("+")) for name in FORMATS} | {
    "instruction": ("instruction", "output")
}
_CUT = (  # in any case: OpenAI, vLLM, SGLang, TGI; Anthropic, Gemini; Mistral; Responses; DeepSeek
    *("length", "max_tokens", "model_length", "max_output_tokens", "max_new_tokens", "incomplete"),
    *("abort", "aborted", "cancelled", "error", "content_filter", "insufficient_system_resource"),
    *("truncated", "timeout", "safety", "recitation", "blocklist", "prohibited_content", "spii"),
    "failed",
)
_ENDED = (
    *("stop", "stopped", "end_turn", "stop_sequence", "stop_token", "eos", "eos_token", "eot"),
    *("end_of_turn", "tool_calls", "tool_call", "tool_use", "function_call", "complete"),
    *("completed", "finished", "done", "end", "success", "null", "none", ""),
)

REASONING = keys("reasoning")
"""Names of the reasoning of a message, in the order in which `apply_chat_template` reads them."""

_SYSTEM = ("system", "developer")
_PARTS = (
    "several text parts of a message: joined without a separator, as templates that read parts do; "
    "for a template that takes a text, vLLM puts a newline between them"
)
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
    lengths: tuple[int, ...] = ()  # of the documents of a pack of `input_ids`; (): it is one
    pictures: dict[str, Picture] = field(default_factory=dict)  # images of messages, by digest
    rendered_with: list[Message] | None = None  # of `input_ids`: the system message; None: unknown
    learned: bool = True  # False: the row says that nothing of it is
    edited: bool = field(default=False, compare=False)  # after `regenerate` wrote its answers
    kind: str = field(default="", compare=False)  # the format of the row
    unused: tuple[str, ...] = field(default=(), compare=False)  # columns
    unread: tuple[str, ...] = field(default=(), compare=False)  # columns, "messages.KEY"
    notes: tuple[str, ...] = field(default=(), compare=False)  # facts that are not used as given
    nulls: tuple[str, ...] = field(default=(), compare=False)  # where nulls were left out
    absent: tuple[str, ...] = field(default=(), compare=False)  # columns of --columns


def recognise(row: Any) -> str | None:
    """Return the name of the row's format, or None if the row has no known set of columns."""
    if not isinstance(row, dict):
        return None
    known = (name for name in FORMATS if all(row.get(c) is not None for c in _NEEDS[name]))
    return next(known, None) or next((c for c in columns("messages") if filled(row.get(c))), None)


def parse_row(row: Any, *, source: str, where: str, layout: Layout = PLAIN) -> Record:
    """Return the record of one parsed row; `source` and `where` are those of `Record`.

    Raises:
        BadRow: the row has no known format, or is broken.
    """
    given = layout.absent(row)
    row = layout.renamed(row, ("answer",))
    record = _record(row, recognise(row) or _pair(row), FORMATS, source, where, layout)
    return replace(record, absent=tuple(given)) if given else record


def _pair(row: Any) -> str | None:
    """Return the format of a question and an answer under other names: "query+response".

    Raises:
        BadRow: there are several of one of them.
    """
    if not isinstance(row, dict):
        return None
    asked = [c for c in columns("question") if filled(row.get(c))]
    asked = [c for c in asked if c != "input"] or asked  # it belongs to the other one
    answers = [c for c in columns("answer") if filled(row.get(c))]
    answers = answers or [c for c in columns("calls") if filled(row.get(c))]
    if not asked:
        return "chosen" if row.get("chosen") else None
    compared = [c for c in columns("compared") if filled(row.get(c))]
    if not answers and compared:
        raise BadRow(
            f"{', '.join(compared)}: answers to compare, and none is said to be the chosen one; "
            f"choose a column: {advice({asked[0]: 'a', compared[0]: 'a'})}"
        )
    for kind, names in (("questions", asked), ("answers", answers)):
        if len(names) > 1 and answers:
            raise BadRow(
                f"{' and '.join(names)} may all be the {kind}; choose: "
                f"{advice({asked[0]: 'a', answers[0]: 'a'})}"
            )
    return f"{asked[0]}+{answers[0]}" if answers else None


def holds_answer(row: dict[str, Any]) -> bool:
    """Return whether a row is of a known format of more than a question."""
    try:
        return bool(recognise(row) or _pair(row))
    except BadRow:  # of several columns
        return False


def holds_text(names: Sequence[str]) -> bool:
    """Return whether columns of these names, if they are filled, are a known format."""
    row = dict.fromkeys(names, "a")
    try:
        return bool(recognise(row) or _pair(row) or "turns" in row)
    except BadRow:  # too many
        return True


@dataclass
class _Said:
    """What is to be said about a row beside its record."""

    layout: Layout
    images: RowImages
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    nulls: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def without_nulls(self, place: str, value: Any, kept: Any) -> Any:
        """Return `kept`, and note it if it has fewer nulls than `value`."""
        if kept != value and place not in self.nulls:
            self.nulls.append(place)
        return kept

    def skip(self, name: str) -> None:
        if name not in self.unread:
            self.unread.append(name)


def _record(
    row: Any, kind: str | None, formats: Sequence[str], source: str, where: str, layout: Layout
) -> Record:
    """Return the record of a row of the format `kind`; `formats` are named in errors."""
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with named columns, found {_kind(row)}")
    _check_text(list(row), "the name of a column")
    if kind is None:
        names = ", ".join(sorted(k for k, v in row.items() if v is not None)) or "none"
        raise BadRow(
            f"no known columns (found: {names}; known formats: {', '.join(formats)}); other names: "
            f"{advice(row)}"
        )
    said = _Said(layout, layout.images.of_row(where), nulls=list(getattr(row, "nulls", ())))
    _check_media(row, "the row", said)
    row = _with_lists(row, kind)
    facts: dict[str, Any]
    if kind == "text":
        facts = {"text": _text(row["text"], "text")}
        if not facts["text"].strip():
            raise BadRow("text is empty")
    elif kind == "input_ids":
        facts = token_facts(row) | _rendered_with(row, said)
    else:
        facts = _chat_facts(kind, row, said)
    for name, value in facts.items():
        if kind != "input_ids" and name != "pictures":
            _check_text(value, name)
    said.images.finish()  # of rows without messages
    facts["learned"] = _is_learned(kind, row, said)
    unused = _unused_columns(kind, row, facts, said)
    facts["edited"] = is_edited(row)
    return Record(
        source=source,
        where=where,
        kind=kind,
        unused=tuple(unused),
        unread=tuple(said.unread),
        notes=tuple(said.notes),
        nulls=tuple(said.nulls),
        **facts,
    )


def _chat_facts(kind: str, row: dict[str, Any], said: _Said) -> dict[str, Any]:
    """Return the fields of `Record` of a conversation."""
    tools = _as_servers_give(_tools(_first(row, "tools", said), "tools", said), said)
    messages, follow_ups = _conversation(kind, row, said, tools)
    messages = _with_images(messages, said)
    messages = _flagged(messages, row, said)
    messages = _joined_calls(messages)
    messages, tools = _tools_of_messages(messages, tools, said)
    messages = _with_finish(messages, row, said)
    system = _first(row, "system", said)
    name = next((c for c in columns("system") if filled(row.get(c))), "system")
    if system is not None:
        if messages[0]["role"] in _SYSTEM:
            if messages[0].get("content") != system:
                said.skip(name)
        elif name == "system" or isinstance(system, str):
            messages = [{"role": "system", "content": _text(system, name)}, *messages]
        else:
            said.skip(name)
    return {
        "messages": messages,
        "tools": tools,
        "template_kwargs": _template_kwargs(row.get("chat_template_kwargs"), said),
        "follow_ups": follow_ups,
        "pictures": said.images.pictures,
    }


def _rendered_with(row: dict[str, Any], said: _Said) -> dict[str, Any]:
    """Return the fields of `Record` of token ids that say how their prompt was rendered.

    They are known if the row has a column of a system message, which may be empty, of tools or of
    template kwargs.
    """
    names = [name for name in columns("system", "tools", "kwargs") if row.get(name) is not None]
    if not names:
        return {}
    system = _first(row, "system", said)
    content = "" if system is None else _text(system, "the system message")
    return {
        "rendered_with": [{"role": "system", "content": content}] if content else [],
        "tools": _tools(_first(row, "tools", said), "tools", said),
        "template_kwargs": _template_kwargs(row.get("chat_template_kwargs"), said),
    }


def _first(row: dict[str, Any], meaning: str, said: _Said) -> Any:
    """Return the first column of a meaning that holds anything; others are not read."""
    names = [c for c in columns(meaning) if filled(row.get(c))]
    for name in names[1:]:
        if row[name] != row[names[0]]:
            said.skip(name)
    return row[names[0]] if names else None


# -- what a row says beside its text ---------------------------------------------------------------

_OF_TOKENS = (
    *("labels", "token-mask", "prompt-mask", "prompt-length", "padding", "positions", "lengths"),
    *("bounds", "segments", "ids"),
)
_OF_CHATS = (
    *("messages", "question", "answer", "calls", "context", "compared", "turns", "history"),
)
_LISTS = ("learned", "masked", *(name for name in _OF_TOKENS if name != "prompt-length"))
_OF_SIDES = re.compile(
    r"(?i)prompt|quer|question|source|input|context|prefix|respon|complet|answer|assist|target|"
    r"suffix|start|split|sep_|_sep|bound"
)


_NUMBERS = re.compile(r"\s*(0|[1-9]\d{0,8}|\[(?:[-\d.,\se]|true|false|null)*\])\s*")


def _with_lists(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a row whose masks and numbers of tokens are lists, also where a file has JSON text."""
    of_tokens = kind == "input_ids"
    named = columns(*(_LISTS if of_tokens else ("learned", "masked", "finish")))
    if of_tokens and (wrong := next((n for n in named if isinstance(row.get(n), dict)), None)):
        raise BadRow(f"{wrong} is an object, not a list")
    lists: dict[str, Any] = {}
    for name, value in row.items() if of_tokens else ((n, row.get(n)) for n in named):
        if not isinstance(value, str):
            continue
        if name in named and value.lstrip().startswith("["):
            lists[name] = _from_json(value, name)
        elif of_tokens and _NUMBERS.fullmatch(value):  # any column may say what is learned
            with contextlib.suppress(ValueError):
                lists[name] = json.loads(value)
    if not lists:
        return row
    row = copy.copy(row)  # with what its reader says of it
    row.update(lists)
    return row


def _unused_columns(
    kind: str, row: dict[str, Any], facts: dict[str, Any], said: _Said
) -> list[str]:
    """Return the columns that say nothing here; add those that may matter to `said.unread`."""
    used = set(kind.split("+")) | {"output" if kind == "instruction" else kind}
    if kind.startswith("instruction"):
        used |= {"history", "input" if filled(row.get("input")) else "context"}
    if "+" in kind and "reasoning" in said.layout.columns:
        used.add("reasoning_content")
    contents = _contents(facts)
    unused = [c for c in said.unread if c in row]
    for name, value in row.items():
        if not filled(value) or name in used or name in unused:
            continue
        meaning = meaning_of(name)
        if meaning in IGNORED:
            _note_inside(name, value, facts, said)
        may_matter = kind == "input_ids" and _may_divide(name, value, facts)
        may_matter |= name in said.layout.variables  # of the template: it is no argument here
        may_matter |= meaning == "rejected" and _is_switch(value)  # of this answer, not another
        if meaning in IGNORED or (meaning in ("reasoning", "switch") and _is_switch(value)):
            unused.append(name)
            if may_matter:
                said.skip(name)
        elif meaning is None or not _understood(meaning, value, kind, contents):
            unused.append(name)
            said.skip(name)
    return unused


def _may_divide(name: str, value: Any, facts: dict[str, Any]) -> bool:
    """Return whether a number beside token ids may say where what is learned begins or ends."""
    inside = type(value) is int and 0 < value <= len(facts["input_ids"])
    return inside and bool(_OF_SIDES.search(name))


def _note_inside(name: str, value: Any, facts: dict[str, Any], said: _Said, depth: int = 6) -> None:
    """Name what an object that nothing reads, such as `metadata`, says of learning or prompts.

    It may be JSON text, and hold others, `depth` of them in one another.
    """
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = parse_json(value)
        except BadRow:  # another text
            return
    for item in value if isinstance(value, list) else [value]:
        for key, inner in item.items() if isinstance(item, dict) else ():
            if _says_something(meaning_of(key), inner, facts):
                said.skip(f"{name}.{key}")
            elif depth and isinstance(inner, (dict, list, str)):
                _note_inside(f"{name}.{key}", inner, facts, said, depth - 1)


def _says_something(meaning: str | None, value: Any, facts: dict[str, Any]) -> bool:
    """Return whether a value of this meaning changes what is learned, or a prompt."""
    flags = [_flag(flag) for flag in (value if isinstance(value, list) else [value])]
    if meaning in ("masked", "prompt-mask"):
        return any(flags)
    if meaning in ("learned", "token-mask", "desirable"):
        return 0 in flags
    if meaning == "system":
        return filled(value) and not _is_said(value, _contents(facts))
    if meaning == "tools":
        return filled(value) and not facts.get("tools")
    cut = meaning == "finish" and str(value).lower() in _CUT
    return cut or (meaning == "kwargs" and filled(value))


def _contents(facts: dict[str, Any]) -> list[str]:
    """Return the texts of the messages that were read."""
    return [m["content"] for m in facts.get("messages") or () if m.get("content")]


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("on", "off", "true", "false")


def _understood(meaning: str, value: Any, kind: str, contents: list[str]) -> bool:
    """Return whether a column was read, or says what is read already."""
    if meaning in ("learned", "masked", "desirable", "mask", "parts", "media"):
        if isinstance(value, dict) and meaning in ("learned", "masked"):
            return False
        return kind != "text" or not isinstance(value, list)  # elsewhere read, noted or refused
    if kind == "input_ids":
        return meaning not in _LISTS or isinstance(value, list)
    if kind == "text":
        return meaning == "question"
    if meaning in _OF_TOKENS:
        return meaning != "token-mask" and not isinstance(value, list)
    if meaning in _OF_CHATS:
        return _is_said(value, contents)
    return meaning not in ("reasoning", "switch") or _is_said(value, contents)


def _is_said(value: Any, contents: list[str]) -> bool:
    """Return whether the texts of a value are in the messages that were read."""
    if isinstance(value, list):
        return all(_is_said(part, contents) for part in value)
    if isinstance(value, dict):
        return any(_is_said(value.get(name), contents) for name in keys("content"))
    return isinstance(value, str) and any(value.strip() in text for text in contents)


def _is_learned(kind: str, row: dict[str, Any], said: _Said) -> bool:
    """Return False if a flag of the whole row says that nothing of it is learned."""
    learned = True
    for meaning in ("learned", "masked", "desirable"):
        for name in columns(meaning):
            value = row.get(name)
            if value is None or isinstance(value, (list, dict)):
                continue
            if meaning == "desirable" and not _is_wish(value, kind):
                if kind == "input_ids":
                    said.skip(name)
                continue
            flag = _flag(value)
            if isinstance(value, str) and re.fullmatch("0[01]+|[01]{4,}", value.strip()):
                raise BadRow(f"{name} is a text of flags ({_shown(value[:40])}); give a list")
            if flag is None:
                said.skip(name)
                continue
            if meaning != "masked" and flag not in (0, 1):
                said.note(f"{name} other than 0 and 1: every weight but 0 counts as 1")
            if meaning == "desirable" and not isinstance(value, bool) and not flag:
                said.note(f"{name} {value!r}: taken for an answer that is not wanted")
            learned &= not flag if meaning == "masked" else bool(flag)
    for name in columns("parts"):
        _check_parts(row.get(name), name)
    speaker = row.get("mask")
    if filled(speaker) and kind != "input_ids":
        role = ROLES.get(str(speaker).lower())
        if role not in ("user", "system", "tool"):
            raise BadRow(
                f"mask is {_shown(speaker)}: 1 can mean learned or masked; call it loss_mask or "
                "masked"
            )
    return learned


def _is_wish(value: Any, kind: str) -> bool:
    """Return whether a label says if an answer is wanted, and is no class of a classifier."""
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return True
    return kind not in ("text", "input_ids") and value in (0, 1, "0", "1")


def _flag(value: Any) -> float | None:
    """Return the number that a flag means, 0 is "no"; None: it is no flag."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, str):
        text = value.strip().lower()
        words = {"false": 0.0, "no": 0.0, "off": 0.0, "true": 1.0, "yes": 1.0, "on": 1.0}
        try:
            return words[text] if text in words else float(text)
        except ValueError:
            return None
    return None


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else _kind(value)


def _check_parts(value: Any, name: str) -> None:
    """Refuse parts of a message that are not learned: positions of characters are not kept."""
    if isinstance(value, list) and any(map(_is_off, value)):
        raise BadRow(f"{name} leaves out parts of a message; only whole messages can be left out")


def _is_off(part: Any) -> bool:
    """Return whether a part of a message says that it is not learned."""
    if not isinstance(part, dict):
        return False
    off = any(_flag(part.get(key)) == 0 for key in (*keys("learned"), *_LABELS))
    return off or any(_flag(part.get(key)) for key in keys("masked"))


def _flagged(messages: list[Message], row: dict[str, Any], said: _Said) -> list[Message]:
    """Return messages with the flags that stand beside them, one for each message or answer."""
    answers = [i for i, m in enumerate(messages) if m["role"] in _ANSWERS]
    for name in columns("learned", "masked"):
        flags = row.get(name)
        if not isinstance(flags, list):
            continue
        places = range(len(messages)) if len(flags) == len(messages) else answers
        if len(flags) != len(places):
            raise BadRow(
                f"{name} has {len(flags)} flags for {len(messages)} messages ({len(answers)} of "
                "answers)"
            )
        for place, flag in zip(places, flags, strict=True):
            if flag is None:
                continue
            number = _flag(flag)
            if number is None:
                raise BadRow(f"{name} holds {_shown(flag)}, not 0 or 1")
            off = bool(number) if meaning_of(name) == "masked" else not number
            _mark(messages, place, off, number, name, said)
    return messages


def _mark(
    messages: list[Message], at: int, off: bool, number: float, name: str, said: _Said
) -> None:
    """Give message `at` weight 0 if a flag turns it off, and note what is not kept."""
    if off:
        messages[at] = messages[at] | {"weight": 0}
    elif number not in (0, 1):
        said.note(f"{name} other than 0 and 1: every weight but 0 counts as 1")
    elif number == 1 and messages[at]["role"] not in _ANSWERS:
        said.note(f"{name} 1 at messages of other roles: only answers are learned")


# -- conversations ---------------------------------------------------------------------------------

_ANSWERS = ("assistant", "call")


def _conversation(
    kind: str, row: dict[str, Any], said: _Said, tools: list[Any] | None
) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages of a row, and the user messages after the first answer of `turns`."""
    if kind == "turns":
        turns = _from_json(row["turns"], "turns")
        if not isinstance(turns, list) or not turns:
            raise BadRow(f"turns is {_kind(turns)}, not a list of user messages")
        texts = [_text(turn, f"turns[{i}] (a user message)") for i, turn in enumerate(turns)]
        return [{"role": "user", "content": texts[0]}], tuple(texts[1:])
    if kind == "instruction":
        return _alpaca(row), ()
    if kind == "chosen":
        return _chosen(row["chosen"], [], said), ()
    if kind in columns("messages"):
        value = _from_json(row[kind], kind)
        messages = _messages(value, kind, said, tools)
        if filled(row.get("chosen")) and messages[-1]["role"] not in _ANSWERS:  # LLaMA-Factory
            messages = _chosen(row["chosen"], messages, said)
        return messages, ()
    question, _, answer = kind.partition("+")
    if question == "instruction":
        messages = _alpaca(row | {"output": ""})[:-1]
    else:
        messages = _side(row[question], question, "user", said)
    if answer == "chosen":
        messages = _chosen(row["chosen"], messages, said)
    elif answer in columns("calls"):
        try:
            messages = [*messages, _called(_from_json(row[answer], answer), answer, said)]
        except BadRow as error:
            raise BadRow(f"{error}; to choose another answer: {advice(row)}") from None
    elif answer:
        messages = [*messages, *_side(row[answer], answer, "assistant", said)]
    if answer and "reasoning" in said.layout.columns and filled(row.get("reasoning_content")):
        thought = _text(row["reasoning_content"], said.layout.columns["reasoning"])
        messages[-1] = {**messages[-1], "reasoning_content": thought}
    return messages, ()


_TRANSCRIPT = re.compile(r"(?is)\s*(human|user):.*\n\s*assistant:")
_SPEAKER = r"(assistant|response|gpt|ai)"
_FORMATTED = re.compile(
    rf"(?i)(^|\n)([#<|[ ]+{_SPEAKER}[\]|> ]*:?|{_SPEAKER} ?:)\s*$"  # "### Response", "Assistant:"
)


def _side(value: Any, column: str, role: str, said: _Said) -> list[Message]:
    """Return the messages of one side of prompt+completion: a string, a message or a list."""
    value = _messages_in(value)
    if isinstance(value, str):
        if role == "assistant" and _TRANSCRIPT.match(value):
            raise BadRow(
                f"{column} is a transcript with both speakers, such as those of HH-RLHF; split it "
                "into messages"
            )
        if role == "user" and (end := _FORMATTED.search(value)):
            said.note(
                f"{column} ends with {end[0].strip()!r}, as a prompt that is formatted already; "
                "the chat template takes all of it for what the user says"
            )
        return [{"role": role, "content": value}]
    return _messages([value] if isinstance(value, dict) else value, column, said)


def _messages_in(value: Any) -> Any:
    """Return the messages that a file holds as JSON text, or the value."""
    if not isinstance(value, str) or not re.match(r"\s*(\[\s*)?\{", value):
        return value
    try:
        parsed = parse_json(value)
    except BadRow:
        return value
    listed = parsed if isinstance(parsed, list) else [parsed]
    speak = (any(isinstance(m.get(n), str) and m[n] in ROLES for n in keys("role")) for m in listed)
    of_messages = all(isinstance(m, dict) for m in listed) and all(speak)
    return parsed if of_messages else value


def _chosen(value: Any, asked: list[Message], said: _Said) -> list[Message]:
    """Return the conversation of preference data, with the chosen answer.

    `chosen` is the answer, or the whole conversation; then the question beside it is part of it.
    """
    if isinstance(value, str) and not asked:
        raise BadRow(
            "chosen is a text without a question beside it, such as a transcript of HH-RLHF; split "
            "it into messages"
        )
    chosen = _side(value, "chosen", "assistant", said)
    if chosen[0]["role"] in _ANSWERS:
        if not asked:
            raise BadRow("chosen is an answer without a question beside it")
        return [*asked, *chosen]
    texts = [m.get("content") for m in chosen]
    if any(m.get("content") not in texts for m in asked):
        raise BadRow("chosen is a whole conversation, and the question beside it is not part of it")
    return chosen


def _alpaca(row: dict[str, Any]) -> list[Message]:
    instruction = _text(row["instruction"], "instruction")
    name = "input" if filled(row.get("input")) else "context"
    extra = _text("" if row.get(name) is None else row[name], name)
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


def _messages(
    value: Any, column: str, said: _Said, tools: list[Any] | None = None
) -> list[Message]:
    if not isinstance(value, list):
        raise BadRow(f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        raise BadRow(f"{column} is empty")
    padded = _is_padded(value, tools)
    named: Iterable[tuple[str, Any]]
    if said.layout.keys is None or "channel" in said.layout.keys:
        named = ((f"{column}[{i}]", message) for i, message in enumerate(value))
    else:
        named = by_channel(value, column)
    return [_message(message, name, said, padded) for name, message in named]


def _message(message: Any, name: str, said: _Said, padded: bool) -> Message:
    """Return one message in OpenAI form: `role`, `content`, then every other key unchanged.

    The role "call" is a tool call as text, which `_joined_calls` makes an answer. In a row that is
    `padded` nulls of arguments are no arguments.
    """
    if not isinstance(message, dict):
        raise BadRow(f"{name} is {_kind(message)}, not a message")
    speaker = next((message[n] for n in keys("role") if message.get(n) is not None), None)
    role = ROLES.get(speaker, ROLES.get(speaker.lower())) if isinstance(speaker, str) else None
    if role is None:
        given = (
            "" if speaker is not None else f" (its keys: {', '.join(map(str, message)) or 'none'})"
        )
        raise BadRow(f"{name} has the unknown role {speaker!r}{given}; known: {', '.join(ROLES)}")
    if speaker in ("system", "developer"):
        role = speaker
    _check_media(message, name, said, of_message=True)
    content = next((message[n] for n in keys("content") if message.get(n) is not None), None)
    result: Message = {"role": role}
    called = any(filled(message.get(n)) for n in keys("calls"))
    if role == "call":
        result |= _called(_from_json(content, name), name, said)
    elif isinstance(content, list):
        texts = [_part(part, name, said) for part in content]
        if sum(bool(text) and not marked(text) for text in texts) > 1:
            said.note(_PARTS)
        result["content"] = "".join(texts)
    elif content is not None:
        result["content"] = _text(content, f"the content of {name}")
    elif role == "assistant" and (called or any(message.get(n) for n in REASONING)):
        result["content"] = ""  # many templates fail without it, and print null as "None"
    else:
        raise BadRow(f"{name} ({role}) has no content (its keys: {', '.join(map(str, message))})")
    taken = (*keys("role"), *keys("content"))
    result.update({k: v for k, v in message.items() if k not in taken and v is not None})
    _note_keys(message, content, said)
    _check_thoughts(result, name, said)
    if isinstance(content, list) and any(map(_is_off, content)):
        if not all(map(_is_off, content)):
            _check_parts(content, f"the content of {name}")
        result["weight"] = 0
    _weigh(result, name, said)
    if calls := _from_json(result.pop("tool_calls", None), f"tool_calls of {name}"):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(f"tool_calls of {name} is not a list of objects")
        calls = [_tool_call(call, padded, said, name) for call in calls]
        result["tool_calls"] = [_call_in_api(call) for call in calls]
    legacy = result.get("function_call")
    if legacy and not _template_reads("function_call", said):
        legacy = _from_json(legacy, f"function_call of {name}")
        if not isinstance(legacy, dict):
            raise BadRow(f"function_call of {name} is {_kind(legacy)}, not a call")
        del result["function_call"]
        function = {k: v for k, v in legacy.items() if v is not None}
        function = _tool_call(function, padded, said, name)
        result.setdefault("tool_calls", [{"type": "function", "function": function}])
    return result


def _template_reads(key: str, said: _Said) -> bool:
    return said.layout.keys is not None and key in said.layout.keys


def _note_keys(message: dict[str, Any], content: Any, said: _Said) -> None:
    """Name the keys of a message that neither the table nor the template knows."""
    speaker = next(message[n] for n in keys("role") if message.get(n) is not None)
    for key, value in message.items():
        if not filled(value) or said.layout.keys is None or key in said.layout.keys:
            continue
        meaning = meaning_of(key, of_message=True)
        other = meaning == "content" and value != content
        if meaning == "role":
            other = ROLES.get(str(value).lower()) != ROLES.get(speaker.lower())
        other |= meaning == "recipient" and value not in TO_ALL  # the answer is a call of a tool
        other |= meaning == "channel" and value not in CHANNELS
        cut = key == "status" and str(value).lower() in _CUT  # of an answer, as Responses has it
        if meaning is None or other or (cut and ROLES.get(speaker.lower()) == "assistant"):
            said.skip(f"messages.{key}")
        elif meaning in IGNORED:
            _note_inside(f"messages.{key}", value, {}, said)


def _check_thoughts(result: Message, name: str, said: _Said) -> None:
    """Refuse reasoning that is no text, and name another one; a switch (true) is named and goes."""
    first = None
    for key in REASONING:
        value = result.get(key)
        if isinstance(value, (bool, int, float)):
            said.skip(f"messages.{key}")
            del result[key]
        elif filled(value):
            text = _text(value, f"{key} of {name}")
            first = text if first is None else first
            if text != first:
                said.skip(f"messages.{key}")


def _weigh(result: Message, name: str, said: _Said) -> None:
    """Give a message weight 0 if one of its flags says that it is not learned.

    Raises:
        BadRow: a flag is none, or may mean either.
    """
    for key in keys("parts"):
        _check_parts(result.get(key), f"{key} of {name}")
    if filled(result.get("mask")):
        raise BadRow(f"mask of {name} can mean learned or masked; call it loss_mask or masked")
    for meaning in ("learned", "masked"):
        for key in keys(meaning):
            if result.get(key) is None:
                continue
            number = _flag(result[key])
            if number is None:
                raise BadRow(f"{key} of {name} is {_shown(result[key])}, not 0 or 1")
            off = bool(number) if meaning == "masked" else not number
            if off:
                result["weight"] = 0
            elif number not in (0, 1):
                said.note(f"messages.{key} other than 0 and 1: every weight but 0 counts as 1")
            elif number == 1 and meaning == "learned" and result["role"] not in _ANSWERS:
                said.note(f"messages.{key} 1 at other roles: only answers are learned")
    if not isinstance(result.get("weight", 1), (int, float)):
        result["weight"] = 1  # a flag as text


def _check_media(table: dict[str, Any], name: str, said: _Said, of_message: bool = False) -> None:
    """Take the images beside the text of a row; refuse other media, and those of a message."""
    for column in columns("media"):
        if not table.get(column):
            continue
        if of_message or column not in ("image", "images"):
            raise BadRow(f"{name} has '{column}'; only text can be rendered")
        if said.layout.images.refused:
            raise BadRow(f"{name} has '{column}'; {said.layout.images.refused}")
    if not of_message:
        said.images.take(table)


_LABELS = ("label",)  # of a segment: axolotl
_OF_PART = ("type", "cache_control", "annotations", "citations", "index", "id", *_LABELS)


def _with_images(messages: list[Message], said: _Said) -> list[Message]:
    """Return messages in whose texts the images of the row have their marks."""
    result = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and message["role"] == "user":
            content = said.images.text(content, f"message {number}")
            message = message | {"content": content}
        elif isinstance(content, str) and marked(content):
            raise BadRow(f"message {number} is of the {message['role']} and has an image")
        result.append(message)
    said.images.finish()
    return result


def _part(part: Any, name: str, said: _Said) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRow(f"{name} holds a part that is {_kind(part)}; only text parts can be rendered")
    kind, texts = part.get("type"), [part[n] for n in keys("content") if part.get(n) is not None]
    if kind in PARTS and not said.layout.images.refused:
        link = part.get("image_url")
        others = [n for n in link if n != "url"] if isinstance(link, dict) else []
        unread = [n for n in part if n not in (*_OF_PART, *SOURCES) and filled(part[n])]
        if any(texts):  # an empty one says nothing
            raise BadRow(f"{name} holds a part with an image and a text; give each a part")
        for key in (*unread, *(f"image_url.{n}" for n in others)):
            said.skip(f"messages.content.{key}")
        return said.images.part(part, name)
    image = next((n for n in ("image", "image_url") if filled(part.get(n))), None)
    if image and kind not in PARTS:
        raise BadRow(f"{name} holds a part of type {kind!r} that has '{image}'")
    if kind not in (*_TEXT_PARTS, *([None] if texts else [])):
        raise BadRow(
            f"{name} holds a part of type {kind!r}; "
            + (said.layout.images.refused if kind in PARTS else "only text parts can be rendered")
        )
    if not texts:
        raise BadRow(f"{name} holds a text part without a text (its keys: {', '.join(part)})")
    if part.get("thought"):
        raise BadRow(f"{name} holds a part that is a thought; write it as reasoning_content")
    read = (*_OF_PART, *keys("content"), *keys("learned"), *keys("masked"))
    for key, value in part.items():
        if filled(value) and key not in read and value is not False:
            said.skip(f"messages.content.{key}")
    return _text(texts[0], f"a text part of {name}")


# -- tool calls ------------------------------------------------------------------------------------


_OF_CALL = ("id", "type", "index", "name", "arguments", "function")
_ARGUMENTS = ("parameters", "args", "input", "kwargs")  # other names of them
_NO_OBJECT = (
    "arguments of a tool call that are no JSON object: the chat template gets them as they stand"
)


def _tool_call(call: dict[str, Any], padded: bool, said: _Said, name: str) -> dict[str, Any]:
    for key in call:
        known = key in (*_OF_CALL, *_ARGUMENTS) or _template_reads(key, said)
        if filled(call[key]) and not known:
            said.skip(f"messages.tool_calls.{key}")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"], padded, said, name)}
    if not isinstance(call.get("name"), str):
        raise BadRow(f"a tool call of {name} has no name (its keys: {', '.join(map(str, call))})")
    other = next((n for n in _ARGUMENTS if filled(call.get(n))), None)
    if other and call.get("arguments") is None:
        call = {k: v for k, v in call.items() if k != other} | {"arguments": call[other]}
    elif other and call[other] != call["arguments"]:
        said.skip(f"messages.tool_calls.{other}")
    arguments = call.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        if padded and isinstance(arguments, dict):
            kept = said.without_nulls("arguments", arguments, _without_none(arguments))
            return {**call, "arguments": kept}
        if not isinstance(arguments, dict):
            said.note(_NO_OBJECT)
        return call
    text = (arguments or "").strip() or "{}"
    try:
        parsed = json.loads(text)
        check_depth(parsed, text)
    except (RecursionError, ValueError):
        parsed = text  # not JSON: some templates print the string unchanged
    if type(parsed) is dict:
        return {**call, "arguments": Arguments(parsed, text)}
    said.note(_NO_OBJECT)
    return call if parsed is text else {**call, "arguments": parsed}


def _call_in_api(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of the API, from a bare one: {"name": ..., "arguments": ...}."""
    if "function" in call:
        return call
    about = {k: v for k, v in call.items() if k in ("id", "index")}
    bare = {k: v for k, v in call.items() if k not in ("id", "index", "type")}
    return {**about, "type": "function", "function": bare}


def _called(value: Any, name: str, said: _Said) -> Message:
    """Return the answer that is one tool call, or several: {"name": ..., "arguments": ...}."""
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list) or not calls:
        raise BadRow(f"{name} is {_kind(value)}, not a tool call")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name} is no tool call with a name and arguments")
        result.append({"type": "function", "function": _tool_call(function, False, said, name)})
    return {"role": "call", "content": "", "tool_calls": result}


def _joined_calls(messages: list[Message]) -> list[Message]:
    """Return messages whose calls as text are answers: they go on with the answer before them."""
    result: list[Message] = []
    for message in messages:
        if message["role"] != "call":
            result.append(message)
            continue
        answer = message | {"role": "assistant"}
        if result and result[-1]["role"] == "assistant":
            before = result[-1]
            answer = {
                **before,
                "tool_calls": [*before.get("tool_calls", ()), *answer["tool_calls"]],
            }
            if not message.get("weight", 1):
                answer["weight"] = 0
            result.pop()
        result.append(answer)
    return result


def _tools_of_messages(
    messages: list[Message], tools: list[Any] | None, said: _Said
) -> tuple[list[Message], list[Any] | None]:
    """Take the tools out of the messages, unless the template reads them there."""
    result = []
    for message in messages:
        for key in keys("tools"):
            if not filled(message.get(key)) or _template_reads(key, said):
                continue
            own = _as_servers_give(_tools(message[key], f"{key} of a message", said), said)
            message = {k: v for k, v in message.items() if k != key}
            if own and tools is None:
                tools = own
            elif own and own != tools:
                said.skip(f"messages.{key}")
        result.append(message)
    return result, tools


def _as_servers_give(tools: list[Any] | None, said: _Said) -> list[Any] | None:
    """Return tools in the form in which servers hand them to the template, also of bare functions.

    A request of the API has no other form, so a bare one would make prompts that serving never has.
    """
    if tools is None:
        return None
    given = []
    for tool in tools:
        in_api, notes = tool_in_api(tool)
        given.append(in_api)
        for note in notes:
            said.note(note)
    return given


def _with_finish(messages: list[Message], row: dict[str, Any], said: _Said) -> list[Message]:
    """Return messages whose answers that a limit or an error cut have the finish reason "length".

    Beside the messages, logs of APIs have the reason of the last answer, or a list of reasons.
    """
    reasons = [_finish(message, "messages.", said) for message in messages]
    for place, reason in _finish_beside(messages, row, said):
        own = reasons[place]
        if own and (own in _CUT) != (reason in _CUT):
            said.note("finish reasons of one answer that differ: the answer counts as cut")
        if not own or reason in _CUT:
            reasons[place] = reason
    for reason in reasons:
        if reason not in _CUT and reason not in _ENDED and not reason.isdigit():
            said.note(f"finish_reason {reason[:40]!r} is not known: the answer counts as whole")
    return [
        m | {"finish_reason": "length"} if m["role"] == "assistant" and reason in _CUT else m
        for m, reason in zip(messages, reasons, strict=True)
    ]


def _finish_beside(
    messages: list[Message], row: dict[str, Any], said: _Said
) -> Iterator[tuple[int, str]]:
    """Yield the places of answers whose reasons stand beside the messages, and these reasons."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for name in columns("finish"):
        values = row.get(name)
        if not isinstance(values, list):
            continue
        places = range(len(messages)) if len(values) == len(messages) else answers
        known = all(value is None or type(value) in (str, int) for value in values)
        if len(values) != len(places) or not known:
            said.skip(name)
            continue
        yield from ((i, str(v).lower()) for i, v in zip(places, values, strict=True) if v)
    rest = {name: value for name, value in row.items() if not isinstance(value, list)}
    if answers and (reason := _finish(rest, "", said)):
        yield answers[-1], reason


def _finish(table: dict[str, Any], place: str, said: _Said) -> str:
    """Return the reason of a message or row; name one that is neither a text nor a number."""
    for name in keys("finish"):
        if isinstance(table.get(name), (list, dict, bool)) and filled(table[name]):
            said.skip(f"{place}{name}")
    number = table.get("finish_reason")  # the number of a stop_reason is the token that vLLM saw
    if type(number) is int:
        said.note(f"finish_reason {number} is a number: the answer counts as whole")
    reasons = (table[n].lower() for n in keys("finish") if isinstance(table.get(n), str))
    return next(reasons, "")


def _tools(value: Any, name: str, said: _Said) -> list[Any] | None:
    as_text = isinstance(value, str)
    value = _from_json(value, name)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"{name} is not a list of tool descriptions")
    if as_text:
        return value
    return said.without_nulls("tools", value, [_without_nulls(tool) for tool in value])


def _template_kwargs(value: Any, said: _Said) -> dict[str, Any]:
    value = _from_json(value, "chat_template_kwargs")
    if value and not isinstance(value, dict):
        raise BadRow(f"chat_template_kwargs is {_kind(value)}, not a table")
    return said.without_nulls("chat_template_kwargs", value or {}, _without_none(value or {}))


# -- nulls -----------------------------------------------------------------------------------------
# Arrow stores a column of objects with the keys of all of them, so that `to_json` of `datasets`
# writes nulls that no row had, and Parquet has them too. In a schema null means something under
# three keys only. JSON text has its own nulls: nothing here touches it. Rows are counted in which a
# null was left out that may have been meant: of tools, arguments and template kwargs. A key of a
# message that is null is none.

REAL_NULLS = ("default", "const", "enum")
"""Keys of a JSON schema under which null is a value."""
_OF_NAMES = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_VALUES = (*REAL_NULLS, "examples")


def _without_nulls(value: Any, names: bool = False) -> Any:
    """Return a tool description without the nulls that Arrow adds to it.

    The keys of `names` are names of properties, not of a schema. A null of `REAL_NULLS` stays if
    it is the only kind of null in its object.
    """
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if not isinstance(value, dict):
        return value
    drop = names or any(v is None and k not in REAL_NULLS for k, v in value.items())
    return {
        k: v if k in _VALUES and not names else _without_nulls(v, k in _OF_NAMES and not names)
        for k, v in value.items()
        if v is not None or not drop
    }


def _without_none(value: Any) -> Any:
    """Return a value without the nulls of its tables; those of lists stay."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _is_padded(messages: list[Any], tools: list[Any] | None) -> bool:
    """Return whether Arrow has added keys to the messages of a row.

    Nobody else gives tool calls to a question, or an argument to a function that has none of it.
    """
    calls = keys("calls")
    for message in (m for m in messages if isinstance(m, dict)):
        if message.get("role") != "assistant" and any(message.get(k, 0) is None for k in calls):
            return True
        listed = message.get("tool_calls")
        for call in listed if isinstance(listed, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict) and isinstance(function, dict):
                nulls = {k for k, v in arguments.items() if v is None}
                if nulls and nulls - _parameters(function.get("name"), tools, nulls):
                    return True
    return False


def _parameters(name: Any, tools: list[Any] | None, otherwise: set[str]) -> set[str]:
    """Return the names of the parameters of a function, `otherwise` if they are not known."""
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if function.get("name") == name and isinstance(properties, dict):
            return set(properties)
    return otherwise


# -- values ----------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; bytes must be UTF-8. What Python cannot read is a BadRow."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error}") from None
    except (RecursionError, ValueError) as error:
        raise BadRow(f"not valid JSON: {error}") from None
    check_depth(value, text)
    return value


_DEEPEST = 200


def check_depth(value: Any, text: str, start: int = 0, end: int | None = None) -> None:
    """Refuse a value that is nested deeper than 200, as `text[start:end]` has written it.

    What is deeper, Python walks or not by the calls that a process is inside of already.
    """
    if text.count("[", start, end) + text.count("{", start, end) <= _DEEPEST:
        return
    level = [value]
    for _ in range(_DEEPEST):
        parts = [part for part in level if isinstance(part, (list, dict))]
        level = [v for part in parts for v in (part.values() if isinstance(part, dict) else part)]
    if any(isinstance(value, (list, dict)) for value in level):
        raise BadRow(f"nested more than {_DEEPEST} deep")


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


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {_kind(value)}, not text")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return "null" if value is None else names.get(type(value), an(type(value).__name__))


# -- prompts ---------------------------------------------------------------------------------------

_NOTICE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""SPEED-Bench on the Hub has it in place of questions that it may not redistribute."""

PROMPT_FORMATS = (
    *("messages", "conversations", "turns", "prompt", "question", "instruction", "input_ids"),
    "text",
)
_PROMPTS = dict.fromkeys((*PROMPT_FORMATS, *columns("messages"), *columns("question"), "chosen"))


_ANSWERED = ("answer", "calls", "compared")
"""Meanings of columns that prompts leave out on purpose."""
CATEGORY = "category"
"""The column of a prompt with its part of the set, which readers of prompts may read."""


def parse_prompt(row: Any, *, source: str, where: str, layout: Layout = PLAIN) -> Record:
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
    kind, given, row = None, layout.absent(row, "answer"), layout.renamed(row)
    if isinstance(row, dict):
        kind = next((name for name in _PROMPTS if row.get(name) is not None), None)
    record = _record(row, kind, PROMPT_FORMATS, source, where, layout)
    if record.lengths:
        raise BadRow("several documents packed into input_ids; a prompt is one")
    unread = (n for n in record.unread if meaning_of(n) not in _ANSWERED and n != CATEGORY)
    record = replace(record, unread=tuple(unread), absent=tuple(given))
    if record.input_ids is not None:
        mask = record.loss_mask or []
        end = mask.index(1) if 1 in mask else 0
        return replace(record, input_ids=record.input_ids[: end or None], loss_mask=None)
    if record.messages is None:
        return record
    messages, follow_ups = record.messages, record.follow_ups
    if kind in columns("messages"):
        if all(m["role"] == "user" for m in messages):  # turns without answers between them
            follow_ups = tuple(m["content"] for m in messages[1:])
            messages = messages[:1]
    elif kind in columns("question") and kind != "instruction":
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
