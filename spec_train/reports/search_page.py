"""The page of a search: every draft with its length, and how the lengths grew."""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_data import __version__
from spec_data.pages.page import Axis, Chart, Column, Note, Page, Part, Section, Table
from spec_data.terminal.progress import duration
from spec_train.training.search import Outcome

_COLUMNS: Sequence[Column] = (
    ("draft", "text"), ("steps", "count"), ("acceptance length", "number"), ("from", "number"),
    ("to (95 %)", "number"), ("", "text"), ("run", "text"),
)  # fmt: skip


def search_page(outcome: Outcome, rows: Sequence[Mapping[str, Any]]) -> Page:
    """Return the page of a search; `rows` are those of its result."""
    cells = []
    for row in rows:
        low, high = row["interval"] or (None, None)
        run = str(row["run"] or "")
        cells.append([row["name"], row["steps"], row["length"], low, high, row["state"], run])
    best = rows[0] if rows[0]["state"] == "best" else None
    equal = sum(row["state"] == "as good" for row in rows)
    lead = "No draft was measured yet."
    if best is not None:
        lead = (
            f"Of {len(rows)} drafts, {best['name']} is the best after {best['steps']:,} steps"
            + (f"; {equal} more cannot be told from it." if equal else ".")
        )
    lengths = {
        name: [(float(step), by[step].length) for step in sorted(by)]
        for name, by in outcome.lengths.items()
    }
    parts: list[Part] = [
        Table(
            title="Drafts",
            columns=_COLUMNS,
            rows=cells,
            best=0 if best is not None else None,
            note="Acceptance length on held-out documents, by simulated decoding. A dropped draft "
            "has the length of the step at which it was dropped.",
        ),
        *(Note(text=f"{name}: {why}", warning=True) for name, why in outcome.failed.items()),
    ]
    axes = Axis(title="steps", format="count", least=0.0), Axis(title="acceptance length")
    chart = Chart(title="Length over steps", x=axes[0], y=axes[1], series=lengths)
    return Page(
        title=outcome.directory.name,
        kind="Search",
        lead=lead,
        figures=[
            ("acceptance length", best["length"] if best else None, "number"),
            ("drafts", len(rows), "count"),
            ("time", duration(outcome.spent), "text"),
        ],
        sections=[Section(title="Result", parts=parts), Section(title="Curves", parts=[chart])],
        footer=f"spec-train {__version__}",
    )
