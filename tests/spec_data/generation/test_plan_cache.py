"""Rendered documents are kept: once per corpus, tokenizer and options; damaged entries are not."""

import json
import logging
import multiprocessing as mp
import os
import shutil
import time
from dataclasses import replace

import pytest

from spec_data.estimation import estimate_size
from spec_data.generation import plan_cache, planning
from spec_data.generation.plan_cache import cache_limit, open_cache
from spec_data.generation.planning import make_plan
from spec_data.generation.setup import set_up
from spec_data.options.generate_options import EstimateConfig, GenerateConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import cache_directory
from tests.spec_data.runs import digests, options, run, save_target, write_corpus


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "chats.jsonl", 12)
    with (tmp_path / "corpus" / "chats.jsonl").open("a") as file:
        file.write('{"odd": 1}\n{"messages": [{"role": "user", "content": "alone"}]}\n')
    return tmp_path / "corpus"


@pytest.fixture
def renders(tmp_path, monkeypatch):
    """Switch the cache on, and count how often a corpus is rendered."""
    monkeypatch.setenv("SPEC_DATA_CACHE_SIZE", "1GB")
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    calls, render = [], planning.render_into
    monkeypatch.setattr(planning, "render_into", lambda *args: (calls.append(1), render(*args))[1])
    return calls


def setup_of(target, corpus, out, **changes):
    return set_up(GenerateConfig(**options(target, corpus, out, **changes)))


def entries(tmp_path):
    return [p for p in (tmp_path / "cache" / "plans").iterdir() if p.is_dir() and p.name[0] != "."]


def facts(plan):
    own = plan.documents
    return [plan.counts, plan.corpus, plan.settings, plan.units, own.sha256, list(own.doc_ids)]


def test_estimate_and_generate_render_a_corpus_once(
    target, corpus, tmp_path, renders, monkeypatch, caplog
):
    given = options(target, corpus, tmp_path / "data")
    estimate = estimate_size(EstimateConfig(**given))
    estimate_size(EstimateConfig(**given | {"layers": "1,3", "max_shard_size": "90KB"}))
    caplog.clear()
    caplog.set_level(logging.INFO)
    run(target, corpus, tmp_path / "data")
    assert len(renders) == 1
    assert "the documents were rendered before" in caplog.text
    assert "bad row skipped: " in caplog.text and "no known columns" in caplog.text
    assert (tmp_path / "data" / "manifest.json").is_file()
    monkeypatch.setenv("SPEC_DATA_CACHE_SIZE", "0")
    run(target, corpus, tmp_path / "fresh")
    assert len(renders) == 2
    assert digests(tmp_path / "data") == digests(tmp_path / "fresh")
    plain = make_plan(replace(estimate.setup))
    assert facts(estimate.plan) == facts(plain)


def test_a_copy_of_the_corpus_elsewhere_is_the_same_corpus(
    target, corpus, tmp_path, renders, caplog
):
    make_plan(setup_of(target, corpus, tmp_path / "a"))
    shutil.copytree(corpus, tmp_path / "copy")
    caplog.set_level(logging.INFO)
    make_plan(setup_of(target, tmp_path / "copy", tmp_path / "a"))
    assert len(renders) == 1 and f"{tmp_path / 'copy'}/chats.jsonl: jsonl" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 30}, {"mask": "all"}, {"keep_tails": True}, {"limit": 5},
        {"max_row_bytes": "1MB"}, {"max_bad_rows": "3"},
        "corpus", "name", "licence", "template", "special", "end", "code",
    ],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_documents_makes_another_entry(
    target, corpus, tmp_path, renders, monkeypatch, change
):
    before = facts(make_plan(setup_of(target, corpus, tmp_path / "out")))
    file, options = corpus / "chats.jsonl", change if isinstance(change, dict) else {}
    if change == "corpus":
        file.write_text(file.read_text().replace("question 1", "question one"))
    if change == "name":
        file.rename(corpus / "talks.jsonl")
    if change == "licence":
        (corpus / "README.md").write_text("---\nlicense: mit\n---\n")
    if change == "code":
        monkeypatch.setattr(planning, "_code_hash", lambda: "another checkout")
    setup = setup_of(target, corpus, tmp_path / "out", **options)
    if change == "template":
        tokenizer_id = setup.tokenizer_id | {"chat_template_hash": "another"}
        setup = replace(setup, tokenizer_id=tokenizer_id)
    if change == "special":
        setup.tokenizer.pad_token = "<|im_end|>"
    if change == "end":
        monkeypatch.setattr(planning, "end_token_ids", lambda directory: [5])
    after = facts(make_plan(setup))
    assert len(renders) == 2 and len(entries(tmp_path)) == 2
    if change in ("corpus", "name", "licence") or options.keys() - {"max_bad_rows"}:
        assert after != before


def test_a_template_with_the_date_is_rendered_again_on_another_day(
    target, corpus, tmp_path, renders, monkeypatch
):
    dated = shutil.copytree(target, tmp_path / "dated")
    template = dated / "chat_template.jinja"
    template.write_text("{{- strftime_now('%d %b') }}" + template.read_text())

    class Tomorrow:
        @staticmethod
        def today():
            return "tomorrow"

    for _ in range(2):
        make_plan(setup_of(dated, corpus, tmp_path / "out"))
    assert len(renders) == 1
    monkeypatch.setattr(planning, "date", Tomorrow)
    make_plan(setup_of(dated, corpus, tmp_path / "out"))
    assert len(renders) == 2


@pytest.mark.parametrize("damage", ["bit", "cut", "facts", "no plan", "no facts", "other key"])
def test_a_damaged_entry_is_made_again(target, corpus, tmp_path, renders, caplog, damage):
    before = facts(make_plan(setup_of(target, corpus, tmp_path / "out")))
    (entry,) = entries(tmp_path)
    plan, written = entry / "plan.arrow", entry / "rendered.json"
    content = bytearray(plan.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        plan.write_bytes(content)
    if damage == "cut":
        plan.write_bytes(content[:-100])
    if damage == "facts":
        written.write_text(written.read_text()[:-30])
    if damage.startswith("no "):
        {"no plan": plan, "no facts": written}[damage].unlink()
    if damage == "other key":
        stored = json.loads(written.read_text())
        written.write_text(json.dumps(stored | {"key": {}}))
    again = make_plan(setup_of(target, corpus, tmp_path / "out"))
    assert facts(again) == before and len(renders) == 2
    assert ("a damaged entry of the cache is made again" in caplog.text) == ("no " not in damage)
    make_plan(setup_of(target, corpus, tmp_path / "out"))
    assert len(renders) == 2


def test_a_corpus_that_changes_while_it_is_rendered_is_not_kept(
    target, corpus, tmp_path, renders, monkeypatch
):
    key = planning.rendering_key

    def late(*args):
        found = key(*args)
        with (corpus / "chats.jsonl").open("a") as file:
            file.write("\n")
        return found

    monkeypatch.setattr(planning, "rendering_key", late)
    make_plan(setup_of(target, corpus, tmp_path / "out"))
    assert not entries(tmp_path)


def test_the_cache_is_bounded_and_drops_what_was_not_used(
    target, corpus, tmp_path, renders, monkeypatch
):
    for length in (20, 30, 40):
        make_plan(setup_of(target, corpus, tmp_path / "out", max_length=length))
        time.sleep(0.01)  # the order of use is told by times of files
    assert len(entries(tmp_path)) == 3
    make_plan(setup_of(target, corpus, tmp_path / "out", max_length=20))
    assert len(renders) == 3
    largest = max((e / "plan.arrow").stat().st_size for e in entries(tmp_path))
    monkeypatch.setenv("SPEC_DATA_CACHE_SIZE", str(2 * largest + 100))
    make_plan(setup_of(target, corpus, tmp_path / "out", max_length=25))
    left = sum((e / "plan.arrow").stat().st_size for e in entries(tmp_path))
    assert len(renders) == 4 and left <= 2 * largest + 100
    for length in (20, 25):
        make_plan(setup_of(target, corpus, tmp_path / "out", max_length=length))
    assert len(renders) == 4, "the newest and the one used last are still there"
    monkeypatch.setenv("SPEC_DATA_CACHE_SIZE", "10")
    before = set(entries(tmp_path))
    make_plan(setup_of(target, corpus, tmp_path / "out", max_length=35))
    assert len(renders) == 5 and set(entries(tmp_path)) == before, "one that is too large"


def test_old_leftovers_of_killed_processes_are_removed(tmp_path, renders):
    plans = tmp_path / "cache" / "plans"
    for name in (".rendering-old", ".rendering-new"):
        (plans / name).mkdir(parents=True)
        (plans / name / "plan.arrow").touch()
    for path in (plans / ".rendering-old", plans / ".rendering-old" / "plan.arrow"):
        os.utime(path, (1, 1))
    open_cache()
    assert [p.name for p in plans.iterdir()] == [".rendering-new"]


def test_a_cache_that_cannot_be_written_is_left_out(target, corpus, tmp_path, renders, caplog):
    (tmp_path / "cache").write_text("a file")
    plan = make_plan(setup_of(target, corpus, tmp_path / "out"))
    assert len(plan.lengths) == 12 and "SPEC_DATA_CACHE" in caplog.text


def test_a_full_disk_of_the_cache_costs_nothing_but_the_entry(
    target, corpus, tmp_path, renders, monkeypatch, caplog
):
    def full(source, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_cache, "link_or_copy", full)
    plan = make_plan(setup_of(target, corpus, tmp_path / "out"))
    assert len(plan.lengths) == 12 and "not kept in the cache" in caplog.text
    assert not entries(tmp_path)


def test_a_process_waits_for_the_one_that_renders(target, corpus, tmp_path, renders, monkeypatch):
    context = mp.get_context("fork")
    held, said = context.Event(), context.SimpleQueue()
    inner = planning.render_into

    def slow(*args):
        said.put("rendering")
        held.wait(60)
        return inner(*args)

    def work(slowly):
        monkeypatch.setattr(planning, "render_into", slow if slowly else None)
        make_plan(setup_of(target, corpus, tmp_path / "out"))

    first = context.Process(target=work, args=(True,))
    first.start()
    assert said.get() == "rendering"
    second = context.Process(target=work, args=(False,))  # it would fail if it rendered
    second.start()
    time.sleep(0.5)
    assert second.is_alive()
    held.set()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0


def test_where_the_cache_is_and_how_large(monkeypatch, tmp_path):
    for name in ("SPEC_DATA_CACHE", "SPEC_DATA_CACHE_SIZE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        cache_directory("plans") == tmp_path / ".cache/spec-data/plans" and cache_limit() == 10**10
    )
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert cache_directory("plans") == tmp_path / name / "spec-data/plans"
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "own"))
    assert cache_directory("plans") == tmp_path / "own" / "plans"
    monkeypatch.setenv("SPEC_DATA_CACHE_SIZE", "much")
    with pytest.raises(ConfigError):
        cache_limit()
