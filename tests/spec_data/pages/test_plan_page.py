"""The page of a plan: the documents, masks and counts that `generate` has, without weights."""

import json
import pickle

import pytest

import spec_data
from spec_data.cli import main
from spec_data.generation.setup import make_plan
from spec_data.pages.dataset_page import plan_page
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.pages.reading_pages import part, read_document
from tests.spec_data.runs import inputs_of, run, save_target, write_corpus

ATTACK = "</script><img src=x onerror=alert(1)>"


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


def page_of(target, corpus, out, documents=1000, **options):
    given = {"target": str(target), "corpus": (str(corpus),), "out": str(out), "layers": "0,1,2"}
    rows, setup = inputs_of(**given, **options)
    return plan_page(given["corpus"], setup, make_plan(rows, setup), documents)


@pytest.mark.parametrize("mask", ["assistant", "all"])
def test_the_page_has_the_documents_that_generate_captures(target, corpus, tmp_path, mask):
    options = {"mask": mask, "max_bad_rows": "5", "max_length": 90}
    run(target, corpus, tmp_path / "set", **options)
    page = page_of(target, corpus, tmp_path / "plan", **options)
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
    assert counts["corpus rows read"] == made.read == 17 and counts["  bad rows"] == 1
    assert counts["documents kept"] == len(dataset) and counts["  dropped: duplicate"] == 1
    assert counts[next(name for name in counts if name.startswith("  cut at"))] == made.cut > 0
    assert f"{int(dataset.lengths.sum()):,} tokens" in page.lead
    assert [v for _, v, _ in page.figures[:2]] == [len(dataset), int(dataset.supervised.sum())]
    bad = part(page, "Corpus", "table", "Bad rows")["rows"]
    assert len(bad) == 1 and "chats.jsonl:13" in bad[0][1]


def test_estimate_writes_the_page_and_texts_of_the_corpus_are_no_markup(
    target, corpus, tmp_path, caplog
):
    file, out = tmp_path / "page.html", tmp_path / "out"
    words = ["--corpus", str(corpus), "--target", str(target), "--layers", "0,1,2"]
    words += ["--out", str(out), "--max-bad-rows", "5"]
    assert main(["estimate", *words, "--page", str(file)]) == 0
    assert not out.exists() and f"written: {file}" in caplog.text
    text = file.read_text()
    assert text.count("</script>") == text.count("<script") == 2 and "<img" not in text
    assert main(["estimate", *words, "--page", str(tmp_path / "no" / "page.html")]) == 2


def test_a_notebook_shows_the_plan_below_the_sizes(target, corpus, tmp_path):
    options = spec_data.CaptureOptions(layers=[0, 1, 2], max_bad_rows="5")
    result = spec_data.estimate(target, corpus, tmp_path / "out", options)
    given = {"layers": [0, 1, 2], "max_bad_rows": "5"}
    same = spec_data.estimate(target, corpus, tmp_path / "out", options=given)
    assert same.facts() | {"bytes_free": 0} == result.facts() | {"bytes_free": 0}
    with pytest.raises(ConfigError, match="options: no option 'limti'; did you mean limit"):
        spec_data.estimate(target, corpus, tmp_path / "out", options={"limti": 3})
    shown = result._repr_html_()
    assert shown.startswith("<pre>documents") and "bytes per token" in shown
    for title in ("Documents", "Corpus", "What was left out"):
        assert f">{title}</h2>" in shown
    assert "<script" not in shown and "Tokens</h2>" not in shown
    assert "page" not in result.facts() and pickle.loads(pickle.dumps(result)) == result


def test_a_sample_of_the_documents_and_a_limit_of_rows_are_named(target, corpus, tmp_path):
    page = page_of(target, corpus, tmp_path / "plan", 3, limit=9)
    note = part(page, "Tokens", "viewer")["data"]["note"]
    assert note.startswith("This page holds 3 of 9 documents")
    notes = [p.text for s in page.sections for p in s.parts if p.kind == "note"]
    assert notes == ["Only the first 9 rows were read (--limit)."]


def test_what_misleads_a_draft_is_named_by_estimate(tmp_path, caplog):
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
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    words = ["--corpus", str(corpus), "--target", str(bare), "--max-length", "40"]
    assert main(["estimate", *words, "--layers", "0,1,2", "--out", str(tmp_path / "out")]) == 0
    said = [line for line in caplog.messages if line.startswith("warning[corpus]: ")]
    for what in ("of all tokens", "2 turns have no end-of-turn token"):
        assert any(what in line for line in said)
