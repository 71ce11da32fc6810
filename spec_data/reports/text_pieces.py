"""The text of every token alone, as the viewer of tokens shows it.

Tokens of byte-level vocabularies may hold a part of a character. Such neighbours are decoded
together: the first of them shows the text, the others are empty.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what decoders put for bytes that are no character
_MOST_JOINED = 12  # tokens that are tried as one text


class TextPieces:
    """Texts of tokens of one tokenizer.

    Attributes:
        special: ids of tokens that no text contains: those that templates add.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prepare texts of the tokens of `tokenizer`."""
        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | frozenset(
            getattr(tokenizer, "added_tokens_decoder", {})
        )
        # Some decoders strip the space before the first token, so each is decoded after another.
        found = tokenizer.encode("a", add_special_tokens=False)
        self._before = found[-1:]
        self._skipped = len(self._decode(self._before))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that follow each other in the middle of a document."""
        return self._decode([*self._before, *ids])[self._skipped :]

    def table(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token alone.

        Args:
            ids: token ids, int [n].

        Returns:
            n texts; a token without text, such as one that pads the vocabulary, is "<token 123>".
        """
        texts = []
        for token in ids.tolist():
            text = self._decode([token]) if token in self.special else self.text([token])
            texts.append(text or f"<token {token}>")
        return texts

    def joined(self, ids: Sequence[int], texts: Sequence[str]) -> dict[int, str]:
        """Return the texts of tokens that hold parts of characters, by position.

        Args:
            ids: the tokens of a document; texts: the text of each alone.

        Returns:
            By position, the text of several tokens at the first of them and "" at the others. What
            cannot be decoded in any way is left out.
        """
        found: dict[int, str] = {}
        at = 0
        while at < len(ids):
            if _BROKEN not in texts[at]:
                at += 1
                continue
            for end in range(at + 2, min(at + _MOST_JOINED, len(ids)) + 1):
                if _BROKEN not in texts[end - 1]:
                    break
                text = self.text(ids[at:end])
                if _BROKEN not in text:
                    found |= {at: text, **dict.fromkeys(range(at + 1, end), "")}
                    at = end - 1
                    break
            at += 1
        return found
