"""Draw the pictures of README and docs from the tables of the code and the results of evidence.py.

`docs/pipeline.svg` has the drafts of the registry, the engines of `engines.toml`, measured bytes;
`docs/evidence/lengths.svg` the lengths of real decoding. evidence_text.py --write writes both.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from spec_data.models.engines import engines
from spec_train.options.kinds import BUILT_IN

NAMES = {
    "eagle": "EAGLE-1/2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
    "xpress": "XPress",
    "mtp": "MTP",
}
"""What the papers call the drafts of the registry."""
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "speculators": "speculators",
    "transformers": "transformers",
}
WIDTH = 576
"""The hidden size of SmolLM2-135M-Instruct, the target of docs/evidence/dataset.json."""
STYLE = """text { font: 13px Helvetica, Arial, sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .box { fill: #f3f6f9; stroke: #8c959f }
.dim { fill: #59636e } .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
.head { font-weight: bold } .a { fill: #0969da } .b { fill: #bc4c00 } .c { fill: #afb8c1 }
.soft { fill: #b6d7ff } .warm { fill: #ffd0a8 }
.right { text-anchor: end } .mid { text-anchor: middle } .mark { stroke: #1f2328 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #0d1117 }
.box { fill: #161b22; stroke: #6e7681 } .dim { fill: #9198a1 } .mark { stroke: #e6edf3 }
.a { fill: #4493f8 } .b { fill: #f0883e } .c { fill: #484f58 }
.soft { fill: #1f4f8f } .warm { fill: #7d3e0c } }"""


def svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Return a picture with a page of its own, that is read on a light and on a dark one."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    page = f'<rect class="page" width="{width}" height="{height}" rx="8"/>'
    title = f"<title>{html.escape(title)}</title>"
    return "\n".join((head, title, f"<style>{STYLE}</style>", page, *body, "</svg>")) + "\n"


def word(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, lines: Sequence[str]) -> list[str]:
    """Return a box; its first line is its name."""
    first = y + height / 2 - 9 * (len(lines) - 1) + 5
    words = [
        word(x + width / 2, first + 18 * n, line, "mid dim" if n else "mid head")
        for n, line in enumerate(lines)
    ]
    return [bar(x, y, width, height, "box"), *words]


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {at} rx="4" class="{kind}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow to the right or down."""
    ends = (-6, -4, -6, 4) if to_x > x else (-4, -6, 4, -6)
    a, b, c, d = (p + q for p, q in zip((to_x, to_y) * 2, ends, strict=True))
    path = f"M{x:g} {y:g}L{to_x:g} {to_y:g}M{a:g} {b:g}L{to_x:g} {to_y:g}L{c:g} {d:g}"
    return f'<path class="line" d="{path}"/>'


def pipeline(results: Mapping[str, Any]) -> str:
    """Return the flow: a corpus and a target make one dataset, every draft is trained from it."""
    data = results["dataset"]
    stored = data["totals"]["bytes"] / data["totals"]["tokens"]
    exact = 2 * WIDTH * (len(data["layers"]) + 1)
    body = [word(125, 28, "once, with the target", "mid dim")]
    body += [word(390, 28, "kept and shared", "mid dim")]
    body += [word(760, 28, "as often as you like, without the target", "mid dim")]
    body += box(20, 44, 210, 52, ("corpus", "chats, text, token ids"))
    body += [arrow(125, 96, 125, 124)]
    body += box(20, 126, 210, 70, ("spec-data generate", "the target reads every", "document once"))
    body += [arrow(230, 161, 268, 161)]
    body += box(270, 44, 240, 152, ("dataset", "hidden states of the layers", "tokens, LM head"))
    body += [word(20, 228, "measured on SmolLM2-135M-Instruct, bytes per token", "dim")]
    for n, (name, value) in enumerate((("bf16", exact), ("stored", stored))):
        wide = 350 * value / exact
        body += [word(20, 254 + 28 * n, name), bar(70, 241 + 28 * n, wide, 18, "ca"[n])]
        body.append(word(78 + wide, 254 + 28 * n, f"{value:,.0f}"))
    body += [word(20, 312, f"{len(data['layers'])} layers, the final state and the tokens;", "dim")]
    body += [word(20, 330, "the LM head is stored once beside them", "dim")]
    body += [arrow(510, 120, 538, 120), word(540, 62, "spec-train fit", "head")]
    table = engines().engine
    for n, name in enumerate(ENGINES.values()):
        body.append(word(668 + 72 * n, 62 - 14 * (n % 2), name, "mid"))
    body.append(f'<path class="line" d="M540 72H1000M540 {76 + 26 * len(BUILT_IN)}H1000"/>')
    for n, kind in enumerate(BUILT_IN):
        y = 92 + 26 * n
        body.append(word(540, y, NAMES[kind]))
        for m, engine in enumerate(ENGINES):
            if kind in table[engine].drafts:
                body.append(f'<circle class="a" cx="{668 + 72 * m}" cy="{y - 5}" r="5"/>')
    last = 96 + 26 * len(BUILT_IN)
    body.append(word(540, last, "a dot: a release of this engine or trainer reads the kind", "dim"))
    title = "A corpus and a target make one dataset; every draft is trained from it"
    return svg(1020, last + 14, title, body)


def lengths(rows: Sequence[tuple[str, float, tuple[float, float], str]]) -> str:
    """Return bars of acceptance lengths; a row is name, length, its range, and "a" or "b".

    A bar begins at 1, what plain decoding has.
    """
    top = max(high for _, _, (_, high), _ in rows)
    scale = 420 / (top - 1)
    body, last = [word(20, 26, "tokens per verification, from 1 (plain decoding)", "dim")], 46
    for n, (name, length, (low, high), color) in enumerate(rows):
        y = 42 + 28 * n
        ends = [300 + scale * (value - 1) for value in (low, high)]
        body += [word(290, y + 14, name, "right"), bar(300, y, scale * (length - 1), 19, color)]
        body.append(f'<path class="mark" d="M{ends[0]:.1f} {y + 9.5}H{ends[1]:.1f}"/>')
        body.append(word(ends[1] + 8, y + 14, f"{length:.2f}"))
        last = y + 28
    return svg(790, last + 12, "Acceptance length of real decoding, every draft", body)
