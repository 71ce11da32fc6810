"""Pages as bytes: safe embedding, the policy, figures that can be read back, the palette."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import spec_data.pages
from spec_data.pages.page import (
    CHART_FILE,
    Page,
    Section,
    Table,
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
    assert found["viewer"]["note"] == ATTACK and "NaN" not in data
    assert found["charts"][1]["series"] == {"draft": [[1, 0.5], [2, None], [3, None]]}
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
    assert rules["script-src"].split() == hashes["script"] and len(hashes["script"]) == 4
    assert rules["style-src"].split() == hashes["style"] and len(hashes["style"]) == 1
    links = [a["href"] for _, a in found.tags if "href" in a]
    assert links == ["#section-1", "#section-2", "#section-3"]
    assert not any("src" in a or "style" in a for _, a in found.tags)


def test_equal_pages_have_equal_bytes_and_charts_bring_their_library_and_licence():
    assert page_bytes(sample_page()) == page_bytes(sample_page())
    whole = page_bytes(sample_page()).decode()
    assert "Chart.js v4.6.1" in whole and "Permission is hereby granted" in whole
    assert "sourceMappingURL" not in whole
    table = Table(title="t", columns=[("a", "text")], rows=[["b"]])
    small = page_bytes(Page(title="t", kind="k", sections=[Section(title="s", parts=[table])]))
    assert b"Chart.js v" not in small and len(small) < 40_000


def test_no_script_of_this_room_parses_markup_or_ends_its_element():
    for file in [*ROOM.glob("*.js"), ROOM / CHART_FILE]:
        text = file.read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "<!--" not in text
        if file.parent == ROOM:
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
    blocks = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
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
