"""The card of a dataset, README.md: what is in it, in words; and where the Hub finds its rows.

Nothing that a text of strangers holds (names, licences, sources) becomes YAML, markup, a link or a
cell of its own.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from spec_data.shards.layer_ids import AUTO_DRAFTS
from spec_data.shards.schema import LAYER_CONVENTION, Manifest
from spec_data.shards.serving import prompt_lines

CARD = "README.md"
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#~&!|])")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,59}")  # an identifier, as the Hub lists them
DOCUMENTS, STATES = "documents", "states"
"""Configurations of `load_dataset`; `push` makes the first, the documents without states."""


def dataset_card(manifest: Manifest) -> str:
    """Return the README.md of a dataset: the YAML header that the Hub reads, then a description."""
    name = manifest.target.name.rstrip("/").rpartition("/")[2]
    documents = {"config_name": DOCUMENTS, "default": True, "data_files": f"{DOCUMENTS}/*.arrow"}
    # Patterns with "?" for every digit instead of names: there may be thousands of shards.
    shards = sorted({re.sub("[0-9]", "?", record.file) for record in manifest.shards})
    header = front_matter(
        {
            "pretty_name": f"Hidden states of {name}",
            **licence_fields(s.licence for s in manifest.corpus),
            "tags": ["speculative-decoding", "hidden-states", "spec-data"],
            "configs": [documents, {"config_name": STATES, "data_files": shards}],
        }
    )
    columns = table(
        ("column", "codec", "bytes per token", "error"),
        (
            (
                *(code(c.name), c.codec, f"{c.bytes_per_token:,.0f}"),
                plain(c.loss or "none"),
            )
            for c in manifest.columns
        ),
    )
    drafts = ", ".join(manifest.draft_layers) or "any draft that reads its layers"
    return f"""{header}# Hidden states of {plain(name)}

What speculative-decoding drafts learn from this target: captured once by spec-data, for
{drafts}. No target is needed to train on it.

{_facts(manifest)}

{columns}

{_agreement(manifest)}
## Use

From the Hub, where REPO is the name of this repository:

```bash
spec-data pull REPO data
spec-data verify data
spec-train fit {next(iter(manifest.draft_layers), AUTO_DRAFTS[0])} --data data --out run
```

```python
import spec_data

ds = spec_data.open_dataset("data")
print(len(ds), ds.features, ds[0]["input_ids"].shape)
```

Token ids, masks and texts alone, without downloading states:
`datasets.load_dataset(REPO, "{DOCUMENTS}")`. `datasets.load_dataset(REPO, "{STATES}")`, and
`datasets.load_from_disk("data")`, open the shards with their columns as they are stored: lossy
columns are codes, which `spec_data` decodes, and `bf16` columns are bits as integers:
`torch.tensor(x).to(torch.uint16).view(torch.bfloat16)`. `manifest.json` records everything that
decided these bytes.
"""


def _facts(manifest: Manifest) -> str:
    totals, target = manifest.totals, manifest.target
    revision = f", revision {target.revision}" if target.revision else ""
    quantised = f", {target.quantised_as}" if target.quantised_as else ""
    facts: dict[str, Any] = {
        "target": f"{target.name}{revision}, {target.dtype}{quantised}",
        "layers": f"{', '.join(map(str, manifest.layers)) or 'none'} ({LAYER_CONVENTION})",
        "documents": f"{totals.documents:,}",
        "dropped documents": ", ".join(
            f"{name} {count:,}" for name, count in manifest.documents.dropped.items()
        ),
        "tokens": f"{totals.tokens:,}, {totals.supervised:,} of them supervised",
        "size": f"{totals.bytes:,} bytes in {len(manifest.shards)} shards",
        "corpus": "; ".join(
            f"{s.source} ({s.licence or 'licence not stated'})" for s in manifest.corpus
        ),
        "responses": manifest.policy,
        **dict(prompt_lines(manifest.identity)),
        "supervision": f"{manifest.supervision}, final states at {manifest.final} tokens",
        "converted from": target.converted.tool if target.converted else "",
    }
    return table(("", ""), [(name, plain(fact)) for name, fact in facts.items() if fact])


def _agreement(manifest: Manifest) -> str:
    if manifest.agreement is None:
        return ""
    head, *rows = manifest.agreement.rows()
    return "\n".join(
        [
            "How often supervised tokens are the target's first choice, and their mean NLL in nats "
            "(own: of text that the target samples):",
            "",
            table(head, (list(map(plain, row)) for row in rows)),
            *(f"\nWarning: {plain(message)}" for message in manifest.suspicions),
            "",
        ]
    )


# -- Markdown -------------------------------------------------------------------------------------


def front_matter(values: Mapping[str, Any]) -> str:
    """Return the YAML header of a card, with its lines of dashes.

    Every text is put on one line: readers look for the next line of dashes before they read YAML.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
    return f"---\n{yaml.safe_dump(_one_line(values), **options)}---\n"


def _one_line(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {name: _one_line(item) for name, item in value.items()}
    return [_one_line(item) for item in value] if isinstance(value, list) else value


def licence_fields(licences: Iterable[str | None]) -> dict[str, str]:
    """Return the fields of the header for the licences of all corpora."""
    stated = sorted({licence for licence in licences if licence})
    if len(stated) != 1:
        return {"license": "other"}
    if _LICENCE.fullmatch(stated[0]):
        return {"license": stated[0]}
    return {"license": "other", "license_name": stated[0]}


def plain(text: object) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> str:
    """Return a text of one line as code."""
    line = " ".join(str(text).split())
    fence, space = _fence(line, 1), " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def code_block(language: str, lines: Sequence[str]) -> str:
    """Return lines of code as a block of their own."""
    text = "\n".join(lines)
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _fence(text: str, least: int) -> str:
    """Return backticks that are more than any in a row of the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown, in which a bar or a new line ends no cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(re.sub(r"(?<!\\)\|", r"\\|", text).split())
