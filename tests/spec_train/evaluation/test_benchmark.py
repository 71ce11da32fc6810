"""`eval` as a benchmark: named sets, parts of a file, several lengths, and where the time goes."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_data.corpus.template import Template
from spec_data.shards.errors import ConfigError, CorpusError, MissingError
from spec_train.decoding.chains import Generation, VerificationStep
from spec_train.evaluation import on_target
from spec_train.evaluation.decoding_metrics import Response, decoding_metrics, speed
from spec_train.evaluation.eval_table import table
from spec_train.evaluation.prompts import read_prompts
from tests.spec_train.evaluation import test_prompts, tools
from tests.spec_train.evaluation.tools import config_of, run_eval

target, prompts, trained, workplace = tools.target, tools.prompts, tools.trained, tools.workplace
tokenizer = test_prompts.tokenizer

# the columns that the sets have on the Hub, by source
SPEED = {"sub_category": "", "source": "", "src_id": "", "difficulty": "", "multiturn": True}
LAYOUTS = {
    "HuggingFaceH4/mt_bench_prompts@train": [
        {"category": "writing", "prompt": ["a", "b"], "reference": [], "prompt_id": 1},
        {"category": "math", "prompt": ["c"], "reference": [], "prompt_id": 2},
    ],
    "openai/gsm8k:main@test": [{"question": "d", "answer": "e"}],
    "openai/openai_humaneval@test": [
        {"task_id": "T/0", "prompt": "e", "canonical_solution": "", "test": "", "entry_point": "f"}
    ],
    "HuggingFaceH4/MATH-500@test": [
        {"problem": "b c", "solution": "", "answer": "", "subject": "", "level": 1, "unique_id": ""}
    ],
    "google-research-datasets/mbpp:full@test": [
        {"task_id": 11, "text": "c b", "code": "", "test_list": [""], "test_setup_code": ""}
    ],
    "nvidia/SPEED-Bench:qualitative@test": [
        {"question_id": str(i), "category": part, "turns": turns, **SPEED}
        for i, (part, turns) in enumerate(
            [("coding", ["a"]), ("coding", ["b", "c", "d"]), ("coding", ["d"]), ("qa", ["e"])]
        )
    ],
}
FILES = ("HumanEval", "translation", "summarization", "qa", "math_reasoning", "rag")
FILES = (*FILES, "question", "tool_call", "writing")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The named sets as directories with the files of the Hub, in the working directory."""
    for source, rows in LAYOUTS.items():
        place, _, split = source.partition("@")
        folder = tmp_path / place / "data"
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    (tmp_path / "RedHatAI").mkdir()
    for name in FILES:
        file = tmp_path / "RedHatAI" / f"speculator_benchmarks:{name}.jsonl"
        test_prompts.write(file, {"prompt": "a b"}, {"prompt": "b c"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def grouped(names: str, tokenizer, **options) -> list[tuple[str, str, tuple[str, ...]]]:
    """The set of each prompt, what is sent first, and what follows the answers."""
    found = read_prompts(names, Template(tokenizer, {}), **options)
    assert found.left_out == 0
    shown = [test_prompts.words(prompt.ids).split(" ", 1)[1] for prompt in found]
    return [
        (found.groups[p.where], text.removesuffix(" <assistant>"), p.record.follow_ups)
        for p, text in zip(found, shown, strict=True)
    ]


def test_named_sets_become_prompts(hub, tokenizer):
    assert grouped("mt-bench,gsm8k,humaneval,math-500,mbpp,speed-bench", tokenizer) == [
        ("mt-bench", "a", ("b",)),
        ("mt-bench", "c", ()),
        ("gsm8k", "d", ()),
        ("humaneval", "e", ()),
        ("math-500", "b c", ()),
        ("mbpp", "c b", ()),
        ("speed-bench: coding", "a", ()),
        ("speed-bench: coding", "b", ("c", "d")),
        ("speed-bench: coding", "d", ()),
        ("speed-bench: qa", "e", ()),
    ]
    found = grouped("speed-bench", tokenizer, limit=1)  # of each category, which come in order
    assert found == [("speed-bench: coding", "a", ()), ("speed-bench: qa", "e", ())]
    for names in ("mt-bench,spec-bench", "spec-bench,speculators"):
        with pytest.raises(ConfigError, match="both have the prompts of"):
            read_prompts(names, Template(tokenizer, {}))


def test_spec_bench_has_its_six_parts_and_speculators_its_nine_files(hub, tokenizer):
    found = grouped("spec-bench", tokenizer, limit=1)
    assert found[0] == ("spec-bench: mt_bench", "a", ("b",))
    parts = ("translation", "summarization", "qa", "math_reasoning", "rag")
    assert found[1:] == [(f"spec-bench: {part}", "a b", ()) for part in parts]
    found = grouped("speculators", tokenizer)
    assert {name for name, _, _ in found} == {f"speculators: {name}" for name in FILES}
    assert len(found) == 2 * len(FILES)


NOTICE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@pytest.mark.parametrize("turns", [[NOTICE], ["a", f"{NOTICE}\n\n{{question}}"]])
def test_questions_that_speed_bench_leaves_out_are_refused(hub, tokenizer, turns):
    """The Hub has a notice in place of questions of other publishers."""
    file = hub / "nvidia/SPEED-Bench:qualitative/data/test-00000-of-00001.parquet"
    rows = LAYOUTS["nvidia/SPEED-Bench:qualitative@test"]
    pq.write_table(pa.Table.from_pylist([*rows, rows[0] | {"turns": turns}]), file)
    template = Template(tokenizer, {})
    for names in ("speed-bench", "nvidia/SPEED-Bench:qualitative"):
        with pytest.raises(CorpusError, match=r"notice of SPEED-Bench[^$]*prepare_data"):
            read_prompts(names, template)
    with pytest.raises(CorpusError, match="notice of SPEED-Bench"):
        read_prompts("speed-bench", template, limit=1)
    found = read_prompts("speed-bench", template, max_bad_rows="1")
    assert (len(found), found.left_out) == (4, 1) and "prepare_data" in found.examples[0]


def test_a_path_is_not_taken_for_a_name_or_a_list(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "a,b"):
        Path(name).mkdir()
        test_prompts.write(Path(name) / "test.jsonl", {"prompt": "a"})
        assert len(read_prompts(name, Template(tokenizer, {}))) == 1


def test_parts_of_a_file_by_category(tmp_path, tokenizer):
    """The layout of question.jsonl of MT-bench and Spec-Bench; also as Parquet."""
    rows = [
        {"question_id": i, "category": c, "turns": ["a"]} for i, c in enumerate(["qa", "rag", "qa"])
    ]
    plain = test_prompts.write(tmp_path / "question.jsonl", *rows, {"prompt": "b"})
    table_file = str(tmp_path / "q.parquet")
    pq.write_table(pa.Table.from_pylist(rows), table_file)
    found = read_prompts(f"{plain},{table_file}", Template(tokenizer, {}))
    assert [found.groups[prompt.where] for prompt in found] == [
        *("question.jsonl: qa", "question.jsonl: rag", "question.jsonl: qa", "question.jsonl"),
        *("q.parquet: qa", "q.parquet: rag", "q.parquet: qa"),
    ]


def test_names_that_cannot_be_read(tmp_path, tokenizer):
    template = Template(tokenizer, {})
    file = test_prompts.write(tmp_path / "p.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigError, match="is there twice"):
        read_prompts(f"{file},{file}", template)
    with pytest.raises(ConfigError, match="between two commas"):
        read_prompts(f"{file},,x", template)
    with pytest.raises(CorpusError, match="no usable row"):
        read_prompts(test_prompts.write(tmp_path / "empty.jsonl"), template)
    with pytest.raises(MissingError, match=r"none\.jsonl: no such file"):
        read_prompts(f"{file},{tmp_path}/none.jsonl", template)


def rounds_of(draw: random.Random, number: int) -> list[VerificationStep]:
    found = []
    for _ in range(number):
        drafted = draw.randint(0, 4)
        tried = draw.randint(0, drafted)
        accepted = draw.randint(max(0, tried - 1), tried)
        found.append(
            VerificationStep(drafted=drafted, tried=tried, accepted=accepted, emitted=accepted + 1)
        )
    return found


def test_sums_by_set_are_those_of_plain_loops():
    draw = random.Random(0)
    rounds = {f"p{i}": (f"set {i % 3}", rounds_of(draw, 30)) for i in range(40)}
    responses = [
        Response(where=where, group=name, ids=[i], generation=Generation(tokens=[], steps=own))
        for i, (where, (name, own)) in enumerate(rounds.items())
    ]
    found = decoding_metrics(responses, 4)
    assert len(found["by_set"]) == 3
    for line in found["by_set"]:
        own = [one for name, some in rounds.values() if name == line["set"] for one in some]
        assert line["rounds"] == len(own) and line["emitted"] == sum(one.emitted for one in own)
        assert line["interval"][0] < line["acceptance_length"] < line["interval"][1]
        for depth, rate in enumerate(line["accept_rate"]):
            tried = [one for one in own if one.tried > depth]
            assert rate == sum(one.accepted > depth for one in tried) / len(tried)
    again = [replace(response, where=f"{response.where} again") for response in responses]
    turns = [replace(response, ids=[*response.ids, 1, 2]) for response in responses]
    for more in (again, turns):
        twice = decoding_metrics(responses + more, 4)
        assert twice["rounds"] == 2 * found["rounds"]
        assert [p["prompt"] for p in twice["per_prompt"]] == [
            p["prompt"] for p in found["per_prompt"]
        ]
        assert twice["interval"] == found["interval"], "they tell nothing new of the draft"


def test_both_speeds_and_the_speed_up_are_of_the_responses_that_were_timed_both_ways():
    made = (8, 2.0), (8, 1.0), (9, 9.0)
    plain, timed, other = (Generation(tokens=[1] * n, seconds=time) for n, time in made)
    given = [(timed, plain), (other, None)]
    found = decoding_metrics(
        [Response(where="", group="", ids=[1], generation=a, plain=b) for a, b in given], 4
    )
    names = ("tokens_per_second", "plain_tokens_per_second", "speedup", "tokens")
    assert [found[name] for name in names] == [8.0, 4.0, 2.0, 17]


def test_costs_are_unknown_without_a_timed_pair():
    assert set(speed([]).values()) == {None}
    plain = Generation(tokens=[1] * 11, seconds=24.0, prefill_seconds=4.0)
    one = VerificationStep(drafted=2, tried=1, accepted=1, emitted=2)
    draft = Generation(tokens=[1] * 11, steps=[one] * 5, draft_passes=10, seconds=20.0,
                       prefill_seconds=4.0, draft_seconds=5.0, verify_seconds=10.0)  # fmt: skip
    figures = speed([(plain, draft)])
    assert (figures["target_pass_seconds"], figures["draft_pass_seconds"]) == (2.0, 0.5)
    assert (figures["cost_ratio"], figures["verification_ratio"]) == (0.25, 1.0)


@pytest.mark.long
def test_a_sweep_has_the_figures_of_every_length(workplace, monkeypatch):
    monkeypatch.setattr(on_target, "TIMED_PAIRS", 2)
    options = {"limit": 4, "max_new_tokens": 12, "cost_ratio": 0.2}
    report = run_eval(config_of(workplace, draft_tokens="3,1", **options))
    assert [line["draft_tokens"] for line in report["sweep"]] == [1, 3]
    assert (report["draft_tokens"], report["timed_pairs"]) == (3, 2)  # two are decoded again
    for line in report["sweep"]:
        alone = run_eval(config_of(workplace, draft_tokens=line["draft_tokens"], **options))
        assert "sweep" in alone and len(alone["sweep"]) == 1
        for name in ("acceptance_length", "interval", "rounds", "emitted"):
            assert line[name] == alone[name]
        assert alone["by_set"][0]["emitted"] == alone["emitted"]
        passes = alone["draft_passes"] / alone["rounds"]
        expected = alone["acceptance_length"] / (1 + 0.2 * passes)
        assert line["modelled"]["speedup"] == pytest.approx(expected)
    best = max(report["sweep"], key=lambda line: line["modelled"]["speedup"])
    assert report["best_draft_tokens"] == best["draft_tokens"]
    shown = table(report)
    assert shown.count("<- fastest") == 1 and "drafted tokens" in shown
    assert "each if those before it were" in shown
