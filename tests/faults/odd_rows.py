"""Odd corpus rows: good rows with a few random changes, as the bytes of a line or of an element."""

import copy
import json
from typing import Any

import numpy as np

DIGITS, DEEP = "@@digits@@", "@@deep@@"  # stand for texts that json.dumps cannot write

SCALARS: list[Any] = [
    *(None, True, False, 0, 5, -1, 1.5, 10**30, float("nan"), float("inf"), -0.0),
    *("", " ", "\x00", "a\x00b", "\ud800", "x\udfffy", "\U0001f642", "\ufeff", "é" * 50, "\x1b[2J"),
    *("assistant", "user", "system", "tool", "developer", "[]", "{}", "null", "5", '"q"'),
    *("{{ x }}", "<|im_end|>", "<|im_start|>assistant\n", "\n", "\r", "\u2028", "{% raw %}"),
    *("[" * 200, DIGITS, DEEP, "x" * 5000, 'x"\\]},[{ ' * 4000),
]
KEYS = [
    *("role", "content", "messages", "text", "input_ids", "loss_mask", "history", "system"),
    *("tools", "tool_calls", "function", "arguments", "weight", "reasoning_content"),
    *("chat_template_kwargs", "conversations", "from", "value", "prompt", "completion"),
    *("instruction", "output", "input", "turns", "image", "enable_thinking", "conversation"),
    *("tokenize", "\ud800", "", "k" * 3000, "\x1b[2J", "é", "type", "name", "documents", "padding"),
]


def good_row(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Return a row that every reader accepts, in a random format; `name` occurs in its text."""
    question, answer = f"{name} question", f"{name} answer é"
    pair = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows: list[dict[str, Any]] = [
        {"messages": pair},
        {"messages": [{"role": "system", "content": "s"}, *pair, *pair]},
        {"messages": json.dumps(pair), "id": 7},
        {
            "messages": [
                pair[0],
                {"role": "assistant", "tool_calls": [call]},
                pair[0] | {"role": "tool"},
                pair[1],
            ],
            "tools": [tool],
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": question}]}, pair[1]]},
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
        {"prompt": question, "completion": answer},
        {"prompt": [pair[0]], "completion": pair[1]},
        {"instruction": question, "input": "i", "output": answer, "history": [["a", "b"]]},
        {"text": answer},
        {"messages": pair, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [pair[0], pair[1] | {"reasoning_content": "r", "weight": 1}]},
    ]
    return copy.deepcopy(rows[int(rng.integers(len(rows)))])


def odd_value(rng: np.random.Generator) -> Any:
    """Return a value that does not belong where it is put."""
    value = copy.deepcopy(SCALARS[int(rng.integers(len(SCALARS)))])
    kind = int(rng.integers(8))
    if kind == 0:
        return [value]
    if kind == 1:
        return {KEYS[int(rng.integers(len(KEYS)))]: value}
    if kind == 2:
        for _ in range(int(rng.integers(1, 150))):
            value = [value] if rng.random() < 0.5 else {"k": value}
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside a value."""
    found, left = [], [value]
    while left:
        item = left.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in keys:
            found.append((item, key))
            if isinstance(item[key], (dict, list)):
                left.append(item[key])
    return found


def changed(rng: np.random.Generator, row: dict[str, Any]) -> Any:
    """Return a row after one to three random changes; any value may come out."""
    for _ in range(int(rng.integers(1, 4))):
        spots = places(row)
        if not spots:
            return odd_value(rng)
        inside, key = spots[int(rng.integers(len(spots)))]
        other, source = spots[int(rng.integers(len(spots)))]
        new_key = KEYS[int(rng.integers(len(KEYS)))] if isinstance(inside, dict) else key
        kind = int(rng.integers(6))
        if kind == 0:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            inside[new_key] = inside.pop(key)
        elif kind == 2:
            inside[key] = json.dumps(inside[key])
        elif kind == 3:
            inside[key] = copy.deepcopy(other[source])
        else:
            inside[new_key] = odd_value(rng)
    return row if rng.random() < 0.97 else odd_value(rng)


def as_json(rng: np.random.Generator, value: Any) -> bytes:
    """Return the JSON text of a value; half surrogate pairs may be bytes that are not UTF-8."""
    text = json.dumps(value, ensure_ascii=bool(rng.random() < 0.7))
    depth = int(rng.integers(90, 3000))
    text = text.replace(f'"{DIGITS}"', "7" * int(rng.integers(4000, 5000)))
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    if rng.random() < 0.05:
        text = text.replace('{"', '{"role": 5, "role": "user", "content": 6, "', 1)
    return text.encode("utf-8", "surrogatepass")


def odd_row(rng: np.random.Generator) -> bytes:
    """Return valid JSON of an odd row."""
    return as_json(rng, changed(rng, good_row(rng, "odd")))


def broken_bytes(rng: np.random.Generator, line: bytes) -> bytes:
    """Return a line with damaged bytes: cut, flipped, inserted, or in another encoding."""
    at, text = int(rng.integers(len(line) + 1)), line.decode("utf-8", "replace")
    damages = [
        line[:at],
        line[:at] + bytes([int(rng.integers(256))]) + line[at + 1 :],
        line[:at] + b"\x00" + line[at:],
        text.encode("utf-16", "replace"),
        text.encode("latin-1", "replace"),
        b"\xef\xbb\xbf" + line + b"\r",
        line[:at] + rng.bytes(int(rng.integers(1, 30))),
    ]
    return damages[int(rng.integers(len(damages)))]
