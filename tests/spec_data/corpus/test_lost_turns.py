"""Turns whose later rendering is not their prompt's continuation: learned, or lost with a cause.

Expected documents are text with the supervised parts in «»; the templates are as short as the
behaviour allows.
"""

import logging

import pytest

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.plan import render_corpus
from spec_data.shards.errors import CorpusError
from tests.spec_data.corpus.chat_cases import answer, user
from tests.spec_data.corpus.reading import write_jsonl
from tests.spec_data.corpus.templates import CHATML, tokenizer
from tests.spec_data.corpus.test_chat import chat, expect, prompt_ids

# gpt-oss: thoughts of calls stay until an answer without a call follows, and the last answer has
# another end than those before it.
HARMONY = """\
{%- set ns = namespace(final=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.final = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and (loop.index0 > ns.final or loop.last) %}
{{- '<|im_start|>me:think ' + m.thinking + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{{- '<|im_start|>me:call ' + m.tool_calls[0].function | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|im_start|>me:say ' + m.content }}
{{- '<|im_end|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + ':' + m.content | tojson + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>me' }}{%- endif %}
"""
CALL_TEXT = ':call {"name": "w", "arguments": {"city": "Paris"}}'
CALL = [{"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}]


def called(thought):
    return answer("", tool_calls=CALL, reasoning_content=thought)


def tool(content):
    return {"role": "tool", "content": content}


def rendered(template, messages, ends=("<|eot_id|>",), **options):
    tok = tokenizer("chatml")
    tok.chat_template = template
    renderer = Renderer(tok, eot_token_ids=tok.convert_tokens_to_ids(list(ends)), **options)
    return tok, renderer.render(chat(*messages))


def check(template, messages, *marked):
    tok, result = rendered(template, messages)
    found = [(d.input_ids, d.loss_mask) for d in result.documents]
    assert [tok.decode(ids) for ids, _ in found] == [
        m.replace("«", "").replace("»", "") for m in marked
    ]
    assert found == [expect(tok, text) for text in marked]
    answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    for document, k in zip(result.documents, answers, strict=True):
        prompt = prompt_ids(tok, list(messages[:k]))
        assert document.input_ids[: document.turns[0].start] == prompt, "not what serving sends"
    assert not result.dropped
    return result


def test_an_answer_is_learned_behind_the_thought_that_its_rendering_drops():
    """gpt-oss: the prompt of the answer has the thought of the call, the conversation has not."""
    ask = '<|im_start|>user:"weather?"<|end|><|im_start|>me'
    sun = f'{ask}:think look<|end|><|im_start|>me{CALL_TEXT}<|eot_id|><|im_start|>tool:"sun"<|end|>'
    final = "«:think say<|end|><|im_start|>me:say Sunny.<|im_end|>»"
    chat = [
        user("weather?"),
        called("look"),
        tool("sun"),
        answer("Sunny.", reasoning_content="say"),
    ]
    first = f"{ask}«:think look<|end|><|im_start|>me{CALL_TEXT}<|eot_id|>»"
    check(HARMONY, chat, first, f"{sun}<|im_start|>me{final}")


def test_several_calls_before_the_answer_and_another_question_behind_it():
    ask = '<|im_start|>user:"a"<|end|><|im_start|>me'
    one = f":think one<|end|><|im_start|>me{CALL_TEXT}<|eot_id|>"
    two = f":think two<|end|><|im_start|>me{CALL_TEXT}<|eot_id|>"
    sun = '<|im_start|>tool:"sun"<|end|><|im_start|>me'
    bare = f"{ask}{CALL_TEXT}<|eot_id|>{sun}{CALL_TEXT}<|eot_id|>{sun}:say Yes.<|end|>"
    messages = [user("a"), called("one"), tool("sun"), called("two"), tool("sun"), answer("Yes.")]
    messages += [user("b"), answer("No.", reasoning_content="hm")]
    check(
        HARMONY,
        messages,
        f"{ask}«{one}»",
        f"{ask}{one}{sun}«{two}»",
        f"{ask}{one}{sun}{two}{sun}«:say Yes.<|im_end|>»",
        f'{bare}<|im_start|>user:"b"<|end|><|im_start|>me'
        "«:think hm<|end|><|im_start|>me:say No.<|im_end|>»",
    )


# DeepSeek: the prompt opens a thought; answers have none of it (R1), or its end (V3.1).
_DEEPSEEK = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>' + CLOSED + m.content.split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function.name + c.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}{{- eos_token }}
{%- else %}{{- '<|' + ('user' if m.role == 'user' else 'system') + '|>' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>OPENED' }}{%- endif %}
"""
R1_CALLS = _DEEPSEEK.replace("CLOSED + ", "").replace("OPENED", "<think>\\n")
V31_CALLS = _DEEPSEEK.replace("CLOSED", "'</think>'").replace("OPENED", "<think>")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("template", "opened", "line", "closed"),
    [(R1_CALLS, "<think>\n", "\n", "</think>\n\n"), (V31_CALLS, "<think>", "", "</think>")],
)
def test_a_thought_before_a_call_is_learned_though_the_template_drops_it(
    template, opened, line, closed, inside
):
    given = called("look")
    if inside:
        given = answer(f"<think>{line}look{line}</think>", tool_calls=CALL)
    messages = [user("a"), given, tool("sun"), answer("Sunny.", reasoning_content="say")]
    call = '<tool_call>w{"city": "Paris"}</tool_call><|im_end|>'
    kept = closed if template is V31_CALLS else ""
    result = check(
        template,
        messages,
        f"<|user|>a<|assistant|>{opened}«look{line}{closed}{call}»",
        f"<|user|>a<|assistant|>{kept}{call}<|system|>sun<|assistant|>{opened}"
        f"«say{line}{closed}Sunny.<|im_end|>»",
    )
    assert not result.counts, "no thought is left out"


# -- lost turns ------------------------------------------------------------------------------------

# Only the first answer continues its prompt.
CHANGED = CHATML.replace(
    "assistant\\n' }}", "' + ('assistant' if messages | length < 3 else 'Assistant') + '\\n' }}"
)
PRETTY = """\
{% for m in messages %}
    <|im_start|>{{ m.role }}
    {{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def test_a_lost_turn_has_a_cause_that_shows_both_texts():
    _, result = rendered(CHANGED, [user("a"), answer("b"), user("c"), answer("d")])
    assert result.dropped == {"unprovable-boundaries": 1}
    (cause,) = result.causes
    assert cause.startswith("s:1 (message 3): ")
    assert "<|im_start|>Assistant\\n'" in cause and "<|im_start|>assistant\\nd<|im_end" in cause


def test_of_a_pretty_printed_template_both_texts_are_shown():
    with pytest.raises(RenderError) as caught:
        rendered(PRETTY, [user("a"), answer("b")])
    assert "the prompt has '" in str(caught.value) and "the conversation '" in str(caught.value)
    assert r"<|im_end|>\n<|im_start|>assis" in str(caught.value)
    assert r"<|im_end|>\n    <|im_start|>a" in str(caught.value)


def corpus(tmp_path, good, bad):
    rows = [{"messages": [user(f"a{i}"), answer("b")]} for i in range(good)]
    rows += [{"messages": [user(f"x{i}"), answer("b"), user("c"), answer("d")]} for i in range(bad)]
    return write_jsonl(tmp_path / "c.jsonl", rows)


def plan_of(path, limit="auto"):
    tok = tokenizer("chatml")
    tok.chat_template = CHANGED
    reader = CorpusReader([path], max_bad_rows=parse_limit(limit))
    return render_corpus(reader, Renderer(tok), 512, processes=1)[1]["counts"]


def test_lost_turns_are_counted_named_and_stored(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        counts = plan_of(corpus(tmp_path, 20, 2))
    assert counts.dropped == {"unprovable-boundaries": 2} and counts.rendered == 24
    (example,) = counts.unrendered_examples["unprovable-boundaries"]
    assert example.startswith("c.jsonl:21 (message 3): ") and "Assistant" in example
    (said,) = [r.getMessage() for r in caplog.records if "turns" in r.getMessage()]
    assert said.startswith("warning[bad-rows]: 2 of 24 turns left out: ") and "c.jsonl:21" in said


def test_too_many_lost_turns_stop_the_run_as_bad_rows_do(tmp_path):
    path = corpus(tmp_path, 5, 5)
    with pytest.raises(CorpusError, match=r"5 of 15 turns are bad; --max-bad-rows auto allows 1"):
        plan_of(path)
    assert plan_of(path, "5").dropped == {"unprovable-boundaries": 5}
    with pytest.raises(CorpusError, match=r"\(message 3\).*\n.*skip bad turns"):
        plan_of(path, "0")
