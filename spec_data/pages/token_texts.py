"""The text of every token alone, for viewers."""

from collections.abc import Iterable
from typing import Any


class TokenTexts:
    """Texts of single tokens of one tokenizer.

    Attributes:
        special: ids of tokens that no text contains: those that templates add.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Prepare texts of the tokens of `tokenizer`, a `PreTrainedTokenizerBase`."""
        self._tokenizer = tokenizer
        self.special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        # Some decoders strip the space before the first token, so each is decoded after another.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode(self._before))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def table(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token alone.

        Bytes that are no character by themselves are U+FFFD. A token without text, such as one that
        pads the vocabulary, is "<token 123>".
        """
        texts = []
        for token in ids:
            before, skipped = ([], 0) if token in self.special else (self._before, self._skipped)
            texts.append(self._decode([*before, int(token)])[skipped:] or f"<token {token}>")
        return texts
