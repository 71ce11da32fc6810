"""Prompts: which part of a line is rendered, only by the tokenizer; errors name the line."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_data.shards.errors import ConfigError, CorpusError, MissingError
from spec_train.evaluation.prompts import (
    opening,
    parse_template_kwargs,
    read_prompts,
    render,
    render_text,
)

TEMPLATE = (
    "{% if shout is defined and shout %}loud {% endif %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<user>", "<assistant>", "<system>", "<tool>", "loud", "a", "b", "c", "d", "e"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=TEMPLATE)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def say(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_trailing_answers_are_dropped_and_history_is_kept(tmp_path, tokenizer):
    chat = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
    path = write(tmp_path / "p.jsonl", {"messages": chat}, {"messages": chat[:3]})
    rendered = [
        words(render(opening(p, tokenizer) or (), tokenizer, {})) for p in read_prompts(path)
    ]
    assert rendered == ["<user> a <assistant> b <user> c <assistant>"] * 2


def test_a_chat_may_end_in_a_tool_result(tmp_path):
    chat = [say("user", "a"), say("assistant", "b"), say("tool", "c"), say("assistant", "d")]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": chat}))
    assert prompt.messages is not None and prompt.messages[-1] == say("tool", "c")


def test_a_string_is_a_user_message_only_with_a_template(tmp_path, tokenizer):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a b"}))
    assert words(render(opening(prompt, tokenizer) or (), tokenizer, {})) == (
        "<user> a b <assistant>"
    )
    tokenizer.chat_template = None
    assert opening(prompt, tokenizer) is None
    assert words(render_text("a b", tokenizer)) == "a b"


def test_turns_open_with_the_first_and_keep_the_rest(tmp_path):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"turns": ["a", "b", "c"]}))
    assert prompt.messages == (say("user", "a"),)
    assert prompt.follow_ups == ("b", "c")


def test_template_kwargs_reach_the_template(tokenizer):
    kwargs = parse_template_kwargs('{"shout": true}')
    assert words(render([say("user", "a")], tokenizer, kwargs)) == "loud <user> a <assistant>"


def test_limit_counts_rows_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\nnot json\n', encoding="utf-8")
    prompts = read_prompts(path, limit=2)
    assert [p.text for p in prompts] == ["a", "b"]
    assert prompts[1].where == f"{path}:4"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "a"}', "needs messages, prompt or turns; found 'text'"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"content": "a"}]}', "messages\\[0\\] must be an object with a role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "found nothing"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "found system"),
        ('{"turns": ["a", 1]}', "turns\\[1\\] must be a string"),
        ('{"prompt": 3}', "prompt must be a non-empty list"),
        ('{"prompt": "a", "tools": 3}', "tools must be a list"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line(tmp_path, line, said):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=f"p.jsonl:2: .*{said}"):
        read_prompts(path)


def test_missing_and_empty_files_and_bad_kwargs(tmp_path):
    with pytest.raises(MissingError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="empty; expected"):
        read_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse_template_kwargs("{")
    with pytest.raises(ConfigError, match="JSON object"):
        parse_template_kwargs("[1]")


def test_a_chat_without_a_template_and_an_empty_rendering(tmp_path, tokenizer):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"turns": ["a"]}))
    with pytest.raises(CorpusError, match="renders to no tokens"):
        render_text("", tokenizer, prompt.where)
    tokenizer.chat_template = "{{ raise_exception('no system please') }}"
    with pytest.raises(CorpusError, match=r"p.jsonl:1: the chat template rejects.*no system"):
        render(prompt.messages or (), tokenizer, {}, where=prompt.where)
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"p.jsonl:1: this is a chat, but .* no chat template"):
        opening(prompt, tokenizer)
