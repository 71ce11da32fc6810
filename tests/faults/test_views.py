"""Manifests and indexes of views that somebody else made, and heads of shards: words or data.

Every checksum is computed again. What is wrong is refused in words; nothing crashes, hangs, asks a
server, or reads a document that the source does not have.
"""

import collections
import json
import shutil
import sys
import traceback

import numpy as np
import pyarrow as pa
import pytest

import spec_data
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.reader import INDEX, HiddenStatesDataset
from spec_data.shards.schema import fingerprint
from spec_data.shards.storage import Storage
from tests.faults.datasets import index_table, linked_copy, trace_shard, use
from tests.faults.test_index import mutated
from tests.faults.test_manifest import BAD, places, replaced
from tests.faults.tools import report, survived, trials
from tests.spec_data.shards import integrity_tools
from tests.spec_data.shards.integrity_tools import shard_file
from tests.spec_data.views.test_views import crafted_index

whole = integrity_tools.whole
LONG = [1, pytest.param(20, marks=pytest.mark.long)]
PATHS = ["s3://bucket/x", "https://host/x", "memory://b/x", "..", ".", "/", "/dev/zero", "a\nb"]


@pytest.fixture
def view(whole, tmp_path):
    spec_data.select(whole, tmp_path / "view", sample="6", mask="all")
    return tmp_path / "view"


@pytest.fixture(autouse=True)
def no_request(monkeypatch):
    """No view of these may ask a server."""

    def asked(*_):
        raise AssertionError("a request was sent")

    monkeypatch.setattr(Storage, "__init__", asked)


def outcome(path) -> str:
    try:
        return use(path).split(":")[0]
    except Exception:
        where = traceback.extract_tb(sys.exc_info()[2])[-1]
        return f"CRASH {sys.exc_info()[1]!r} at {where.name} {where.lineno}"


@pytest.mark.parametrize("times", LONG)
def test_wrong_values_in_the_manifest_of_a_view(view, times):
    raw, outcomes, wrong = (
        json.loads((view / "manifest.json").read_text()),
        collections.Counter(),
        [],
    )
    paths = [path for path in places(raw) if path[0] in ("view", "files", "totals", "columns")]
    for _, rng in trials(f"manifest of a view x{times}", 40 * times):
        path = paths[rng.integers(len(paths))]
        values = PATHS if path[-1] == "path" else BAD
        value = values[rng.integers(len(values))]
        new = replaced(raw, path, value)
        try:
            new["fingerprint"] = fingerprint(new)
            (view / "manifest.json").write_text(json.dumps(new))
        except UnicodeEncodeError:
            continue
        found = outcome(view)
        outcomes[found.split(" ")[0]] += 1
        wrong += [(path, value, found)] if found.startswith("CRASH") else []
    report("manifest of a view", outcomes)
    assert outcomes["refused"] and not wrong, wrong


def test_a_manifest_without_its_index_is_refused(view):
    """A KeyError of `verify` before, found by the campaign."""
    raw = json.loads((view / "manifest.json").read_text())
    del raw["files"]
    raw["fingerprint"] = fingerprint(raw)
    (view / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(DatasetError, match=r"files has no index\.arrow"):
        HiddenStatesDataset(view)


@pytest.mark.parametrize("change", ["one less", "one twice", "one more"])
def test_a_view_whose_groups_are_not_its_columns_is_refused(view, change):
    """A KeyError before, found by the campaign."""
    raw = json.loads((view / "manifest.json").read_text())
    names = raw["view"]["groups"][0]
    if change == "one less":
        names.pop()
    else:
        names.append(names[0] if change == "one twice" else "x")
    raw["fingerprint"] = fingerprint(raw)
    (view / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(DatasetError, match=r"view\.groups does not name every column once"):
        HiddenStatesDataset(view)


@pytest.mark.parametrize("times", LONG)
def test_wrong_numbers_in_the_index_of_a_view(view, times):
    """A view that is read has documents of its source, each with its own tokens."""
    table, outcomes, wrong = index_table(view), collections.Counter(), []
    shutil.copytree(view, view.with_name("whole"))
    names = [f.name for f in table.schema if pa.types.is_integer(f.type)]
    known = {tuple(d["input_ids"].tolist()) for d in HiddenStatesDataset(view).sources[0]}
    for _, rng in trials(f"index of a view x{times}", 40 * times):
        name = names[rng.integers(len(names))]
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        values = table.column(name).to_numpy().copy()
        low, high = (0, 2**62) if field.type == pa.uint64() else (-3, 30)
        values[rng.integers(len(values))] = rng.integers(low, high)
        crafted_index(view, table.set_column(place, field, pa.array(values, field.type)))
        found = outcome(view)
        if found == "read":
            dataset = HiddenStatesDataset(view)
            own = all(tuple(d["input_ids"].tolist()) in known for d in dataset)
            found = "read" if own else "OTHER DOCUMENTS"
        outcomes[found.split(" ")[0]] += 1
        wrong += [(name, found)] if found.startswith(("CRASH", "OTHER")) else []
    report("index of a view", outcomes)
    assert outcomes["refused"] and not wrong, wrong


@pytest.mark.parametrize("times", LONG)
def test_wrong_heads_of_shards(whole, tmp_path, times):
    """The metadata of IPC messages: lengths of buffers, offsets, counts, the schema."""
    data = linked_copy(whole, tmp_path / "data", INDEX, "shards/unit-00000.arrow")
    content = shard_file(whole, 0).read_bytes()
    spans = message_heads(content)

    def trial(number: int) -> str:
        rng = np.random.default_rng([99, times, number])
        first, last = spans[rng.integers(len(spans))]
        head = mutated(content[first:last], rng)
        trace_shard(data, 0, content[:first] + head + content[last:])
        try:
            return use(data).split(":")[0]
        except SpecDataError as error:
            return f"refused: {error}"

    count = len(list(trials(f"heads of shards x{times}", 40 * times)))
    found = survived(trial, count)
    report("heads of shards", collections.Counter(text.split(" ")[0] for text in found))
    assert not [text for text in found if not text.startswith(("refused", "read"))], found


def message_heads(content: bytes) -> list[tuple[int, int]]:
    """Where the metadata of every message lie in an Arrow stream."""
    buffer, spans = pa.py_buffer(content), []
    for message in pa.ipc.MessageReader.open_stream(buffer):
        start = message.metadata.address - buffer.address
        spans.append((start - 8, start + message.metadata.size))
    return spans
