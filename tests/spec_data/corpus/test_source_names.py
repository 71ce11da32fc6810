"""Two files of one name are two sources, wherever documents are counted, filtered or judged."""

import json

import pytest

import spec_data
from spec_data.corpus.record_reader import CorpusReader
from spec_data.shards.files import MANIFEST
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_data.shards.source_names import distinct
from spec_train.data.mixture import open_documents
from spec_train.options.data_option import DataSource
from tests.spec_data.runs import call, options, run, save_target, write_corpus


def names_of(*paths) -> list[str]:
    return [source.name for source in CorpusReader(list(map(str, paths))).sources]


@pytest.fixture
def folders(tmp_path):
    """a/chats.jsonl and b/chats.jsonl, and a/only.jsonl."""
    for name in ("a/chats.jsonl", "b/chats.jsonl", "a/only.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_corpus(tmp_path / name, 4)
        text = (tmp_path / name).read_text().replace("question", f"{name} asks")
        (tmp_path / name).write_text(text)
    return tmp_path


def test_names_stay_unless_two_places_have_one(folders):
    a, b, only = folders / "a/chats.jsonl", folders / "b/chats.jsonl", folders / "a/only.jsonl"
    assert names_of(a) == ["chats.jsonl"]
    assert names_of(a, only) == ["chats.jsonl", "only.jsonl"]
    assert names_of(a, b, only) == ["a/chats.jsonl", "b/chats.jsonl", "only.jsonl"]
    assert names_of(folders / "a", b) == ["a/chats.jsonl", "only.jsonl", "b/chats.jsonl"]
    assert names_of(a, a) == ["chats.jsonl", "chats.jsonl"]  # one source, named twice
    (folders / "x/a").mkdir(parents=True)
    deep = folders / "x/a/chats.jsonl"
    deep.write_bytes(b.read_bytes())
    assert names_of(a, deep)[1] == "x/a/chats.jsonl"


def test_names_that_folders_do_not_tell_apart_are_numbered():
    assert distinct(["d", "d", "d"], [1, 2, 1], ["", "", ""]) == ["d", "d#2", "d"]
    assert distinct(["d", "d", "e"], [1, 2, 3], ["a", "b", ""]) == ["a/d", "b/d", "e"]
    assert distinct(["d", "d", "a/d"], [1, 2, 3], ["x/a", "x/b", ""]) == ["x/a/d", "x/b/d", "a/d"]


def test_documents_of_two_files_of_one_name_are_counted_and_filtered_apart(folders):
    target = save_target(folders / "target")
    corpus = folders / "a/chats.jsonl", folders / "b/chats.jsonl"
    made = call(spec_data.generate, options(target, corpus, folders / "data"))
    assert list(made.agreement) == ["a/chats.jsonl", "b/chats.jsonl"]
    dataset = HiddenStatesDataset(folders / "data")
    assert [record.source for record in dataset.manifest.corpus] == list(made.agreement)
    spec_data.select(folders / "data", folders / "b-only", where="source = 'b/chats.jsonl'")
    chosen = HiddenStatesDataset(folders / "b-only")
    assert 0 < len(chosen) < len(dataset)
    assert {row["source"] for row in chosen} == {"b/chats.jsonl"}


def test_sources_of_one_name_in_a_merge_are_two(folders):
    target = save_target(folders / "target")
    for name in "ab":
        run(target, folders / name / "chats.jsonl", folders / f"data-{name}")
    inputs = [folders / "data-a", folders / "data-b"]
    spec_data.merge(inputs, folders / "both")
    both = HiddenStatesDataset(folders / "both")
    wanted = ["data-a/chats.jsonl", "data-b/chats.jsonl"]
    assert [record.source for record in both.manifest.corpus] == wanted
    assert list(dict.fromkeys(row["source"] for row in both)) == wanted
    assert list(dict.fromkeys(map(both.source_of, range(len(both))))) == wanted
    spec_data.copy(folders / "both", folders / "copied")
    assert {row["source"] for row in HiddenStatesDataset(folders / "copied")} == set(wanted)
    mixture = open_documents([DataSource(path) for path in inputs])
    told = [mixture.source_of(index) for index in range(len(mixture))]
    assert list(dict.fromkeys(told)) == wanted
    again = folders / "again"
    run(target, folders / "a/chats.jsonl", again, mask="last-turn")  # the same file
    spec_data.merge([inputs[0], again], folders / "same")
    corpus = Manifest.read(folders / "same" / MANIFEST).corpus
    assert [record.source for record in corpus] == ["chats.jsonl"] * 2
    assert json.loads((folders / "data-a" / MANIFEST).read_text())["corpus"][0]["source"] == (
        "chats.jsonl"
    )
