"""A page with every kind of part, and texts that try to become markup."""

from spec_data.pages.page import Axis, Chart, Figures, Note, Page, Section, Table, Viewer

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--\u2028\u2029\ud800"


def sample_viewer(text: str) -> Viewer:
    """Return a viewer of one response with `text` as a token of every kind."""
    kinds = ("context", "accepted", "differs", "rejected", "unused", "target", "document", "sup")
    items = [{"words": [[f"{text} ", kind]], "about": [f"{kind} {text}"]} for kind in kinds]
    segment = {"title": f"turn {text}", "learned": True, "items": items}
    keys = [[kind, f"{kind} {text}"] for kind in kinds]
    modes = [["steps", "drafted", keys], ["steps all", "all", keys], ["supervised", "mask", keys]]
    documents = [{"head": f"{n} {text}", "id": text, "segments": [segment]} for n in range(2)]
    data = {"note": text, "noun": "response", "item": "step", "modes": modes}
    return Viewer(data=data | {"documents": documents})


def sample_page(text: str = "plain") -> Page:
    """Return the page; `text` is in every place that a text of the data can be in."""
    steps = [(float(i), 2.0 / (i + 1)) for i in range(40)]
    lines = Chart(
        title=f"Loss {text}",
        x=Axis(title=f"trained tokens {text}", format="count"),
        y=Axis(title="loss in nats"),
        series={f"first {text}": steps, "second": [(x, y + 0.2) for x, y in steps]},
    )
    bars = Chart(
        title="Documents by length",
        x=Axis(title="tokens"),
        y=Axis(title="documents", format="count", least=0),
        labels=["0–49", f"50–99 {text}"],
        series={"documents": [3, 4]},
    )
    table = Table(
        title=f"Columns {text}",
        columns=[("column", "text"), (f"bytes {text}", "bytes"), ("share", "share")],
        rows=[[f"hidden.L1 {text}", 1536, 0.25], ["hidden.final", 10**9, float("nan")]],
        note=text,
    )
    figures = Figures(items=[(f"documents {text}", 1234, "count"), ("target", text, "text")])
    return Page(
        title=f"data {text}",
        kind="Dataset",
        sections=[
            Section(title=f"Overview {text}", text=text, parts=[figures, Note(text=text)]),
            Section(title="Charts", parts=[lines, bars, table, Note(text=text, warning=True)]),
            Section(title="Viewer", parts=[sample_viewer(text)]),
        ],
        footer=f"spec-data {text}",
    )
