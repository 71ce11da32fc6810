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


def im(role, content):
    return f"<|im_start|>{role}\n{content}\n"


def l3(role, content):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}"


NO_THINKING = {"enable_thinking": False}
LLAMA_TOOLS = l3(
    "system",
    'Tools: [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]'
    "<|eot_id|>",
)

# name -> (family, messages, template kwargs, tools, the expected documents)
CASES = {
    "llama3": (
        "llama3",
        (system("Be brief. "), *TWO),
        {},
        None,
        [
            "<|begin_of_text|>"
            + l3("system", "Be brief.<|eot_id|>")
            + l3("user", "hello<|eot_id|>")
            + l3("assistant", "«Paris 🦊\n\n x<|eot_id|>»")
            + l3("user", "and?<|eot_id|>")
            + l3("assistant", "«I think so.<|eot_id|>»")
        ],
    ),
    "llama3 tools": (
        "llama3",
        TOOL_CHAT,
        {},
        TOOLS,
        [
            "<|begin_of_text|>"
            + LLAMA_TOOLS
            + l3("user", "weather?<|eot_id|>")
            + l3("assistant", f"«{CALL_JSON}<|eot_id|>»")
            + l3("ipython", "sun<|eot_id|>")
            + l3("assistant", "«It is sunny.<|eot_id|>»")
            + l3("user", "sure?<|eot_id|>")
            + l3("assistant", "«Yes.<|eot_id|>»")
        ],
    ),
    "chatml, header quoted by the user": (
        "chatml",
        (user(QUOTE), answer("no "), user("ok"), answer(QUOTE[:4])),
        {},
        None,
        [
            im("user", QUOTE + "<|im_end|>")
            + im("assistant", "«no <|im_end|>»")
            + im("user", "ok<|im_end|>")
            + im("assistant", "«say <|im_end|>»")
        ],
    ),
    "an end-of-turn token only the template knows": (
        "odd-end",
        TWO,
        {},
        None,
        [
            im("user", "hello<|stop|>")
            + im("assistant", "«Paris 🦊\n\n x<|stop|>»")
            + im("user", "and?<|stop|>")
            + im("assistant", "«I think so.<|stop|>»")
        ],
    ),
    "qwen2.5 default system": (
        "qwen2.5",
        TWO[:2],
        {},
        None,
        [
            im("system", "You are Qwen.<|im_end|>")
            + im("user", "hello<|im_end|>")
            + im("assistant", "«Paris 🦊\n\n x<|im_end|>»")
        ],
    ),
    "qwen3 thinking, earlier thinking dropped": (
        "qwen3",
        (user("a"), THOUGHT, user("b"), answer("<think>\nfirst\n</think>\n\nB")),
        {},
        None,
        [
            im("user", "a<|im_end|>")
            + im("assistant", "«<think>\nI think\n\nhard\n</think>\n\nThe answer.<|im_end|>»"),
            im("user", "a<|im_end|>")
            + im("assistant", "The answer.<|im_end|>")
            + im("user", "b<|im_end|>")
            + im("assistant", "«<think>\nfirst\n</think>\n\nB<|im_end|>»"),
        ],
    ),
    "qwen3 without thinking: the empty block is prompt": (
        "qwen3",
        TWO[:2],
        NO_THINKING,
        None,
        [
            im("user", "hello<|im_end|>")
            + im("assistant", "<think>\n\n</think>\n\n«Paris 🦊\n\n x<|im_end|>»")
        ],
    ),
    "qwen3 tools and thinking after the last question": (
        "qwen3",
        (
            user("weather?"),
            {**CALL, "reasoning_content": "look"},
            {"role": "tool", "content": "sun"},
            {"role": "tool", "content": "rain"},
            answer("Both.", reasoning_content="odd"),
        ),
        {},
        None,
        [
            im("user", "weather?<|im_end|>")
            + im(
                "assistant",
                f"«<think>\nlook\n</think>\n\n<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>»",
            )
            + im(
                "user",
                "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
                "<|im_end|>",
            )
            + im("assistant", "«<think>\nodd\n</think>\n\nBoth.<|im_end|>»")
        ],
    ),
    "mistral": (
        "mistral",
        TWO,
        {},
        None,
        ["<s>[INST] hello[/INST]« Paris 🦊\n\n x</s>»[INST] and?[/INST]« I think so.</s>»"],
    ),
    "mistral moves the system message": (
        "mistral",
        (system("Brief."), *TWO),
        {},
        None,
        [
            "<s>[INST] Brief.\n\nhello[/INST]« Paris 🦊\n\n x</s>»",
            "<s>[INST] hello[/INST] Paris 🦊\n\n x</s>"
            "[INST] Brief.\n\nand?[/INST]« I think so.</s>»",
        ],
    ),
    "gemma3 merges the system message": (
        "gemma3",
        (system("Brief."), *TWO),
        {},
        None,
        [
            "<|begin_of_text|><start_of_turn>user\nBrief.\n\nhello<end_of_turn>\n"
            "<start_of_turn>model\n«Paris 🦊\n\n x<end_of_turn>»\n"
            "<start_of_turn>user\nand?<end_of_turn>\n"
            "<start_of_turn>model\n«I think so.<end_of_turn>»\n"
        ],
    ),
    "phi3 closes the conversation": (
        "phi3",
        TWO,
        {},
        None,
        [
            "<|user|>\nhello<|end|>\n<|assistant|>\n«Paris 🦊\n\n x<|end|>»\n"
            "<|user|>\nand?<|end|>\n<|assistant|>\n«I think so.<|end|>»\n<|endoftext|>"
        ],
    ),
    **{
        name: (
            name,
            (user("q"), answer("old", skip=True), user(QUOTE), answer("no 🦊")),
            {},
            None,
            [
                im("user", "q<|im_end|>")
                + im("assistant", "old<|im_end|>")
                + im("user", QUOTE + "<|im_end|>")
                + im("assistant", "«no 🦊<|im_end|>»")
            ],
        )
        for name in ("tagged", "tagged-bare", "tagged-wide")
    },
}
METHODS = {
    **dict.fromkeys(("tagged", "tagged-bare", "tagged-wide"), "generation tags"),
    "qwen3 thinking, earlier thinking dropped": "turn by turn",
    "mistral moves the system message": "turn by turn",
}
