"""A page with every kind of part, and texts that try to become markup."""

from spec_data.pages.page_parts import (
    Axis,
    Bars,
    Figures,
    Lines,
    Note,
    Page,
    Section,
    Table,
    Viewer,
)

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--\u2028\u2029\ud800"
VIEWER_SCRIPT = """
page.viewers.sample = function (box, data, tools) {
  box.append(tools.make("p", { class: "sample" }, data.text));
};
"""


def sample_page(text: str = "plain") -> Page:
    """Return the page; `text` is in every place that a text of the data can be in."""
    steps = [(float(i), 2.0 / (i + 1)) for i in range(40)]
    lines = Lines(
        title=f"Loss {text}",
        x=Axis(title=f"trained tokens {text}", format="count"),
        y=Axis(title="loss in nats"),
        series={f"first {text}": steps, "second": [(x, y + 0.2) for x, y in steps]},
    )
    bars = Bars(
        title="Documents by length",
        x=Axis(title="tokens", format="text"),
        y=Axis(title="documents", format="count", least=0),
        labels=["0–49", f"50–99 {text}"],
        series={"documents": [3, 4]},
        dense=True,
    )
    table = Table(
        title=f"Columns {text}",
        columns=[("column", "text"), (f"bytes {text}", "bytes"), ("share", "share")],
        rows=[[f"hidden.L1 {text}", 1536, 0.25], ["hidden.final", 10**9, float("nan")]],
        note=text,
    )
    figures = Figures(items=[(f"documents {text}", 1234, "count"), ("target", text, "text")])
    viewer = Viewer(name="sample", data={"text": text}, script=VIEWER_SCRIPT)
    return Page(
        title=f"data {text}",
        kind="Dataset",
        sections=[
            Section(title=f"Overview {text}", text=text, parts=[figures, Note(text=text)]),
            Section(title="Charts", parts=[lines, bars, table, Note(text=text, warning=True)]),
            Section(title="Viewer", parts=[viewer]),
        ],
        footer=f"spec-data {text}",
    )
