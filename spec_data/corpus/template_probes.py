"""What a chat template does by itself: a system message of its own, and how it ends an answer.

Both are found by rendering texts that no template contains.
"""

from collections.abc import Sequence
from typing import NamedTuple

from spec_data.corpus.records import Message
from spec_data.corpus.template import EndTokens, Template

_SYSTEM, _QUESTION, _ANSWER = "Qzv7system", "Qzv7question", "Qzv7answer"


def default_system(template: Template) -> str:
    """Return what the template writes as a system message where a chat has none; "": nothing.

    Qwen2.5's writes "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.".
    """
    question: Message = {"role": "user", "content": _QUESTION}
    given = _render(template, [{"role": "system", "content": _SYSTEM}, question])
    alone = _render(template, [question])
    before, found, between = given.partition(_SYSTEM)
    between, asked, _ = between.partition(_QUESTION)
    if not found or not asked or not alone.startswith(before):
        return ""
    written, asked, _ = alone.removeprefix(before).partition(_QUESTION)
    if not asked or not between or not written.endswith(between):
        return ""
    return written.removesuffix(between).strip()


class UnstoppedEnd(NamedTuple):
    """How a template ends an answer, where generation does not stop there.

    `token`: the end is one token. `next_turn`: nothing is behind the answer, and `text` begins the
    turn after it.
    """

    text: str
    stops: str
    token: bool = True
    next_turn: bool = False

    def __str__(self) -> str:
        ends = f"ends an answer with {self.text}"
        if self.next_turn:
            ends = f"ends an answer by the {self.text} of the next turn"
        advice = "add the token to eos_token_id in its generation_config.json"
        if not self.token:
            advice = "no eos_token_id can name it, as it is no single token: take a template whose "
            advice += "end is one, or send it to engines as a stop string (stop) with every request"
        return (
            f"the chat template {ends}, at which generation does not stop (its stop tokens: "
            f"{self.stops}): an answer runs on behind its end, with turns of its own, and so it "
            f"does in an engine. If the target ends its answers so, {advice}"
        )


def unstopped_end(template: Template, stops: Sequence[int] | EndTokens) -> UnstoppedEnd | None:
    """Return how the template ends an answer, if no token of it stops generation; else None.

    Where a template writes nothing there, what begins the next turn ends the answer: None, if that
    is a stop token too, or none of the tokenizer's special tokens.
    """
    ids = set(stops.stops if isinstance(stops, EndTokens) else stops)
    chat: list[Message] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]
    text = _render(template, chat)
    if text.count(_ANSWER) != 1:
        return None
    tail, tokenizer = text.partition(_ANSWER)[2], template.tokenizer
    if next_turn := not tail.strip():
        longer = _render(template, [*chat, {"role": "user", "content": _QUESTION}])
        tail = longer.partition(_ANSWER)[2].partition(_QUESTION)[0]
    tokens = list(tokenizer(tail, add_special_tokens=False)["input_ids"])
    if next_turn:
        special = set(getattr(tokenizer, "added_tokens_decoder", {}))
        tokens = [i for i in tokens if tokenizer.decode([i]).strip()][:1]
        if not special & set(tokens):
            return None
        tail = tokenizer.decode(tokens)
    if not tail.strip() or ids & set(tokens):
        return None
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in sorted(ids))
    first = tokens[0] if tokens else None
    whole = first is not None and tokenizer.decode([first]) == tail.strip()
    shown = f"{tail.strip()} ({first})" if whole else repr(tail.strip())
    return UnstoppedEnd(shown, names or "none", whole, next_turn)


def _render(template: Template, chat: list[Message]) -> str:
    try:
        return str(template.apply(chat, None, template.kwargs, tokenize=False))
    except Exception:  # it wants more than these; the error of a real record names it
        return ""
