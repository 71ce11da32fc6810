"""What a template may not do: leave parts out uncounted, ignore a kwarg, or never end."""

import contextlib
import json
import logging
import random
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import Record
from spec_data.corpus.template import Template
from spec_data.corpus.time_limit import TimeIsUp, time_limit
from spec_data.shards.errors import ConfigError, CorpusError
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
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def chat(*messages, **more):
    return Record(source="s", where="s:1", messages=list(messages), **more)


def template(text, family="chatml"):
    tok = tokenizer(family)
    tok.chat_template = text
    return tok


def left_out(tok, *messages, **more):
    renderer = Renderer(tok)
    renderer.render(chat(*messages, **more))
    prefix = "left out by the template: "
    counts = {k.removeprefix(prefix): n for k, n in renderer.counts.items() if prefix in k}
    assert counts == renderer.left_out, "the manifest and the log count alike"
    return counts


def developer(content):
    return {"role": "developer", "content": content}


# --- what is left out -----------------------------------------------------------------------------


def test_messages_of_a_role_that_the_template_does_not_know_are_counted():
    messages = [developer("Be brief."), *TWO[:2], developer("hello"), *TWO[2:]]
    assert left_out(template(DEAF), *messages) == {"developer messages": 2}
    assert left_out(template(CHATML), *messages) == {}


def test_a_short_text_that_occurs_elsewhere_does_not_count_as_there():
    """ "user" is in every header."""
    assert left_out(template(DEAF), system("user"), *TWO) == {"system messages": 1}


def test_reasoning_that_no_document_has_is_counted():
    once = [user("a"), THOUGHT, user("b"), answer("c", reasoning="hm")]
    assert left_out(template(CHATML), *once) == {"reasoning texts": 2}
    assert left_out(tokenizer("qwen3"), *once) == {}, "each is in the document of its own turn"
    dropping = QWEN3.replace("loop.last or thinking", "loop.last and false")
    assert left_out(template(dropping), *once) == {"reasoning texts": 2}
    inline = answer("<think>\nI think\n</think>\n\nB")
    assert left_out(template(dropping), user("a"), inline) == {"reasoning texts": 1}
    assert left_out(template(CHATML), user("a"), inline) == {}


def test_earlier_reasoning_without_a_document_of_its_own_is_counted():
    renderer = Renderer(tokenizer("qwen3"), mask="last-turn")
    renderer.render(chat(user("a"), THOUGHT, user("b"), THOUGHT))
    assert renderer.left_out == {"reasoning texts": 1}


def test_a_short_text_is_not_found_elsewhere_in_any_of_several_documents():
    """The user says "hello" too, and the turns are documents of their own."""
    deaf = QWEN3.replace("messages %}", "messages if message.role != 'developer' %}")
    messages = [developer("hello"), user("hello there"), THOUGHT, user("b"), THOUGHT]
    assert deaf != QWEN3
    assert left_out(template(deaf), *messages) == {"developer messages": 1}


def test_a_tool_whose_first_argument_is_its_own_name_is_not_left_out():
    call = {"function": {"name": "search", "arguments": {"query": "search"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert left_out(tokenizer("qwen3"), user("a"), message, tools=TOOLS) == {}


def test_tool_calls_and_lists_of_tools_are_counted():
    lines = CHATML.replace("message.content", "(message.content or '')")
    messages = [user("Is it w in Paris?"), CALL, {"role": "tool", "content": "sun"}, answer("Yes")]
    assert left_out(template(lines), *messages, tools=TOOLS) == {
        "tool calls": 1,
        "lists of tools": 1,
    }
    names = lines.replace("+ '<|im_end|>", "+ (message.tool_calls or [{'function': {'name': ''}}])"
                          "[0].function.name + '<|im_end|>")  # fmt: skip
    assert left_out(template(names), *messages) == {"tool calls": 1}, "the arguments are missing"


@pytest.mark.parametrize("family", ["llama3", "qwen3", "thinking"])
def test_tools_that_the_template_writes_are_not_counted(family):
    assert left_out(tokenizer(family), *TOOL_CHAT, tools=TOOLS) == {}


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


def test_a_template_that_acts_on_the_mark_is_judged_by_the_text():
    """This one drops long messages: the mark makes one too long, which the record is not."""
    short = CHATML.replace("messages %}", "messages if message.content | length < 12 %}")
    assert left_out(template(short), user("four words"), answer("b")) == {}
    assert left_out(template(short), user("four words are too long"), answer("b")) == {
        "user messages": 1
    }


def test_no_family_leaves_anything_out_of_a_plain_chat():
    for family in TEMPLATES:
        if family != "r1":  # nothing of it can be rendered
            assert left_out(tokenizer(family), *TWO) == {}, family


def test_the_reader_names_what_is_left_out_per_source(tmp_path, caplog):
    rows = [{"messages": [developer("Be brief."), *TWO]}] * 17
    named = write_jsonl(tmp_path / "a.jsonl", rows)
    plain = write_jsonl(tmp_path / "b.jsonl", [{"messages": list(TWO)}])
    reader, renderer = CorpusReader([named, plain]), Renderer(template(DEAF))
    with caplog.at_level(logging.WARNING):
        for record in reader:
            renderer.render(record)
            reader.count_left_out(renderer.left_out)
    assert [r.template_left_out for r in reader.reports] == [{"developer messages": 17}, {}]
    assert [r.getMessage() for r in caplog.records] == [
        f"{named}: the chat template leaves out 17 developer messages"
    ]


def test_columns_that_no_format_uses_are_named_once_per_source(tmp_path, caplog):
    rows = [{"messages": list(TWO), "system_prompt": "s", "id": i, "empty": ""} for i in range(3)]
    rows.append({"messages": [system("own"), *TWO], "system": "other"})
    rows.append({"text": "t", "tools": [1]})
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.INFO):
        reader = CorpusReader([name])
        assert len(list(reader)) == 5
    (line,) = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
    assert line == f"{name}: columns that are not used: system_prompt, id, system, tools"
    assert reader.reports[0].unused_columns == ["system_prompt", "id", "system", "tools"]


def test_columns_of_parquet_files_that_no_format_uses_are_named(tmp_path):
    table = pa.table({"text": ["a", "b"], "system_prompt": ["s", None], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    reader = CorpusReader([str(tmp_path / "a.parquet")])
    assert len(list(reader)) == 2
    assert reader.reports[0].unused_columns == ["system_prompt", "id"]


# --- kwargs ---------------------------------------------------------------------------------------


def test_kwargs_that_the_template_does_not_read_are_refused():
    tok = tokenizer("qwen3")
    with pytest.raises(ConfigError, match=r"does not read enable_thinkin \(it reads .*\bthinking"
                                          r".*did you mean enable_thinking\?"):  # fmt: skip
        Renderer(tok, template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="does not read date_string"):
        Renderer(tokenizer("chatml"), template_kwargs={"date_string": "1 Jan"})
    record = chat(*TWO, template_kwargs={"enable_thinkin": False})
    with pytest.raises(
        RenderError, match=r"s:1: chat_template_kwargs: .*enable_thinking"
    ) as caught:
        Renderer(tok).render(record)
    assert caught.value.reason == "bad-template-kwargs" and caught.value.broken


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_an_empty_kwarg_of_a_row_that_the_template_does_not_read_is_left_out(empty):
    """Smoltalk2 has four kwargs in each row, those of its own template, and most are empty."""
    renderer = Renderer(tokenizer("qwen3"))
    given = {"enable_thinking": False, "xml_tools": empty}
    documents = renderer.render(chat(*TWO, template_kwargs=given))
    assert documents == renderer.render(chat(*TWO, template_kwargs={"enable_thinking": False}))
    assert list(renderer.kwargs_used) == ['{"enable_thinking": false}']
    for full in (False, 0, "x", [1]):
        with pytest.raises(RenderError, match="does not read xml_tools"):
            renderer.render(chat(*TWO, template_kwargs={"xml_tools": full}))


def test_reserved_kwargs_are_refused():
    tok = tokenizer("chatml")
    with pytest.raises(ConfigError, match="add_generation_prompt cannot be set"):
        Renderer(tok, template_kwargs={"add_generation_prompt": True})
    with pytest.raises(RenderError, match="tokenize cannot be set") as caught:
        Renderer(tok).render(chat(*TWO, template_kwargs={"tokenize": False}))
    assert caught.value.reason == "bad-template-kwargs"


@pytest.mark.parametrize(
    "reads",
    [
        "{% if date_string is not defined %}{% set date_string = 1 %}{% endif %}{{ date_string }}",
        "{% macro f(a, b=date_string) %}{{ b }}{% endmacro %}{{ f(1) }}",
        "{% macro f() %}{{ date_string }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(d=date_string | default('x')) %}{{ ns.d }}",
        "{% for m in messages %}{% generation %}{{ date_string }}{% endgeneration %}{% endfor %}",
    ],
)
def test_every_way_of_reading_a_kwarg_counts(reads):
    assert Template(template(reads + CHATML), {"date_string": "1 Jan"}).names >= {"date_string"}


def test_named_templates_read_what_any_of_them_reads():
    tok = template({"default": CHATML, "tool_use": "{{ mode }}" + CHATML})
    assert Template(tok, {"mode": "x"})
    with pytest.raises(ConfigError, match="did you mean mode"):
        Template(tok, {"modes": "x"})


def test_a_template_that_prints_the_date_causes_a_warning(caplog):
    today = "{{- strftime_now('%Y') }}" + CHATML
    fixed = "{% if not date_string %}{% set date_string = strftime_now('%Y') %}{% endif %}" + CHATML
    with caplog.at_level(logging.WARNING):
        Renderer(template(today))
        Renderer(template(fixed))
    first, second = [r.getMessage() for r in caplog.records]
    assert "today's date" in first and "reads no template kwarg" in first
    assert "set a fixed date with the template kwarg date_string" in second
    caplog.clear()
    Renderer(template(fixed), template_kwargs={"date_string": "1 Jan"})
    assert not caplog.records
    with pytest.raises(ConfigError, match="does not read date_string"):  # it cannot silence it
        Renderer(template(today), template_kwargs={"date_string": "1 Jan"})


# --- time -----------------------------------------------------------------------------------------


def test_a_template_that_never_ends_is_stopped():
    tok = template("{% if 'loop' in messages[0].content %}" + ENDLESS + "{% endif %}" + CHATML)
    renderer = Renderer(tok, seconds=0.5)
    for _ in range(3):  # a row that ends is no reason to go on: the count begins again
        with pytest.raises(RenderError, match=r"s:1: the template did not finish in 0.5 s") as hit:
            renderer.render(chat(user("loop"), answer("b")))
        assert hit.value.reason == "template-timeout" and hit.value.broken
        assert renderer.render(chat(*TWO))


def test_a_template_that_never_ends_for_any_row_ends_the_run(tmp_path):
    renderer = Renderer(template(ENDLESS), seconds=0.15)  # its probe is the first time
    with pytest.raises(RenderError, match="did not finish"):
        renderer.render(chat(*TWO))
    with pytest.raises(CorpusError, match="3 times in a row; correct the template") as caught:
        renderer.render(chat(*TWO))
    assert not isinstance(caught.value, RenderError), "no bad row, but the end"


def test_the_limit_works_outside_the_main_thread_and_leaves_nothing_behind():
    found = []

    def endless():
        try:
            with time_limit(0.05):
                while True:
                    with contextlib.suppress(Exception):
                        json.dumps([1])
        except TimeIsUp:
            found.append(threading.current_thread().name)

    threads = [threading.Thread(target=endless, name=str(i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == ["0", "1", "2"]
    with time_limit(0.05):
        pass
    for _ in range(40):  # nothing is raised after the block
        time.sleep(0.005)
