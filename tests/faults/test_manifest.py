"""Manifests with wrong types and values anywhere: words that name the key, never a TypeError.

The fingerprint is computed again each time, so that it does not hide what the reader makes of the
value. A value of the right type may be accepted: only `verify` compares with the data themselves.
"""

import collections
import copy
import dataclasses
import json
import sys
import traceback

import pytest
from msgspec import structs

from spec_data.pages.report import dataset_text
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Evidence, Manifest
from spec_train.data.mixture import common_manifest
from spec_train.losses.head import TargetHead
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from spec_train.training.fit import open_data
from spec_train.training.settings import resolve_config
from tests.faults.datasets import linked_copy, use
from tests.faults.tools import report, trials
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.integrity_tools import write_manifest

target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed

MISSING = object()
BAD = [
    *(None, True, -1, 0, 1, 2**63, -(2**40), 1.5, 1e400, float("nan")),
    *("", "x", "\ud800", "../x", "é" * 300, [], [None], [[]], {}, {"a": None}, {"": {}}),
    MISSING,
]
FREE = ("settings", "identity")  # tables of facts that are compared as a whole


@pytest.fixture
def data(mixed, tmp_path):
    return linked_copy(mixed, tmp_path / "data")


def places(value, path: tuple = ()) -> list[tuple]:
    """The path of every value in a manifest, except in what is free; of lists, two values."""
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if path or k not in FREE]
    elif isinstance(value, list):
        items = list(enumerate(value))[:2] + list(enumerate(value))[-1:]
    else:
        return [path]
    below = [place for key, item in items for place in places(item, (*path, key))]
    return ([path] if path else []) + below


def replaced(raw: dict, path: tuple, value) -> dict:
    raw = copy.deepcopy(raw)
    at = raw
    for key in path[:-1]:
        at = at[key]
    if value is MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return raw


def everywhere(data) -> str:
    """What every reader of a manifest makes of it: "read", or the first refusal in words."""
    try:
        dataset = HiddenStatesDataset(data)
        dataset_text(dataset.manifest)
        _ = FollowedDataset(data).manifest
        config = Training(data=str(data), out=str(data.parent / "run"), device="cpu")
        documents = open_data(dataclasses.replace(config, data=f"{parse_sources(str(data))[0]}:2"))
        resolve_config(config, documents)
        common_manifest([dataset.manifest, dataset.manifest])
        TargetHead.from_dataset(data)
    except SpecDataError as error:
        return f"refused: {error}"
    return use(data)


def test_every_wrong_value_is_refused_in_words_or_harmless(data):
    """For a random sample of (key, value): SPEC_FAULTS=100 covers most."""
    raw = json.loads((data / "manifest.json").read_text())
    paths = places(raw)
    outcomes, errors = collections.Counter(), {}
    for _, rng in trials("manifest", 30):
        path = paths[rng.integers(len(paths))]
        value = BAD[rng.integers(len(BAD))]
        new = replaced(raw, path, value)
        try:
            write_manifest(data, new)
        except UnicodeEncodeError:  # its author cannot compute a fingerprint either
            (data / "manifest.json").write_text(json.dumps(new))
        try:
            outcomes[everywhere(data).split(":")[0]] += 1
        except Exception:
            where = traceback.extract_tb(sys.exc_info()[2])[-1]
            errors[f"{path} = {value!r}"] = f"{sys.exc_info()[1]!r} at {where.name} {where.lineno}"
    report("manifest", outcomes)
    assert outcomes["refused"] and not errors, errors


def test_a_capture_without_its_measured_difference_is_shown_as_such(data):
    """A TypeError of the report before, found by the campaign."""
    raw = json.loads((data / "manifest.json").read_text())
    form, facts = raw["packing"]["form"], {"tool": "x", "stored_layers": [], "masks": ""}
    facts |= {"final_norm": "after", "mask_frame": "token", "documents": 0, "tokens": 0}
    write_manifest(data, replaced(raw, ("packing", "differences", form), MISSING))
    manifest = HiddenStatesDataset(data).manifest
    assert "unpacked is not recorded" in " ".join(dataset_text(manifest).split())
    target = structs.replace(manifest.target, converted=Evidence(**facts, differences={}))
    shown = dataset_text(structs.replace(manifest, target=target))
    assert "an unknown part" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("totals", "tokens"), 5, "'tokens': 5"),
        (("shards", 0, "sha256"), "x", "shards[0].sha256"),
        (("shards", 0, "more"), 1, "shards[0]: object contains unknown field more"),
        (("shards", 0, "file"), "../x", "got '../x'"),
        (("columns", 2, "width"), 64, "columns has ('hidden.L0', 'packed', 64, 'all')"),
        (("columns", 2, "codec"), "zstd", "which this release cannot read"),
        (("layers",), [4, 0], "[4, 0]: expected ascending"),
        (("head", "vocab_size"), 0, "head.vocab_size"),
        (("draft_layers",), {"dspark": [1, 2]}, "dspark is [1, 2]: expected"),
        (("supervision",), "topk:-1", "supervision"),
        (("format_version",), "1.2", "format version 1.2, this release reads 1.0 and 1.1"),
        (("format_version",), 1.0, "format version 1.0, this release reads 1.0"),
        (("format_version",), None, "format version None, this release reads 1.0"),
        (("files", "index.arrow"), 3, "files[...]: "),
        (("card",), MISSING, "a dataset with shards has a card"),
    ],
)
def test_the_message_names_the_key_and_the_file(data, path, value, said):
    raw = json.loads((data / "manifest.json").read_text())
    write_manifest(data, replaced(raw, path, value))
    with pytest.raises(DatasetError) as caught:
        Manifest.read(data / "manifest.json")
    assert said in str(caught.value)
    assert str(data / "manifest.json") in str(caught.value) or "which this release" in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": "spec-data"}',
        b"NaN",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_is_no_manifest_is_refused_in_words(data, content):
    (data / "manifest.json").write_bytes(content)
    with pytest.raises(DatasetError, match=r"manifest\.json: "):
        Manifest.read(data / "manifest.json")
