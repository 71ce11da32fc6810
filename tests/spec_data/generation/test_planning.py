"""The plan is the same for any number of processes, and that of the slow path in plain lists."""

import gzip
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from spec_data.corpus import in_order as pool
from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.record_reader import CorpusReader, RawRow, RowResult
from spec_data.generation.plan import render_corpus, render_row
from spec_data.shards.errors import CorpusError, RunError
from tests.faults.odd_rows import as_json, broken_bytes, changed, good_row
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.generation.plan_reference import one_by_one, slow_renderer

PROCESSES = 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Other processes begin after three rows, and get five rows at a time."""
    monkeypatch.setattr(pool, "_FEW", 3)
    monkeypatch.setattr(pool, "_ROWS", 5)


def row_of(rng, i):
    kind = rng.random()
    if kind < 0.15:
        return broken_bytes(rng, as_json(rng, good_row(rng, f"odd-{i}"))).replace(b"\n", b" ")
    if kind < 0.3:
        return as_json(rng, changed(rng, good_row(rng, "odd"))).replace(b"\n", b" ")
    if kind < 0.35:
        ids = rng.integers(0, 200, int(rng.integers(1, 9))).tolist()
        return as_json(rng, {"input_ids": ids, "loss_mask": [1] * len(ids)})
    if kind < 0.4:
        return json.dumps({"messages": [{"role": "user", "content": f"alone {i}"}]}).encode()
    row = good_row(rng, f"good-{i % 20}")  # some rows are duplicates
    return json.dumps(row).encode()


def corpus(rng, folder):
    """Write files of several kinds below a directory, and return it."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(row_of(rng, i) for i in range(40)))
    rows = [json.dumps(good_row(rng, f"packed-{i}")).encode() for i in range(8)]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows)))
    (folder / "c.txt").write_text("a text of its own " * 9)
    (folder / "d.json").write_text(json.dumps([good_row(rng, f"listed-{i}") for i in range(6)]))
    texts = [f"columns {i}" for i in range(7)]
    pq.write_table(pa.table({"text": texts, "other": list(range(7))}), folder / "e.parquet")
    return folder


def plain_counts(counts, prompts, reports):
    """Return all counts as JSON text, so that their order is compared as well."""
    return json.dumps([structs.asdict(counts), prompts, [structs.asdict(r) for r in reports]])


def reader_of(path, **options):
    options = {"max_bad_rows": parse_limit("100%")} | options
    return CorpusReader([str(path)], **options)


def slow(reader, family, mask, length):
    renderer = slow_renderer(tokenizer(family), mask=mask)
    found = one_by_one(reader, renderer, length)
    flat = [found.ids, found.masks, found.turns, found.doc_ids, found.sources]
    return flat, plain_counts(*found.counts, reader.reports)


def fast(reader, family, mask, length, processes):
    tok = tokenizer(family)
    found, record = render_corpus(reader, Renderer(tok, mask=mask), length, processes)
    unit = found.read(0, len(found))
    flat = [
        [unit.tokens[name][a:b].tolist() for a, b in pairwise(found.offsets.tolist())]
        for name in ("input_ids", "loss_mask")
    ]
    flat += [unit.turns, unit.doc_ids, unit.sources]
    return flat, plain_counts(record["counts"], record["prompts"], reader.reports)


@pytest.mark.parametrize("family", ["qwen3", "tagged"])
@pytest.mark.parametrize("processes", [1, PROCESSES])
def test_plans_of_random_corpora_are_those_of_the_slow_path(tmp_path, family, processes):
    for trial, mask in enumerate(("assistant", "last-turn", "all")):
        rng = np.random.default_rng([trial, processes])
        path = corpus(rng, tmp_path / str(trial))
        options = {"limit": int(rng.integers(10, 50))} if trial == 1 else {}
        length = int(rng.choice([20, 60, 4096]))
        expected = slow(reader_of(path, **options), family, mask, length)
        assert fast(reader_of(path, **options), family, mask, length, processes) == expected


def error_of(function, *args):
    with pytest.raises(CorpusError) as error:
        function(*args)
    return str(error.value)


def test_errors_come_after_the_same_rows(tmp_path, caplog):
    """A row too many, the first bad row, and a file that breaks off: message, counts and log."""
    rng = np.random.default_rng(5)
    good = [json.dumps(good_row(rng, f"g{i}")).encode() for i in range(30)]
    files = {
        "many.jsonl": (b"\n".join([*good[:9], *[b"{"] * 130, *good]), {"max_bad_rows": "5"}),
        "first.jsonl": (b"\n".join([*good[:20], b"[]", *good]), {"max_bad_rows": "0"}),
        "cut.jsonl.gz": (gzip.compress(b"\n".join([*good, b"{", *good]))[:-40], {}),
    }
    caplog.set_level(logging.INFO)
    for name, (content, options) in files.items():
        (tmp_path / name).write_bytes(content)
        if "max_bad_rows" in options:
            options = {"max_bad_rows": parse_limit(options["max_bad_rows"])}
        found = []
        for run, processes in ((slow, []), (fast, [1]), (fast, [PROCESSES])):
            caplog.clear()
            reader = reader_of(tmp_path / name, **options)
            message = error_of(run, reader, "chatml", "assistant", 99, *processes)
            logged = [r.getMessage() for r in caplog.records if "render:" not in r.getMessage()]
            found.append((message, logged, plain_counts_of(reader)))
        assert found[0] == found[1] == found[2]


def plain_counts_of(reader):
    return [structs.asdict(r) for r in reader.reports], reader.refused, reader.refused_examples


def dying(renderer, max_length, parse, row):
    if b"die" in row.value and os.getpid() != int(os.environ["SPEC_TEST_PARENT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return render_row(renderer, max_length, parse, row)


def test_a_killed_process_ends_the_run_in_words(tmp_path, monkeypatch):
    before = set(psutil.Process().children())
    monkeypatch.setenv("SPEC_TEST_PARENT", str(os.getpid()))
    monkeypatch.setattr("spec_data.generation.plan.render_row", dying)
    rows = [json.dumps({"text": f"text {i}" + " die" * (i == 30)}) for i in range(60)]
    (tmp_path / "c.jsonl").write_text("\n".join(rows))
    with pytest.raises(RunError, match="fewer processes \\(--num-proc\\)"):
        fast(reader_of(tmp_path / "c.jsonl"), "chatml", "all", 99, PROCESSES)
    assert not set(psutil.Process().children()) - before


def never(row):
    return time.sleep(60) if row.value >= 10 else RowResult()


def broken_off(count):
    yield from (RawRow(0, "", f"row {i}", i) for i in range(count))
    raise TimeoutError("the storage does not answer")


@pytest.mark.long
def test_a_template_that_never_ends_and_a_storage_that_does_not_answer(monkeypatch):
    before = set(psutil.Process().children())
    monkeypatch.setattr(pool, "_SECONDS", 0.3)
    rows = (RawRow(0, "", f"row {i}", i) for i in range(100))
    with pytest.raises(CorpusError, match=r"row 10 to row 14: not rendered in 0\.3 s"):
        list(pool.in_order(rows, never, 2))
    rows = (RawRow(0, "", f"row {i}", i + 10) for i in range(100))
    with pytest.raises(CorpusError, match=r"row 0 to row 4: not rendered in 0\.3 s"):
        list(pool.in_order(rows, never, 1))  # among the rows that no process renders
    with pytest.raises(TimeoutError, match="does not answer"):
        list(pool.in_order(broken_off(8), never, 2))
    assert not set(psutil.Process().children()) - before


ONE = "messages[0]['content'][0]"
BOMBS = (
    f"{ONE} * 4000000000",
    "('%' ~ messages[0]['content']|length ~ '000000000d') % 1",
    f"{ONE}.center(4000000000)",
    f"range(99999)|join({ONE} * 99999)",
)


@pytest.mark.parametrize(
    ("bomb", "processes"), [(bomb, 1) for bomb in BOMBS] + [(BOMBS[0], PROCESSES)]
)
def test_a_template_that_takes_all_memory_on_a_later_row_is_named(
    tmp_path, monkeypatch, bomb, processes
):
    """It behaves on the rows that are tried. Memory of the process stays below the bound."""
    monkeypatch.setattr(pool, "_MEMORY", 1 << 29)
    made = tokenizer("chatml")
    odd = "{% if messages[0]['content'] == 'boom' %}{{ " + bomb + " }}{% endif %}"
    made.chat_template = odd + made.chat_template
    late = 4 if processes == 1 else 30
    rows = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "b"}]] * late
    rows += [[{"role": "user", "content": "boom"}, {"role": "assistant", "content": "b"}]]
    lines = [json.dumps({"messages": messages}) for messages in [*rows, rows[0]]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    before = resource.getrlimit(resource.RLIMIT_AS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorpusError, match=rf"a\.jsonl:{late + 1}: rendering it needs more than"):
        render_corpus(reader_of(tmp_path / "a.jsonl"), Renderer(made), 99, processes)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + (1 << 20), "kilobytes"


ENDLESS = """
import sys
from argparse import Namespace
from spec_data.terminal.console import run_cli
from spec_data.corpus import in_order as pool
from spec_data.corpus.chat import Renderer
from spec_data.corpus.record_reader import RawRow, RowResult
pool._FEW, pool._ROWS = 1, 4
def work(row):  # its result is still being sent when it is asked for no more
    return RowResult(made=bytes(10**6))
def render():
    rows = (RawRow(0, "", "", i) for i in range(10**9))
    for n, _ in enumerate(pool.in_order(rows, work, 2)):
        if n == 150:
            print("running", flush=True)
sys.exit(run_cli(render, Namespace(quiet=False, verbose=False, debug=False)))
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_when_their_parent_does(number):
    """A terminal sends its signals to all of them: only the parent says something."""
    command, pipe = [sys.executable, "-c", ENDLESS], subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[1]
    assert said == ("" if number == signal.SIGKILL else "interrupted\n")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
