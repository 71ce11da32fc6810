"""The rules of rendering, for templates that behave like those of Llama-3, Qwen, Mistral, Gemma...

Expected documents (`chat_cases`) are text with the supervised parts in «». `expect` tokenises the
text and marks tokens by their character offsets; it shares no code with the renderer.
"""

import random
from copy import copy

import pytest
from tokenizers import processors

from spec_data.corpus.chat import Renderer, RenderError, Turn, loss_mask_from_turns
from spec_data.corpus.documents import CONTROL
from spec_data.corpus.records import Record
from spec_data.shards.errors import ConfigError
from tests.spec_data.corpus.chat_cases import (
    CALL,
    CASES,
    METHODS,
    PARIS,
    THOUGHT,
    TWO,
    answer,
    im,
    system,
    user,
)
from tests.spec_data.corpus.templates import CHATML, R1, TEMPLATES, tokenizer


def chat(*messages, **more):
    return Record(source="s", where="s:1", messages=list(messages), **more)


def text(content):
    return Record(source="s", where="s:1", text=content)


def documents_of(tok, record, **options):
    return Renderer(tok, **options).render(record).documents


def expect(tok, marked):
    """Return (input_ids, loss_mask) of a text whose supervised parts are in «»."""
    text, supervised, inside = "", [], False
    for char in marked:
        if char in "«»":
            inside = char == "«"
            continue
        text += char
        supervised.append(inside)
    encoded = tok._tokenizer.encode(text, add_special_tokens=False)
    mask = []
    for start, end in encoded.offsets:
        assert len(set(supervised[start:end])) <= 1, "a token straddles a boundary"
        mask.append(int(supervised[start]))
    return encoded.ids, mask


def prompt_ids(tok, messages, tools=None, **kwargs):
    """Return the token ids that serving sends."""
    rendered = tok.apply_chat_template(messages, tools=tools, add_generation_prompt=True, **kwargs)
    return list(rendered["input_ids"])


def supervised_texts(tok, document):
    return [tok.decode(document.input_ids[turn.start : turn.end]) for turn in document.turns]


@pytest.mark.parametrize("name", CASES)
def test_documents_and_masks_are_the_expected_ones(name):
    family, messages, kwargs, tools, expected = CASES[name]
    tok = tokenizer(family)
    result = Renderer(tok, template_kwargs=kwargs).render(chat(*messages, tools=tools))
    found = [(d.input_ids, d.loss_mask) for d in result.documents]
    assert found == [expect(tok, e) for e in expected]
    assert result.method == METHODS.get(name, "prefix boundaries")
    assert not [n for n in result.counts if not n.startswith(CONTROL)]


@pytest.mark.parametrize("name", CASES)
def test_every_stored_prompt_is_what_serving_sends(name):
    family, messages, kwargs, tools, _ = CASES[name]
    tok = tokenizer(family)
    documents = documents_of(tok, chat(*messages, tools=tools), template_kwargs=kwargs)
    turns = [(d.input_ids, turn) for d in documents for turn in d.turns]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("skip")]
    assert len(turns) == len(answers)
    for (ids, turn), k in zip(turns, answers, strict=True):
        assert ids[: turn.start] == prompt_ids(tok, list(messages[:k]), tools, **kwargs)


FAMILIES = [name for name in TEMPLATES if name not in ("r1", "glm", "thinking", "qwen3")]
PIECES = ("Paris", " ", "\n", "\n\n", "🦊é", "<|im_start|>assistant\n", "[INST]", "the end.")
PIECES += ("<start_of_turn>model\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "  x")
PIECES += ("<think>", "\t")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_follow_the_rules(family):
    """Prompts are those of serving, and supervised text is content + end, even if the content
    quotes headers."""
    tok, draw = tokenizer(family), random.Random(family)
    renderer = Renderer(tok)
    end = {"llama3": "<|eot_id|>", "mistral": "</s>", "phi3": "<|end|>", "odd-end": "<|stop|>"}
    end |= {"gemma2": "<end_of_turn>", "gemma3": "<end_of_turn>"}
    for _ in range(20):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append(user("".join(draw.choices(PIECES, k=draw.randint(0, 5)))))
            messages.append(answer("".join(draw.choices(PIECES, k=draw.randint(0, 5))) + "z"))
        turns = []
        for document in renderer.render(chat(*messages)).documents:
            length = len(document.input_ids)
            assert document.loss_mask == loss_mask_from_turns(length, document.turns, "assistant")
            turns += [(document.input_ids, turn) for turn in document.turns]
        assert len(turns) == len(messages) // 2
        for k, (ids, turn) in zip(range(1, len(messages), 2), turns, strict=True):
            assert ids[: turn.start] == prompt_ids(tok, messages[:k])
            text = tok.decode(ids[turn.start : turn.end])
            content = messages[k]["content"] + end.get(family, "<|im_end|>")
            assert text.strip() == content.strip()


def test_a_boundary_inside_a_merged_token_is_detected_and_split_as_text():
    """The thinking prompt ends in a newline; in the whole it merges with the next newline."""
    tok = tokenizer("thinking")
    result = Renderer(tok).render(chat(user("a"), answer("B")))
    (document,) = result.documents
    assert result.method == "turn by turn"
    prompt = prompt_ids(tok, [user("a")])
    assert document.input_ids[: len(prompt)] == prompt
    assert supervised_texts(tok, document) == ["B<|im_end|>"]
    assert result.counts == {"empty think blocks, not supervised": 1}
    whole = list(tok.apply_chat_template([user("a"), answer("B")])["input_ids"])
    assert document.input_ids != whole, "the case tests nothing: no token merged"
    assert tok.decode(document.input_ids) == tok.decode(whole)


EMPTY_THOUGHTS = [
    ("<|channel>thought\\n<channel|>", ""),  # Gemma 4 without thinking
    ("<think>\\n\\n</think>\\n\\n", ""),  # Nemotron's /no_think
    ("<|START_THINKING|><|END_THINKING|>", ""),  # Command
    ("<think></think>", "</think>"),  # DeepSeek-V3.2
    ("<think>\\n\\n</think>\\n\\n", "\\n</think>\\n\\n"),
]


@pytest.mark.parametrize(("empty", "closed"), EMPTY_THOUGHTS)
@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_thought_in_the_prompt_alone_stays_before_the_answer(empty, closed, count):
    """No rendered answer has it, or just its closing tag."""
    tok = tokenizer("chatml")
    tok.add_tokens(["<|START_THINKING|>", "<|END_THINKING|>", "<|channel>", "<channel|>"])
    tok.chat_template = CHATML.replace("assistant\\n' }}", f"assistant\\n{empty}' }}}}").replace(
        "+ message.content",
        f"+ ('{closed}' if message.role == 'assistant' else '') + message.content",
    )
    result = Renderer(tok).render(chat(*TWO[: 2 * count]))
    assert (result.method, len(result.documents)) == ("turn by turn", count)
    for k, document in enumerate(result.documents):
        prompt = prompt_ids(tok, list(TWO[: 2 * k + 1]))
        assert document.input_ids[: len(prompt)] == prompt
        assert tok.decode(prompt).endswith(empty.replace("\\n", "\n"))
        answered = TWO[2 * k + 1]["content"]
        assert supervised_texts(tok, document) == [f"{answered}<|im_end|>"]
    thought = empty.replace("\\n", "\n").replace("<channel|>", "so<channel|>")
    thought = thought.replace("</think>", "so</think>").replace("<|END", "so<|END")
    with pytest.raises(RenderError, match="ends a thought: give them none"):
        Renderer(tok).render(chat(user("a"), answer(f"{thought}B")))


def test_a_system_message_that_only_the_prompt_has_stays_before_the_answer():
    """Mistral Nemo: it stands in the last message, if that is a question."""
    tok = tokenizer("chatml")
    tok.chat_template = (
        "{%- for message in messages if message.role != 'system' %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if loop.last and message.role == 'user' and messages[0].role == 'system' %}"
        "{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    result = Renderer(tok).render(chat(system("Brief."), *TWO))
    marked = [
        im("user", "Brief.\n\nhello", "assistant", f"«{PARIS}»"),
        im("user", "hello", "assistant", PARIS, "user", "Brief.\n\nand?")
        + im("assistant", "«I think so.»"),
    ]
    for document, text in zip(result.documents, marked, strict=True):
        assert (document.input_ids, document.loss_mask) == expect(tok, text)
    assert result.counts == {}, "the documents have the system message"
    tok.chat_template = tok.chat_template.replace("assistant\\n' }}", "Assistant\\n' }}")
    for question in ("hello", "s"):  # no answer has that header, also if it has the question
        with pytest.raises(RenderError, match="no assistant turn"):
            Renderer(tok).render(chat(system("Brief."), user(question), answer("b")))


# Nemotron Nano 2: the last answer follows the thought that its prompt opens, as it is.
OPENED_AGAIN = R1.replace(
    "'<|assistant|>' + message.content.split('</think>')[-1]",
    "'<|assistant|>' + ('<think>\\n' if loop.last else '') + message.content",
)


@pytest.mark.parametrize("template", [R1, OPENED_AGAIN])
@pytest.mark.parametrize(
    "given",
    [
        answer("<think>\nwhy\n</think>\n\nParis."),
        answer("why\n</think>\n\nParis."),
        answer("Paris.", reasoning_content="why\n"),
    ],
)
def test_a_thought_that_the_prompt_opens_and_the_template_loses_is_learned(template, given):
    tok = tokenizer("r1")
    tok.chat_template = template
    result = Renderer(tok).render(chat(user("a"), given, user("b"), given))
    first, second = result.documents
    marked = (
        "<|begin_of_text|><|user|>a<|assistant|><think>\n«why\n</think>\n\nParis.<|endoftext|>»"
    )
    assert (first.input_ids, first.loss_mask) == expect(tok, marked)
    prompt = prompt_ids(tok, [user("a"), given, user("b")])
    assert second.input_ids[: len(prompt)] == prompt
    assert supervised_texts(tok, second) == ["why\n</think>\n\nParis.<|endoftext|>"]
    assert result.counts == {}, "the thoughts are not left out"


@pytest.mark.parametrize("template", [R1, OPENED_AGAIN])
def test_an_answer_without_the_thought_that_its_prompt_opens_is_refused(template):
    """With thinking on, the target does not write it."""
    tok = tokenizer("r1")
    tok.chat_template = template
    call = {**CALL, "content": "", "reasoning_content": "why"}
    with pytest.raises(RenderError, match="writes no tool calls"):
        Renderer(tok).render(chat(user("a"), call))
    for given in (
        answer("Paris."),
        answer("<think>\n\n</think>\n\nParis."),
        {**CALL, "content": ""},
    ):
        with pytest.raises(RenderError, match="opens a thought: give them one") as caught:
            Renderer(tok).render(chat(user("a"), given))
        assert caught.value.reason == "unprovable-boundaries"
    tok.chat_template = template.replace("<think>\\n' }}", "' + ('' if off else '<think>') }}")
    tok.chat_template = tok.chat_template.replace("off", "enable_thinking is false")
    with pytest.raises(
        RenderError, match=r'pass --chat-template-kwargs .\{"enable_thinking": false\}'
    ):
        Renderer(tok).render(chat(user("a"), answer("Paris.")))


def test_an_empty_thought_in_tags_of_their_own_is_not_supervised():
    """Kimi K3: the prompt opens it, and the template closes it."""
    opened, closed = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    tok = tokenizer("chatml")
    tok.add_tokens(["<|open|>", "<|close|>", "<|sep|>"])
    tok.chat_template = CHATML.replace("assistant\\n' }}", f"assistant\\n{opened}' }}}}").replace(
        "+ message.content",
        f"+ ('{opened}{closed}' if message.role == 'assistant' else '') + message.content",
    )
    result = Renderer(tok).render(chat(*TWO))
    (document,) = result.documents
    wanted = [f"{TWO[1]['content']}<|im_end|>", "I think so.<|im_end|>"]
    assert supervised_texts(tok, document) == wanted
    assert result.counts == {"empty think blocks, not supervised": 2}


def test_an_answer_of_which_the_template_writes_nothing_is_no_data():
    """SmolLM3, LFM2, Phi-3: the tool calls are left out, and the end alone would be learned."""
    tok = tokenizer("chatml")
    call, sun = {**CALL, "content": ""}, {"role": "tool", "content": "sun"}
    result = Renderer(tok).render(chat(user("a"), call, sun, answer("Sunny.")))
    (document,) = result.documents
    assert supervised_texts(tok, document) == ["Sunny.<|im_end|>"]
    left_out = {"left out by the template: tool calls": 1}
    assert result.counts == {"empty answers, not supervised": 1, **left_out}
    tok.chat_template = CHATML.replace("'<|im_end|>", "'<|end|><|im_end|>")  # with two ends
    with pytest.raises(RenderError, match="left out by the template") as caught:
        Renderer(tok).render(chat(user("a"), call))
    assert caught.value.reason == "nothing-supervised"


def test_the_token_that_ends_generation_may_follow_another_one():
    """Command: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>."""
    tok = tokenizer("chatml")
    tok.chat_template = CHATML.replace("'<|im_end|>", "'<|end|><|im_end|>")
    (document,) = documents_of(tok, chat(*TWO))
    assert supervised_texts(tok, document)[1] == "I think so.<|end|><|im_end|>"
    cut = answer("I think") | {"finish_reason": "length"}
    (document,) = documents_of(tok, chat(user("a"), cut))
    assert supervised_texts(tok, document) == ["I think"], "the target wrote none of them"


def test_turns_that_only_the_next_header_ends():
    """GLM: if <|user|> is an end-of-turn token, it is supervised where the whole has it."""
    tok = tokenizer("glm")
    header = tok.convert_tokens_to_ids("<|user|>")
    result = Renderer(tok, eot_token_ids=[header]).render(chat(*TWO))
    (document,) = result.documents
    marked = (
        "<|user|>\nhello<|assistant|>\n«Paris 🦊\n\n x<|user|>»\n"
        "and?<|assistant|>\n«I think so.<|user|>»"
    )
    assert (document.input_ids, document.loss_mask) == expect(tok, marked)
    assert result.counts == {"end-of-turn tokens appended": 1}


# GLM-4.5: the think block stands on a line of its own, and earlier thoughts are dropped. A tool's
# header stands for <|observation|>.
GLM_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|' + {'tool': 'system'}.get(message.role, message.role) + '|>' }}
{%- if message.role == 'assistant' %}
{{- '\\n<think>' + (message.reasoning_content or '' if loop.index0 > ns.last else '') }}
{{- '</think>' + ('\\n' + message.content if message.content else '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '</tool_call>' }}
{%- endfor %}
{%- else %}{{- '\\n' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


@pytest.mark.parametrize(
    ("messages", "marked"),
    [
        (
            [TWO[0], answer("Paris.")],
            ["<|user|>\nhello<|assistant|>\n<think></think>\n«Paris.<|user|>»"],
        ),
        (
            [TWO[0], answer("Paris.", reasoning_content="so")],
            ["<|user|>\nhello<|assistant|>«\n<think>so</think>\nParis.<|user|>»"],
        ),
        (  # turn by turn, because the second question drops the first thought
            [
                user("hello"),
                answer("", reasoning_content="so", tool_calls=CALL["tool_calls"]),
                {"role": "tool", "content": "sunny"},
                answer("Paris.", reasoning_content="so"),
                user("and?"),
                answer("", reasoning_content="so", tool_calls=CALL["tool_calls"]),
            ],
            [
                "<|user|>\nhello<|assistant|>"
                "«\n<think>so</think>\n<tool_call>w</tool_call><|system|>»",
                "<|user|>\nhello<|assistant|>"
                "\n<think>so</think>\n<tool_call>w</tool_call><|system|>\nsunny<|assistant|>"
                "«\n<think>so</think>\nParis.<|user|>»",
                "<|user|>\nhello<|assistant|>"
                "\n<think></think>\n<tool_call>w</tool_call><|system|>\nsunny<|assistant|>"
                "\n<think></think>\nParis.<|user|>\nand?<|assistant|>"
                "«\n<think>so</think>\n<tool_call>w</tool_call><|system|>»",
            ],
        ),
    ],
)
def test_a_think_block_on_a_line_of_its_own_and_ends_that_no_header_shows(messages, marked):
    tok = tokenizer("glm")
    tok.chat_template = GLM_THINKING
    ends = tok.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|system|>"])
    result = Renderer(tok, eot_token_ids=ends).render(chat(*messages))
    for document, text in zip(result.documents, marked, strict=True):
        assert (document.input_ids, document.loss_mask) == expect(tok, text)


@pytest.mark.parametrize("thinking", [True, False])
def test_template_kwargs_of_a_row_override_those_of_the_run(thinking):
    tok = tokenizer("qwen3")
    answered = THOUGHT if thinking else TWO[1]
    record = chat(TWO[0], answered, template_kwargs={"enable_thinking": thinking})
    run = {"enable_thinking": not thinking}
    (document,) = documents_of(tok, record, template_kwargs=run)
    start = document.turns[0].start
    assert document.input_ids[:start] == prompt_ids(tok, [TWO[0]], enable_thinking=thinking)


def test_an_empty_think_block_that_only_the_template_writes_is_not_supervised():
    """With thinking, serving never generates an empty one; without it, the block is prompt."""
    tok, count = tokenizer("qwen3"), {"empty think blocks, not supervised": 1}
    result = Renderer(tok).render(chat(*TWO[:2]))
    (document,) = result.documents
    assert supervised_texts(tok, document) == [TWO[1]["content"] + "<|im_end|>"]
    start = document.turns[0].start
    assert document.input_ids[:start] == prompt_ids(tok, [TWO[0]], enable_thinking=False)
    assert result.counts == count
    (document,) = documents_of(tok, chat(TWO[0], THOUGHT))
    assert supervised_texts(tok, document)[0].startswith("<think>")
    result = Renderer(tok).render(chat(TWO[0], THOUGHT, *TWO[:2]))  # turn by turn
    assert supervised_texts(tok, result.documents[1]) == [TWO[1]["content"] + "<|im_end|>"]
    assert result.counts == count


@pytest.mark.parametrize(
    ("family", "content", "reasoning", "written"),
    [
        ("qwen3", "", "I think", "<think>\nI think"),
        ("thinking", "", "I think", "I think"),
        ("qwen3", "<think>\nI think", None, "<think>\nI think"),
        ("thinking", "I think", None, "I think"),
        ("thinking", "<think>\nI think", None, "I think"),
        ("qwen3", "It is", "I think", "<think>\nI think\n</think>\n\nIt is"),
        ("qwen3", "It is", None, "It is"),
        ("qwen3", "It is <think>", None, "It is <think>"),
        ("chatml", "<think>\nI think", None, "<think>\nI think"),
    ],
)
def test_a_limit_inside_a_thought_does_not_end_it(family, content, reasoning, written):
    """Templates close the thought, or take it for the answer to an empty one: neither was
    generated."""
    tok = tokenizer(family)
    cut = answer(content) | {"finish_reason": "length"}
    cut |= {} if reasoning is None else {"reasoning_content": reasoning}
    (document,) = documents_of(tok, chat(user("a"), cut))
    assert supervised_texts(tok, document) == [written]
    prompt = prompt_ids(tok, [user("a")])
    assert document.input_ids[: len(prompt)] == prompt
    if not written.startswith("It is"):  # those are behind an empty block
        assert document.turns[0].start == len(prompt)
    later = documents_of(tok, chat(user("a"), cut, user("b"), answer("c")))
    assert [t for d in later for t in supervised_texts(tok, d)] == [written, "c<|im_end|>"]


BY_CHANNEL = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}{{- '<|im_start|>a|think|' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|im_start|>a|say|' + m.content + ('<|im_end|>' if loop.last else '<|end|>') }}
{%- else %}{{- '<|im_start|>' + m.role + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>a' }}{%- endif %}
"""


@pytest.mark.parametrize("thought", ["I think", "I th ", "so\n"])
def test_a_limit_inside_a_thought_by_channel_begins_no_answer(thought):
    """gpt-oss: behind the thought the template writes the header of an answer."""
    tok = copy(tokenizer("chatml"))
    tok.chat_template = BY_CHANNEL
    cut = answer("", reasoning_content=thought, finish_reason="length")
    for more in ([], [user("b"), answer("c")]):
        messages = [user("a"), cut, *more]
        documents = documents_of(tok, chat(*messages))
        assert supervised_texts(tok, documents[0]) == [f"|think|{thought}"]
        assert tok.decode(documents[0].input_ids).endswith(f"<|im_start|>a|think|{thought}")
        result = Renderer(tok, mask="without-reasoning")
        texts = [t for d in rendered_or_none(result, messages) for t in supervised_texts(tok, d)]
        assert texts == ["|say|c<|im_end|>"] * bool(more)
    whole = answer("It", reasoning_content=thought, finish_reason="length")
    (document,) = documents_of(tok, chat(user("a"), whole))
    written = f"|think|{thought}<|end|><|im_start|>a|say|It"
    assert supervised_texts(tok, document) == [written]


def rendered_or_none(renderer, messages):
    try:
        return renderer.render(chat(*messages)).documents
    except RenderError as error:
        assert error.reason == "nothing-supervised"
        return []


def test_a_cut_answer_that_begins_with_an_end_token_costs_no_other_answer():
    tok = tokenizer("qwen3")
    cut = answer("<|im_end|>x") | {"finish_reason": "length"}
    documents = documents_of(tok, chat(user("a"), cut, user("b"), answer("fine")))
    assert [supervised_texts(tok, d) for d in documents] == [["fine<|im_end|>"]]
    with pytest.raises(RenderError, match="cut before its first token"):
        documents_of(tok, chat(user("a"), cut))
    blank = answer("") | {"finish_reason": "length", "reasoning_content": " "}
    documents = documents_of(tok, chat(user("a"), blank, user("b"), answer("fine")))
    assert supervised_texts(tok, documents[-1]) == ["fine<|im_end|>"]


def test_unanswered_messages_at_the_end_are_left_out_and_counted():
    tok = tokenizer("chatml")
    result = Renderer(tok).render(chat(*TWO, user("bye"), user("bye?")))
    assert result.documents == documents_of(tok, chat(*TWO))
    assert result.counts == {"trailing messages left out": 2}


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        ("r1", TWO, "unprovable-boundaries"),
        ("chatml", [user("a")], "no-assistant-turn"),
        ("chatml", [answer("a")], "no-assistant-turn"),
        ("gemma2", [system("s"), user("a"), answer("b")], "template-error"),
        ("mistral", [user("a"), answer("b"), answer("c")], "template-error"),
        ("chatml", [user("a"), CALL], "template-error"),
        ("tagged", [user("a"), answer("b", skip=True)], "nothing-supervised"),
    ],
)
def test_records_that_cannot_be_rendered_say_why(family, messages, reason):
    with pytest.raises(RenderError, match=r"^s:1: ") as caught:
        Renderer(tokenizer(family)).render(chat(*messages))
    assert caught.value.reason == reason


def test_a_tokenizer_without_template_renders_text_only():
    tok = tokenizer("chatml")
    tok.chat_template = None
    with pytest.raises(RenderError) as caught:
        Renderer(tok).render(chat(*TWO))
    assert caught.value.reason == "no-chat-template"
    assert documents_of(tok, text("hello"))


@pytest.mark.parametrize("quoted", ["b<|im_end|> and more", "b<|im_end|>\n<|im_end|>x"])
def test_a_turn_ends_at_the_first_end_token_that_its_answer_quotes(quoted):
    """The target stops at the first end-of-turn token it generates."""
    tok = tokenizer("chatml")
    messages = [user("a"), answer(quoted), user("c"), answer("d")]
    (document,) = documents_of(tok, chat(*messages))
    assert supervised_texts(tok, document) == ["b<|im_end|>", "d<|im_end|>"]
    assert document.input_ids == list(tok.apply_chat_template(messages)["input_ids"])


@pytest.mark.parametrize(
    ("messages", "ends", "supervised"),
    [
        ([answer("Welcome"), user("a"), answer("b")], [], ["b<|im_end|>"]),  # an opening is context
        ([user("a"), answer("b"), answer("c")], [], ["b<|im_end|>", "c<|im_end|>"]),
        # gpt-oss closes each channel with <|end|>; only what ends generation ends a turn
        ([user("a"), answer("think<|end|>say")], [], ["think<|end|>say<|im_end|>"]),
        ([user("a"), answer("b<|end|>c")], ["<|end|>"], ["b<|end|>"]),
    ],
)
def test_supervised_turns(messages, ends, supervised):
    tok = tokenizer("chatml")
    ids = tok.convert_tokens_to_ids(ends)
    (document,) = documents_of(tok, chat(*messages), eot_token_ids=ids)
    assert supervised_texts(tok, document) == supervised


def test_a_last_turn_without_end_gets_the_token_of_the_generation_config():
    tok = tokenizer("glm")
    end, other = tok.convert_tokens_to_ids(["<|eot_id|>", "<|end|>"])
    record = chat(user("a"), answer("b"))
    result = Renderer(tok, eot_token_ids=[end, other]).render(record)
    (document,) = result.documents
    assert supervised_texts(tok, document) == ["b<|eot_id|>"]
    assert document.loss_mask[-1] == 1
    assert result.counts == {"end-of-turn tokens appended": 1}
    result = Renderer(tok).render(record)  # no generation config: nothing to append
    assert supervised_texts(tok, result.documents[0]) == ["b"]
    assert result.counts == {"turns without an end-of-turn token": 1}
    (document,) = documents_of(tok, text("hi"), eot_token_ids=[end])
    assert document.input_ids == tok("hi")["input_ids"]
    assert all(document.loss_mask) and [turn.role for turn in document.turns] == ["text"]


def test_answers_of_weight_zero_are_context():
    tok = tokenizer("chatml")
    messages = [user("a"), answer("b", weight=0), user("c"), answer("d", weight=1)]
    result = Renderer(tok).render(chat(*messages))
    (document,) = result.documents
    assert supervised_texts(tok, document) == ["d<|im_end|>"]
    assert "assistant\nb<|im_end|>" in tok.decode(document.input_ids)
    assert result.counts == {"answers of weight 0, not supervised": 1}
    messages[3]["weight"] = 0.0
    with pytest.raises(RenderError, match="empty or has weight 0") as caught:
        Renderer(tok).render(chat(*messages))
    assert caught.value.reason == "nothing-supervised" and not caught.value.broken
    (document,) = documents_of(tok, chat(user("a"), answer("b", weight=0.5)))  # as of weight 1
    assert supervised_texts(tok, document) == ["b<|im_end|>"]


@pytest.mark.parametrize("nothing", ["", " \n", "<think>\n\n</think>\n\n"])
def test_an_empty_answer_is_no_data(nothing):
    tok = tokenizer("qwen3")
    with pytest.raises(RenderError, match="empty or has weight 0"):
        Renderer(tok).render(chat(user("a"), answer(nothing)))
    cut = answer(nothing, finish_reason="length")
    result = Renderer(tok).render(chat(user("a"), cut, user("b"), answer("c")))
    turns = [t for d in result.documents for t in supervised_texts(tok, d)]
    assert len(turns) == 1 and turns[0].endswith("c<|im_end|>")
    assert result.counts["empty answers, not supervised"] == 1
    for full in (answer("", reasoning_content="r"), {**CALL, "content": ""}):
        assert documents_of(tok, chat(user("a"), full))


def test_a_text_that_begins_with_the_tokenizers_first_token_is_refused():
    tok = tokenizer("llama3")
    tok._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tok.bos_token_id)]
    )
    renderer = Renderer(tok)
    (document,) = renderer.render(text("hi")).documents
    assert document.input_ids[0] == tok.bos_token_id != document.input_ids[1]
    with pytest.raises(RenderError, match=r"begins with <.begin_of_text.>.*remove it") as caught:
        renderer.render(text("<|begin_of_text|>hi"))
    assert caught.value.reason == "doubled-bos" and caught.value.broken


def test_mask_policies():
    tok = tokenizer("chatml")
    policies = ("assistant", "last-turn", "all")
    by_policy = {p: documents_of(tok, chat(*TWO), mask=p)[0] for p in policies}
    assert len({d.turns for d in by_policy.values()}) == 1, "the policy can be changed later"
    first, last = by_policy["assistant"].turns
    expected = [int(last.start <= t < last.end) for t in range(len(by_policy["all"].input_ids))]
    assert by_policy["last-turn"].loss_mask == expected
    assert all(by_policy["all"].loss_mask)
    assert sum(by_policy["assistant"].loss_mask) == sum(expected) + first.end - first.start


def test_last_turn_of_a_rewriting_template_is_one_document():
    tok = tokenizer("qwen3")
    record = chat(user("a"), THOUGHT, *TWO[:2])
    (document,) = documents_of(tok, record, mask="last-turn")
    everything = documents_of(tok, record)
    assert len(everything) == 2 and document == everything[-1]
    assert [d.where for d in everything] == ["s:1 (message 1)", "s:1 (message 3)"]


def test_a_turn_outside_its_document_is_refused():
    with pytest.raises(ConfigError, match="outside"):
        loss_mask_from_turns(4, [Turn("assistant", 2, 5)], "assistant")


def given(ids, mask=None):
    return Record(source="s", where="s:1", input_ids=ids, loss_mask=mask)


def test_input_ids_are_stored_unchanged():
    tok = tokenizer("chatml")
    (document,) = documents_of(tok, given([5, 6, 7, 8, 9], [1, 0, 1, 1, 0]))
    assert document.input_ids == [5, 6, 7, 8, 9]
    assert document.loss_mask == [1, 0, 1, 1, 0]
    assert [(t.role, t.start, t.end) for t in document.turns] == [("given", 0, 1), ("given", 2, 4)]
    (document,) = documents_of(tok, given([5, 6]))
    assert document.loss_mask == [1, 1]


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([1, 2], [1], "bad-loss-mask"),
        ([1, 2], [1, 2], "bad-loss-mask"),
        ([1, 50], None, "bad-token-id"),
        ([-1, 2], None, "bad-token-id"),
        ([1, 2], [0, 0], "nothing-supervised"),
    ],
)
def test_broken_input_ids_are_refused(ids, mask, reason):
    with pytest.raises(RenderError) as caught:
        Renderer(tokenizer("chatml"), vocab_size=50).render(given(ids, mask))
    assert caught.value.reason == reason


# --- answers that were cut at a limit of tokens: the target never wrote the end after them ---

CUT = "answers cut at a limit of tokens, their end not supervised"


def rendered(family, *messages):
    """Return (tokenizer, end-of-turn tokens, rendering) of a conversation."""
    tok = tokenizer(family)
    ends = [tok.convert_tokens_to_ids("<|user|>")] if family == "glm" else []
    renderer = Renderer(tok, eot_token_ids=ends)
    return tok, renderer.ends.all, renderer.render(chat(*messages))


def cut(content, **more):
    return answer(content, finish_reason="length", **more)


def test_the_end_of_a_cut_answer_is_not_supervised():
    tok, _, result = rendered(
        "chatml", user("hello"), cut("Paris x"), user("and?"), answer("I think so.")
    )
    marked = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«Paris x»<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«I think so.<|im_end|>»\n"
    )
    (document,) = result.documents
    assert (document.input_ids, document.loss_mask) == expect(tok, marked)
    assert result.counts == {CUT: 1, "turns without an end-of-turn token": 1}


@pytest.mark.parametrize("family", ["qwen3", "mistral", "glm", "tagged-wide"])
def test_in_every_template_only_the_end_is_taken_away(family):
    """Beside the same conversation uncut: equal but for end tokens of the answers that were cut."""
    shorter = [dict(m, finish_reason="length") if m["role"] == "assistant" else m for m in TWO]
    _, ends, plain = rendered(family, *TWO)
    _, _, cut_ones = rendered(family, *shorter)
    for one, other in zip(plain.documents, cut_ones.documents, strict=True):
        for turn, less in zip(one.turns, other.turns, strict=True):
            assert turn.start == less.start
            assert less.end == turn.end - (one.input_ids[turn.end - 1] in ends)
            assert other.input_ids[less.end - 1] not in ends
        assert one.input_ids[: len(other.input_ids)] == other.input_ids
