"""Contents and arguments of calls in the form that a template reads, as the probe finds it.

The templates are as short as their kind allows; each copies what one family does with a message.
"""

import pytest

from spec_data.corpus.chat import Renderer
from spec_data.corpus.message_forms import MessageForms
from spec_data.corpus.records import parse_row
from spec_data.corpus.template import Template
from tests.spec_data.corpus.chat_cases import answer, system, user
from tests.spec_data.corpus.templates import CHATML, LLAMA3, QWEN3, TEMPLATES, tokenizer

TURN = "{{- '<|im_start|>' + m.role + '\\n' }}BODY{{- '<|im_end|>\\n' }}"


def looped(body, before=""):
    """A template that writes each message by `body`."""
    ask = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    turn = TURN.replace("BODY", body)
    return before + "{%- for m in messages %}" + turn + "{%- endfor %}" + ask


PARTS = {
    "selected": "{%- for c in m.content | selectattr('type', 'equalto', 'text') %}"  # LLaVA
    "{{- c.text }}{%- endfor %}",
    "in a loop": "{%- for c in m['content'] %}{%- if c['type'] == 'text' %}"  # Idefics
    "{{- c['text'] }}{%- endif %}{%- endfor %}",
    "the first": "{{- m.content[0].text }}",
    "the first, or it fails": "{{- m.content[0]['text'] + '' }}",
}
SOME = {  # parts for some roles only
    "users'": "{%- if m.role == 'user' %}{{- m.content[0].text }}"
    "{%- else %}{{- m.content + '' }}{%- endif %}",
    "answers'": "{%- if m.role == 'assistant' %}{{- m.content[0].text }}"
    "{%- else %}{{- m.content + '' }}{%- endif %}",
    "all but the system's": "{%- if m.role != 'system' %}{{- m.content[0].text }}"
    "{%- else %}{{- m.content + '' }}{%- endif %}",
    "the system's": "{%- if m.role == 'system' %}{{- m.content[0].text }}"
    "{%- else %}{{- m.content + '' }}{%- endif %}",
    "both": "{%- if m.content is string %}{{- m.content }}{%- else %}"  # Qwen2-VL
    "{%- for c in m.content %}{{- c.text + '!' }}{%- endfor %}{%- endif %}",
}
CHAT = [system("Be brief."), user("q"), answer("a"), user("r"), answer("")]


def row(messages, **more):
    return parse_row({"messages": messages, **more}, source="s", where="s:1")


def texts_of(template, messages, **more):
    """The decoded documents, and the supervised part of each turn."""
    tok = tokenizer("chatml")
    tok.chat_template = template
    result = Renderer(tok).render(row(messages, **more))
    return [
        (
            tok.decode(d.input_ids),
            [tok.decode(d.input_ids[t.start : t.end]) for t in d.turns],
        )
        for d in result.documents
    ]


@pytest.mark.parametrize("kind", PARTS | SOME)
def test_contents_come_out_as_of_a_template_that_reads_text(kind):
    body = (PARTS | SOME)[kind]
    chat = [*CHAT[:4], answer("b", reasoning_content="")]
    assert texts_of(looped(body), chat) == texts_of(CHATML, chat)


def test_parts_are_written_for_those_roles_only_that_need_them():
    def forms(body):
        tok = tokenizer("chatml")
        tok.chat_template = looped(body)
        return Template(tok).forms(tools=False).parts

    every = {"system", "user", "assistant", "tool"}
    assert all(forms(body) == every for body in PARTS.values())
    assert forms(SOME["users'"]) == {"user"}
    assert forms(SOME["answers'"]) == {"assistant"}
    assert forms(SOME["all but the system's"]) == every - {"system"}
    assert forms(SOME["the system's"]) == {"system"}
    assert forms(SOME["both"]) == set(), "text, which renders what it always did"


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_that_read_text_and_objects_get_them(family):
    for tools in (False, True):
        assert Template(tokenizer(family)).forms(tools) == MessageForms()


CALLS = {
    "joined": "{{- '<c>' + c.function.name + ' ' + c.function.arguments }}",  # DeepSeek
    "written": "{{- '<c>' ~ c.function.name ~ ' ' ~ c.function.arguments }}",  # as Python's repr
    "needs an id": "{%- if c.id | length != 9 %}{{- raise_exception('id') }}{%- endif %}"
    "{{- '<c>' + c.function.name + ' ' + c.function.arguments }}",
    "as JSON": "{{- '<c>' + c.function.name + ' ' + c.function.arguments | tojson }}",
    "either": "{{- '<c>' + c.function.name + ' ' }}{%- if c.function.arguments is string %}"  # Kimi
    "{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}",
    "by name": "{{- '<c>' + c.function.name + ' ' }}"  # GLM, Qwen3-Coder
    "{%- for k, v in c.function.arguments.items() %}{{- k + '=' + v }}{%- endfor %}",
}
CALLS["with tools only"] = "{%- if tools %}" + CALLS["joined"] + "{%- endif %}"
CALLED = "{{- m.content }}{%- for c in m.tool_calls or [] %}CALL{%- endfor %}"
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]


def called(arguments, **more):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "w"} | arguments}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], **more}
    return [user("weather?"), asked, {"role": "tool", "content": "sun"}, answer("Sunny.")]


GIVEN = {"arguments": '{"city":"Paris"}'}, {"arguments": {"city": "Paris"}}, {}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", CALLS)
def test_arguments_come_out_as_the_target_writes_them(kind, given):
    """The text of the row where the template writes a text; else what the template makes of it."""
    template = looped(CALLED.replace("CALL", CALLS[kind]))
    ((_, turns),) = texts_of(template, called(given), tools=TOOLS)
    text = {"{}": "{}", "by name": "city=Paris" if given else ""}.get(
        "{}" if not given and kind != "by name" else kind
    )
    if text is None:
        as_text = isinstance(given["arguments"], str) and kind not in ("as JSON", "either")
        text = given["arguments"] if as_text else '{"city": "Paris"}'
    assert turns == [f"<c>w {text}<|im_end|>", "Sunny.<|im_end|>"]


@pytest.mark.parametrize("kind", ["joined", "written", "as JSON"])
def test_parts_and_arguments_are_found_together(kind):
    body = "{%- for c in m.content %}{{- c['text'] + '' }}{%- endfor %}"
    body += "{%- for c in m.tool_calls or [] %}" + CALLS[kind] + "{%- endfor %}"
    ((_, turns),) = texts_of(looped(body), called(GIVEN[0]))
    written = '{"city": "Paris"}' if kind == "as JSON" else '{"city":"Paris"}'
    assert turns == [f"<c>w {written}<|im_end|>", "Sunny.<|im_end|>"]


def test_each_of_several_named_templates_has_forms_of_its_own():
    tok = tokenizer("chatml")
    tok.chat_template = {
        "default": looped(PARTS["selected"]),
        "tool_use": looped(CALLED.replace("CALL", CALLS["joined"])),
    }
    template = Template(tok)
    assert template.forms(tools=False).parts and not template.forms(tools=False).text_arguments
    assert not template.forms(tools=True).parts and template.forms(tools=True).text_arguments
    (document,) = Renderer(tok).render(row(called(GIVEN[0]), tools=TOOLS)).documents
    assert '<c>w {"city":"Paris"}' in tok.decode(document.input_ids)


def test_an_argument_named_as_an_attribute_of_ours_is_the_argument():
    body = CALLED.replace("CALL", "{{- c.function.arguments.written }}")
    ((_, turns),) = texts_of(looped(body), called({"arguments": '{"written": "yes"}'}))
    assert turns[0] == "yes<|im_end|>"


@pytest.mark.parametrize("template", [LLAMA3, QWEN3])
def test_a_broken_form_is_the_error_of_its_row(template):
    """A template that fails in every form is not guessed at."""
    broken = template + "{{- messages[0].content.nothing() }}"
    tok = tokenizer("chatml")
    tok.chat_template = broken
    assert Template(tok).forms(tools=False) == MessageForms()
