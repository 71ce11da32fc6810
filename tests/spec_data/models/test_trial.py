"""Chat templates and tokenizers that take all memory, never end, or abort: refused in words."""

import os
import resource
import signal
import threading
import time

import pytest
from tokenizers import normalizers

from spec_data.corpus import in_order
from spec_data.corpus import template as template_module
from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.record_reader import RawRow
from spec_data.corpus.template import Template
from spec_data.corpus.template_keys import message_keys
from spec_data.models import tokenizer as tokenizer_module
from spec_data.models import trial
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import CorpusError, TargetError
from spec_train.evaluation.prompts import read_prompts
from tests.spec_data.corpus.chat_cases import TWO, user
from tests.spec_data.corpus.reading import write_jsonl
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.corpus.test_chat import chat

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
LOOPS += "{% endfor %}{% endfor %}{% endfor %}"
ENDS = "(needs more than .* bytes of memory|does not end in 3 s)"
BOMBS = {
    "{{ 'a' * 9999999999 }}": ENDS,
    "{{ '%9999999999d' % 1 }}": ENDS,
    "{{ '{:>9999999999}'.format(1) }}": ENDS,
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}"
    "{% endfor %}{{ ns.t }}": ENDS,
    LOOPS: "does not end in 3 s",
}
LATE = "{%% if messages[0]['content'] != 'Hello?' and messages|length > 3 %%}%s{%% endif %%}"
PLAIN = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture(autouse=True)
def _bounds(monkeypatch):
    monkeypatch.setattr(trial, "_SECONDS", 3)
    monkeypatch.setattr(trial, "_BYTES", 1 << 30)


def saved(folder, template: str):
    """Save a tokenizer with a template, and return its folder."""
    made = tokenizer("chatml")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_without_bounds_is_refused_when_it_is_loaded(tmp_path, bomb):
    with pytest.raises(TargetError, match=f"{tmp_path}: the chat template .* {BOMBS[bomb]}"):
        load_tokenizer(saved(tmp_path, bomb + PLAIN))


@pytest.mark.parametrize("bomb", ["{{ messages[0]['content'] * 9999999999 }}", LOOPS])
def test_one_that_is_without_bounds_for_real_chats_is_refused_at_the_first(tmp_path, bomb):
    made = load_tokenizer(saved(tmp_path, LATE % bomb + PLAIN))
    prompts = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*TWO, user("c")]}])
    with pytest.raises(TargetError, match=f"the chat template .* {ENDS}"):
        Renderer(made).render(chat(*TWO))
    with pytest.raises(TargetError, match=f"the chat template .* {ENDS}"):
        read_prompts(prompts, Template(made))


@pytest.mark.parametrize(
    "deep",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
        "{% for x in [1] %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "not " * 30_000 + "1 }}",
        "{{ " + "messages + " * 3_000 + "1 }}",
    ],
    ids=["brackets", "ifs", "loops", "words", "a sum"],
)
def test_a_template_deeper_than_python_reads_fails_in_words(tmp_path, deep):
    made = load_tokenizer(saved(tmp_path, deep + PLAIN))
    assert message_keys(made) is None
    renderer = Renderer(made)
    with pytest.raises(RenderError, match="the chat template fails: "):
        renderer.render(chat(*TWO))


def test_a_long_text_of_a_later_row_is_the_error_of_the_row():
    made = tokenizer("chatml")
    made.chat_template = "{{ messages[0]['content'] * (messages|length * 300) }}"
    renderer = Renderer(made)
    renderer.template.trials = 99
    with pytest.raises(RenderError, match="it writes 1,200,000 characters of a chat of"):
        renderer.render(chat(*[m | {"content": "x" * 1000} if m is TWO[0] else m for m in TWO]))


class Never:
    """Ends never, as a normaliser of a tokenizer can."""

    def __call__(self, *_, **__):
        while True:
            pass


class Aborts:
    def __call__(self, *_, **__):
        os.abort()


class PanicException(BaseException):
    """As libraries in Rust raise it: no `Exception`, so it ended commands with a traceback."""


class Panics:
    def __call__(self, *_, **__):
        raise PanicException("index out of bounds: the len is 12292 but the index is 12292")


def test_a_tokenizer_that_panics_on_a_row_makes_it_a_bad_row(monkeypatch):
    renderer = Renderer(tokenizer("chatml"))
    monkeypatch.setattr(renderer, "_rendered", Panics())
    with pytest.raises(RenderError, match="PanicException: index out of bounds"):
        renderer.render(chat(*TWO))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Panics, "ends in a panic of the library"),
        (Never, "does not end in 3 s"),
        (Aborts, r"ends the process \(SIGABRT\)"),
    ],
)
def test_a_tokenizer_that_never_ends_or_aborts_is_refused(tmp_path, monkeypatch, kind, said):
    made = saved(tmp_path, PLAIN)
    monkeypatch.setattr(tokenizer_module, "usual_tokenizer", lambda *_: kind())
    with pytest.raises(TargetError, match=said):
        load_tokenizer(made)


def test_a_normaliser_whose_text_grows_without_end_is_refused(tmp_path):
    made = tokenizer("chatml")
    grow = [normalizers.Replace("e", "e" * 1000) for _ in range(9)]
    made.backend_tokenizer.normalizer = normalizers.Sequence(grow)
    made.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="the chat template or the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_trial_leaves_no_process_and_no_text(capfd):
    def noisy():
        os.write(1, b"out")
        os.write(2, b"err")
        raise ValueError("said when the row is rendered")

    assert trial.fault_in_child(noisy, 5, 1 << 30) == ""
    assert capfd.readouterr() == ("", "")
    assert "SIGSEGV" in trial.fault_in_child(lambda: os.kill(os.getpid(), 11), 5, 1 << 30)
    start = time.monotonic()
    assert trial.fault_in_child(signal.pause, 0.2, 1 << 30) == "does not end in 0.2 s"
    assert time.monotonic() > start
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_elsewhere_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(trial.sys, "platform", "darwin")
    assert trial.fault_in_child(os.abort, 1, 1) == ""


def test_each_template_is_tried_with_its_first_chats_alone(monkeypatch):
    tried = []
    monkeypatch.setattr(template_module, "check_in_child", lambda work, name: tried.append(name))
    renderer = Renderer(tokenizer("chatml"))
    for _ in range(5):
        renderer.render(chat(*TWO))
    assert tried == ["the tokenizer", "s:1", "s:1"]


def test_a_bound_of_memory_goes_with_the_last_thread_that_needs_it():
    before = resource.getrlimit(resource.RLIMIT_AS)
    first, second = trial.MemoryBound(1 << 30), trial.MemoryBound(1 << 28)
    with first:
        bound = resource.getrlimit(resource.RLIMIT_AS)
        second.__enter__()
        assert bound != before and resource.getrlimit(resource.RLIMIT_AS) > bound
    assert resource.getrlimit(resource.RLIMIT_AS) != before
    with pytest.raises(MemoryError):
        bytes(2 << 30)
    second.__exit__(None, None, None)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def rendered_for_ever(way: str, work: object) -> None:
    if way == "alone":
        in_order.in_time("c:1", work)
    else:
        rows = iter([RawRow(0, "c", "c:1", JsonText(b"{}"))])
        list(in_order.in_order(rows, work, 1))


@pytest.mark.parametrize("way", ["alone", "among rows"])
def test_a_thread_that_never_ends_leaves_no_bound_of_memory(way, monkeypatch):
    """The rest of a notebook's life would have 4 GB."""
    monkeypatch.setattr(in_order, "_SECONDS", 0.3)
    before, end, begun = resource.getrlimit(resource.RLIMIT_AS), threading.Event(), []

    def work(*row: object) -> None:
        begun.append(resource.getrlimit(resource.RLIMIT_AS) != before)
        end.wait(30)

    with pytest.raises(CorpusError, match="not rendered in"):
        rendered_for_ever(way, work)
    assert begun == [True]
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    end.set()
    with trial.MemoryBound(1 << 40):
        time.sleep(0.1)  # the thread has ended: it takes no bound of others away
        assert resource.getrlimit(resource.RLIMIT_AS) != before
