"""Draw docs/pipeline.svg, the figure of the README: `python scripts/draw_pipeline.py`.

The bars show measured bytes per token; they are read from the table of docs/performance.md, so the
figure and the table cannot disagree.
"""

import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 960, 330
INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
TARGET, DATA, DRAFT, ENGINE = "#f0b429", "#2186eb", "#0c9d58", "#8719e0"


def text(
    x: float,
    y: float,
    words: str,
    size: int = 14,
    ink: str = INK,
    bold: bool = False,
    anchor: str = "middle",
) -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}>'
        f"{html.escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, ink: str, *lines: str) -> str:
    """A rounded box: the first line is its title."""
    out = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="#ffffff" '
        f'stroke="{ink}" stroke-width="2"/>'
    )
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        out += text(
            x + width / 2, top + 18 * i, line, 15 if i == 0 else 12, INK if i == 0 else SOFT, i == 0
        )
    return out


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line that ends in an arrow head."""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="2" '
        'marker-end="url(#head)"/>'
    )


def bytes_per_token() -> list[tuple[str, int, str]]:
    """Codec, bytes per token and share of bf16, from the table of docs/performance.md."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = []
    for name in ("bf16", "int8c", "lm4c"):
        found = re.search(
            rf"^\| `{name}`[^|]*\|[^|]*\|[^|]*\|[^|]*\| ([\d,]+) \| ([\d.]+)", page, re.M
        )
        if found is None:
            raise SystemExit(f"docs/performance.md: no row of codec {name}")
        rows.append((name, int(found[1].replace(",", "")), found[2]))
    return rows


def bars(x: float, y: float, width: float) -> str:
    """Bytes per token of three codecs."""
    rows = bytes_per_token()
    out = text(x, y, "bytes per token", 12, SOFT, anchor="start")
    for i, (name, size, share) in enumerate(rows):
        top, length = y + 12 + 24 * i, (width - 120) * size / rows[0][1]
        ink = DATA if name == "lm4c" else LINE
        out += (
            f'<rect x="{x + 42}" y="{top}" width="{length:.0f}" height="15" rx="3" fill="{ink}"/>'
        )
        out += text(x, top + 12, name, 12, INK, name == "lm4c", "start")
        label = f"{size:,}" if share == "1.00" else f"{size:,} ({share})"
        out += text(x + 48 + length, top + 12, label, 12, SOFT, anchor="start")
    return out


def draw() -> str:
    """The whole figure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>A corpus and a target make one dataset; every draft is trained from it</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#f8fafc"/>',
        text(120, 34, "once, with the target", 13, SOFT),
        text(410, 34, "kept and shared", 13, SOFT),
        text(700, 34, "as often as you like, without the target", 13, SOFT),
        box(30, 60, 180, 56, LINE, "corpus", "chats, text, token ids"),
        box(30, 160, 180, 76, TARGET, "spec-data generate", "packed, proven, resumable"),
        arrow(120, 116, 120, 158),
        arrow(210, 198, 288, 150),
        box(
            290,
            60,
            240,
            150,
            DATA,
            "dataset",
            "Arrow shards, a checksum for",
            "every column of every document,",
            "one column per layer",
        ),
        bars(290, 236, 300),
    ]
    parts.append(arrow(530, 149, 602, 149))
    parts.append(
        f'<rect x="604" y="46" width="162" height="242" rx="12" fill="#effcf6" stroke="{DRAFT}"/>'
    )
    drafts = ("EAGLE-1/2", "EAGLE-3", "P-EAGLE", "DSpark", "DFlash")
    for i, name in enumerate(drafts):
        top = 58 + 38 * i
        parts.append(
            f'<rect x="620" y="{top}" width="130" height="30" rx="8" fill="#ffffff" '
            f'stroke="{DRAFT}" '
            'stroke-width="2"/>'
        )
        parts.append(text(685, top + 20, name, 14, INK, True))
    parts.append(text(685, 273, "spec-train fit, eval, export", 12, SOFT))
    for i, name in enumerate(("vLLM", "SGLang", "llama.cpp", "transformers")):
        top = 68 + 42 * i
        parts.append(arrow(766, 149, 818, top + 15))
        parts.append(
            f'<rect x="820" y="{top}" width="116" height="30" rx="8" fill="#ffffff" '
            f'stroke="{ENGINE}" stroke-width="2"/>'
        )
        parts.append(text(878, top + 20, name, 14, INK, True))
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    out = ROOT / "docs" / "pipeline.svg"
    out.write_text(draw(), encoding="utf-8")
    print(out)
