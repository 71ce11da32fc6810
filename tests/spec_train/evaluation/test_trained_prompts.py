"""Prompts that are training documents are counted; so are rows that are no prompts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_data.corpus.chat import Renderer
from spec_data.corpus.prompt_overlap import Grams, add_prompt
from spec_data.corpus.template import Template
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import write_record
from spec_train.data.order import SPLIT_RULE, hash_prompts, split_border
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import RunRecord, read_run
from spec_train.evaluation.trained_prompts import find_trained, kwargs_for
from tests.factory import tiny_dataset
from tests.spec_data.corpus import templates
from tests.spec_data.corpus.chat_cases import answer, user
from tests.spec_data.corpus.test_template import chat
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import config_of, respond, run_eval

target, prompts = evaluate_tools.target, evaluate_tools.prompts
workplace = evaluate_tools.workplace


@pytest.fixture(scope="module")
def trained(target) -> Any:
    """Any draft will do: here it matters what is asked, not what is accepted."""
    return evaluate_tools.draft_for("eagle3", target)


@pytest.fixture(scope="module")
def run(tmp_path_factory, workplace, target, prompts) -> Path:
    """A run whose data are the target's answers to 12 of the prompts; some are held out."""
    folder = tmp_path_factory.mktemp("trained")
    answered = [respond(target, prompt) for prompt in prompts[:12]]
    documents = [(ids, mask, [("assistant", mask.index(1), len(ids))]) for ids, mask in answered]
    data = tiny_dataset(folder / "data", layers=(0, 1, 2), model=target, documents=documents)
    run = folder / "run"
    run.mkdir()
    (run / "best").symlink_to(workplace / "draft", target_is_directory=True)
    options = {"data": str(data), "seed": 0, "validation": 0.3, "seq_len": 2048}
    fingerprint = HiddenStatesDataset(data).manifest.fingerprint
    (run / "fit.json").write_text(json.dumps(options))
    identity = {"dataset": fingerprint, "split_rule": SPLIT_RULE, "split_seed": 0}
    identity["split_border"] = split_border(hash_prompts(HiddenStatesDataset(data).prompts, 0), 0.3)
    write_record(run / "run.json", {"identity": identity, "total_steps": 2})
    return run


def facts_of(run: Path) -> RunRecord:
    facts = read_run(run, run / "best")
    assert facts is not None
    return facts


def grams_of(prompts) -> Grams:
    """Return prompts as their template renders them: <user> ... <assistant>."""
    grams = Grams()
    for ids in prompts:
        grams.add([ids[1:-1]], ids)
    return grams


@pytest.mark.parametrize(
    "text", ["hi", "how many apples do seven children carry home in their bags"]
)
def test_blanks_around_a_prompt_hide_no_leak(text):
    tok = templates.tokenizer("chatml")
    chats = [user(text)], [user("so"), answer("well"), user(text)], [user(text[:-2] + "x")]
    document, later, other = (
        Renderer(tok).render(chat(*messages, answer("fine"))).documents[0] for messages in chats
    )
    for asked in (text, f"{text} ", f"\n{text}\n"):
        grams = Grams()
        add_prompt(grams, chat(user(asked)), Template(tok))
        ids = [np.array(d.input_ids, np.int32) for d in (document, later, other)]
        found = [grams.matches(one) for one in ids]
        assert found[0] == {0} and (len(text) < 9 or found[1] == {0})
        assert len(text) >= 9 or found[2] == set()


def test_prompts_that_begin_training_documents_are_found_and_held_out_ones_are_not(
    run, prompts, monkeypatch
):
    facts = facts_of(run)
    data = facts.sources[0]
    dataset = HiddenStatesDataset(data)
    learned = choose_documents(dataset, "train", facts)[0]
    assert 0 < len(learned) < 12, "no document is held out: the test shows nothing"
    found = find_trained(grams_of(prompts), facts, None)
    assert (found.numbers, found.data, found.problem) == (learned, [str(data)], None)
    monkeypatch.chdir(data.parent)
    again = find_trained(grams_of(prompts), facts, Path(data.name))
    assert (again.numbers, again.data) == (learned, [data.name]), "once, by either name"
    assert find_trained(grams_of(prompts), None, data).numbers == list(range(12)), (
        "no run: every document"
    )
    beginnings = [prompt[:-1] for prompt in prompts]  # a beginning too, but of no one's answer
    assert find_trained(grams_of(beginnings), facts, None).numbers == learned
    others = [[*prompt[:-2], 63, 2] for prompt in prompts]
    assert find_trained(grams_of([*others, [], [1] * 999]), facts, None).numbers == []


def test_what_the_draft_of_init_from_learned_is_found(run, prompts, tmp_path, target):
    """Runs that began as the draft of another, once and twice, on data of their own."""
    facts, began = facts_of(run), run
    first = HiddenStatesDataset(facts.sources[0])
    learned = choose_documents(first, "train", facts)[0]
    for name in ("second", "third"):
        own = tiny_dataset(tmp_path / f"{name} data", n_docs=2, layers=(0, 1, 2), model=target)
        later = tmp_path / name
        shutil.copytree(run, later, symlinks=True)
        options = json.loads((run / "fit.json").read_text())
        options |= {"data": str(own), "init_from": str(began)}
        (later / "fit.json").write_text(json.dumps(options))
        record = json.loads((run / "run.json").read_text())
        record["identity"]["dataset"] = HiddenStatesDataset(own).manifest.fingerprint
        write_record(later / "run.json", record)
        found = find_trained(grams_of(prompts), facts_of(later), None)
        assert (found.numbers, found.problem) == (learned, None) and len(found.data) > 1
        measured = choose_documents(first, "auto", facts_of(later))
        assert measured == choose_documents(first, "validation", facts)
        began = later
    second = tmp_path / "second" / "fit.json"  # written again since, from the third
    options = json.loads(second.read_text()) | {"init_from": str(tmp_path / "third")}
    second.write_text(json.dumps(options))
    assert "third, which the draft began as" in str(
        find_trained(grams_of(prompts), facts_of(tmp_path / "third"), None).problem
    )
    second.unlink()
    unknown = find_trained(grams_of(prompts), facts_of(tmp_path / "third"), None)
    assert unknown.numbers == [] and "second, which the draft began as" in str(unknown.problem)


def test_data_that_cannot_be_compared_is_named(run, prompts, tmp_path, target):
    facts = facts_of(run)
    gone = find_trained(grams_of(prompts), replace(facts, sources=[tmp_path / "gone"]), None)
    assert gone.numbers is None and "no such dataset directory" in str(gone.problem)
    assert find_trained(grams_of(prompts), None, None).problem == "the training data is not known"
    other = tiny_dataset(tmp_path / "other", n_docs=2, layers=(0, 1, 2), model=target)
    moved = find_trained(grams_of(prompts), replace(facts, sources=[other]), None)
    assert moved.numbers is None and "is not the dataset that the draft was tr" in str(
        moved.problem
    )
    data = facts.sources[0]
    found = find_trained(grams_of(prompts), replace(facts, sources=[tmp_path / "gone"]), data)
    assert found.numbers and found.data == [str(data)], "--data is the dataset of the run"
    assert found.problem, "not all were compared"


def test_eval_warns_of_training_documents(run, workplace):
    report = run_eval(config_of(workplace, draft=str(run), max_new_tokens=2))
    learned = choose_documents(HiddenStatesDataset(run.parent / "data"), "train", facts_of(run))[0]
    count = sum(number < 6 for number in learned)  # six of the prompts are the first six
    assert report["trained_prompts"] == count > 0
    (warning,) = [w for w in report["warnings"] if "in training documents" in w]
    assert warning.startswith(f"{count} of 7 prompts are in training documents (the first: ")
    report = run_eval(config_of(workplace, max_new_tokens=2, limit=1))
    assert report["trained_prompts"] is None
    assert not [w for w in report["warnings"] if "in training documents" in w]


def test_a_later_turn_that_the_template_rejects_is_counted(workplace, tmp_path, caplog):
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": ["w9", "w10"]}))
    template = evaluate_tools.TEMPLATE
    folder = tmp_path / "target"
    folder.symlink_to(workplace / "target", target_is_directory=True)
    report = run_eval(config_of(workplace, prompts=str(tmp_path / "p.jsonl"), max_new_tokens=2))
    assert report["responses"] == 2 and report["failed_turns"] == []
    file = workplace / "target" / "chat_template.jinja"
    before = file.read_text()
    strict = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    file.write_text(strict + template)
    try:
        report = run_eval(config_of(workplace, prompts=str(tmp_path / "p.jsonl"), max_new_tokens=2))
    finally:
        file.write_text(before)
    assert report["responses"] == 1
    assert "warning[long-prompt]: the next turn of a prompt is left out" in caplog.text
    (failed,) = report["failed_turns"]
    assert "p.jsonl:1: the chat template fails" in failed and "one question" in failed


def test_kwargs_of_the_training_data_that_the_target_does_not_read_are_named(workplace):
    tokenizer = templates.tokenizer("qwen3")
    assert kwargs_for({"x": 1}, {}, tokenizer) == ({"x": 1}, [])
    usual = {"enable_thinking": False, "enable_thinkin": True}
    trained = {"chat_template_kwargs": usual}
    kept, (warning,) = kwargs_for(None, trained, tokenizer)
    assert kept == {"enable_thinking": False}
    assert "rendered with enable_thinkin = True, which this target's chat template does" in warning
    kept, (warning,) = kwargs_for(None, {}, tokenizer)
    assert kept == {} and "pass --chat-template-kwargs" in warning
    with pytest.raises(ConfigError, match=r"does not read loud \(it reads"):
        run_eval(config_of(workplace, chat_template_kwargs={"loud": True}))
