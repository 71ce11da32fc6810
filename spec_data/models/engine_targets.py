"""Which targets an engine's release can serve with which draft: one dated table.

`scripts/engine_targets.py` reads it from the engines' own released packages. A draft reads hidden
states of its target, and an engine hands them over in some of its model classes only. A target that
the table does not name is unknown to that release, which is never a yes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spec_data.models.families import TARGETS

PATH = Path(__file__).with_suffix(".json")
_LAYERS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("eagle3", "peagle", "dspark", "dflash"), ("aux",)
)
_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": _LAYERS | {"eagle": ()},
    "vllm-cpu": _LAYERS | {"eagle": ()},
    "sglang": {
        "eagle": ("head",),
        "eagle3": ("aux", "head"),
        "dspark": ("dspark",),
        "dflash": ("dflash",),
    },
    "llama.cpp": {draft: ("aux",) for draft in ("eagle3", "dspark", "dflash")},
}
"""What an engine's class of a target must have, by kind of draft: names of lists in the table."""
_VLLM = "its class has no EAGLE-3 interface, and the server stops at its start"
_BLOCK = "its class has no set_dflash_layers_to_capture, and the server stops at its start"
_LACKS = {
    ("vllm", "aux"): _VLLM,
    ("vllm-cpu", "aux"): _VLLM,
    ("sglang", "aux"): "its class has no set_eagle3_layers_to_capture, and the server stops at "
    "its start",
    ("sglang", "head"): "its class has no get_embed_and_head, which such a draft takes its "
    "embedding from",
    ("sglang", "dspark"): _BLOCK,
    ("sglang", "dflash"): _BLOCK,
    ("llama.cpp", "aux"): "its graph does not keep the inputs of layers, and the process aborts",
}
_HEADER = "| target | architectures | "
COLUMNS = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
"""The engines of docs/targets.md."""


_UNKNOWN = "its release has no model class of that name"


@dataclass(frozen=True)
class Served:
    """Whether an engine can serve a target with a draft; None: unknown.

    `name` is the architecture that counts, and `reason` why the answer is not yes.
    """

    answer: bool | None
    name: str = ""
    reason: str = ""

    def text(self, drafts: Sequence[str]) -> str:
        """Say it of some kinds of drafts; nothing if the engine serves them."""
        if self.answer:
            return ""
        if not self.name:
            return (
                "the target's architecture is unknown, so it was not checked that this release "
                "serves it; pass --target DIR"
            )
        start = "cannot serve" if self.answer is False else "it is unknown whether it serves"
        return f"{start} {self.name} with {', '.join(drafts)} drafts: {self.reason}"


@cache
def _table() -> dict[str, Any]:
    found = json.loads(PATH.read_text(encoding="utf-8"))
    for lists in found["engines"].values():
        for name in lists.keys() - {"release", "package"}:
            lists[name] = frozenset(lists[name].split())
    return found


def read_on() -> str:
    """Return the day on which the table was read, as YYYY-MM-DD."""
    return str(_table()["read"])


def release(engine: str) -> str:
    """Return the release of an engine that the table is about, for example "vLLM 0.33.0"."""
    return str(_table()["engines"][engine]["release"])


def served(engine: str, draft: str, architectures: Sequence[str]) -> Served:
    """Return whether an engine's class of a target has what a kind of draft needs.

    An engine or a kind of draft that is not in the table needs nothing of the target's class.
    Of several names, the first one that the engine knows counts, as in the engines.
    """
    if draft not in _NEEDS.get(engine, {}):
        return Served(True)
    lists = _table()["engines"][engine]
    name = next((name for name in architectures if name in lists["known"]), None)
    if name is None:
        return Served(None, ", ".join(architectures), _UNKNOWN)
    lacks = [need for need in _NEEDS[engine][draft] if name not in lists[need]]
    return Served(False, name, _LACKS[engine, lacks[0]]) if lacks else Served(True, name)


def engine_warnings(drafts: Sequence[str], architectures: Sequence[str]) -> list[str]:
    """Return a line per release that cannot or may not serve a target with some of the drafts."""
    lines = []
    for engine in COLUMNS:
        found = {draft: served(engine, draft, architectures) for draft in drafts}
        for answer in dict.fromkeys(found.values()):
            if text := answer.text([draft for draft in drafts if found[draft] == answer]):
                lines.append(f"{release(engine)}: {text}")
    return lines


def page_with_columns(page: str) -> str:
    """Return docs/targets.md with the table's columns of engines, and the releases, as they are."""
    lines, width = page.splitlines(), 0
    for i, line in enumerate(lines):
        if line.startswith(_HEADER):
            cells = line.split(" | ")
            width = len(COLUMNS) if cells[-2] == [*COLUMNS.values()][-1] else 0
            lines[i] = _with(line, [*COLUMNS.values()], width)
        elif i and lines[i - 1].startswith(_HEADER):
            lines[i] = _with(line, ["---"] * len(COLUMNS), width)
        elif (names := re.findall(r"`(\w+)`", line.split(" | ")[1] if " | " in line else "")) and (
            set(names) <= TARGETS.keys()
        ):
            lines[i] = _with(line, [_cell(engine, names) for engine in COLUMNS], width)
        elif line.startswith("Read on "):
            lines[i] = (
                f"Read on {read_on()} from the packages of "
                + ", ".join(map(release, COLUMNS))
                + "."
            )
    return "\n".join(lines) + "\n"


def _with(line: str, cells: list[str], width: int) -> str:
    """Return a row of the table with the engines' cells before the last one."""
    old = line.strip().strip("|").split("|")
    *rest, test = [cell.strip() for cell in old]
    rest = rest[: len(rest) - width]
    return "| " + " | ".join([*rest, *cells, test]) + " |"


def _cell(engine: str, names: list[str]) -> str:
    """Return the drafts of an engine for the architectures of a row: "all", "none", "?" or some."""
    found = {
        draft: {served(engine, draft, [name]).answer for name in names} for draft in _NEEDS[engine]
    }
    if any(None in answers for answers in found.values()):
        return "?"
    yes = [draft for draft, answers in found.items() if answers == {True}]
    return "all" if len(yes) == len(found) else ", ".join(yes) or "none"
