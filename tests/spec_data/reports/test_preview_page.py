"""The page of a corpus: the documents, masks and counts that `generate` has, without weights."""

import json
import shlex
import shutil

import pytest

from spec_data.cli import build_parser, main
from spec_data.dataset_page_api import write_preview
from spec_data.options.generate_options import EstimateConfig
from spec_data.pages.html_page import read_page_data
from spec_data.reports import preview_page
from spec_data.shards.errors import CorpusError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.config import resolve
from tests.spec_data.reports.reading_pages import part, read_document
from tests.spec_data.runs import run, save_target, write_corpus

ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Chats with one of everything that is left out: bad, without an answer, repeated."""
    file = write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 12)
    lines = file.read_text().splitlines()
    silent = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    talk = [{"role": "user", "content": ATTACK}, {"role": "assistant", "content": f"no {ATTACK}"}]
    long = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "so 1 2 " * 70}]
    lines += ["{not json", silent, lines[3]]
    lines += [json.dumps({"messages": messages}) for messages in (talk, long)]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("mask", ["assistant", "last-turn", "all"])
def test_the_page_has_the_documents_that_generate_captures(
    target, corpus, tmp_path, monkeypatch, mask
):
    monkeypatch.setattr(preview_page, "_AT_ONCE", 5)
    options = {"mask": mask, "max_bad_rows": "5", "max_length": 90}
    run(target, corpus, tmp_path / "set", **options)
    page = read_page_data(write_preview(corpus, target, tmp_path / "page.html", **options))
    viewer = part(page, "Tokens", "viewer")["data"]
    dataset = HiddenStatesDataset(tmp_path / "set")
    assert len(viewer["documents"]) == len(dataset) >= 10
    for place, row in enumerate(dataset):
        found = read_document(viewer, place)
        assert found["id"] == row["doc_id"] and found["ids"] == row["input_ids"].tolist()
        assert found["mask"] == [bool(m) for m in row["loss_mask"]]
        assert found["turns"] == [[t["role"], t["start"], t["end"]] for t in row["turns"]]
        assert "choice" not in found
    made = dataset.manifest.documents
    counts = dict(part(page, "What was left out", "table", "From rows to documents")["rows"])
    assert counts["corpus rows read"] == made.read == 17 and counts["bad rows"] == 1
    assert counts["documents kept"] == len(dataset) and counts["dropped: duplicate"] == 1
    assert counts[next(name for name in counts if name.startswith("cut at"))] == made.cut > 0
    left = part(page, "What was left out", "bars", "Rows and documents left out")
    assert sum(left["series"][0]["values"]) == 17 - len(dataset)
    items = {n: v for n, v, _ in part(page, "Overview", "figures")["items"]}
    assert items["tokens"] == int(dataset.lengths.sum())
    assert items["supervised tokens"] == int(dataset.supervised.sum())
    chart = part(page, "Documents", "bars", "Supervised tokens")
    bounds = [[int(n) for n in label.split("–")] for label in chart["labels"]]
    assert chart["series"][0]["values"] == [
        sum(b[0] <= count <= b[-1] for count in dataset.supervised.tolist()) for b in bounds
    ]
    bad = part(page, "Overview", "table", "Bad rows")["rows"]
    assert len(bad) == 1 and "chats.jsonl:13" in bad[0][1]


def test_texts_of_the_corpus_are_no_markup_of_the_page(target, corpus, tmp_path):
    out = write_preview(corpus, target, tmp_path / "page.html", max_bad_rows="5")
    text = out.read_text()
    assert text.count("</script>") == text.count("<script") == 5 and "<img" not in text
    viewer = part(read_page_data(out), "Tokens", "viewer")["data"]
    assert ATTACK in "".join(read_document(viewer, 12)["texts"])


def test_a_tokenizer_alone_is_enough_and_weights_are_not_read(target, corpus, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(target, folder)
    for file in folder.iterdir():
        if not file.name.startswith(("tokenizer", "chat_template", "special")):
            file.unlink()
    small = tmp_path / "model"
    shutil.copytree(target, small)
    for file in small.glob("*.safetensors"):
        file.unlink()
    pages = [
        read_page_data(write_preview(corpus, place, tmp_path / "page.html", limit=5))
        for place in (folder, small)
    ]
    one, two = (part(page, "Tokens", "viewer")["data"]["documents"] for page in pages)
    assert one == two and len(one) == 5
    note = [p["text"] for p in pages[0]["sections"][0]["parts"] if p["kind"] == "note"]
    assert note == ["Only the first 5 rows were read (--limit)."]


def test_the_command_prints_the_counts(target, corpus, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["--corpus", str(corpus), "--target", str(target), "--out", str(out)]
    assert main(["preview", *words, "--max-bad-rows", "5", "--documents", "3"]) == 0
    shown = capsys.readouterr().out
    assert "documents kept" in shown and f"written: {out}" in shown
    viewer = part(read_page_data(out), "Tokens", "viewer")["data"]
    assert "This page holds 3 of 14 documents" in viewer["note"]


def test_the_next_command_captures_what_the_page_shows(target, corpus, tmp_path, caplog):
    words = ["--corpus", str(corpus), "--target", str(target), "--max-bad-rows", "5"]
    words += ["--mask", "last-turn", "--max-length", "90", "--limit", "9"]
    words += ["--max-row-bytes", "1MB"]
    assert main(["preview", *words, "--out", str(tmp_path / "page.html")]) == 0
    _, _, following = caplog.text.rpartition("next:  spec-data ")
    args = build_parser().parse_args(shlex.split(following.splitlines()[0]))
    shown = build_parser().parse_args(["estimate", *words, "--out", "DIR"])
    assert resolve(EstimateConfig, args) == resolve(EstimateConfig, shown)


def test_what_misleads_a_draft_is_named_where_it_is_counted(tmp_path, capsys, caplog):
    """Documents are cut, and the template closes no turn while no token is known that ends one."""
    bare = save_target(tmp_path / "bare")
    (bare / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        if (bare / name).is_file():
            table = json.loads((bare / name).read_text())
            (bare / name).write_text(json.dumps(table | {"eos_token_id": None, "eos_token": None}))
    texts = ["so 1 2 " * 70, "so 1"]
    talks = [
        [{"role": "user", "content": "count"}, {"role": "assistant", "content": t}] for t in texts
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    words = ["--corpus", str(tmp_path / "c.jsonl"), "--target", str(bare), "--max-length", "40"]
    page = tmp_path / "page.html"
    assert main(["preview", *words, "--out", str(page)]) == 0
    words += ["--layers", "0,1,2"]
    assert main(["estimate", *words, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    section = next(s for s in read_page_data(page)["sections"] if s["title"] == "What was left out")
    notes = [p["text"] for p in section["parts"] if p["kind"] == "note" and p["warning"]]
    for what in ("of all tokens", "2 turns have no end-of-turn token"):
        assert any(what in note for note in notes) and printed.count(what) == 2
        assert any(what in r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert not any(p.get("note") == "Nothing was left out." for p in section["parts"])


def test_a_user_is_told_what_is_wrong(target, corpus, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    with pytest.raises(CorpusError, match="no document is left"):
        write_preview(empty, target, tmp_path / "page.html")
    with pytest.raises(MissingError, match="no such directory"):
        write_preview(corpus, tmp_path / "nothing", tmp_path / "page.html")
    words = ["preview", "--corpus", str(corpus), "--target", str(target)]
    assert main([*words, "--max-length", "1", "--out", str(tmp_path / "x.html")]) == 2
    assert "--max-length 1" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "pass a file name" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
