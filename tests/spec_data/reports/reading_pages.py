"""Read the data of a page again, token by token, without the code that wrote it."""

import base64
import re
import struct
from typing import Any


def part(data: dict[str, Any], section: str, kind: str, title: str = "") -> dict[str, Any]:
    """Return the only part of a section with this kind and title."""
    own = next(s for s in data["sections"] if s["title"] == section)
    found = [p for p in own["parts"] if p["kind"] == kind and p.get("title", "") == title]
    assert len(found) == 1, [(p["kind"], p.get("title")) for p in own["parts"]]
    return found[0]


def rows_of(data: dict[str, Any], text: str) -> list[int]:
    """Return numbers of rows of the table of texts, from base64."""
    raw, code = base64.b64decode(text), {2: "H", 4: "I"}[data["width"]]
    return list(struct.unpack(f"<{len(raw) // data['width']}{code}", raw))


def marked(spans: list[int], length: int) -> list[bool]:
    """Return which tokens runs [a, b, a, b, ...] mark."""
    pairs = list(zip(spans[::2], spans[1::2], strict=True))
    return [any(a <= t < b for a, b in pairs) for t in range(length)]


def whole_text(texts: list[str]) -> str:
    """Return the text of a document: that of its tokens without marks of bytes."""
    return re.sub("⟨[0-9A-F]{2}(?: [0-9A-F]{2})*⟩", "", "".join(texts))


def read_document(data: dict[str, Any], place: int) -> dict[str, Any]:
    """Return ids, texts, mask, and the teacher's figures (None where unknown) of a document."""
    own = data["documents"][place]
    rows = rows_of(data, own["t"])
    joined = own.get("join", {})
    found: dict[str, Any] = {
        "number": own["n"],
        "id": own["id"],
        "source": data["sources"][own["s"]],
        "turns": own["turns"],
        "ids": [data["tokens"][row] for row in rows],
        "texts": [joined.get(str(t), data["pieces"][row]) for t, row in enumerate(rows)],
        "mask": marked(own["m"], len(rows)),
    }
    if "k" not in own:
        return found
    known = marked(own["k"], len(rows))
    bits = base64.b64decode(own["a"])
    choices = [data["tokens"][row] for row in rows_of(data, own["c"])]
    for name in ("choice", "entropy", "nll"):
        found[name] = [None] * len(rows)
    count = wrong = 0
    for t in range(len(rows)):
        if not known[t]:
            continue
        right = bits[count // 8] >> (count % 8) & 1
        found["choice"][t] = found["ids"][t] if right else choices[wrong]
        wrong += not right
        found["entropy"][t] = own["e"][count] if "e" in own else None
        found["nll"][t] = own["l"][count] if "l" in own else None
        count += 1
    assert wrong == len(choices)
    return found
