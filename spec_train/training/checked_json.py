"""JSON files of a run with a checksum of their own content: `run.json`, `training_state.json`.

The checksum is the SHA-256 of the other fields in canonical form, so indenting a file again is not
damage, and a changed digit is.
"""

import json
from typing import Any

from spec_data.shards.files import dump_json, sha256_json

CHECKSUM = "checksum"


def dump_checked(table: dict[str, Any]) -> str:
    """Return the text of a file with `table` and its checksum."""
    plain = json.loads(json.dumps({k: v for k, v in table.items() if k != CHECKSUM}))
    return dump_json(plain | {CHECKSUM: sha256_json(plain)})


def is_intact(table: dict[str, Any]) -> bool | None:
    """Return whether the content of a file fits its checksum; None: it has no checksum."""
    if CHECKSUM not in table:
        return None
    content = {name: value for name, value in table.items() if name != CHECKSUM}
    return bool(table[CHECKSUM] == sha256_json(content))
