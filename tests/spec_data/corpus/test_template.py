"""What a template may not do: leave parts out uncounted, or ignore a kwarg."""

import logging
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers.utils import chat_template_utils

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.documents import LEFT_OUT
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import Record
from spec_data.corpus.template import Template
from spec_data.shards.errors import ConfigError
from tests.spec_data.corpus.chat_cases import (
    CALL,
    THOUGHT,
    TOOL_CHAT,
    TOOLS,
    TWO,
    answer,
    system,
    user,
)
from tests.spec_data.corpus.reading import write_jsonl
from tests.spec_data.corpus.templates import CHATML, QWEN3, TEMPLATES, tokenizer

DEAF = CHATML.replace("messages %}", "messages if message.role in ('user', 'assistant') %}")


def chat(*messages, **more):
    return Record(source="s", where="s:1", messages=list(messages), **more)


def template(text, family="chatml"):
    tok = tokenizer(family)
    tok.chat_template = text
    return tok


def left_out(tok, *messages, **more):
    result = Renderer(tok).render(chat(*messages, **more))
    counts = result.counts.items()
    return {k.removeprefix(LEFT_OUT): n for k, n in counts if k.startswith(LEFT_OUT)}


def developer(content):
    return {"role": "developer", "content": content}


# --- what is left out -----------------------------------------------------------------------------


def test_messages_of_a_role_that_the_template_does_not_know_are_counted():
    messages = [developer("Be brief."), *TWO[:2], developer("hello"), *TWO[2:]]
    assert left_out(template(DEAF), *messages) == {"developer messages": 2}
    assert left_out(template(CHATML), *messages) == {}


def test_reasoning_that_no_document_has_is_counted(monkeypatch):
    # transformers before 5.21 has not this step, which gives the reasoning the name of templates
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", list, raising=False)
    once = [user("a"), THOUGHT, user("b"), answer("c", reasoning="hm")]
    assert left_out(template(CHATML), *once) == {"reasoning texts": 2}
    assert left_out(tokenizer("qwen3"), *once) == {}, "each is in the document of its own turn"
    dropping = QWEN3.replace("loop.last or thinking", "loop.last and false")
    assert left_out(template(dropping), *once) == {"reasoning texts": 2}
    inline = answer("<think>\nI think\n</think>\n\nB")
    assert left_out(template(dropping), user("a"), inline) == {"reasoning texts": 1}
    assert left_out(template(CHATML), user("a"), inline) == {}


DEAF_QWEN3 = QWEN3.replace("messages %}", "messages if message.role != 'developer' %}")
LINES = CHATML.replace("message.content", "(message.content or '')")
SEARCH = {"function": {"name": "search", "arguments": {"query": "search"}}}
SEARCHES = [user("a"), {"role": "assistant", "content": "", "tool_calls": [SEARCH]}]
CALLED = [user("Is it w in Paris?"), CALL, {"role": "tool", "content": "sun"}, answer("Yes")]
ONCE = [user("a"), answer("b", function_call=SEARCH["function"]), user("c"), answer("d")]
SAID_TWICE = [developer("hello"), user("hello there"), THOUGHT, user("b"), THOUGHT]


@pytest.mark.parametrize(
    ("text", "messages", "tools", "expected"),
    [
        (DEAF, [system("user"), *TWO], None, {"system messages": 1}),  # every header has "user"
        (DEAF_QWEN3, SAID_TWICE, None, {"developer messages": 1}),  # in several documents
        (QWEN3, SEARCHES, TOOLS, {}),
        (LINES, CALLED, TOOLS, {"tool calls": 1, "lists of tools": 1}),
        (QWEN3, ONCE, None, {"tool calls": 1}),  # a call in the form before tool_calls
        (TEMPLATES["llama3"][0], TOOL_CHAT, TOOLS, {}),
        (QWEN3, TOOL_CHAT, TOOLS, {}),
    ],
)
def test_parts_that_are_left_out_are_counted(text, messages, tools, expected):
    assert left_out(template(text), *messages, tools=tools) == expected


PIECES = ("Paris", " ", "\n\n", '"{quoted}"', "é🦊", "\\", "<b>", "ok", "  x", "assistant", "a\tb")
FORMS = {
    "as it is": "message.content",
    "trimmed": "message.content | trim",
    "as JSON": "message.content | tojson",
    "as JSON with ASCII alone": "message.content | tojson(ensure_ascii=true)",
    "indented": "message.content | indent(2)",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_may_rewrite_what_it_keeps(form):
    draw = random.Random(form)
    tok = template(CHATML.replace("message.content", f"({FORMS[form]})"))
    for _ in range(30):
        words = ["".join(draw.choices(PIECES, k=draw.randint(1, 4))) + "z" for _ in range(4)]
        assert left_out(tok, system(words[0]), *map(user, words[1:3]), answer(words[3])) == {}


def test_columns_that_no_format_uses_are_named_once_per_source(tmp_path, caplog):
    rows = [{"messages": list(TWO), "system_prompt": "s", "id": i, "empty": ""} for i in range(3)]
    rows.append({"messages": [system("own"), *TWO], "system": "other"})
    rows.append({"text": "t"})
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.INFO):
        reader = CorpusReader([name])
        assert len(list(reader)) == 5
    (line,) = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
    assert line == f"{name}: columns that are not used: id, system"
    assert reader.reports[0].unused_columns == ["id", "system"]
    table = pa.table({"text": ["a", "b"], "system_prompt": ["s", None], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    reader = CorpusReader([str(tmp_path / "a.parquet")])
    assert len(list(reader)) == 2 and reader.reports[0].unused_columns == ["system_prompt", "id"]


# --- kwargs ---------------------------------------------------------------------------------------


def test_kwargs_that_the_template_does_not_read_are_refused():
    tok = tokenizer("qwen3")
    with pytest.raises(ConfigError, match=r"does not read enable_thinkin \(it reads .*\benable_th"):
        Renderer(tok, template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="does not read date_string"):
        Renderer(tokenizer("chatml"), template_kwargs={"date_string": "1 Jan"})
    record = chat(*TWO, template_kwargs={"enable_thinkin": False})
    with pytest.raises(
        RenderError, match=r"s:1: chat_template_kwargs: .*enable_thinking"
    ) as caught:
        Renderer(tok).render(record)
    assert caught.value.reason == "bad-template-kwargs" and caught.value.broken
    with pytest.raises(ConfigError, match="add_generation_prompt cannot be set"):
        Renderer(tok, template_kwargs={"add_generation_prompt": True})
    with pytest.raises(RenderError, match="tokenize cannot be set"):
        Renderer(tok).render(chat(*TWO, template_kwargs={"tokenize": False}))


def test_an_empty_kwarg_of_a_row_that_the_template_does_not_read_is_left_out():
    """Smoltalk2 has four kwargs in each row, those of its own template, and most are empty."""
    renderer = Renderer(tokenizer("qwen3"))
    given = {"enable_thinking": False, "a": None, "b": "", "c": [], "d": {}}
    result = renderer.render(chat(*TWO, template_kwargs=given))
    assert result == renderer.render(chat(*TWO, template_kwargs={"enable_thinking": False}))
    assert result.prompt["template_kwargs_used"] == '{"enable_thinking": false}'
    for full in (False, 0, "x", [1]):
        with pytest.raises(RenderError, match="does not read xml_tools"):
            renderer.render(chat(*TWO, template_kwargs={"xml_tools": full}))


def test_named_templates_read_what_any_of_them_reads():
    tok = template({"default": CHATML, "tool_use": "{{ mode }}" + CHATML})
    assert Template(tok, {"mode": "x"})
    with pytest.raises(ConfigError, match=r"\(it reads .*mode\)"):
        Template(tok, {"modes": "x"})


def test_a_template_that_prints_the_date_causes_a_warning(caplog):
    today = "{{- strftime_now('%d.%m.%Y') }}" + CHATML
    fixed = "{% if not date_string %}{% set date_string = strftime_now('%Y') %}{% endif %}" + CHATML
    with caplog.at_level(logging.WARNING):
        for text in (today, fixed):
            Template(template(text)).warn_of_the_date()
    said = [r.getMessage().partition(": ") for r in caplog.records]
    assert [code for code, _, _ in said] == ["warning[template-date]"] * 2
    assert ["date_string" in text for _, _, text in said] == [True, True]
    caplog.clear()
    Template(template(fixed), {"date_string": "1 Jan"}).warn_of_the_date()
    given = Template(template(today), {"date_string": "2025-06-28"})
    given.warn_of_the_date()
    assert not caplog.records, "what the warning advises must silence it"
    assert given.apply(TWO, None, given.kwargs, tokenize=False).startswith("28.06.2025<|im_start|>")
    with pytest.raises(ConfigError, match="write the date as 2025-06-28"):
        Template(template(today), {"date_string": "1 Jan"})
