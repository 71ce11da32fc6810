"""The page of a dataset: every figure equals a slow loop over the dataset."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import spec_data
from spec_data.cli import main
from spec_data.commands.inspect import write_report
from spec_data.models.tokenizer import load_tokenizer
from spec_data.pages.dataset_page import dataset_page, shown_documents
from spec_data.pages.page import page_bytes
from spec_data.pages.token_texts import TokenTexts
from spec_data.results import WrittenDataset
from spec_data.shards.errors import MissingError
from spec_data.shards.reader import HiddenStatesDataset
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.pages.reading_pages import part, read_document
from tests.spec_data.runs import run, write_corpus


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    one = write_corpus(folder / "one.jsonl", 14)
    two = folder / "two.jsonl"
    lines = write_corpus(folder / "all.jsonl", 20).read_text().splitlines()
    two.write_text("\n".join([*lines[14:], lines[14], lines[15]]) + "\n")  # two are repeated
    return one, two


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, sources):
    out = tmp_path_factory.mktemp("data") / "set"
    run(target, sources, out)
    return out


@pytest.fixture(scope="module")
def page(data):
    return dataset_page(data)


@pytest.fixture(scope="module")
def rows(data):
    return list(HiddenStatesDataset(data))


def test_totals_and_bytes_are_those_of_the_shards(page, data, rows):
    tokens = sum(len(row["input_ids"]) for row in rows)
    supervised = sum(int(row["loss_mask"].sum()) for row in rows)
    files = sum(file.stat().st_size for file in (data / "shards").iterdir())
    (of, count, _), (own, share, _), (_, per_token, _) = page.figures
    assert of == f"supervised of {tokens:,} tokens" and count == supervised
    measured = HiddenStatesDataset(data).manifest.agreement.total
    assert share == measured.share and f"{100 * measured.own_share:.1f}" in own
    assert per_token == pytest.approx(files / tokens)
    assert page.lead.startswith("20 documents of one.jsonl, two.jsonl, with the states of 3 layers")
    table = dict(part(page, "What it is", "table")["rows"])
    assert table["documents"] == "20" and table["tokens"] == f"{tokens:,}"
    columns = part(page, "Bytes", "table", "Columns")["rows"]
    width = rows[0]["hidden.L0"].shape[1]
    predicting = sum(int(row["loss_mask"][1:].sum()) for row in rows)
    for name, codec, per_token, payload in columns:
        each = {"int32": 4, "bool8": 1, "bf16": 2 * width, "float32": 4}[codec]
        wanted = each * (supervised if name.startswith("target_") else tokens)
        assert (payload, per_token) == (wanted, pytest.approx(wanted / tokens)), name
    assert predicting == supervised and len(columns) == 8


def test_lengths_and_sources_count_every_document(page, data, rows):
    lengths = sorted(len(row["input_ids"]) for row in rows)
    for share, most in part(page, "Documents", "table", "Length of documents")["rows"]:
        assert most == lengths[math.floor(share * (len(lengths) - 1))]
    table = part(page, "Documents", "table", "Sources")["rows"]
    measured = HiddenStatesDataset(data).manifest.agreement.sources
    for name, documents, tokens, supervised, share, first, _, nll, _ in table:
        assert (first, nll) == (measured[name].share, measured[name].nll)
        own = [row for row in rows if row["source"] == name]
        assert documents == len(own) and tokens == sum(len(row["input_ids"]) for row in own)
        assert supervised == sum(int(row["loss_mask"].sum()) for row in own)
        assert share == pytest.approx(supervised / tokens)
    assert {row[0] for row in table} == {"one.jsonl", "two.jsonl"}


def test_what_was_left_out_is_counted_by_reason(page):
    counts = dict(part(page, "What was left out", "table", "From rows to documents")["rows"])
    assert counts["corpus rows read"] == 22 and counts["documents kept"] == 20
    assert counts["  dropped: duplicate"] == 2


def test_the_viewer_holds_every_token_of_every_document(page, data, rows):
    viewer = part(page, "Tokens", "viewer")["data"]
    tokenizer = load_tokenizer(data / "target")
    assert "20 of 20 documents" in viewer["note"] and len(viewer["documents"]) == 20
    special = {viewer["tokens"][row] for row in viewer["special"]}
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in special
    for place, row in enumerate(rows):
        found = read_document(viewer, place)
        ids = row["input_ids"].tolist()
        assert found["head"].startswith(f"Document {place} · {row['source']} · {len(ids)} tokens")
        assert found["id"] == row["doc_id"] and found["ids"] == ids
        assert found["mask"] == [bool(m) for m in row["loss_mask"]]
        assert found["turns"] == [[t["role"], t["start"], t["end"]] for t in row["turns"]]
        assert "".join(found["texts"]) == tokenizer.decode(ids)
        stored = [t > 0 and bool(row["loss_mask"][t]) for t in range(len(ids))]
        best = [None, *row["target_argmax"].tolist()[:-1]]
        assert found["choice"] == [best[t] if stored[t] else None for t in range(len(ids))]
        wrong = sum(stored[t] and best[t] != ids[t] for t in range(len(ids)))
        assert f"{100 * (1 - wrong / sum(stored)):.1f}\u00a0% the target's" in found["head"]


def test_the_worst_documents_come_first(page, rows):
    """Sorted by the share of first choices, or by the NLL, as slow loops have them."""
    viewer = part(page, "Tokens", "viewer")["data"]
    assert [s[0] for s in viewer["sorts"][:2]] == ["lowest top-1", "highest NLL"]
    for place, (row, own) in enumerate(zip(rows, viewer["documents"], strict=True)):
        ids, best = row["input_ids"].tolist(), row["target_argmax"].tolist()
        asked = [t for t in range(1, len(ids)) if row["loss_mask"][t]]
        share = sum(best[t - 1] == ids[t] for t in asked) / len(asked)
        (number, _), (tokens, _), (first, text), (nll, _), (_, source) = own["row"]
        assert (own["number"], number, tokens, source) == (place, place, len(ids), row["source"])
        assert first == pytest.approx(share) and text == f"{100 * share:.1f}\u00a0%" and nll > 0


def test_a_sample_is_even_and_the_page_says_so(data):
    viewer = dataset_page(data, documents=4).sections[0].parts[-1]
    heads = [d["head"].split(" · ")[0] for d in viewer.data["documents"]]
    assert heads == [f"Document {n}" for n in (2, 7, 12, 17)]
    assert viewer.data["note"].startswith("This page holds 4 of 20 documents, evenly spaced.")


def test_a_notebook_has_the_tables_without_reading_the_documents(data, page):
    shown = WrittenDataset.of(data, HiddenStatesDataset(data).manifest)._repr_html_()
    for section in page.sections[1:]:
        assert f">{section.title}</h2>" in shown
    assert "viewer" not in re.sub(r"<style>.*</style>", "", shown, flags=re.DOTALL)
    inspected = spec_data.inspect(data)
    assert inspected._repr_html_() == shown
    facts = str(inspected).partition("\nwarning: ")[0].splitlines()
    assert len(facts) <= 12 < len(inspected.details().splitlines())
    report = spec_data.verify(data)
    rows = report._repr_html_().split("<tbody>")[1]
    assert rows.count("<tr") == len([*report.proven, *report.warnings])
    assert report.proven[0] in rows and not report.failures
    assert spec_data.inspect(data, doc=0)._repr_html_().startswith("<pre>document 0")
    assert WrittenDataset(path=data, sealed=False)._repr_html_().startswith("<pre>not sealed")
    counts = {"skipped_rows": {"a": 3, "b": 2}, "dropped": {"a": 1, "c": 9, "d": 1, "e": 1}}
    written = str(WrittenDataset(path=data, sealed=True, **counts))
    assert "left out: 9 c, 4 a, 2 b, 1 d, 1 more reason (--verbose)" in written
    assert WrittenDataset.of("s3://bucket/data", None).path == "s3://bucket/data"


def test_a_dataset_here_is_named_by_its_directory(data, monkeypatch):
    monkeypatch.chdir(data / "target")
    for given in ("..", "../", str(data)):
        assert Path(write_report(given).path) == Path(f"{data}.html")
        assert dataset_page(given).title == data.name


@pytest.mark.parametrize(
    "changes",
    [
        {"supervision": "topk:4"},
        {"supervision": "logits", "teacher": "all"},
        {"final": "supervised", "codec": "fine"},
    ],
    ids=["topk", "logits", "sparse"],
)
def test_every_kind_of_supervision_has_a_page(target, sources, tmp_path, changes):
    run(target, sources[0], tmp_path / "set", **changes)
    page = dataset_page(tmp_path / "set")
    assert len(page_bytes(page)) > 10_000
    row = HiddenStatesDataset(tmp_path / "set")[0]
    found = read_document(part(page, "Tokens", "viewer")["data"], 0)
    for t, choice in enumerate(found["choice"]):
        stored = t > 0 and (changes.get("teacher") == "all" or bool(row["loss_mask"][t]))
        assert choice == (int(row["target_argmax"][t - 1]) if stored else None)


def test_the_command_writes_beside_the_dataset_and_names_the_next_one(data, capsys, caplog):
    assert main(["report", str(data)]) == 0
    out = capsys.readouterr().out
    assert f"written: {data}.html" in out and "spec-train fit eagle3" in caplog.text
    assert f"<title>{data.name} – Dataset</title>" in Path(f"{data}.html").read_text()


def test_a_user_is_told_what_is_wrong(tmp_path, data, capsys):
    with pytest.raises(MissingError, match="no such dataset"):
        write_report(tmp_path / "nothing")
    for words, message in (
        (["--out", str(tmp_path / "no" / "x.html")], "pass a file name"),
        (["--documents", "0"], "--documents 0: "),
    ):
        assert main(["report", str(data), *words]) == 2
        assert message in capsys.readouterr().err


def test_a_remote_dataset_has_the_page_of_the_local_one(data, page, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    put_in_memory(data, "memory://bucket/set")
    try:
        out = write_report("memory://bucket/set")
    finally:
        forget_memory()
    assert out.path == Path("set.html") and out.path.read_bytes() == page_bytes(page)


def test_a_sample_keeps_to_its_tokens():
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    assert shown_documents(np.array([9_000_000, 5]), 2) == [1]
    assert 3_900_000 < lengths[shown_documents(lengths, 20_000)].sum() < 4_100_000


TEXT = " The capital of  France.\n\n  def add(a):\n\treturn a + é "


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_texts_are_the_decoded_text(family):
    tok = tokenizer(family)
    ids = tok.encode(TEXT, add_special_tokens=False)
    before = tok.encode("a", add_special_tokens=False)
    whole = tok.decode([*before, *ids])[len(tok.decode(before)) :]
    texts = "".join(TokenTexts(tok).table(ids))
    assert texts == whole.replace("é", "\ufffd\ufffd" if "\ufffd" in texts else "é")
    assert TokenTexts(tok).table([len(tok) + 7]) == [f"<token {len(tok) + 7}>"]
