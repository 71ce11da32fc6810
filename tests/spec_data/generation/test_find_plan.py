"""The plan of a directory is made once: processes that start together wait for its maker."""

import json
import logging
import multiprocessing as mp
from pathlib import Path

import pytest

from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation import setup as generation_setup
from spec_data.generation.plan import unit_tokens
from spec_data.generation.setup import changed_settings, find_plan, make_plan
from spec_data.shards.errors import ConfigError
from spec_data.shards.resumable import refuse_changes
from tests.spec_data.runs import digests, inputs_of, options, run, write_corpus


class Process:
    """A forked process that makes or finds the plan, and says what it does."""

    def __init__(self, given, held=None):
        context = mp.get_context("fork")
        self.said, saying = context.Pipe(duplex=False)
        self.process = context.Process(target=self._work, args=(given, held, saying))
        self.process.start()
        saying.close()

    def _work(self, given, held, saying):
        def slow(*args):
            saying.send("making")
            if held is not None:
                held.wait()
            return make_plan(*args)

        class Saying(logging.Handler):
            def emit(self, record):
                if "waiting for it" in record.getMessage():
                    saying.send("waiting")

        logging.getLogger().addHandler(Saying())
        logging.getLogger().setLevel(logging.INFO)
        generation_setup.make_plan = slow
        find_plan(*inputs_of(**given), Path(given["out"]))
        saying.send("planned")

    def next(self):
        assert self.said.poll(120), "it says nothing"
        return self.said.recv()


def test_processes_wait_for_the_maker_and_one_takes_over_when_it_is_killed(
    reference, target, corpus, tmp_path
):
    out = tmp_path / "data"
    given = options(target, corpus, out)
    maker = Process(given, mp.get_context("fork").Event())
    assert maker.next() == "making"
    others = [Process(given) for _ in range(2)]
    assert [other.next() for other in others] == ["waiting", "waiting"]
    assert not (out / ".generate" / "plan.json").exists()
    maker.process.kill()
    said = [(other.next(), other) for other in others]
    assert sorted(word for word, _ in said) == ["making", "planned"]
    assert next(other for word, other in said if word == "making").next() == "planned"
    for process in (maker, *others):
        process.process.join(60)
    assert [other.process.exitcode for other in others] == [0, 0]
    assert sorted(p.name for p in (out / ".generate").iterdir()) == [
        *("plan.arrow", "plan.json", "plan.lock", "prompts.arrow")
    ]
    run(target, corpus, out)
    assert digests(out) == digests(reference)


def test_resuming_hashes_the_corpus_without_parsing_it(target, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write_corpus(folder / f"{name}.jsonl", 6)
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text().replace("question", "q"))
    for limit in (0, 8, 6):
        out = tmp_path / f"data{limit}"
        rows, setup = inputs_of(**options(target, folder, out, limit=limit))
        plan = find_plan(rows, setup, out)
        assert len(plan.corpus) == {0: 3, 8: 2, 6: 1}[limit]
        with monkeypatch.context() as patch:
            patch.setattr("spec_data.corpus.sources.json_lines", None)
            patch.setattr(CorpusReader, "results", None)
            assert changed_settings(rows, setup, plan.settings) == []
        second = folder / "b.jsonl"
        before = second.read_text()
        second.write_text(before + " ")
        changed = changed_settings(rows, setup, plan.settings)
        assert bool(changed) == (limit != 6), "the second file was not read with --limit 6"
        assert all(line.startswith("corpus") for line in changed)
        second.write_text(before)
    with pytest.raises(ConfigError, match="limit: 8 -> 7"):
        settings = plan.settings | {"limit": 8}
        given = options(target, folder, out, limit=7)
        refuse_changes(changed_settings(*inputs_of(**given), settings), out)


@pytest.mark.parametrize(
    ("size", "per_token", "tokens", "batch", "expected"),
    [
        ("1MB", 1000, 10**9, 8192, 1000),  # what the user says is all that counts
        ("10B", 1000, 10**9, 8192, 1),
        ("auto", 8206, 10**9, 8192, 60_931),  # 500 MB of a large target
        ("auto", 100, 10**9, 8192, 262_144),  # a small target: the bound in tokens
        ("auto", 407, 1_000_000, 8192, 62_500),  # a small corpus: sixteen units
        ("auto", 407, 1_000_001, 8192, 62_501),
        ("auto", 407, 20_000, 8192, 8192),  # but no less than a batch
        ("auto", 10**9, 10**6, 8192, 1),
    ],
)
def test_a_unit_has_the_tokens_of_the_tightest_bound(size, per_token, tokens, batch, expected):
    assert unit_tokens(size, per_token, tokens, batch) == expected


def test_a_plan_with_another_size_resumes_without_the_flag(target, corpus, tmp_path):
    """Nothing but an explicit size is refused."""
    run(target, corpus, tmp_path / "data", max_shard_size="60KB", workers="1/2")
    before = (tmp_path / "data" / ".generate" / "plan.json").read_bytes()
    with pytest.raises(ConfigError, match="max_shard_size: '60KB' -> '61KB'"):
        run(target, corpus, tmp_path / "data", max_shard_size="61KB")
    run(target, corpus, tmp_path / "data", max_shard_size="auto", workers="1/2")
    assert (tmp_path / "data" / ".generate" / "plan.json").read_bytes() == before
    run(target, corpus, tmp_path / "data", max_shard_size="auto")
    run(target, corpus, tmp_path / "whole", max_shard_size="60KB")
    assert digests(tmp_path / "data") == digests(tmp_path / "whole")
    settings = json.loads((tmp_path / "data" / "manifest.json").read_text())["settings"]
    assert settings["max_shard_size"] == "60KB"
    run(target, corpus, tmp_path / "data", max_shard_size="auto")  # sealed: nothing to do
