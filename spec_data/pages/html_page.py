"""From a page to the bytes of one HTML file: equal pages have equal bytes.

No text of the data is ever part of the markup. It is JSON inside a script element of a type that no
browser runs, with the characters escaped that could end that element. The content security policy
allows the scripts and styles of this file by their hashes, and nothing else: no network, no event
attributes, no frames, no forms.
"""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from spec_data.pages.page_parts import Bars, Lines, Page, Part, Viewer, plain
from spec_data.shards.errors import ConfigError, FileError
from spec_data.shards.files import write_atomically

CHART_FILE = "vendor/chart-4.6.1.umd.min.js"
_HERE = Path(__file__).parent
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def safe_json(value: Any) -> str:
    """Return JSON that is safe inside a script element; its texts may contain markup.

    Args:
        value: plain values; numbers that are not finite become null.

    Returns:
        The text, in which `<`, `>`, `&`, U+2028, U+2029 and lone surrogates are escapes.

    Raises:
        TypeError: a value that JSON does not have.
    """
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def page_bytes(page: Page) -> bytes:
    """Return the HTML file of a page.

    Args:
        page: what it shows.

    Returns:
        UTF-8 bytes; the same for equal pages and equal releases of this project.

    Raises:
        TypeError: the page holds a value that JSON does not have.
    """
    parts = [part for section in page.sections for part in section.parts]
    viewers = [part for part in parts if isinstance(part, Viewer)]
    scripts = [*_chart_scripts(parts), _asset("page.js"), *(v.script for v in viewers)]
    scripts = [*dict.fromkeys(scripts), "page.start();\n"]
    styles = list(dict.fromkeys([_asset("page.css"), *(v.style for v in viewers if v.style)]))
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            "<title>spec-data</title>\n",
            *(f"<style>{style}</style>\n" for style in styles),
            "</head>\n<body>\n<noscript>This page shows its data with a script of its own. ",
            "Allow scripts for this file.</noscript>\n",
            f'<script type="application/json" id="data">{safe_json(_page_json(page))}</script>\n',
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        ]
    ).encode()


def write_page(file: str | Path, page: Page) -> Path:
    """Write the HTML file of a page in one step.

    Args:
        file: where to; an existing file is replaced. page: what it shows.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path, data = Path(file), page_bytes(page)
    try:
        write_atomically(path, data)
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path}: the page cannot be written: {error.strerror}; pass another file with --out"
        ) from None
    return path


def read_page_data(file: str | Path) -> dict[str, Any]:
    """Return the JSON of a page that `write_page` wrote: everything that it shows.

    Args:
        file: the HTML file.

    Returns:
        `title`, `kind`, `footer` and `sections`, each with `title`, `text` and `parts`.

    Raises:
        ConfigError: the file is no such page.
    """
    text = Path(file).read_text(encoding="utf-8")
    start = '<script type="application/json" id="data">'
    if start not in text:
        raise ConfigError(f"{file}: not a page of this project")
    found: dict[str, Any] = json.loads(text.split(start, 1)[1].split("</script>", 1)[0])
    return found


def _page_json(page: Page) -> dict[str, Any]:
    sections = [
        {"title": s.title, "text": s.text, "parts": [part.to_json() for part in s.parts]}
        for s in page.sections
    ]
    return {"title": page.title, "kind": page.kind, "footer": page.footer, "sections": sections}


def _chart_scripts(parts: list[Part]) -> list[str]:
    """Return Chart.js with its licence if there is a chart, without the name of its source map."""
    if not any(isinstance(part, (Lines, Bars)) for part in parts):
        return []
    code = _asset(CHART_FILE).split("//# sourceMappingURL=")[0].rstrip("\n")
    return [f"/*\n{_asset('vendor/chart-LICENSE.md').strip()}\n*/\n{code}\n"]


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
