"""The text of every token alone, for viewers.

A token of a byte-level vocabulary may hold some of the bytes of a character. Such bytes are written
as a mark: the three tokens E6 BC | A2 61 are "⟨E6 BC⟩" and "⟨A2⟩a".
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BROKEN = "\ufffd"  # what decoders put for bytes that are no character
_ESCAPED = re.compile("[\udc80-\udcff]+")  # bytes, as "surrogateescape" decodes them
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def marked(data: bytes) -> str:
    """Return the text of bytes; those that are no character are a mark: ⟨E2 82⟩."""

    def mark(match: re.Match[str]) -> str:
        return f"⟨{match[0].encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩"

    return _ESCAPED.sub(mark, data.decode("utf-8", "surrogateescape"))


class TokenTexts:
    """Texts of single tokens of one tokenizer.

    Attributes:
        special: ids of tokens that no text contains: those that templates add.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Prepare texts of the tokens of `tokenizer`, a `PreTrainedTokenizerBase`."""
        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | frozenset(
            getattr(tokenizer, "added_tokens_decoder", {})
        )
        # Some decoders strip the space before the first token, so each is decoded after another.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode(self._before))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def table(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token alone, with marks for bytes that are no character.

        A token without text, such as one that pads the vocabulary, is "<token 123>". Where the
        tokenizer does not tell the bytes of a token, U+FFFD stands for them.
        """
        return [self._text(int(token)) or f"<token {token}>" for token in ids]

    def _text(self, token: int) -> str:
        if token in self.special:
            text = self._decode([token])
        else:
            text = self._decode([*self._before, token])[self._skipped :]
        data = self._bytes(token) if _BROKEN in text else None
        return text if data is None else marked(data)

    def _bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token of a byte-level vocabulary; None if they are unknown."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, bytes):
            return name
        if not isinstance(name, str):
            return None
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else None
