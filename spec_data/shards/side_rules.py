"""What the sides of a manifest (see `sides`) must agree with."""

from collections.abc import Iterator
from typing import Any

_COUNTS = ("rows", "tokens", "supervised")


def side_problems(raw: dict[str, Any]) -> Iterator[str]:
    """Yield what the sides of a manifest, each of the right type, say against its other keys."""
    shards = raw["shards"]
    files = {shard["file"] for shard in shards}
    known = {column["name"] for column in raw["columns"]}
    taken: set[str] = set()
    for number, entry in enumerate(raw.get("sides", [])):
        where = f"sides[{number}]"
        names, own = entry["columns"], entry["shards"]
        wrong = [n for n in names if n not in known - taken or not n.startswith("hidden.L")]
        if wrong or len(set(names)) < len(names) or not names:
            yield f"{where} has the columns {', '.join(names)}, expected layers of the dataset"
        taken |= set(names)
        if len(own) != len(shards):
            yield f"{where} has {len(own)} files, and there are {len(shards)} shards"
        for shard, record in zip(shards, own, strict=False):
            if any(shard[count] != record[count] for count in _COUNTS):
                yield f"{where}: {record['file']} has other counts than {shard['file']}"
            if record["file"] in files:
                yield f"{where}: {record['file']} is there twice"
            files.add(record["file"])
