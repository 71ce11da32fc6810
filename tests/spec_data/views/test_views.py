"""Views against plain Python and against copies of themselves: documents, values, sources."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec import structs

import spec_data
from spec_data import cli
from spec_data.shards.errors import ConfigError, DatasetError, DraftError, MissingError
from spec_data.shards.files import MANIFEST
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.schema import CountsRecord, Manifest, fingerprint
from spec_data.shards.seal import file_records, seal
from spec_data.shards.serving import usual_kwargs
from spec_data.shards.shard import CodedRows
from spec_data.shards.storage import check_view_sources
from spec_data.shards.turn_masks import supervised_spans
from spec_data.views.derive import joined_counts
from spec_data.views.select import document_id, document_scores, sample_size
from tests.factory import tiny_dataset
from tests.faults.datasets import INDEX, index_table, set_column, stream_of
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_data.runs import digests, run, save_target, write_corpus
from tests.spec_data.shards.integrity_tools import flip
from tests.spec_data.views.view_tools import assert_same_documents, assert_verified, documents_of
from tests.spec_train.training.tools import change, metrics
from tests.spec_train.training.tools import config as config_fixture
from tests.spec_train.training.tools import run as fit_run

config = config_fixture


# -- a view reads what a copy of it reads ---------------------------------------------------------

VIEWS = {
    "some": lambda c, out: spec_data.select(c / "sparse", out, sample="50%", layers="0,4"),
    "coded": lambda c, out: spec_data.select(c / "default", out, where="number % 2 = 0"),
    "mask": lambda c, out: spec_data.select(c / "default", out, mask="last-turn"),
    "dense mask": lambda c, out: spec_data.select(c / "dense", out, mask="all", layers="2"),
    "merge": lambda c, out: spec_data.merge([c / "sparse", c / "dense"], out),
    "merge codecs": lambda c, out: spec_data.merge([c / "default", c / "fine", c / "dense"], out),
    "join": lambda c, out: spec_data.join([c / "sparse", c / "layers"], out),
    "join codecs": lambda c, out: spec_data.join([c / "default", c / "coded layers"], out),
    "join alike": lambda c, out: spec_data.join(
        [c / "default", spec_data.recode(c / "layers", out.with_name("same"), "default").path], out
    ),
}


def nested(c: Path, out: Path):
    """A view of views: two that are joined and masked, merged with a capture, and a part of it."""
    one, two, three = (out.with_name(f"{out.name}-{n}") for n in range(3))
    spec_data.join([c / "sparse", c / "layers"], one)
    spec_data.select(one, two, mask="first-1", layers="0,2,3", where="length > 12")
    spec_data.merge([two, one, c / "sparse"], three)
    result = spec_data.select(three, out, layers="2", sample="80%")
    for path in (one, two, three):
        shutil.rmtree(path)  # only the captures are referred to
    return result


@pytest.mark.parametrize("name", [*VIEWS, "nested"])
def test_a_view_reads_what_its_copy_reads(captured, tmp_path, name):
    view, copied = tmp_path / "view", tmp_path / "copied"
    (nested if name == "nested" else VIEWS[name])(captured, view)
    assert sorted(p.name for p in view.iterdir()) == ["index.arrow", "manifest.json"]
    spec_data.copy(view, copied)
    assert_same_documents(view, documents_of(copied))
    assert_verified(view)
    assert_verified(copied)
    one, other = HiddenStatesDataset(view), HiddenStatesDataset(copied)
    for facts in ("lengths", "supervised", "first_supervised"):
        assert np.array_equal(getattr(one, facts), getattr(other, facts))
    assert one.doc_ids == other.doc_ids and one.features == other.features
    for index in range(len(one)):
        assert one.source_of(index) == other.source_of(index)
        for column in one.manifest.columns:
            assert torch.equal(*(part_of(d, index, column) for d in (one, other))), column.name


def part_of(dataset, index, column):
    """The first tokens of a column, as the loader reads them: gathered codes, or a buffer."""
    count = max(1, int(dataset.lengths[index]) - 2)
    if column.lossy:
        rows = CodedRows(column.width, count + 1, pin=False)
        dataset.read_into(index, {column.name: rows}, start=1, length=count)
        return rows.states(count + 1, "cpu", torch.float32, False)
    width = () if column.width is None else (column.width,)
    out = torch.full((count + 1, *width), 7.0)
    dataset.read_into(index, {column.name: out}, start=1, length=count, marked=False)
    return out


def test_fit_learns_the_same_from_a_view_and_from_its_copy(config, tmp_path):
    view, copied = tmp_path / "view", tmp_path / "copied"
    spec_data.select(config.data, view, sample="60%", mask="first-1")
    spec_data.copy(view, copied)
    for name, path in (("a", view), ("b", copied)):
        fit_run(change(config, data=str(path), out=str(tmp_path / name), steps=6))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    files = [tmp_path / name / "last/model.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- sources --------------------------------------------------------------------------------------


@pytest.fixture
def moved(data, tmp_path):
    """A dataset of its own and a view of it, both in one folder."""
    shutil.copytree(data, tmp_path / "here/set")
    spec_data.select(tmp_path / "here/set", tmp_path / "here/views/short", where="number < 22")
    return tmp_path / "here"


def test_a_folder_with_a_view_and_its_source_can_be_moved(moved, tmp_path):
    before = documents_of(moved / "views/short")
    moved.rename(tmp_path / "there")
    assert_same_documents(tmp_path / "there/views/short", before)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there/views/short")
    assert_same_documents(link, before)


def replaced(source: Path) -> None:
    shutil.rmtree(source)
    tiny_dataset(source, n_docs=24, seed=3)


def shortened(source: Path) -> None:
    file = source / "shards/unit-00001.arrow"
    file.write_bytes(file.read_bytes()[:-8])


def turned_into_a_view(source: Path) -> None:
    source.rename(source.with_name("set2"))
    spec_data.select(source.with_name("set2"), source, sample="100%")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda source: source.rename(source.with_name("x")), MissingError, "moved or deleted"),
        (lambda source: (source / "shards/unit-00000.arrow").unlink(), MissingError, "unit-00000"),
        (replaced, DatasetError, "another dataset is there now"),
        (turned_into_a_view, DatasetError, "another dataset is there now"),
        (shortened, DatasetError, "unit-00001"),
    ],
)
def test_a_source_that_changed_is_an_error_that_names_it(moved, change, error, words, capsys):
    change(moved / "set")
    with pytest.raises(error, match=words) as refused:
        HiddenStatesDataset(moved / "views/short")
    assert str(moved / "set") in str(refused.value) and "views/short" in str(refused.value)
    assert cli.main(["verify", str(moved / "views/short")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["unit-00001.arrow", "config.json"])
def test_damage_of_a_source_is_found_before_it_is_read_or_copied(moved, tmp_path, name):
    file = next((moved / "set").rglob(name))
    flip(file)
    if file.suffix == ".arrow":
        with pytest.raises(DatasetError, match=name):
            list(HiddenStatesDataset(moved / "views/short"))
    with pytest.raises(DatasetError, match=name):
        spec_data.copy(moved / "views/short", tmp_path / "copied")
    with pytest.raises(AssertionError, match=name):
        assert_verified(moved / "views/short")
    assert not (tmp_path / "copied" / MANIFEST).exists()


def test_views_of_remote_datasets(data, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPEC_DATA_REMOTE_SOURCES", "memory://bucket")
    put_in_memory(data, "memory://bucket/set")
    try:
        where = "length < 20 and (nll > 0 or supervised = 0)"  # also what only the shards say
        spec_data.select("memory://bucket/set", tmp_path / "view", where=where)
        spec_data.select(data, tmp_path / "local", where=where)
        with pytest.raises(ConfigError, match="no shards here; make a dataset of it"):
            spec_data.push("memory://bucket/set", "me/set")
        expected = documents_of(tmp_path / "local")
        assert_same_documents(tmp_path / "view", expected)
        assert_verified(tmp_path / "view")
        spec_data.copy(tmp_path / "view", tmp_path / "copied")
        assert_same_documents(tmp_path / "copied", expected)
        with pytest.raises(DatasetError, match="leave --follow out"):
            FollowedDataset(tmp_path / "view")
        view = HiddenStatesDataset(tmp_path / "view")
        assert view.fetch_ahead(range(len(view))) >= 0 and view.sources[0].mirror is not None
        monkeypatch.delenv("SPEC_DATA_REMOTE_SOURCES")  # this one lies beside its source
        put_in_memory(tmp_path / "view", "memory://bucket/view")
        assert_same_documents("memory://bucket/view", expected)
    finally:
        forget_memory()


# -- views that somebody else made ----------------------------------------------------------------


def edited_view(folder: Path, edit, to: Path) -> Path:
    """A copy of a view with another manifest, sealed again."""
    copy = Path(shutil.copytree(folder, to))
    raw = json.loads((copy / MANIFEST).read_text())
    edit(raw)
    raw["fingerprint"] = fingerprint(raw)
    (copy / MANIFEST).write_text(json.dumps(raw))
    return copy


def source_of(folder: Path, path: str) -> dict:
    manifest = Manifest.read(folder / MANIFEST)
    return {"path": path, "fingerprint": manifest.fingerprint, "documents": 24}


def test_a_chain_of_views_is_refused_at_its_first_link(data, tmp_path):
    """Each is one of the one before, to a depth that no recursion could reach."""
    spec_data.select(data, tmp_path / "v0", sample="5")
    for n in range(1, 5):
        last = source_of(tmp_path / f"v{n - 1}", f"../v{n - 1}")
        edited_view(
            tmp_path / "v0",
            lambda raw, last=last: raw["view"].update(sources=[last]),
            tmp_path / f"v{n}",
        )
    with pytest.raises(DatasetError, match=r"v4: a view of \S+/v3 .*: it is a view itself"):
        HiddenStatesDataset(tmp_path / "v4")


@pytest.mark.parametrize("path", [".", "../itself", "../itself/../itself"])
def test_a_view_of_itself_is_refused(data, tmp_path, path):
    spec_data.select(data, tmp_path / "v", sample="5")
    edit = lambda raw: raw["view"]["sources"][0].update(path=path)  # noqa: E731
    made = edited_view(tmp_path / "v", edit, tmp_path / "itself")
    with pytest.raises(DatasetError, match=r"itself: a view of .*: another dataset is there now"):
        HiddenStatesDataset(made)


def test_a_source_that_is_named_many_times_is_opened_once(data, tmp_path, monkeypatch):
    spec_data.select(data, tmp_path / "v", sample="5")
    edit = lambda raw: raw["view"].update(sources=raw["view"]["sources"] * 3000)  # noqa: E731
    made = edited_view(tmp_path / "v", edit, tmp_path / "many")
    read = []
    monkeypatch.setattr(Manifest, "read", counted(Manifest.read, read))
    assert_same_documents(made, documents_of(tmp_path / "v"))
    assert len(read) == 4  # two views, and their source for each


def counted(real, calls: list):
    def call(*given, **named):
        calls.append(given)
        return real(*given, **named)

    return call


def test_a_view_of_too_many_sources_is_refused_before_any_is_opened(data, tmp_path, monkeypatch):
    spec_data.select(data, tmp_path / "v", sample="5")
    edit = lambda raw: raw["view"].update(sources=raw["view"]["sources"] * 20_000)  # noqa: E731
    made = edited_view(tmp_path / "v", edit, tmp_path / "many")
    with pytest.raises(DatasetError, match="view: 20,000 sources, at most 4,096"):
        HiddenStatesDataset(made)
    monkeypatch.setattr("spec_data.views.rows.MOST_SOURCES", 0)
    with pytest.raises(ConfigError, match="a view of 1 datasets, at most 0; `merge` some of them"):
        spec_data.select(data, tmp_path / "w", sample="5")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("given", "url", "allowed"),
    [
        ("", "memory://bucket/set", False),
        ("memory://bucket", "memory://bucket/set", True),
        ("memory://other, memory://bucket/set/", "memory://bucket/set", True),
        ("memory://", "memory://bucket/set", True),
        ("memory://buck", "memory://bucket/set", False),
        ("memory://bucket/se", "memory://bucket/set", False),
    ],
)
def test_a_local_view_reads_remote_storage_only_if_the_user_names_it(
    data, tmp_path, monkeypatch, given, url, allowed
):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPEC_DATA_REMOTE_SOURCES", given)
    spec_data.select(data, tmp_path / "v", sample="5")
    edit = lambda raw: raw["view"]["sources"][0].update(path=url)  # noqa: E731
    made = edited_view(tmp_path / "v", edit, tmp_path / "remote")
    put_in_memory(data, url)
    try:
        if allowed:
            assert_same_documents(made, documents_of(tmp_path / "v"))
            return
        monkeypatch.setattr("spec_data.shards.storage.Storage.read", None)  # nothing is asked
        with pytest.raises(
            ConfigError, match=r": export SPEC_DATA_REMOTE_SOURCES=memory://bucket$"
        ):
            HiddenStatesDataset(made)
    finally:
        forget_memory()


def test_a_remote_view_reads_what_lies_in_its_own_bucket_only(monkeypatch):
    monkeypatch.delenv("SPEC_DATA_REMOTE_SOURCES", raising=False)
    for view, source in [
        ("s3://bucket/view", "s3://bucket/set"),
        ("hf://datasets/me/view", "hf://datasets/me/view/set"),
        ("https://host/view", "https://host/set"),
        ("s3://bucket/view", "/local/set"),
    ]:
        check_view_sources(view, [source])
    for view, source in [
        ("s3://bucket/view", "s3://bucket-2/set"),
        ("s3://bucket/view", "gs://bucket/set"),
        ("hf://datasets/me/view", "hf://datasets/other/set"),
        ("https://host/view", "http://169.254.169.254/latest"),
        ("views/v", "https://host/set"),
    ]:
        with pytest.raises(ConfigError, match="SPEC_DATA_REMOTE_SOURCES"):
            check_view_sources(view, [source])


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("source_number.0", -1, "which does not exist"),  # would be read from the last one
        ("source_number.0", 1, "which does not exist"),
        ("document.0", -1, "which does not exist"),
        ("document.0", 24, "which does not exist"),
    ],
)
def test_references_to_nothing_are_refused(data, tmp_path, column, value, words):
    spec_data.select(data, tmp_path / "v", sample="5")
    table = index_table(tmp_path / "v")
    crafted_index(tmp_path / "v", set_column(table, column, lambda v: v.__setitem__(2, value)))
    with pytest.raises(DatasetError, match=rf"index\.arrow: document 2 is said .*{words}"):
        list(HiddenStatesDataset(tmp_path / "v"))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([3], "half a span"),
        ([2, 2], "impossible spans"),
        ([5, 3], "impossible spans"),
        ([-4, -1], "impossible spans"),
        ([0, 10**6], "impossible spans"),
        ([4, 6, 5, 7], "impossible spans"),
        ([1, 2], "other supervised tokens than its spans"),
        ([], "other supervised tokens than its spans"),
    ],
)
def test_spans_that_cannot_be_are_refused(data, tmp_path, spans, words):
    spec_data.select(data, tmp_path / "v", sample="5", mask="all")
    table = index_table(tmp_path / "v")
    values = table.column("spans").to_pylist()
    values[1] = spans
    place = table.schema.get_field_index("spans")
    field = table.schema.field(place)
    table = table.set_column(place, field, pa.array(values, field.type))
    crafted_index(tmp_path / "v", table)
    with pytest.raises(DatasetError, match=rf"index\.arrow: document 1 has {words}"):
        HiddenStatesDataset(tmp_path / "v").mask_of(0)


def crafted_index(view: Path, table: pa.Table) -> None:
    """Write the index of a view, with its checksums in the manifest."""
    (view / INDEX).write_bytes(stream_of(table))
    raw = json.loads((view / MANIFEST).read_text())
    raw["files"] |= plain(file_records(view, [INDEX]))
    raw["fingerprint"] = fingerprint(raw)
    (view / MANIFEST).write_text(json.dumps(raw))


# -- select ---------------------------------------------------------------------------------------


def test_a_condition_keeps_the_documents_that_plain_python_keeps(data, tmp_path):
    documents = documents_of(data)
    plain = [
        d
        for d in documents
        if 10 <= len(d["input_ids"]) <= 30 and 4 <= int(d["loss_mask"].sum()) <= 12
    ]
    assert 0 < len(plain) < len(documents)
    where = "length between 10 and 30 and supervised >= 4 and supervised <= 12"
    made = spec_data.select(data, tmp_path / "v", where=where)
    assert_same_documents(tmp_path / "v", plain)
    manifest = Manifest.read(tmp_path / "v" / MANIFEST)
    assert made.dropped == {"select:where": len(documents) - len(plain)}
    assert manifest.documents.stored == made.documents == len(plain)
    assert manifest.provenance.options == {"where": where}
    again = spec_data.select(data, tmp_path / "v", where=where)
    assert again.fingerprint == made.fingerprint


def test_samples_and_the_documents_of_others(data, tmp_path):
    plain = {d["doc_id"] for d in documents_of(data)}
    chosen = {}
    for amount in (6, "50%", 0.5):
        out = tmp_path / str(amount)
        spec_data.select(data, out, sample=amount, seed=3)
        chosen[amount] = {d["doc_id"] for d in documents_of(out)}
    assert len(chosen[6]) == 6 and chosen[6] < chosen["50%"] == chosen[0.5] < plain
    spec_data.select(data, tmp_path / "other", sample="6", seed=4)
    assert {d["doc_id"] for d in documents_of(tmp_path / "other")} != chosen[6]
    made = spec_data.select(data, tmp_path / "rest", not_in=tmp_path / "6")
    assert {d["doc_id"] for d in documents_of(tmp_path / "rest")} == plain - chosen[6]
    assert made.dropped == {"select:not-in": 6}


def test_conditions_are_about_documents_as_the_new_mask_makes_them(captured, tmp_path):
    """In one step as in two: what is held out under a mask is not trained on under it."""
    data, masked = captured / "default", tmp_path / "masked"
    spec_data.select(data, masked, mask="last-turn")
    every = {d["doc_id"] for d in documents_of(masked)}
    spec_data.select(data, tmp_path / "held", mask="last-turn", sample="6")
    held = {d["doc_id"] for d in documents_of(tmp_path / "held")}
    spec_data.select(data, tmp_path / "rest", mask="last-turn", not_in=tmp_path / "held")
    assert {d["doc_id"] for d in documents_of(tmp_path / "rest")} == every - held
    dataset = HiddenStatesDataset(masked)
    nll = document_scores(dataset, np.arange(len(dataset)), nll=True)[1]
    where = f"nll < {np.median(nll)}"
    spec_data.select(data, tmp_path / "one", mask="last-turn", where=where)
    spec_data.select(masked, tmp_path / "two", where=where)
    one, two = ({d["doc_id"] for d in documents_of(tmp_path / name)} for name in ("one", "two"))
    assert one == two and 0 < len(one) < len(every)


def test_what_a_capture_cut_off_is_no_share_of_a_view(tmp_path):
    target = save_target(tmp_path / "target")
    corpus = write_corpus(tmp_path / "c.jsonl", 12)
    run(target, corpus, data := tmp_path / "data", max_length=40)
    assert "were cut off at the maximal length" in str(spec_data.inspect(data))
    spec_data.select(data, tmp_path / "view", where="length < 40")
    assert "cut off" not in str(spec_data.inspect(tmp_path / "view"))
    spec_data.write_report(tmp_path / "view", out=tmp_path / "view.html")
    assert "cut off" not in (tmp_path / "view.html").read_text()


def test_a_link_to_an_empty_folder_is_an_output(data, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    spec_data.select(data, tmp_path / "link", sample=3)
    assert (tmp_path / "link").is_symlink()
    assert len(HiddenStatesDataset(tmp_path / "link")) == 3


@pytest.mark.parametrize("amount", ["0", "-5", "120%", "1.5", "nan"])
def test_a_wrong_sample_is_refused(amount):
    with pytest.raises(ConfigError, match="--sample"):
        sample_size(amount, 10)


def test_a_new_mask_changes_masks_and_ids_alone(data, tmp_path):
    plain = []
    for document in documents_of(data):
        turns = [(t["role"], t["start"], t["end"]) for t in document["turns"]]
        mask = torch.zeros(len(document["input_ids"]), dtype=torch.bool)
        for start, end in supervised_spans(len(mask), turns, "roles=user"):
            mask[start:end] = True
        name = document_id(document["input_ids"].numpy(), mask.numpy())
        plain.append(document | {"loss_mask": mask, "doc_id": name})
    made = spec_data.select(data, tmp_path / "v", mask="roles=user", where="supervised > 3")
    plain = [d for d in plain if int(d["loss_mask"].sum()) > 3 and d["loss_mask"][1:].any()]
    assert_same_documents(tmp_path / "v", plain)
    assert_verified(tmp_path / "v")
    assert "select:where" in made.dropped, "conditions see the new mask"
    assert Manifest.read(tmp_path / "v" / MANIFEST).mask == "roles=user"


def test_documents_that_a_mask_makes_equal_are_kept_once(tmp_path):
    rows = [
        {"input_ids": [5 + i, *range(8, 20)], "loss_mask": [0] * given + [1] * (13 - given)}
        for given in (3, 6)
        for i in range(4)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target = save_target(tmp_path / "target")
    assert run(target, tmp_path / "c.jsonl", tmp_path / "data", teacher="all").totals.documents == 8
    made = spec_data.select(tmp_path / "data", tmp_path / "v", mask="all")
    assert (made.documents, made.dropped) == (4, {"duplicate": 4})
    assert_verified(tmp_path / "v")


def test_a_mask_that_needs_states_that_are_not_stored_is_refused(captured, tmp_path):
    with pytest.raises(DatasetError, match=r"mask all supervises tokens of \d+ documents"):
        spec_data.select(captured / "sparse", tmp_path / "v", mask="all")
    assert not (tmp_path / "v").exists()


def test_fewer_layers(data, captured, tmp_path):
    spec_data.select(data, tmp_path / "v", layers=[0, 2])
    expected = [{k: v for k, v in d.items() if k != "hidden.L1"} for d in documents_of(data)]
    assert_same_documents(tmp_path / "v", expected)
    assert HiddenStatesDataset(tmp_path / "v").manifest.layers == (0, 2)
    with pytest.raises(DraftError, match="no layer"):
        spec_data.select(data, tmp_path / "w", layers="0,5")
    with pytest.raises(ConfigError, match="records no layers"):
        spec_data.select(data, tmp_path / "w", layers="eagle3")


def test_directories_that_cannot_be_written_are_refused(data, tmp_path):
    before = digests(data)
    for out in (data, data / "inside", data.parent):
        with pytest.raises(ConfigError, match="lies in, or contains"):
            spec_data.select(data, out, sample="3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    spec_data.select(data, tmp_path / "v", sample="3")
    for name in ("full", "v"):
        with pytest.raises(ConfigError, match="holds something else"):
            spec_data.select(data, tmp_path / name, sample="4")
    with pytest.raises(ConfigError, match=r"no document is left .*Its sources: 'tiny'$"):
        spec_data.select(data, tmp_path / "n", where="source = 'typo'")
    with pytest.raises(ConfigError, match=r"no document is left [^I]*$"):
        spec_data.select(data, tmp_path / "n", where="length > 1000000")
    with pytest.raises(ConfigError, match="--out \\.: give a new directory by its name"):
        spec_data.select(data, ".", sample="3")
    with pytest.raises(ConfigError, match="nothing would change"):
        spec_data.select(data, tmp_path / "n")
    target = save_target(tmp_path / "target")
    with pytest.raises(ConfigError, match="`spec-data select` made of others"):
        run(target, write_corpus(tmp_path / "chats.jsonl", 1), tmp_path / "v")
    assert digests(data) == before and (tmp_path / "full/notes.txt").read_text() == "mine"


# -- merge and join -------------------------------------------------------------------------------


def resealed(source, out, **changes):
    """Copy a dataset, with other values in its manifest."""
    shutil.copytree(source, out)
    manifest = Manifest.read(out / MANIFEST)
    (out / MANIFEST).unlink()
    seal(out, manifest.changed(files={}, card=None, **changes), manifest.shards)
    return out


def test_a_union_has_each_document_once_in_order(data, other, tmp_path):
    some = spec_data.select(data, tmp_path / "some", sample="9").path
    plain = documents_of(some) + documents_of(other)
    known = {d["doc_id"] for d in plain}
    plain += [d for d in documents_of(data) if d["doc_id"] not in known]
    made = spec_data.merge([some, other, data], tmp_path / "v")
    assert_same_documents(tmp_path / "v", plain)
    manifest = Manifest.read(tmp_path / "v" / MANIFEST)
    assert made.dropped == {"duplicate": 9, "select:sample": 15}
    assert [entry.documents for entry in manifest.provenance.of] == [9, 12, 24]
    spec_data.select(data, tmp_path / "narrow", layers="1")
    spec_data.merge([data, tmp_path / "narrow"], tmp_path / "w")
    dataset = HiddenStatesDataset(tmp_path / "w")
    assert dataset.manifest.layers == (1,)


def test_columns_of_other_codecs_are_decoded(captured, tmp_path, caplog):
    columns = Manifest.read(captured / "fine" / MANIFEST).columns
    worse = [
        structs.replace(c, error=c.error and structs.replace(c.error, escaped=0.5)) for c in columns
    ]
    resealed(captured / "fine", tmp_path / "o", columns=tuple(worse))
    spec_data.merge([captured / "default", tmp_path / "o"], tmp_path / "v")
    parts = [documents_of(captured / name) for name in ("default", "fine")]
    known = {d["doc_id"] for d in parts[0]}
    assert_same_documents(
        tmp_path / "v", parts[0] + [d for d in parts[1] if d["doc_id"] not in known]
    )
    manifest = HiddenStatesDataset(tmp_path / "v").manifest
    declared = next(column for column in manifest.columns if column.name == "hidden.L0")
    assert declared.codec == "packed" and not declared.exact
    assert declared.error.total > 0.01 and declared.error.escaped == 0.5  # of each the worst
    copied = spec_data.copy(tmp_path / "v", tmp_path / "c")
    assert "warning[codec]" in caplog.text and "will be stored in bf16" in caplog.text
    assert {c.codec for c in HiddenStatesDataset(copied.path).manifest.columns} & {"bf16"}
    with pytest.raises(DatasetError, match="encoded before"):
        spec_data.recode(tmp_path / "v", tmp_path / "w", "fine")


def test_a_join_has_the_layers_of_all(captured, tmp_path):
    spec_data.select(captured / "layers", tmp_path / "few", sample="9")
    made = spec_data.join([captured / "sparse", tmp_path / "few"], tmp_path / "v")
    more = {d["doc_id"]: d for d in documents_of(tmp_path / "few")}
    expected = [
        {k: (more[d["doc_id"]] | d)[k] for k in HiddenStatesDataset(tmp_path / "v").column_names}
        for d in documents_of(captured / "sparse")
        if d["doc_id"] in more
    ]
    assert_same_documents(tmp_path / "v", expected)
    assert HiddenStatesDataset(tmp_path / "v").manifest.layers == (0, 1, 2, 3, 4)
    assert made.dropped["join:missing"] == 5
    spec_data.join([captured / "sparse", captured / "coded layers"], tmp_path / "coded")
    paths = (captured / "coded layers", captured / "sparse", tmp_path / "coded")
    coded, exact, both = (HiddenStatesDataset(path).declared for path in paths)
    assert both == coded | exact, "the error of a column that was not taken is none of the view"
    for names, error, words in (
        (["sparse", "dense"], ConfigError, "adds no layer"),
        (["sparse"], ConfigError, "two datasets"),
    ):
        with pytest.raises(error, match=words):
            spec_data.join([captured / name for name in names], tmp_path / "w")
    rest = spec_data.select(captured / "layers", tmp_path / "rest", not_in=tmp_path / "few").path
    with pytest.raises(DatasetError, match="no document in common"):
        spec_data.join([tmp_path / "few", rest], tmp_path / "w")


def test_datasets_of_other_targets_are_refused(data, other, tmp_path):
    foreign = tiny_dataset(tmp_path / "foreign", n_docs=4, seed=3)
    target = structs.replace(Manifest.read(other / MANIFEST).target, dtype="bfloat16")
    rounded = resealed(other, tmp_path / "rounded", target=target)
    one = resealed(data, tmp_path / "one", identity={"weights_hash": "a"})
    two = resealed(other, tmp_path / "two", identity={"weights_hash": "b"})
    tokens = resealed(other, tmp_path / "tokens", identity={"tokenizer_hash": "b"})
    named = resealed(data, tmp_path / "named", identity={"tokenizer_hash": "a"})
    for make in (spec_data.merge, spec_data.join):
        for pair, words in (
            ((data, foreign), "head.safetensors: other"),
            ((data, rounded), "dtype"),
            ((one, two), "weights_hash"),
            ((named, tokens), "tokenizer_hash"),
        ):
            with pytest.raises(DatasetError, match=words):
                make(pair, tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_template_kwargs_of_documents_that_are_left_out_are_not_told(data, other, tmp_path):
    for path, used in ((data, "{}"), (other, '{"enable_thinking": false}')):
        identity = {"template_kwargs_used": {used: len(HiddenStatesDataset(path))}}
        resealed(path, tmp_path / path.parent.name, identity=identity)
    inputs = [tmp_path / path.parent.name for path in (data, other)]
    spec_data.merge(inputs, tmp_path / "both")
    spec_data.select(tmp_path / "both", tmp_path / "some", where="number >= 24")  # of `other`
    known = [Manifest.read(tmp_path / name / MANIFEST).identity for name in ("both", "some")]
    assert list(map(usual_kwargs, known)) == [{}, None]


def test_counts_of_a_union():
    a = CountsRecord(read=5, dropped={"duplicate": 1}, unrendered_examples={"x": ["1", "2"]})
    b = CountsRecord(read=2, dropped={"cut": 2}, unrendered_examples={"x": ["3", "4"]})
    counts = joined_counts([a, b], 4)
    assert counts.read == 7 and counts.dropped == {"cut": 2, "duplicate": 5}
    assert counts.unrendered_examples == {"x": ["3", "4"]}


def test_the_commands(data, other, tmp_path, capsys):
    out = str(tmp_path / "v")
    assert cli.main(["merge", str(data), str(other), "--out", out]) == 0
    printed = capsys.readouterr()
    assert "next:  spec-data verify" in printed.err and "view of" in printed.out
    assert cli.main(["inspect", out]) == 0
    assert "view of" in capsys.readouterr().out
    words = ["select", out, str(tmp_path / "w"), "--where", "length < 20 and source = 'tiny'"]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] < 36
    assert cli.main(["copy", str(tmp_path / "w"), str(tmp_path / "c")]) == 0
    assert cli.main(["merge", str(data), "--out", str(tmp_path / "x")]) == 2
    assert cli.main(["select", str(data), "s3://bucket/set", "--sample", "3"]) == 2
