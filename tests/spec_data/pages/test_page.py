"""Pages as bytes: safe embedding, the policy, figures that can be read back, the palette."""

import base64
import csv
import hashlib
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import spec_data.pages
from spec_data.pages.page import (
    Axis,
    Chart,
    Page,
    Section,
    Table,
    notebook_html,
    page_bytes,
    shown,
    write_page,
)
from spec_data.shards.errors import ConfigError
from tests.spec_data.pages.samples import ATTACK, sample_page

ROOM = Path(spec_data.pages.__file__).parent


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.texts.append((self.tags[-1], data))


def test_texts_never_become_markup():
    quiet, loud = (page_bytes(sample_page(text)).decode() for text in ("plain", ATTACK))
    assert [t for t, _ in Elements(quiet).tags] == [t for t, _ in Elements(loud).tags]
    assert "onerror" in loud and "<img" not in loud
    (data,) = (text for (_, own), text in Elements(loud).texts if own.get("id") == "data")
    found = json.loads(data)
    assert found["note"] == ATTACK and "NaN" not in data and "nan" not in loud
    assert data.isascii() and not re.search("[<>&]", data)


def test_values_are_shown_by_their_format():
    for value, form, text in (
        (1234567, "count", "1,234,567"),
        (0.25, "share", "25.0\u00a0%"),
        (1536, "bytes", "1.54 kB"),
        (10**9, "bytes", "1.00 GB"),
        (0.000123456, "number", "0.0001235"),
        (3.14159, "number", "3.142"),
        (31415.9, "number", "31,416"),
        (12, "number", "12"),
        (None, "number", "\u2013"),
        (float("nan"), "share", "\u2013"),
        ("text", "count", "text"),
    ):
        assert shown(value, form) == text, (value, form)


def test_numbers_of_a_column_have_equal_digits():
    columns = [("", "text"), ("", "number"), ("", "number"), ("", "share")]
    rows = [("a", 4, 3, 0.5), ("b", 65.28, 12, None), ("c", None, 5, 1), ("d", 1.678, None, 0)]
    texts = list(zip(*Table(title="", columns=columns, rows=rows).texts(), strict=True))
    assert texts[1] == ("4.00", "65.28", "\u2013", "1.68")
    assert texts[2] == ("3", "12", "5", "\u2013") and texts[3][0] == "50.0\u00a0%"
    for values in ([1e-5, 3e-4], [1e-5, 123456.7], [0.0, 0.25], [float("nan"), -1.5]):
        table = Table(title="", columns=[("", "number")], rows=[[x] for x in values])
        shown_ = [text.replace(",", "") for (text,) in table.texts() if text != "\u2013"]
        assert len({len(text.partition(".")[2]) for text in shown_}) == 1
        largest = max((x for x in values if x == x), key=abs)
        assert float(max(shown_, key=lambda t: abs(float(t)))) == pytest.approx(largest, rel=6e-4)
    assert Table(title="", columns=columns, rows=[]).texts() == []


def test_the_policy_names_every_script_and_style_and_nothing_else():
    found = Elements(page_bytes(sample_page()).decode())
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = {"script": [], "style": []}
    for (tag, attributes), text in found.texts:
        if attributes.get("type") != "application/json":
            digest = hashlib.sha256(text.encode()).digest()
            hashes[tag].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    assert rules["script-src"].split() == hashes["script"] and len(hashes["script"]) == 1
    assert rules["style-src"].split() == hashes["style"] and len(hashes["style"]) == 1
    assert not any({"src", "style"} & set(a) for _, a in found.tags)
    links = [(tag, a["href"]) for tag, a in found.tags if "href" in a]
    assert all(tag == "a" and to.startswith("data:text/csv;charset") for tag, to in links)


def test_equal_pages_have_equal_bytes_and_only_a_viewer_needs_a_script():
    assert page_bytes(sample_page()) == page_bytes(sample_page())
    table = Table(title="t", columns=[("a", "text")], rows=[["b"], ["c"]], best=1)
    sections = [Section(title="s", parts=[table])]
    small = page_bytes(Page(title="t", kind="k", lead="l", figures=[], sections=sections)).decode()
    assert "<script" not in small and "script-src &#39;none&#39;" in small and len(small) < 20_000
    (row,) = re.findall(r'<tr class="best">(.*?)</tr>', small, re.DOTALL)
    assert "c" in row and "b" not in re.sub(r"<[^>]*>", "", row)


def test_a_notebook_shows_tables_and_curves_without_scripts_and_nothing_else_changes():
    whole, part = page_bytes(sample_page()).decode(), notebook_html(sample_page, "")
    assert "<script" not in part and "<html" not in part and 'id="viewer"' not in part
    assert part.lstrip().startswith('<div class="spec"><style>.spec {')
    for tag in ("svg", "polyline", "td", "circle"):
        assert len(re.findall(f"<{tag}[ >]", part)) == len(re.findall(f"<{tag}[ >]", whole)) > 0

    def broken():
        raise ConfigError("gone")

    assert notebook_html(broken, "a < b") == "<pre>a &lt; b</pre>"


def test_ticks_are_round_and_enclose_the_values():
    for seed in range(40):
        random = np.random.default_rng(seed)
        values = (random.normal(size=5) * 10.0 ** random.integers(-6, 9)).tolist()
        ticks = Axis(title="x").ticks(values)
        assert ticks[0] <= min(values) and max(values) <= ticks[-1], seed
        steps = {f"{b - a:.6e}" for a, b in itertools.pairwise(ticks)}
        assert 2 <= len(ticks) <= 8 and len(steps) == 1 and steps.pop()[0] in "125", seed
    assert Axis(title="x").ticks([3.0])[0] <= 3.0 < Axis(title="x").ticks([3.0])[-1] + 1
    assert Axis(title="x", format="count", least=1).ticks([1, 2, 3]) == [1, 2, 3]
    assert Axis(title="x", least=0, most=9).ticks([]) == [0, 2, 4, 6, 8, 10]


def test_a_chart_draws_every_point_at_its_place_and_leaves_gaps():
    """Places are read back by the ticks, which say what a place means."""
    points = [(1.0, 0.5), (2.0, 0.25), (3.0, None), (4.0, 1.0), (5.0, float("nan")), (6.0, 0.75)]
    x, y = Axis(title="x", format="count", least=1), Axis(title="y", least=0)
    chart = Chart(title="c", x=x, y=y, series={"a": points, "b": points[:2]})
    drawn = chart.drawing()

    def scale(ticks):
        (low, first), (high, last) = ticks[0], ticks[-1]
        each = (float(last) - float(first)) / (high - low)
        return lambda place: float(first) + (place - low) * each

    across, down = scale(drawn["x"]), scale(drawn["y"])
    own, other = drawn["series"]
    places = [(across(a), down(b)) for a, b, _ in own["marks"]]
    assert places == [
        pytest.approx(p, abs=0.01) for p in points if p[1] is not None and p[1] == p[1]
    ]
    assert [len(path.split()) for path in own["paths"]] == [2]  # lone points are marks only
    assert own["style"] != other["style"] and own["marks"][0][2] == "a: 0.5 at 1"


def test_a_chart_has_its_numbers_in_full_as_csv():
    """A name that a spreadsheet would run is text there."""
    lines = {'a, "b"': [(1, 0.123456789), (3, None)], "=1+1": [(2, 5.0)], "-x": [(1, 1.0)]}
    chart = Chart(title="Loss", x=Axis(title="steps"), y=Axis(title="loss"), series=lines)
    kind, data = chart.csv().split(",", 1)
    assert kind == "data:text/csv;charset=utf-8;base64"
    rows = list(csv.reader(io.StringIO(base64.b64decode(data).decode())))
    assert rows == [
        ["steps", 'a, "b"', "'=1+1", "'-x"],
        ["1", "0.123456789", "", "1.0"],
        ["2", "", "5.0", ""],
        ["3", "", "", ""],
    ]
    page = Page(
        title="t", kind="k", lead="l", figures=[], sections=[Section(title="s", parts=[chart])]
    )
    assert f'<a download="loss.csv" href="{chart.csv()}">' in page_bytes(page).decode()


def test_the_style_of_each_of_36_lines_is_its_own():
    series = {str(i): [(0.0, 1.0), (1.0, 2.0)] for i in range(36)}
    drawn = Chart(title="c", x=Axis(title="x"), y=Axis(title="y"), series=series).drawing()
    assert len({line["style"] for line in drawn["series"]}) == 36


def test_no_script_of_this_room_parses_markup_or_ends_its_element():
    for file in ROOM.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "<!--" not in text
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text
    for file in ROOM.glob("*.css"):
        assert "url(" not in file.read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"page\.html"):
        write_page(tmp_path / "no" / "page.html", sample_page())


def palettes():
    """The colours of page.css: light, and dark on top of light."""
    text = (ROOM / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r"& \{(.*?)\}", text, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): #(\w{6})", block)) for block in blocks)
    assert set(light) == set(dark)
    return {"light": light, "dark": dark}


def contrast(one, other):
    """The contrast ratio of WCAG 2.1 of two colours as six hex digits."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_text_has_a_contrast_of_at_least_4_5(mode):
    own = palettes()[mode]
    pairs = [(t, b) for t in ("text", "soft", "accent") for b in ("page", "panel")]
    pairs += [(f"{kind}-text", f"{kind}-page") for kind in ("warn", "mark", "bad", "chip")]
    pairs += [(name, "page") for name in own if name.startswith("series-")]
    for text, behind in pairs:
        assert contrast(own[text], own[behind]) >= 4.5, (mode, text, behind)
