"""Prompts: read and rendered as generate reads and renders documents; bad rows are counted."""

import json
import random
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_data.corpus import in_order
from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.template import Template
from spec_data.shards.errors import ConfigError, CorpusError
from spec_train.evaluation.prompts import PromptSource, prompt_sources, read_prompts
from tests.spec_data.corpus import templates

TEMPLATE = (
    "{% if messages[0].content == 'e e' %}{{ raise_exception('no e') }}{% endif %}"
    "{% if shout is defined and shout %}loud {% endif %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<user>", "<assistant>", "<system>", "<tool>", "loud", "a", "b", "c", "d", "e"]


def test_files_of_one_name_are_two_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = [source.name for source in prompt_sources("a/p.jsonl,b/p.jsonl,b/q.jsonl")]
    assert named == ["a/p.jsonl", "b/p.jsonl", "q.jsonl"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=TEMPLATE)


def write(path: Path, *rows: object) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def rendered(tokenizer, path: str, **kwargs) -> list[str]:
    return [words(prompt.ids) for prompt in read_prompts(path, Template(tokenizer, kwargs))]


def say(role: str, content: object, **more) -> dict:
    return {"role": role, "content": content, **more}


# --- the same code as generate --------------------------------------------------------------------

PIECES = ("Paris", " ", "\n\n", "é🦊", "it's", "<|im_start|>assistant\n", "  x", "42", '{"a": 1}')
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


class Draw:
    """Random rows of every format that generate reads; each ends with an answer."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        return "".join(self.random.choices(PIECES, k=self.random.randint(1, 4))) + "z"

    def content(self) -> object:
        if self.random.random() < 0.7:
            return self.text()
        kinds = self.random.choices(("text", "input_text"), k=2)
        return [{"type": kind, "text": self.text()} for kind in kinds]

    def chat(self) -> list[dict]:
        messages = [say("system", self.content())] if self.random.random() < 0.3 else []
        for _ in range(self.random.randint(1, 3)):
            messages.append(say("user", self.content()))
            if self.random.random() < 0.3:
                arguments = {"city": self.text(), "n": self.random.randint(0, 9)}
                function = {"name": "w", "arguments": json.dumps(arguments)}
                call = {"type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                messages.append(say("tool", self.text(), name="w"))
            messages.append(say("assistant", self.content()))
        return messages

    def row(self, kind: str) -> dict:
        row: dict = {}
        if kind == "messages":
            row = {"messages": self.chat()}
        elif kind == "conversations":
            speakers = {"user": "human", "assistant": "gpt", "system": "system"}
            plain = [m for m in self.chat() if "tool_calls" not in m and m["role"] != "tool"]
            row["conversations"] = [
                {"from": speakers[m["role"]], "value": m["content"]} for m in plain
            ]
        elif kind == "prompt+completion":
            row = {"prompt": self.text(), "completion": self.text()}
            if self.random.random() < 0.5:
                row = {"prompt": self.chat()[:-1], "completion": [say("assistant", self.text())]}
        elif kind == "instruction":
            row = {"instruction": self.text(), "output": self.text(), "input": self.text()}
            row["history"] = [[self.text(), self.text()]]
        if self.random.random() < 0.4:
            row["system"] = self.text()
        if self.random.random() < 0.4:
            row["tools"] = self.random.choice(([TOOL], json.dumps([TOOL])))
        if self.random.random() < 0.4:
            row["chat_template_kwargs"] = {"enable_thinking": self.random.random() < 0.5}
        return row


@pytest.mark.parametrize("kind", ["messages", "conversations", "prompt+completion", "instruction"])
def test_a_prompt_is_the_beginning_of_the_document_of_the_same_row(tmp_path, kind):
    """Token for token, for random rows: content parts, tool arguments, system column, kwargs."""
    draw, tokenizer = Draw(kind), templates.tokenizer("qwen3")
    path = write(tmp_path / "rows.jsonl", *(draw.row(kind) for _ in range(40)))
    kwargs = {"enable_thinking": True}
    renderer = Renderer(tokenizer, template_kwargs=kwargs)
    documents = {
        r.where: (r, renderer.render(r).documents)
        for r in CorpusReader([path], max_bad_rows=parse_limit("100%"))
    }
    prompts = read_prompts(path, Template(tokenizer, kwargs), max_bad_rows="100%")
    compared = 0
    for prompt in prompts:
        if prompt.where not in documents:
            continue
        record, found = documents[prompt.where]
        assert len(prompt.record.messages) == len(record.messages) - 1
        last = max((turn.start, n) for n, d in enumerate(found) for turn in d.turns)
        ids = found[last[1]].input_ids[: last[0]]
        block = tokenizer.decode(ids[len(prompt.ids) :])  # an empty one is no part of answers
        assert block.split() in ([], ["<think>", "</think>"])
        assert prompt.ids == ids[: len(prompt.ids)], prompt.where
        compared += 1
    assert compared >= 10


CHAT = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
ASKED = "<user> a <assistant> b <user> c <assistant>"


@pytest.mark.parametrize(
    "row, asked",
    [
        ({"text": "a b"}, "a b"),
        ({"input_ids": [6, 7, 8, 9], "loss_mask": [0, 0, 1, 1]}, "a b"),
        ({"input_ids": [6, 7]}, "a b"),
        ({"messages": CHAT}, ASKED),
        ({"messages": CHAT[:3]}, ASKED),
        ({"prompt": CHAT[:3]}, ASKED),
        ({"messages": [*CHAT, say("assistant", "e")]}, ASKED),
        ({"prompt": "a b"}, "<user> a b <assistant>"),
        ({"prompt": "a b", "completion": "c"}, "<user> a b <assistant>"),
    ],
)
def test_what_is_asked(tmp_path, tokenizer, row, asked):
    path = write(tmp_path / "p.jsonl", row)
    assert rendered(tokenizer, path) == [asked]
    if isinstance(row.get("prompt"), str):  # a user message only with a template
        tokenizer.chat_template = None
        assert rendered(tokenizer, path) == ["a b"]


def test_messages_of_the_user_alone_are_turns(tmp_path, tokenizer):
    """With an answer they are one prompt: the beginning of the document of that row."""
    said = [say("user", "a"), say("user", "b"), say("user", "c")]
    answer = say("assistant", "d")
    rows = [{"messages": said}, {"messages": [*said, answer]}, {"prompt": said}]
    rows.append({"messages": [say("system", "e"), *said]})
    path = write(tmp_path / "p.jsonl", *rows, {"prompt": said, "completion": [answer]})
    found = read_prompts(path, Template(tokenizer)).prompts
    assert words(found[0].ids) == "<user> a <assistant>"
    assert found[0].record.follow_ups == ("b", "c")
    together = "<user> a <user> b <user> c <assistant>"
    assert [words(p.ids).removeprefix("<system> e ") for p in found[1:]] == [together] * 4
    assert all(not p.record.follow_ups for p in found[1:])


def test_turns_open_with_the_first_and_keep_the_rest(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "b", "c"], "system": "d"})
    prompts = read_prompts(path, Template(tokenizer))
    (prompt,) = prompts
    assert words(prompt.ids) == "<system> d <user> a <assistant>"
    assert prompt.record.follow_ups == ("b", "c")
    chat = [*prompt.record.messages, say("assistant", "e"), say("user", "b")]
    assert words(prompts.continued(prompt, chat)) == (
        "<system> d <user> a <assistant> e <user> b <assistant>"
    )


def test_template_kwargs_of_the_run_and_of_rows_reach_the_template(tmp_path, tokenizer):
    kwargs = {"shout": True}
    quiet = {"prompt": "a", "chat_template_kwargs": {"shout": False}}
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, quiet, {"text": "a"})
    prompts = read_prompts(path, Template(tokenizer, kwargs))
    assert [words(p.ids) for p in prompts] == [
        *("loud <user> a <assistant>", "<user> a <assistant>", "a")
    ]
    used = prompts.facts()["template_kwargs_used"]
    assert used == {'{"shout": true}': 1, '{"shout": false}': 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object with named columns, found a list"),
        ({"ask": "a"}, r"no known columns \(found: ask; .*turns"),
        ({"messages": [say("assistant", "a")]}, "must be of a user or a tool, not nothing"),
        ({"turns": ["a", 1]}, r"turns\[1\] \(a user message\) is a number"),
        ({"prompt": "a", "chat_template_kwargs": {"shot": 1}}, "does not read shot"),
        ({"prompt": "e e"}, "the chat template fails"),
    ],
)
def test_a_bad_row_is_counted_and_named(tmp_path, tokenizer, row, said):
    path = write(tmp_path / "p.jsonl", *[{"prompt": "a"}] * 19, row)
    prompts = read_prompts(path, Template(tokenizer))
    assert (len(prompts), prompts.left_out) == (19, 1)
    (example,) = prompts.examples
    assert example.startswith("p.jsonl:20: ")
    path = write(tmp_path / "few.jsonl", {"prompt": "a"}, row)
    with pytest.raises(
        CorpusError, match=rf"(?s)--prompts .*few.jsonl: 1 of 2 rows .*:2: .*{said}"
    ) as refused:
        read_prompts(path, Template(tokenizer))
    assert "--max-bad-rows" not in str(refused.value)  # `eval` has no such option


def test_chats_without_a_template_and_empty_renderings(tmp_path, tokenizer):
    chat = write(tmp_path / "p.jsonl", {"turns": ["a"]})
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"p.jsonl:1: the target's tokenizer has no chat templ"):
        read_prompts(chat, Template(tokenizer), max_bad_rows="1")
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(CorpusError, match="renders to no tokens"):
        read_prompts(chat, Template(tokenizer), max_bad_rows="1")


def test_a_template_that_never_ends_stops_eval_too(tmp_path, tokenizer, monkeypatch):
    """It ends when it may, not after a time: no machine is too fast or too slow for this."""
    may_end, render = threading.Event(), tokenizer.apply_chat_template

    def rendered(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            may_end.wait(60)
        return render(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", rendered)
    path = write(tmp_path / "p.jsonl", *[{"prompt": "a"}] * 50)
    monkeypatch.setattr(in_order, "_SECONDS", 0.05)
    with pytest.raises(CorpusError, match=r"p\.jsonl:1: not rendered in 0\.05 s; the chat"):
        read_prompts(path, Template(tokenizer))
    may_end.set()
    monkeypatch.setattr(in_order, "_SECONDS", 600)
    prompts = read_prompts(path, Template(tokenizer), limit=1)
    may_end.clear()
    monkeypatch.setattr(in_order, "_SECONDS", 0.05)
    with pytest.raises(CorpusError, match="not rendered"):
        prompts.continued(prompts.prompts[0], [{"role": "user", "content": "b"}])
    may_end.set()  # the threads of both end


def test_what_nothing_reads_of_prompts_is_named_as_in_a_corpus(tmp_path, tokenizer, caplog):
    """Columns and keys of messages; answers are left out on purpose, and are not named."""
    message = {"role": "user", "content": "q", "mood": "kind"}
    rows = [
        {"messages": [message], "persona": "a pirate", "answer": "no", "category": "x"},
        {"prompt": "q", "response": "a", "hint": "short", "question": "other"},
    ]
    read_prompts(write(tmp_path / "p.jsonl", *rows), Template(tokenizer))
    (said,) = [r.getMessage() for r in caplog.records if "warning[unread]" in r.getMessage()]
    for name in ("persona", "messages.mood", "hint", "question"):
        assert f"{name} in 1 row" in said
    assert "answer" not in said and "response" not in said and "category" not in said


def test_columns_of_a_named_set_are_not_named(tmp_path, tokenizer, caplog, monkeypatch):
    """Its question is what its publisher means; other columns are for other uses."""
    table = pa.table({"question": ["q"], "test": ["assert"], "entry_point": ["f"]})
    pq.write_table(table, tmp_path / "p.parquet")
    one = PromptSource(str(tmp_path / "p.parquet"), "question")
    monkeypatch.setattr("spec_train.evaluation.prompts.SETS", {"humaneval": {"": one}})
    assert len(read_prompts("humaneval", Template(tokenizer))) == 1
    assert "unread" not in caplog.text
    read_prompts(str(tmp_path / "p.parquet"), Template(tokenizer))
    assert "warning[unread]" in caplog.text, "of any other file they are"


@pytest.mark.parametrize(
    "name", ["mtbench", "mt_bench", "MT-bench", "gsm-8k", "speedbench", "spec bench"]
)
def test_a_set_by_another_spelling_is_named_before_anything_is_asked_for(name):
    with pytest.raises(ConfigError, match=r"did you mean (mt-bench|gsm8k|speed-bench|spec-bench)"):
        prompt_sources(name)


def test_a_name_of_the_hub_is_no_misspelling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [s.source for s in prompt_sources("squad")] == ["squad"]
    (tmp_path / "mtbench").write_text("")
    assert [s.source for s in prompt_sources("mtbench")] == ["mtbench"]
