"""The card of a dataset on the Hub: what is in it, in words; and where its viewer finds rows."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from spec_data.shards.card_text import code, front_matter, licence_fields, plain, table
from spec_data.shards.codec_tables import error_text
from spec_data.shards.likelihood_text import agreement_rows, suspicions
from spec_data.shards.schema import LAYER_CONVENTION, Manifest
from spec_data.terminal.progress import size

_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B")
DOCUMENTS, STATES = "documents", "states"
"""Configurations of `load_dataset`."""


def size_category(documents: int) -> str:
    """Return the size category of the Hub, such as "1K<n<10K"."""
    bounds = [1000 * 10**i for i in range(len(_SIZES))]
    place = sum(documents >= bound for bound in bounds)
    if place == 0:
        return "n<1K"
    return f"{_SIZES[place - 1]}<n<{_SIZES[place]}" if place < len(_SIZES) else f"n>{_SIZES[-1]}"


def hub_card(manifest: Manifest, repo: str) -> str:
    """Return the README.md of a dataset on the Hub, in `repo`."""
    name = manifest.target.name.rstrip("/").rpartition("/")[2]
    documents = {"config_name": DOCUMENTS, "default": True, "data_files": f"{DOCUMENTS}/*.arrow"}
    header = front_matter(
        {
            "pretty_name": f"Hidden states of {name}",
            **licence_fields(s.licence for s in manifest.corpus),
            "tags": ["speculative-decoding", "hidden-states", "spec-data"],
            "size_categories": [size_category(manifest.totals.documents)],
            "configs": [documents, _state_config(manifest)],
        }
    )
    columns = table(("column", "codec", "bytes per token", "error"), _columns(manifest))
    return f"""{header}# Hidden states of {plain(name)}

What speculative-decoding drafts learn from this target: captured once by spec-data, for
{_drafts(manifest)}. No target is needed to train on it.

{_facts(manifest)}

{columns}

{_agreement(manifest)}
## Use

```bash
spec-data pull {repo} data
spec-data verify data
spec-train fit {next(iter(manifest.draft_layers), "eagle3")} --data data --out run
```

```python
import spec_data

spec_data.pull("{repo}", "data")
ds = spec_data.open_dataset("data")
print(len(ds), ds.features, ds[0]["input_ids"].shape)
```

Token ids, masks and texts alone, without downloading states:

```python
from datasets import load_dataset

documents = load_dataset("{repo}", "{DOCUMENTS}", split="train")
```

`load_dataset("{repo}", "{STATES}")` opens the shards with their columns as they are stored: lossy
columns are codes, which `spec_data` decodes. `manifest.json` records everything that decided these
bytes.
"""


def _state_config(manifest: Manifest) -> dict[str, Any]:
    """Return the configuration of the shards.

    Names are given as patterns, with "?" for every digit: there may be thousands of shards.
    """
    names = sorted({re.sub("[0-9]", "?", record.file) for record in manifest.shards})
    return {"config_name": STATES, "data_files": names}


def _drafts(manifest: Manifest) -> str:
    return ", ".join(manifest.draft_layers) or "any draft that reads its layers"


def _facts(manifest: Manifest) -> str:
    totals, target = manifest.totals, manifest.target
    revision = f", revision {target.revision}" if target.revision else ""
    corpora = "; ".join(
        f"{s.source} ({s.licence or 'licence not stated'})" for s in manifest.corpus
    )
    lines = {
        "target": f"{target.name}{revision}, {target.dtype}"
        + (f", {target.quantised_as}" if target.quantised_as else ""),
        "layers": f"{', '.join(map(str, manifest.layers)) or 'none'} ({LAYER_CONVENTION})",
        "documents": f"{totals.documents:,}",
        "tokens": f"{totals.tokens:,}, {totals.supervised:,} of them supervised",
        "size": f"{size(totals.bytes)} in {len(manifest.shards)} shards",
        "corpus": corpora,
        "responses": manifest.policy,
        "supervision": f"{manifest.supervision}, final states at {manifest.final} tokens",
        **({"converted from": target.converted.tool} if target.converted else {}),
    }
    cells = [(k, plain(v)) for k, v in lines.items()]
    return table(("", ""), [*cells, ("fingerprint", code(manifest.fingerprint))])


def _columns(manifest: Manifest) -> Iterator[Sequence[str]]:
    for c in manifest.columns:
        error = error_text(c.codec, c.error) if c.error else "none"
        yield code(c.name), c.codec, f"{c.bytes_per_token:,}", plain(error)


def _agreement(manifest: Manifest) -> str:
    if manifest.agreement is None:
        return ""
    head, *rows = agreement_rows(manifest.agreement)
    return "\n".join(
        [
            "How often supervised tokens are the target's first choice, and their mean NLL in nats "
            "(own: of text that the target samples):",
            "",
            table(head, (list(map(plain, row)) for row in rows)),
            *(f"\nWarning: {plain(message)}" for message in suspicions(manifest)),
            "",
        ]
    )
