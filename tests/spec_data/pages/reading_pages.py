"""Read a page again, token by token, without the code that wrote it."""

from typing import Any

from spec_data.pages.page import Page


def part(page: Page, section: str, kind: str, title: str = "") -> dict[str, Any]:
    """Return the fields of the only part of a section with this kind and title."""
    own = next(s for s in page.sections if s.title == section)
    found = [p for p in own.parts if p.kind == kind and getattr(p, "title", "") == title]
    assert len(found) == 1, [(p.kind, getattr(p, "title", "")) for p in own.parts]
    return vars(found[0])


def marked(spans: list[int], length: int) -> list[bool]:
    """Return which tokens runs [a, b, a, b, ...] mark."""
    pairs = list(zip(spans[::2], spans[1::2], strict=True))
    return [any(a <= t < b for a, b in pairs) for t in range(length)]


def read_document(data: dict[str, Any], place: int) -> dict[str, Any]:
    """Return ids, texts, mask, and the target's choices (None where unknown) of a document."""
    own = data["documents"][place]
    rows = own["t"]
    found: dict[str, Any] = {
        "head": own["head"],
        "id": own["id"],
        "turns": own["turns"],
        "ids": [data["tokens"][row] for row in rows],
        "texts": [data["texts"][row] for row in rows],
        "mask": marked(own["m"], len(rows)),
    }
    if "known" in own:
        known = marked(own["known"], len(rows))
        wrong = dict(zip(own["wrong"][::2], own["wrong"][1::2], strict=True))
        ids = [data["tokens"][wrong.get(t, row)] for t, row in enumerate(rows)]
        found["choice"] = [ids[t] if known[t] else None for t in range(len(rows))]
    return found
