"""Conversations and the documents that they must become, written by hand.

A document is its text, with the supervised parts in «».
"""


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


TWO = (user("hello"), answer("Paris 🦊\n\n x"), user("and?"), answer("I think so."))
THOUGHT = answer("The answer.", reasoning_content="I think\n\nhard")
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}],
}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
TOOL_CHAT = (
    *(user("weather?"), CALL, {"role": "tool", "content": "sun"}, answer("It is sunny.")),
    *(user("sure?"), answer("Yes.")),
)
CALL_JSON = '{"name": "w", "arguments": {"city": "Paris"}}'
QUOTE = "say <|im_start|>assistant\nhi<|im_end|>\n<|im_start|>assistant\n"


def _turns(header, end, behind, pairs):
    """Join (role, content) pairs; the end of a turn belongs to a supervised content."""
    text = ""
    for role, content in zip(pairs[::2], pairs[1::2], strict=True):
        inside = content.endswith("»")
        content = content.removesuffix("»") + end + "»" * inside
        text += header.format(role) + content + behind
    return text


def im(*pairs, end="<|im_end|>"):
    return _turns("<|im_start|>{}\n", end, "\n", pairs)


def l3(*pairs):
    return _turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "", pairs)


NO_THINKING = {"enable_thinking": False}
TOOL_LIST = (
    'Tools: [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]'
)
PARIS = "Paris 🦊\n\n x"
CALLED = f"<tool_call>\n{CALL_JSON}\n</tool_call>"
RESPONSES = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
FIRST = answer("<think>\nfirst\n</think>\n\nB")
TWO_TOOLS = (
    *(user("weather?"), {**CALL, "reasoning_content": "look"}, {"role": "tool", "content": "sun"}),
    *({"role": "tool", "content": "rain"}, answer("Both.", reasoning_content="odd")),
)
TAGGED = (user("q"), answer("old", skip=True), user(QUOTE), answer("no 🦊"))
TAGGED_TEXT = im("user", "q", "assistant", "old", "user", QUOTE, "assistant", "«no 🦊»")


def case(family, messages, *documents, tools=None, kwargs=None):
    """Return (family, messages, template kwargs, tools, the expected documents)."""
    return family, messages, kwargs or {}, tools, list(documents)


CASES = {
    "llama3": case(
        "llama3",
        (system("Be brief. "), *TWO),
        "<|begin_of_text|>"
        + l3("system", "Be brief.", "user", "hello", "assistant", f"«{PARIS}»")
        + l3("user", "and?", "assistant", "«I think so.»"),
    ),
    "llama3 tools": case(
        "llama3",
        TOOL_CHAT,
        "<|begin_of_text|>"
        + l3("system", TOOL_LIST, "user", "weather?", "assistant", f"«{CALL_JSON}»")
        + l3(
            "ipython", "sun", "assistant", "«It is sunny.»", "user", "sure?", "assistant", "«Yes.»"
        ),
        tools=TOOLS,
    ),
    "chatml, header quoted by the user": case(
        "chatml",
        (user(QUOTE), answer("no "), user("ok"), answer(QUOTE[:4])),
        im("user", QUOTE, "assistant", "«no »", "user", "ok", "assistant", "«say »"),
    ),
    "an end-of-turn token only the template knows": case(
        "odd-end",
        TWO,
        im("user", "hello", "assistant", f"«{PARIS}»", end="<|stop|>")
        + im("user", "and?", "assistant", "«I think so.»", end="<|stop|>"),
    ),
    "qwen2.5 default system": case(
        "qwen2.5",
        TWO[:2],
        im("system", "You are Qwen.", "user", "hello", "assistant", f"«{PARIS}»"),
    ),
    "qwen3 thinking, earlier thinking dropped": case(
        "qwen3",
        (user("a"), THOUGHT, user("b"), FIRST),
        im("user", "a", "assistant", "«<think>\nI think\n\nhard\n</think>\n\nThe answer.»"),
        im("user", "a", "assistant", "The answer.")
        + im("user", "b", "assistant", "«<think>\nfirst\n</think>\n\nB»"),
    ),
    "qwen3 without thinking: the empty block is prompt": case(
        "qwen3",
        TWO[:2],
        im("user", "hello", "assistant", f"<think>\n\n</think>\n\n«{PARIS}»"),
        kwargs=NO_THINKING,
    ),
    "qwen3 tools and thinking after the last question": case(
        "qwen3",
        TWO_TOOLS,
        im("user", "weather?", "assistant", f"«<think>\nlook\n</think>\n\n{CALLED}»")
        + im("user", RESPONSES, "assistant", "«<think>\nodd\n</think>\n\nBoth.»"),
    ),
    "mistral": case(
        "mistral", TWO, f"<s>[INST] hello[/INST]« {PARIS}</s>»[INST] and?[/INST]« I think so.</s>»"
    ),
    "mistral moves the system message": case(
        "mistral",
        (system("Brief."), *TWO),
        f"<s>[INST] Brief.\n\nhello[/INST]« {PARIS}</s>»",
        f"<s>[INST] hello[/INST] {PARIS}</s>[INST] Brief.\n\nand?[/INST]« I think so.</s>»",
    ),
    "gemma3 merges the system message": case(
        "gemma3",
        (system("Brief."), *TWO),
        "<|begin_of_text|><start_of_turn>user\nBrief.\n\nhello<end_of_turn>\n"
        f"<start_of_turn>model\n«{PARIS}<end_of_turn>»\n<start_of_turn>user\nand?<end_of_turn>\n"
        "<start_of_turn>model\n«I think so.<end_of_turn>»\n",
    ),
    "phi3 closes the conversation": case(
        "phi3",
        TWO,
        f"<|user|>\nhello<|end|>\n<|assistant|>\n«{PARIS}<|end|>»\n"
        "<|user|>\nand?<|end|>\n<|assistant|>\n«I think so.<|end|>»\n<|endoftext|>",
    ),
    **{name: case(name, TAGGED, TAGGED_TEXT) for name in ("tagged", "tagged-bare", "tagged-wide")},
}
METHODS = {
    **dict.fromkeys(("tagged", "tagged-bare", "tagged-wide"), "generation tags"),
    "qwen3 thinking, earlier thinking dropped": "turn by turn",
    "mistral moves the system message": "turn by turn",
}
