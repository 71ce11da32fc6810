"""Tokenise the beginnings of one conversation from one tokenisation of all of it.

The proof of turn boundaries compares the tokens of prompt_k and through_k for every answer k.
Tokenising each anew costs the square of the conversation's length. But a *cut token* (an added
token that is matched in the text as it is written, such as <|im_start|>) cuts the text: the
tokenizer finds these first, and treats the pieces between them one by one. Hence, for a cut token
that a text has in common with the whole:

    tokens(text) = tokens(whole) before the cut token + tokens(text from the cut token on)

Why the cut token stands in both: added tokens are searched from left to right, the longest one
first. Up to the end of a cut token of the whole, a text that is the beginning of the whole has the
same candidates, less those that end beyond it. A text that differs from the whole after some
character has the same candidates up to there, less the length of the longest added token.

This holds for tokenizers of the `tokenizers` library whose parts treat each piece alone, as all
parts of the library do. The result is compared with plain tokenisation on probes when `Tokens` is
made, and any other tokenizer tokenises every text by itself.
"""

import bisect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_PROBED = 32  # cut tokens; some tokenizers have thousands
_PROBES = (("a b", "c d\n"), (" x ", "  y z "), ("Ü\n\n", "\n1,2"), ("", "w"), ("q", ""))


class TokenisedText:
    """A text, its token ids, and the cut tokens in it."""

    def __init__(self, text: str, encoding: Any, cut_tokens: dict[int, str]) -> None:
        self.text = text
        self.ids: list[int] = encoding.ids
        self._encoding = encoding
        self._cut_tokens = cut_tokens

    @cached_property
    def _cuts(self) -> list[tuple[int, int, int]]:
        """(Last character + 1, first character, index) of every cut token, ascending."""
        cuts = []
        for index, token in enumerate(self.ids):
            if (content := self._cut_tokens.get(token)) is not None:
                start, end = self._encoding.token_to_chars(index)
                # With the white space that it takes in. A model may make the same id from other
                # characters, which do not cut.
                written = self.text[start:end]
                if written == content or (content.strip() and written.strip() == content):
                    cuts.append((end, start, index))
        return cuts

    def cut_before(self, limit: int) -> tuple[int, int] | None:
        """Return (first character, index) of the last cut token that ends within `limit`
        characters, or None without one."""
        at = bisect.bisect_right(self._cuts, limit, key=lambda cut: cut[0])
        return self._cuts[at - 1][1:] if at else None


class Tokens:
    """Token ids of rendered texts, without the tokens that a tokenizer adds.

    `direct`: texts can be tokenised here, else only `apply_chat_template` knows their ids.
    `cut_tokens` by id are empty if every text is tokenised by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.direct = _is_plain(tokenizer)
        self.cut_tokens: dict[int, str] = {}
        if not self.direct:
            return
        self._backend: Any = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._longest = max((len(t.content) for t in added.values()), default=0)
        if _treats_pieces_alone(self._backend):
            self.cut_tokens = {
                i: t.content for i, t in added.items() if not t.normalized and not t.single_word
            }
        if not self._probed():
            self.cut_tokens = {}

    def tokenise(self, text: str) -> TokenisedText:
        """Return the text with its tokens."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return TokenisedText(text, encoding, self.cut_tokens)

    def beginning(self, whole: TokenisedText, text: str) -> list[int] | None:
        """Return the token ids of a text that begins as `whole` does.

        Return None if they have no cut token in common; then the text must be tokenised.
        """
        if whole.text == text:
            return whole.ids
        beginning = whole.text.startswith(text)
        cut = whole.cut_before(len(text) if beginning else common(whole.text, text) - self._longest)
        if cut is None:
            return None
        start, index = cut
        end: list[int] = self._backend.encode(text[start:], add_special_tokens=False).ids
        return whole.ids[:index] + end

    def _probed(self) -> bool:
        """Return whether beginnings of short texts have the ids that plain tokenisation finds."""
        contents = list(self.cut_tokens.values())
        for content in contents[:: 1 + len(contents) // _PROBED]:
            for before, after in _PROBES:
                whole = self.tokenise(before + content + after + content + before)
                for end in range(len(before), len(whole.text) + 1):
                    for text in (whole.text[:end], whole.text[:end] + "e\n"):
                        ids = self.beginning(whole, text)
                        if ids is not None and ids != self.tokenise(text).ids:
                            return False
        return True


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `apply_chat_template` renders a text and passes it to the backend as it is."""
    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or vars(tokenizer).keys() & {"apply_chat_template", "__call__", "_encode_plus"}
        or kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
    ):
        return False
    try:
        tokenizer("a", add_special_tokens=False)  # switches off truncation and padding, if set
    except Exception:  # every record then reports it
        return False
    backend = tokenizer.backend_tokenizer
    return backend.truncation is None and backend.padding is None


def _treats_pieces_alone(backend: Any) -> bool:
    """Return whether the tokens of a piece between two cut tokens depend on this piece only."""
    try:
        for part in (backend.normalizer, backend.pre_tokenizer):
            if part is not None:
                part.__getstate__()
    except Exception:  # one written in Python cannot be stored; it may do anything
        return False
    return not (backend.encode_special_tokens or getattr(backend.model, "dropout", None))


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, by bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
