"""`merge`, `append` and `gc` against plain Python: documents, order, refusals, kills, locks."""

import json
import shutil

import pytest
from filelock import FileLock
from msgspec import structs

from spec_data import cli
from spec_data.options.view_options import (
    AppendConfig,
    DropColumnsConfig,
    MergeConfig,
    SelectConfig,
)
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.schema import Ancestor, Manifest
from spec_data.shards.seal import seal
from spec_data.views import appending
from spec_data.views.appending import append, append_sizes, plan_append
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.joining import joined_counts, plan_merge
from spec_data.views.leftovers import delete_leftovers, find_leftovers
from spec_data.views.select_view import plan_select
from spec_data.views.view_manifest import joined_total
from spec_data.views.write_view import view_sizes, write_view
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_data.runs import digests
from tests.spec_data.views.view_tools import (
    Killed,
    assert_same_documents,
    assert_verified,
    documents_of,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other documents of the same target."""
    path = tmp_path_factory.mktemp("other") / "set"
    made = tiny_dataset(
        path, seed=7, model=tiny_llama(64, seed=0), documents=random_documents(12, 64, 7)
    )
    return made


def merge(out, *data) -> Manifest:
    config = MergeConfig(data=tuple(map(str, data)), out=str(out))
    return write_view(out, plan_merge(config))


def grow(path, *others) -> Manifest:
    return append(plan_append(AppendConfig(data=tuple(map(str, (path, *others))))))


def part(data, out, **options):
    config = SelectConfig(data=str(data), out=str(out), **options)
    write_view(out, plan_select(config))
    return out


def resealed(source, out, **changes):
    """Copy a dataset, with other values in its manifest."""
    shutil.copytree(source, out)
    manifest = Manifest.read(out / MANIFEST)
    (out / MANIFEST).unlink()
    seal(out, manifest.changed(files={}, **changes), manifest.shards)
    return out


# -- merge ------------------------------------------------------------------------------------


def test_a_union_has_each_document_once_in_order(data, other, tmp_path):
    some = part(data, tmp_path / "some", sample="9")
    plain = documents_of(some) + documents_of(other)
    known = {d["doc_id"] for d in plain}
    plain += [d for d in documents_of(data) if d["doc_id"] not in known]
    config = MergeConfig(data=tuple(map(str, (some, other, data))), out=str(tmp_path / "v"))
    sizes = view_sizes(plan_merge(config))
    manifest = merge(tmp_path / "v", some, other, data)
    assert_same_documents(tmp_path / "v", plain)
    assert_verified(tmp_path / "v")
    assert sizes.bytes == manifest.totals.bytes and sizes.documents == len(plain)
    assert manifest.documents.dropped["duplicate"] == 9
    linked = [(tmp_path / "v" / r.file).stat().st_nlink for r in manifest.shards]
    assert linked[0] == 2, "a shard that does not change is linked"
    first = Manifest.read(some / MANIFEST).fingerprint
    assert manifest.ancestors == [Ancestor(fingerprint=first, documents=9)]
    assert [entry.documents for entry in manifest.view.of] == [9, 12, 24]
    merge(tmp_path / "again", some, other, data)
    assert digests(tmp_path / "again") == digests(tmp_path / "v")


def test_a_union_has_the_columns_and_rows_that_all_have(data, sparse, other, tmp_path):
    narrow = tmp_path / "narrow"
    config = DropColumnsConfig(data=str(other), out=str(narrow), layers="0,2")
    write_view(narrow, plan_drop_columns(config))
    manifest = merge(tmp_path / "v", narrow, sparse)
    whole = tmp_path / "whole"
    config = DropColumnsConfig(
        data=str(narrow), out=str(whole), final="supervised", teacher="supervised"
    )
    write_view(whole, plan_drop_columns(config))
    plain = documents_of(whole)
    plain += [{k: v for k, v in d.items() if k != "hidden.L1"} for d in documents_of(sparse)]
    assert_same_documents(tmp_path / "v", plain)
    assert_verified(tmp_path / "v")
    assert manifest.layers == (0, 2) and manifest.teacher == manifest.final == "supervised"
    assert not manifest.ancestors, "the first dataset did not stay as it was"


def test_datasets_that_cannot_be_one_are_refused(data, other, tmp_path):
    foreign = tiny_dataset(tmp_path / "foreign", n_docs=4, seed=3)
    with pytest.raises(DatasetError, match=r"head\.safetensors: other"):
        merge(tmp_path / "v", data, foreign)
    target = structs.replace(Manifest.read(other / MANIFEST).target, dtype="bfloat16")
    rounded = resealed(other, tmp_path / "rounded", target=target)
    with pytest.raises(DatasetError, match="dtype"):
        merge(tmp_path / "v", data, rounded)
    one = resealed(data, tmp_path / "one", identity={"weights_hash": "a"})
    two = resealed(other, tmp_path / "two", identity={"weights_hash": "b"})
    with pytest.raises(DatasetError, match="weights_hash"):
        merge(tmp_path / "v", one, two)
    tokens = resealed(other, tmp_path / "tokens", identity={"tokenizer_hash": "b"})
    named = resealed(data, tmp_path / "named", identity={"tokenizer_hash": "a"})
    with pytest.raises(DatasetError, match="tokenizer_hash"):
        merge(tmp_path / "v", named, tokens)
    with pytest.raises(ConfigError, match="two datasets"):
        merge(tmp_path / "v", data)
    assert not (tmp_path / "v").exists()


def test_counts_and_figures_of_a_union():
    a = {"read": 5, "dropped": {"duplicate": 1}, "unrendered_examples": {"x": ["1", "2"]}}
    b = {"read": 2, "dropped": {"cut": 2}, "unrendered_examples": {"x": ["3", "4"]}}
    found = joined_counts([a, b], 4)
    assert found["read"] == 7 and found["dropped"] == {"cut": 2, "duplicate": 5}
    assert found["unrendered_examples"] == {"x": ["1", "2"]}
    names = ("nll", "own_nll", "own_share", "nll_error", "excess_error")
    one = {"documents": 1, "tokens": 100, "first_choice": 60} | dict.fromkeys(names, 1.0)
    two = {"documents": 3, "tokens": 300, "first_choice": 90} | dict.fromkeys(names, 2.0)
    total = joined_total([one, two])
    assert (total["documents"], total["tokens"], total["first_choice"]) == (4, 400, 150)
    assert total["nll"] == 1.75, "weighted by tokens"
    assert total["nll_error"] == pytest.approx((100**2 + 600**2) ** 0.5 / 400, rel=1e-5)


# -- append -----------------------------------------------------------------------------------


def test_append_adds_shards_and_leaves_the_others(data, other, tmp_path):
    grown = tmp_path / "grown"
    shutil.copytree(data, grown)
    before = Manifest.read(grown / MANIFEST)
    old = {r.file: (grown / r.file).stat().st_ino for r in before.shards}
    planned = plan_append(AppendConfig(data=(str(grown), str(other))))
    sizes = append_sizes(planned)
    manifest = append(planned)
    assert_same_documents(grown, documents_of(data) + documents_of(other))
    assert_verified(grown)
    assert {r.file: (grown / r.file).stat().st_ino for r in before.shards} == old
    assert sizes.bytes == sum(r.bytes for r in manifest.shards[len(before.shards) :])
    (ancestor,) = manifest.ancestors
    assert ancestor.fingerprint == before.fingerprint
    assert ancestor.documents == len(HiddenStatesDataset(data))
    assert not (grown / ".view").exists()
    after = digests(grown)
    assert plan_append(AppendConfig(data=(str(grown), str(other)))).view is None
    assert digests(grown) == after, "a second time there is nothing new"
    third = part(data, tmp_path / "third", mask="roles=user")
    manifest = grow(grown, third)
    assert [a.documents for a in manifest.ancestors] == [24, 36]


def test_append_resumes_wherever_it_is_killed(data, other, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    shutil.copytree(data, whole)
    grow(whole, other)
    expected = digests(whole)
    move = Killed(appending.replace_durably)
    monkeypatch.setattr(appending, "replace_durably", move)
    for allowed in range(5):
        grown, move.left = tmp_path / f"v{allowed}", allowed
        shutil.copytree(data, grown)
        with pytest.raises(KeyboardInterrupt):
            grow(grown, other)
        move.left = 99
        grow(grown, other)
        assert digests(grown) == expected, allowed

    def failing(*_):
        raise KeyboardInterrupt

    grown = tmp_path / "early"
    shutil.copytree(data, grown)
    monkeypatch.setattr(appending, "seal", failing)
    with pytest.raises(KeyboardInterrupt):
        grow(grown, other)
    assert len(HiddenStatesDataset(grown)) == 24, "until then it is the dataset that it was"
    with pytest.raises(ConfigError, match=r"an append with other .*`spec-data gc .*early --yes`"):
        grow(grown, part(other, tmp_path / "few", sample="3"))
    found = {leftover.path.name for leftover in delete_leftovers(grown)}
    assert ".view" in found and any(name.startswith("unit-") for name in found)
    assert digests(grown) == digests(data)


def test_a_view_written_again_leaves_the_append_to_it_alone(
    data, other, tmp_path, monkeypatch, caplog
):
    view = part(data, tmp_path / "view", sample="9")
    whole = tmp_path / "whole"
    shutil.copytree(view, whole)
    grow(whole, other)
    move = Killed(appending.replace_durably)
    move.left = 1
    monkeypatch.setattr(appending, "replace_durably", move)
    with pytest.raises(KeyboardInterrupt):
        grow(view, other)
    part(data, view, sample="9")  # its manifest is still that of the view
    assert "`append` was interrupted; run it again" in caplog.text
    move.left = 99
    grow(view, other)
    assert digests(view) == digests(whole)


def test_append_refuses_what_would_change_its_shards(data, sparse, tmp_path):
    grown = tmp_path / "grown"
    shutil.copytree(data, grown)
    with pytest.raises(ConfigError, match="spec-data merge"):
        grow(grown, sparse)
    assert digests(grown) == digests(data)


# -- gc ---------------------------------------------------------------------------------------


def test_gc_deletes_what_nothing_needs_and_nothing_else(data, tmp_path):
    path = tmp_path / "set"
    shutil.copytree(data, path)
    planted = [path / n for n in (".index.arrow.ab0123456789.tmp", "shards/unit-00099.arrow")]
    planted += [path / "target/.config.json.ab0123456789.tmp", path / ".generate/plan.json"]
    (path / ".generate").mkdir()
    for file in planted:
        file.write_bytes(b"left")
    kept = [path / n for n in ("notes.txt", "shards/mine.arrow", "target/extra.json", ".x.tmp")]
    for file in kept:
        file.write_text("mine")
    found = find_leftovers(path)
    assert len(found) == 4 and all(f.exists() for f in planted), "nothing is deleted yet"
    assert sum(f.bytes for f in found) == 16
    (path / ".generate/worker-0-of-1.lock").write_text("")
    with (
        FileLock(path / ".generate/worker-0-of-1.lock"),
        pytest.raises(RunError, match="works here"),
    ):
        delete_leftovers(path)
    assert all(f.exists() for f in planted)
    delete_leftovers(path)
    assert not any(f.exists() for f in planted) and all(f.exists() for f in kept)
    for file in kept:
        file.unlink()
    assert digests(path) == digests(data)
    with pytest.raises(MissingError, match="no dataset"):
        find_leftovers(tmp_path)


def test_gc_of_an_unfinished_directory_keeps_finished_units(tmp_path):
    path = tmp_path / "set"
    (path / "shards").mkdir(parents=True)
    (path / ".generate").mkdir()
    for unit in (0, 1):
        (path / f"shards/unit-0000{unit}.arrow").write_bytes(b"states")
    (path / ".generate/unit-00000.json").write_text(json.dumps({"record": {}}))
    assert [f.path.name for f in delete_leftovers(path)] == ["unit-00001.arrow"]
    assert (path / "shards/unit-00000.arrow").exists()


# -- commands ---------------------------------------------------------------------------------


def test_commands_take_directories_and_say_the_next_one(data, other, tmp_path, capsys):
    grown = tmp_path / "grown"
    shutil.copytree(data, grown)
    out = str(tmp_path / "v")
    assert cli.main(["merge", str(data), str(other), "--out", out, "--dry-run"]) == 0
    assert "documents      36" in capsys.readouterr().out
    assert cli.main(["append", str(grown), str(other), "--dry-run"]) == 0
    assert "unchanged    2" in capsys.readouterr().out
    assert cli.main(["append", str(grown), str(data)]) == 0
    assert "nothing is new" in capsys.readouterr().out
    (grown / ".index.arrow.120123456789.tmp").write_bytes(b"half")
    assert cli.main(["gc", str(grown)]) == 0
    found = capsys.readouterr()
    assert "1 leftovers, 4 bytes" in found.out and "--yes" in found.out + found.err
    assert cli.main(["gc", str(grown), "--yes"]) == 0
    assert digests(grown) == digests(data)
    assert cli.main(["merge", str(data), "--out", out]) == 2
    assert cli.main(["select", "s3://bucket/set", "--out", out]) == 2
