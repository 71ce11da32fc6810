"""Which tokens end a turn: those that stop generation, and those that a template writes there."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spec_data.corpus.template import Template

_KNOWN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "</s>"),
    *("<|return|>", "<|call|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>"),
    "<|end_of_text|>",
)
_PROBE = "Qzv7probe"  # an answer that no template contains


class EndTokens:
    """The end-of-turn tokens of a target.

    Args:
        template: the chat template, with its tokenizer.
        generation: the ids that end generation (`generation_config.eos_token_id`), in their order.

    Attributes:
        generation: see above.
        stops: the ids at which serving stops: `generation` and the tokenizer's eos.
        all: `stops`, known end-of-turn tokens, and the one that this template writes. A template
            may write them inside a turn too (gpt-oss ends each channel with <|end|>).
    """

    def __init__(self, template: Template, generation: Sequence[int]) -> None:
        tokenizer = template.tokenizer
        own = tokenizer.eos_token_id
        self.generation = tuple(generation)
        self.stops = frozenset([*generation, *([] if own is None else [own])])
        added = {str(t): i for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        known = {added[name] for name in _KNOWN if name in added}
        self.all = self.stops | known | set(_probed(template, set(added.values())))
        self._tokenizer = tokenizer
        self._blank: dict[int, bool] = {}

    def turn_end(self, ids: Sequence[int], start: int) -> int:
        """Return the index after the end-of-turn token of the last turn of `ids`.

        That turn begins at `start`. Without an end-of-turn token, return the length of `ids`.
        """
        end = at = len(ids)
        while at > start and (ids[at - 1] in self.all or self._is_blank(ids[at - 1])):
            at -= 1
            if ids[at] in self.all:
                end = at + 1
        # A stop that the content quotes: the target would end there.
        return next((i + 1 for i in range(start, end) if ids[i] in self.stops), end)

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self._tokenizer.decode([token]).strip()
        return self._blank[token]


def _probed(template: Template, added: set[int]) -> list[int]:
    """Return the special token that the template writes after an answer, as a list."""
    tokenizer: PreTrainedTokenizerBase = template.tokenizer
    if not tokenizer.chat_template:
        return []
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = template.apply(probe, None, template.kwargs, tokenize=False)
    except Exception:  # the template may need more; the error of a real record names it
        return []
    if text.count(_PROBE) != 1:
        return []
    tail = tokenizer(text.partition(_PROBE)[2], add_special_tokens=False)["input_ids"]
    return [token for token in tail if token in added][:1]
