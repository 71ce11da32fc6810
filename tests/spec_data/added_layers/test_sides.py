"""Datasets with sides are read, verified, copied and damaged like any other."""

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from spec_data.options.dataset_options import VerifyConfig
from spec_data.options.view_options import (
    AppendConfig,
    DropColumnsConfig,
    MergeConfig,
    SelectConfig,
)
from spec_data.shards import schema
from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.files import dump_json
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest, fingerprint
from spec_data.shards.sides import stored_records
from spec_data.verification.run import examine
from spec_data.views import appending
from spec_data.views.appending import plan_append
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.joining import plan_merge
from spec_data.views.leftovers import find_leftovers
from spec_data.views.select_view import plan_select
from spec_data.views.write_view import view_sizes, write_view
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_data.runs import digests, run, write_corpus
from tests.spec_data.views.view_tools import assert_same_documents, documents_of, killed_after

SIDE = "shards/unit-00001-side1.arrow"


@pytest.fixture
def own(wide, tmp_path):
    return Path(shutil.copytree(wide, tmp_path / "own"))


def failures(path) -> list[str]:
    return examine(VerifyConfig(data=str(path), samples=2, device="cpu")).failures


def rewritten(data: Path, change) -> None:
    raw = json.loads((data / "manifest.json").read_text())
    change(raw)
    raw["fingerprint"] = fingerprint(raw)
    (data / "manifest.json").write_text(dump_json(raw))


# -- reading ----------------------------------------------------------------------------------


def test_buffers_and_projections_read_both_files(wide):
    dataset = HiddenStatesDataset(wide)
    few = HiddenStatesDataset(wide, columns=("hidden.L3", "hidden.L4"))
    for index in (0, 9, 19):
        row = dataset[index]
        count = len(row["input_ids"])
        out = {name: torch.zeros(count, 32, dtype=torch.bfloat16) for name in few.columns}
        assert few.read_into(index, out) == count
        for name in few.columns:
            assert torch.equal(out[name], row[name]) and torch.equal(few[index][name], row[name])


def test_remote_readers_see_one_dataset(wide, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    put_in_memory(wide, "memory://wide/data")
    try:
        remote = HiddenStatesDataset("memory://wide/data")
        for own, other in zip(documents_of(wide), remote, strict=True):
            assert all(torch.equal(own[n], other[n]) for n in own if n.startswith("hidden."))
        config = DropColumnsConfig(
            data="memory://wide/data", out=str(tmp_path / "few"), layers="0,4"
        )
        write_view(tmp_path / "few", plan_drop_columns(config))  # no shard can be linked
        assert_same_documents(tmp_path / "few", documents_of(plain))
        remote.fetch_ahead(3, ["hidden.L1", "hidden.L4"])
        found = examine(VerifyConfig(data="memory://wide/data", samples=2, device="cpu"))
        assert not found.failures, found.text()
        system = fsspec.filesystem("memory")
        data = bytearray(system.cat_file(f"/wide/data/{SIDE}"))
        data[len(data) // 2] ^= 1
        system.pipe_file(f"/wide/data/{SIDE}", bytes(data))
        monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "again"))
        with pytest.raises(DatasetError, match="unit-00001-side1"):
            _ = list(HiddenStatesDataset("memory://wide/data"))
        system.rm_file(f"/wide/data/{SIDE}")
        with pytest.raises(MissingError, match="unit-00001-side1"):
            HiddenStatesDataset("memory://wide/data")
    finally:
        forget_memory()


def test_releases_before_it_refuse_it_by_its_version(wide, monkeypatch):
    monkeypatch.setattr(schema, "READ_VERSIONS", ("1.0", "1.1", "1.2"))
    with pytest.raises(DatasetError, match=r"format version 1\.3, this release reads 1\.0, 1\.1"):
        HiddenStatesDataset(wide)


def test_a_follower_says_that_it_is_complete(wide):
    with pytest.raises(ConfigError, match="leave --follow out"):
        FollowedDataset(wide)


# -- views ------------------------------------------------------------------------------------


def test_views_of_it_have_whole_shards(wide, plain, tmp_path):
    config = SelectConfig(data=str(wide), out=str(tmp_path / "some"), sample="7")
    planned = plan_select(config)
    sizes = view_sizes(planned)
    manifest = write_view(tmp_path / "some", planned)
    assert "sides" not in manifest.raw and manifest.raw["format_version"] == "1.2"
    assert sizes.bytes == manifest.raw["totals"]["bytes"]
    chosen = set(HiddenStatesDataset(tmp_path / "some").doc_ids)
    assert_same_documents(
        tmp_path / "some", [d for d in documents_of(wide) if d["doc_id"] in chosen]
    )
    config = MergeConfig(data=(str(tmp_path / "some"), str(wide)), out=str(tmp_path / "all"))
    write_view(tmp_path / "all", plan_merge(config))
    assert len(HiddenStatesDataset(tmp_path / "all")) == 20
    config = DropColumnsConfig(data=str(wide), out=str(tmp_path / "few"), layers="0,4")
    manifest = write_view(tmp_path / "few", plan_drop_columns(config))
    assert_same_documents(tmp_path / "few", documents_of(plain))
    links = {(tmp_path / "few" / record.file).stat().st_nlink for record in manifest.shards}
    assert min(links) > 1, "without the added layers, its shards are the old ones"
    assert not failures(tmp_path / "few") and not failures(tmp_path / "all")


def append_to(own, other):
    return appending.append(plan_append(AppendConfig(data=(str(own), str(other)))))


def test_append_writes_files_of_sides_too(own, target, tmp_path, monkeypatch):
    corpus = tmp_path / "more.jsonl"
    rows = write_corpus(corpus, 32).read_text().splitlines(keepends=True)
    corpus.write_text("".join(rows[14:]))  # six documents are there already
    other = tmp_path / "other"
    run(target, corpus, other, layers="0,1,3,4", max_shard_size="40KB")
    before, more = documents_of(own), documents_of(other)
    known = {document["doc_id"] for document in before}
    config = AppendConfig(data=(str(own), str(other)))
    sizes = appending.append_sizes(plan_append(config))
    whole = Path(shutil.copytree(own, tmp_path / "whole"))
    old = Manifest.read(own / "manifest.json")
    manifest = append_to(whole, other)
    new = manifest.shards[len(old.shards) :]
    assert len(new) > 1 and len(manifest.raw["sides"][0]["shards"]) == len(manifest.shards)
    assert sizes.bytes == manifest.raw["totals"]["bytes"] - old.raw["totals"]["bytes"]
    assert manifest.raw["ancestors"][-1]["fingerprint"] == old.fingerprint
    assert_same_documents(whole, before + [d for d in more if d["doc_id"] not in known])
    assert not failures(whole)
    for count in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(appending, "write_shard", killed_after(appending.write_shard, count))
            with pytest.raises(KeyboardInterrupt):
                append_to(own, other)
        assert HiddenStatesDataset(own).manifest.fingerprint == old.fingerprint
    append_to(own, other)
    assert digests(own) == digests(whole)


def test_append_needs_the_added_layers_too(own, plain):
    """Otherwise layers would be lost without a word."""
    with pytest.raises(ConfigError, match=r"another dataset lacks.*spec-data merge"):
        plan_append(AppendConfig(data=(str(own), str(plain))))


def test_gc_keeps_the_files_of_sides(own):
    stray = own / "shards" / "unit-00000-side7.arrow"
    shutil.copyfile(own / SIDE, stray)
    assert [leftover.path for leftover in find_leftovers(own)] == [stray]


# -- damage -----------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_side_is_found(own):
    file = own / SIDE
    whole = file.read_bytes()
    for place in range(len(whole) // 7, len(whole), len(whole) // 7):
        data = bytearray(whole)
        data[place] ^= 0x40
        file.write_bytes(bytes(data))
        found = failures(own)
        assert found and any("side1" in line for line in found), place
    file.write_bytes(whole[:-100])
    with pytest.raises(DatasetError, match=r"unit-00001-side1.*truncated"):
        HiddenStatesDataset(own)
    file.unlink()
    with pytest.raises(MissingError, match="unit-00001-side1"):
        HiddenStatesDataset(own)


def test_a_value_that_changed_is_named_by_its_column(own):
    dataset = HiddenStatesDataset(own)
    first = dataset.manifest.shards[0].rows
    value = dataset[first]["hidden.L3"].view(torch.int16).numpy().tobytes()
    file = own / SIDE
    data = file.read_bytes()
    place = data.index(value)
    file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(DatasetError, match=r"side1\.arrow: row 0 .*column hidden\.L3: damaged"):
        _ = HiddenStatesDataset(own)[first]
    assert any("column hidden.L3" in line for line in failures(own))


def test_files_that_were_swapped_are_refused(own):
    records = stored_records(Manifest.read(own / "manifest.json"))
    sides = [record for record in records if "side" in record.file]
    one, other = sides[0], sides[1]
    a, b = (own / one.file).read_bytes(), (own / other.file).read_bytes()
    (own / one.file).write_bytes(b)
    (own / other.file).write_bytes(a)

    def swapped(raw):  # and a manifest that says so, which only the index contradicts
        first, second = raw["sides"][0]["shards"][:2]
        for name in ("bytes", "sha256", "outline"):
            first[name], second[name] = second[name], first[name]

    rewritten(own, swapped)
    with pytest.raises(DatasetError, match="side1"):
        _ = HiddenStatesDataset(own)[0]["hidden.L1"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("sides"), "totals.bytes"),
        (lambda raw: raw.update(format_version="1.2"), "format_version is 1.2"),
        (lambda raw: raw["sides"][0]["shards"].pop(), "files, and there are"),
        (lambda raw: raw["sides"][0].update(columns=["hidden.L1", "hidden.L1"]), "expected layers"),
        (lambda raw: raw["sides"][0].update(columns=["input_ids"]), "expected layers"),
        (lambda raw: raw["sides"].append(raw["sides"][0]), "expected layers"),
        (lambda raw: raw["sides"][0]["shards"][0].update(tokens=1), "other counts"),
        (lambda raw: raw["sides"][0]["shards"][0].update(file="../x"), "path inside"),
        (lambda raw: raw["sides"][0].update(columns=3), "columns"),
        (lambda raw: raw["totals"].update(bytes=7), "totals.bytes"),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(own, change, words):
    rewritten(own, change)
    with pytest.raises(DatasetError, match=words):
        _ = HiddenStatesDataset(own)[0]


BAD = [None, True, -1, 0, 2**63, 1.5, "", "x", "../x", "é" * 300, [], [None], {}, {"a": None}]


def test_wrong_values_anywhere_in_sides_are_refused_in_words(own):
    """A manifest is a file that anyone can edit; see tests/faults/test_manifest.py."""
    whole = (own / "manifest.json").read_text()
    rng = np.random.default_rng(3)
    for _ in range(40):
        raw = json.loads(whole)
        at = raw["sides"][0]
        key = rng.choice(["columns", "shards"])
        if rng.random() < 0.7:
            at, key = at[key], int(rng.integers(2))
            if isinstance(at[key], dict) and rng.random() < 0.8:
                at, key = at[key], str(rng.choice(sorted(at[key])))
        at[key] = BAD[rng.integers(len(BAD))]
        raw["fingerprint"] = fingerprint(raw)
        (own / "manifest.json").write_text(dump_json(raw))
        try:
            _ = HiddenStatesDataset(own)[0]["hidden.L1"]
        except (DatasetError, MissingError):
            continue
        assert failures(own), raw["sides"]
