"""A page with every kind of part, and texts that try to become markup."""

from spec_data.pages.page import Axis, Chart, Note, Page, Section, Table, Viewer

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--\u2028\u2029\ud800"


def sample_viewer(text: str) -> Viewer:
    """Return a viewer of one response with `text` as a token of every kind."""
    kinds = ("context", "accepted", "target", "document", "sup", "wrong", "special")
    items = [{"words": [[f"{text} ", kind]], "about": [f"{kind} {text}"]} for kind in kinds]
    segment = {"title": f"turn {text}", "learned": True, "items": items}
    keys = [[kind, f"{kind} {text}"] for kind in kinds]
    documents = [
        {"number": n, "row": [[n, str(n)], [None, text]], "head": f"{n} {text}", "id": text}
        | {"segments": [segment]}
        for n in range(2)
    ]
    data = {"note": text, "noun": "answer", "item": "step", "keys": keys}
    data |= {"columns": [("answer", "count"), (text, "text")], "sorts": [[text, 0, 1]]}
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
    depths = Chart(
        title="Acceptance by depth",
        x=Axis(title="depth", format="count", least=1),
        y=Axis(title="share", format="share", least=0),
        series={"draft": [(1, 0.5), (2, float("nan")), (3, None)]},
    )
    table = Table(
        title=f"Columns {text}",
        columns=[("column", "text"), (f"bytes {text}", "bytes"), ("share", "share")],
        rows=[[f"hidden.L1 {text}", 1536, 0.25], ["hidden.final", 10**9, float("nan")]],
        note=text,
    )
    return Page(
        title=f"data {text}",
        kind="Dataset",
        lead=f"what it is {text}",
        figures=[(f"documents {text}", 1234, "count"), ("target", text, "text")],
        sections=[
            Section(title=f"Overview {text}", text=text, parts=[Note(text=text)]),
            Section(title="Charts", parts=[lines, depths, table, Note(text=text, warning=True)]),
            Section(title="Viewer", parts=[sample_viewer(text)]),
        ],
        footer=f"spec-data {text}",
    )
