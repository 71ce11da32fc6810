"""Modes of answers, told from the tokens that a template renders: against what was rendered."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spec_data.corpus.chat import Renderer
from spec_data.corpus.records import Record
from spec_data.shards.packing import runs
from spec_data.shards.serving import OTHERS, TOOLS
from spec_data.shards.thoughts import thinks
from spec_train.simulation.modes import KINDS, DocumentModes, modes_of, ordered, text_of_tools
from tests.spec_data.corpus.chat_cases import (
    FIRST,
    NO_THINKING,
    THOUGHT,
    TOOL_CHAT,
    TWO,
    TWO_TOOLS,
    answer,
    system,
    user,
)
from tests.spec_data.corpus.chat_cases import TOOLS as LIST
from tests.spec_data.corpus.templates import tokenizer

BOTH = {"tools_used": {"": 1, TOOLS: 1}}
OLDER = tuple(part for n in range(5) for part in (user(f"q{n}"), answer(f"a{n}")))


def told(family: str, messages: Any, identity: Any = BOTH, mask=None, **more: Any) -> list[Any]:
    """The modes of each answer of the documents of a chat."""
    tok, kwargs = tokenizer(family), more.pop("kwargs", {})
    record = Record(source="s", where="s:1", messages=list(messages), **more)
    documents = (
        Renderer(tok, template_kwargs=kwargs, **({"mask": mask} if mask else {}))
        .render(record)
        .documents
    )
    dataset = SimpleNamespace(
        manifest=SimpleNamespace(identity=identity),
        turns_of=lambda n: [(t.role, t.start, t.end) for t in documents[n].turns],
    )
    modes, found = DocumentModes(dataset, tok), []
    for number, document in enumerate(documents):
        ids, supervised = np.array(document.input_ids), np.array(document.loss_mask, dtype=bool)
        own = modes.of(number, (None, ids, None, supervised))
        assert len(own) == len(runs(supervised))
        assert modes.of(number, (None, ids, None, supervised)) is own
        found += own
    return found


YES, NO = "with thinking", "without thinking"


@pytest.mark.parametrize(
    ("family", "messages", "kwargs", "expected"),
    [
        ("qwen3", (user("a"), THOUGHT, user("b"), FIRST), {}, [(YES, 1), (YES, 2)]),
        ("qwen3", TWO[:2], NO_THINKING, [(NO, 1)]),
        ("qwen3", TWO[:2], {}, [(NO, 1)]),
        ("qwen3", TWO_TOOLS, {}, [(YES, 1), (YES, 2)]),
        ("thinking", (user("a"), THOUGHT), {}, [(YES, 1)]),
        ("llama3", (system("x"), *TWO), {}, [(NO, 1), (NO, 2)]),
        ("mistral", TWO, {}, [(NO, 1), (NO, 2)]),  # nothing stands before an answer
        ("gemma3", TWO, {}, [(NO, 1), (NO, 2)]),
        ("chatml", OLDER, {}, [(NO, n) for n in range(1, 6)]),
    ],
)
def test_thoughts_and_turns_are_told_from_the_tokens(family, messages, kwargs, expected):
    found = [(modes[0], modes[-1]) for modes in told(family, messages, kwargs=kwargs)]
    turns = {n: f"turn {n}" if n < 4 else "turn 4 or later" for n in range(1, 6)}
    assert found == [(thought, turns[n]) for thought, n in expected]


def test_without_reasoning_the_answer_is_one_behind_a_thought():
    assert told("qwen3", (user("a"), THOUGHT), mask="without-reasoning")[0][0] == YES


@pytest.mark.parametrize("family", ["llama3", "qwen3", "thinking"])
def test_a_list_of_tools_is_told_from_the_text_beside_it(family):
    plain = (system("Be brief."), *TWO) if family != "thinking" else (user("a"), THOUGHT)
    chats = [(TOOL_CHAT if family == "llama3" else TWO_TOOLS, LIST), (plain, None)]
    for messages, tools in chats:
        for modes in told(family, messages, tools=tools):
            assert modes[1] == ("with tools" if tools else "without tools")
    # where all documents have the same, nothing is looked for
    for used, mode in (({TOOLS: 3, "": 0}, "with tools"), ({"": 3}, "without tools")):
        assert {m[1] for m in told(family, plain, {"tools_used": used})} == {mode}


def test_what_cannot_be_told_is_no_mode():
    assert text_of_tools(tokenizer("gemma2")) is None
    identity = {"tools_used": {"": 1, OTHERS: 2}}
    assert told("gemma2", TWO, identity) == [(NO, "turn 1"), (NO, "turn 2")]
    dataset = SimpleNamespace(
        manifest=SimpleNamespace(identity={}), turns_of=lambda n: [("text", 0, 3)]
    )
    ids, mask = np.arange(4), np.array([True, True, False, True])
    assert DocumentModes(dataset, None).of(0, (None, ids, None, mask)) == [(), ()]
    dataset.turns_of = lambda n: [("assistant", 0, 2), ("assistant", 3, 4)]
    without = DocumentModes(dataset, None).of(0, (None, ids, None, mask))
    assert without == [("turn 1",), ("turn 2",)]


@pytest.mark.parametrize(
    ("before", "begin", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "Let me see", True),
        ("<|im_start|>assistant\n<think>\n", "\n</think>\n\nParis", False),  # it chose not to
        ("<|im_start|>assistant\n", "<think>\nLet me", True),
        ("<|im_start|>assistant\n", "<think>\n\n</think>\n\nParis", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Paris", False),
        ("so it is Paris.\n</think>\n\n", "Paris", True),
        ("<|im_start|>assistant\n", "Paris </think>", False),
        ("<|start|>assistant", "<|channel|>analysis<|message|>We", True),
        ("<|start|>assistant", "<|channel|>final<|message|>Hi", False),
        ("[/INST]", "[THINK]Let me", True),
        ("thus.[/THINK]", "Paris", True),
        ("<start_of_turn>model\n", "<|channel>thought\nhm", True),
    ],
)
def test_an_answer_thinks_if_its_thought_has_words(before, begin, expected):
    assert thinks(before, begin) is expected


def test_kinds_of_one_mode_say_nothing():
    assert modes_of(None, None, None) == ()
    assert modes_of(True, False, 9) == ("with thinking", "without tools", "turn 4 or later")
    assert ordered(["turn 3", "without tools", "turn 1"]) == ["turn 1", "turn 3"]
    every = [mode for kind in KINDS for mode in kind]
    assert ordered(every[::-1]) == every
