"""What `select` keeps: by likelihood, overlap with a benchmark, and SQL, against plain Python."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest

import spec_data
from spec_data.corpus.prompt_overlap import Grams
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.views.select import document_scores, matching, read_benchmark
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import write_corpus
from tests.spec_data.views.view_tools import assert_same_documents, documents_of


def test_scores_are_those_of_all_logits(data):
    dataset = HiddenStatesDataset(data)
    head = load_head_tensors(data)["lm_head"].double()
    shares, means = document_scores(dataset, np.arange(len(dataset)), nll=True)
    for number, row in enumerate(dataset):
        logits = row["hidden.final"].double() @ head.T
        pairs = [
            (
                int(row["target_argmax"][t]) == int(row["input_ids"][t + 1]),
                float(row["target_logsumexp"][t]) - logits[t][row["input_ids"][t + 1]].item(),
                -logits[t].log_softmax(-1)[row["input_ids"][t + 1]].item(),
            )
            for t in range(len(logits) - 1)
            if row["loss_mask"][t + 1]
        ]
        if not pairs:
            assert np.isnan(means[number])
            continue
        share, nll, of_stored = (sum(p[i] for p in pairs) / len(pairs) for i in range(3))
        assert shares[number] == pytest.approx(share, rel=1e-12)
        assert means[number] == pytest.approx(nll, rel=1e-9)
        assert nll == pytest.approx(of_stored, abs=0.02)  # the stored logsumexp is of f32 states


def test_likely_documents_are_kept(data, tmp_path):
    dataset = HiddenStatesDataset(data)
    shares, means = document_scores(dataset, np.arange(len(dataset)), nll=True)
    border = float(np.nanmedian(means))
    spec_data.select(data, tmp_path / "v", where=f"nll <= {border!r} or first_choice > 0.5")
    kept = (means <= border) | (shares > 0.5)
    assert_same_documents(tmp_path / "v", [d for d, k in zip(dataset, kept, strict=True) if k])


def test_overlap_is_that_of_sets_of_tuples():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 6, size).tolist() for size in (20, 9, 30, 5)]
    grams = Grams(10)
    for prompt in prompts:
        grams.add([prompt])
    assert grams.short == 1, "5 tokens say nothing"
    some = 0
    for _ in range(300):
        ids = rng.integers(0, 6, 12).tolist()
        if rng.random() < 0.5:  # plant a part of a prompt
            source = prompts[int(rng.integers(4))]
            at = int(rng.integers(max(1, len(source) - 9)))
            ids = ids[:3] + source[at : at + 10] + ids[3:]
        plain = set()
        for number, prompt in enumerate(prompts):
            size = min(10, len(prompt))
            known = {tuple(prompt[i : i + size]) for i in range(len(prompt) - size + 1)}
            own = {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}
            if size >= 8 and known & own:
                plain.add(number)
        some += bool(plain)
        assert grams.matches(np.array(ids, np.int32)) == plain
    assert 50 < some < 250


def test_prompts_are_compared_without_what_all_of_them_share(tmp_path):
    """The words of the user count; a system prompt and the template are in every document."""
    tok = tokenizer("chatml")
    tok.save_pretrained(tmp_path / "tokenizer")
    asked = "how many apples does each of the seven children carry home today"
    system = "you are a careful and friendly assistant that answers every question in full"
    rows = [
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": asked}]},
        {"prompt": "hi"},
    ]
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grams = read_benchmark(str(file), tmp_path / "tokenizer").grams
    assert (grams.prompts, grams.short) == (2, 0)

    def matches(text):
        return grams.matches(np.array(tok(text)["input_ids"], np.int32))

    assert matches(f"<|im_start|>user\n{asked}<|im_end|>") == {0}
    assert matches(f"<|im_start|>system\n{system}<|im_end|>") == set()
    alone = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello"
    assert matches(alone) == {1}, "a short prompt is compared as all that serving sends"
    assert matches("<|im_start|>user\nhello" + alone) == set()


def test_documents_with_a_prompt_of_a_benchmark_are_dropped(captured, tmp_path):
    """The dataset has the rows 0 to 13; the benchmark is row 3 and a row that nobody has."""
    rows = write_corpus(tmp_path / "all.jsonl", 40).read_text().splitlines()
    (tmp_path / "bench.jsonl").write_text(f"{rows[3]}\n{rows[33]}\n")
    made = spec_data.select(
        captured / "sparse", tmp_path / "v", decontaminate=tmp_path / "bench.jsonl"
    )
    assert made.dropped["select:overlap"] >= 1
    kept = {d["doc_id"] for d in documents_of(tmp_path / "v")}
    assert HiddenStatesDataset(captured / "sparse").doc_ids[3] not in kept


def test_a_benchmark_may_have_its_questions_under_another_name(captured, tmp_path):
    """Without --columns its rows are bad, and a name that no row has is refused."""
    rows = write_corpus(tmp_path / "all.jsonl", 40).read_text().splitlines()
    asked = json.loads(rows[3])["messages"][0]["content"]
    bench = tmp_path / "bench.jsonl"
    bench.write_text(json.dumps({"ask_me": asked, "solution": "no"}) + "\n")
    given = {"decontaminate": bench, "columns": "prompt=ask_me"}
    made = spec_data.select(captured / "sparse", tmp_path / "v", **given)
    assert made.dropped["select:overlap"] >= 1
    options = HiddenStatesDataset(tmp_path / "v").manifest.provenance.options
    assert options["columns"] == {"prompt": "ask_me"}
    for wrong in ({"columns": ""}, {"columns": "prompt=typo"}):
        with pytest.raises((CorpusError, ConfigError)):
            spec_data.select(captured / "sparse", tmp_path / "w", **given | wrong)
    with pytest.raises(ConfigError, match="--columns names columns of --decontaminate"):
        spec_data.select(captured / "sparse", tmp_path / "w", sample=3, columns="prompt=ask_me")


def test_the_overlap_with_each_file_of_benchmarks_is_said_and_stored(captured, tmp_path, caplog):
    """A folder of two files, and a file that repeats a prompt of the first."""
    rows = write_corpus(tmp_path / "all.jsonl", 40).read_text().splitlines()
    (tmp_path / "bench").mkdir()
    for name, numbers in {"bench/a": [3, 5, 33], "bench/b": [34], "c": [5]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows[n] for n in numbers))
    caplog.set_level("INFO")
    given = tmp_path / "bench", tmp_path / "c.jsonl"
    made = spec_data.select(captured / "sparse", tmp_path / "v", decontaminate=given)
    assert made.dropped["select:overlap"] == 2
    stored = HiddenStatesDataset(tmp_path / "v").manifest.provenance.options["decontaminate"]
    names = ("prompts", "found", "documents")
    assert [tuple(file[name] for name in names) for file in stored] == [
        (3, 2, 2),
        (1, 0, 0),
        (1, 1, 1),
    ]
    assert "a.jsonl: 2 of 14 documents, with 2 of its 3 prompts" in caplog.text
    assert "b.jsonl: 0 of 14 documents, with 0 of its 1 prompts" in caplog.text
    line = r"overlap with c\.jsonl +1 documents left out, with 1 of 1 prompts"
    assert re.search(line, made.details())


TABLE = pa.table(
    {
        "number": [3, 5, 8],
        "doc_id": ["a", "b", "c"],
        "source": ["gsm8k", "chats", "gsm8k"],
        "length": pa.array([100, 2000, 3000], pa.int32()),
        "nll": pa.array([0.5, None, 2.0]),
    }
)


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("length < 1024 and source = 'gsm8k'", [3]),
        ("source in ('chats') or nll > 1", [5, 8]),
        ("nll < 1", [3]),  # what is not known meets no condition
        ("length > (select avg(1000) from range(3))", [5, 8]),
        ("true", [3, 5, 8]),
        ("false", []),
    ],
)
def test_a_condition_is_sql(condition, kept):
    assert TABLE["number"].to_numpy()[matching(TABLE, condition)].tolist() == kept


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("lenght < 10", r"no column lenght; did you mean length\?; columns: number, doc_id"),
        ("length <", "Parser Error"),
        ("true; drop table x", "Parser Error"),
        ("length < 'many'", "Conversion Error"),
    ],
)
def test_a_wrong_condition_is_an_error_that_lists_the_columns(condition, words):
    with pytest.raises(ConfigError, match=words) as refused:
        matching(TABLE, condition)
    assert "source, length, nll" in str(refused.value)


@pytest.mark.parametrize(
    "read", ["read_text('{file}')", "'{file}'", "read_parquet('http://127.0.0.1:9/x')", "secret"]
)
def test_a_condition_reads_no_file_no_url_and_no_variable(tmp_path, read):
    secret = pa.table({"length": [1]})  # noqa: F841 (a variable that duckdb could find)
    file = tmp_path / "secret.csv"
    file.write_text("length\n1\n")
    where = f"exists (select * from {read.format(file=file, folder=tmp_path)})"
    with pytest.raises(ConfigError, match="where"):
        matching(TABLE, where)


def test_rows_stay_in_order_whatever_their_number():
    count = 300_000
    table = pa.table({"number": np.arange(count), "length": np.arange(count) % 7})
    assert np.array_equal(matching(table, "length = 3"), np.arange(count) % 7 == 3)
