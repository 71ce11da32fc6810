"""What is sent to an OpenAI-compatible server for one answer, and what is read from its body."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.json_values import parse_json
from spec_data.corpus.records import REASONING, parse_row
from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import Answer, Conversation, Message
from spec_data.regeneration.local_target import EMPTY

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
_ENDED = ("stop", "length", "tool_calls", "function_call")
_MOST_TOKENS = 1 << 31  # of one answer or prompt that a server can mean


class MalformedBody(ValueError):
    """The body of a response is not an answer; another try may have one."""


class RefusedAnswer(ValueError):
    """The server does not answer this conversation, however often it is asked."""


def request_of(
    conversation: Conversation, answers: Sequence[Answer], config: RegenerateConfig
) -> dict[str, Any]:
    """Return the arguments of a chat completion for the turn after `answers`, without the model.

    Options that not every server knows (top_k, chat_template_kwargs) are sent only where set.
    """
    turn = len(answers)
    extra: dict[str, Any] = {}
    if config.top_k is not None:
        extra["top_k"] = config.top_k or -1  # vLLM and SGLang: -1 is all of them
    kwargs = config.template_kwargs | conversation.record.template_kwargs
    if kwargs:
        extra["chat_template_kwargs"] = kwargs
    request: dict[str, Any] = {
        "messages": [_sent(m) for m in conversation.before(answers)],
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_new_tokens,
        "seed": _seed(config.seed, conversation, turn),
    }
    if conversation.record.tools:
        request["tools"] = conversation.record.tools
    return request | ({"extra_body": extra} if extra else {})


def _seed(seed: int, conversation: Conversation, turn: int) -> int:
    """Return the seed of a turn: the same one whenever it is asked for."""
    digest = hashlib.sha256(f"{seed} {conversation.id} {turn}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _sent(message: Message) -> Message:
    """Return a message as servers take it: known keys, and arguments of calls as JSON text."""
    found = {name: message[name] for name in _SENT if name in message}
    found.setdefault("content", "")
    if found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return dict(call)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        function = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", **call, "function": function}


def read_answer(body: bytes) -> Answer:
    """Return the answer in the body of a chat completion.

    Whatever a server sends ends here: an answer is what a row of a corpus may hold, as JSON.

    Raises:
        MalformedBody: the body is not JSON, or not the completion of an answer.
        RefusedAnswer: the server stopped the answer, such as its content filter.
    """
    try:
        found = parse_json(body)
    except BadRow:
        raise MalformedBody(f"no JSON: {_start(body)}") from None
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedBody(f"no choices: {_start(body)}")
    message, finish = choices[0].get("message"), choices[0].get("finish_reason")
    if finish == "content_filter":
        raise RefusedAnswer("the server's content filter stopped the answer")
    if not isinstance(message, dict) or finish not in _ENDED:
        raise MalformedBody(f"no message, or no known finish reason: {_start(body)}")
    own = _message(message)
    usage = found.get("usage")
    return Answer(
        message=own,
        finish=finish,
        tokens=_count(usage, "completion_tokens"),
        prompt_tokens=_count(usage, "prompt_tokens"),
        notes=() if any(_holds(value) for value in own.values()) else (EMPTY,),
    )


def _holds(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _message(message: Mapping[str, Any]) -> Message:
    """Return what a corpus row holds of a message of a server."""
    own: Message = {"content": message.get("content") or ""}
    own |= {n: message[n] for n in (*REASONING, "tool_calls") if message.get(n)}
    if not all(isinstance(value, str) for name, value in own.items() if name != "tool_calls"):
        raise MalformedBody("its content is no text")
    asked, answered = {"role": "user", "content": ""}, {"role": "assistant", **own}
    try:
        parse_row({"messages": [asked, answered]}, source="", where="")
        json.dumps(own, allow_nan=False)
    except ValueError as error:  # a BadRow, or NaN
        raise MalformedBody(f"its message is no row of a corpus: {error}") from None
    return own


def _count(usage: Any, name: str) -> int:
    """Return a number of tokens; 0 if the server does not tell."""
    found = usage.get(name) if isinstance(usage, dict) else None
    if found is None:
        return 0
    if not isinstance(found, (int, float)) or not 0 <= found < _MOST_TOKENS:
        raise MalformedBody(f"its {name} is no number of tokens")
    return int(found)


def _start(body: bytes) -> str:
    text = body[:80].decode("utf-8", "replace")
    return repr(text + ("..." if len(body) > 80 else ""))
