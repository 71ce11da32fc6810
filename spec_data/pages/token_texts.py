"""The text of every token alone, and of tokens that hold parts of characters: for viewers.

A token of a byte-level vocabulary may hold some of the bytes of a character. Such bytes are written
as a mark, ⟨F0 9F⟩, which every token keeps wherever it stands. The token with the last byte of a
character has the character as its text (`Joiner`), because that token decides which one it is: a
draft and the target can agree on the first bytes and not on the last.

    bytes  E6 BC | A2 | 61        texts  ⟨E6 BC⟩ | 漢 | a

A byte that no token makes a character of stays a mark.
"""

import codecs
import re
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BROKEN = "\ufffd"  # what decoders put for bytes that are no character
_MARK = re.compile("⟨([0-9A-F]{2}(?: [0-9A-F]{2})*)⟩")
_ESCAPED = re.compile("[\udc80-\udcff]+")  # bytes, as "surrogateescape" decodes them
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_LONGEST = 4  # bytes of a character
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def marked(data: bytes) -> str:
    """Return the text of bytes; those that are no character are a mark: ⟨E2 82⟩."""

    def mark(found: re.Match[str]) -> str:
        return f"⟨{found[0].encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩"

    return _ESCAPED.sub(mark, data.decode("utf-8", "surrogateescape"))


def _bytes_of(text: str) -> bytes:
    """Return the bytes that `marked` made a text of."""
    parts = _MARK.split(text)
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=True)
    return b"".join(own.encode("utf-8", "replace") + bytes.fromhex(mark) for own, mark in pairs)


class Joiner:
    """Texts of tokens one after the other: a character is the text of the token that ends it.

    Attributes:
        begun: the first bytes of a character that the last tokens have begun.
    """

    def __init__(self, begun: bytes = b"") -> None:
        """Go on after tokens that left `begun`."""
        self.begun = begun

    def add(self, text: str) -> str:
        """Return the text of the next token; `text` is its text alone, as of `TokenTexts`."""
        if not self.begun and "⟨" not in text:
            return text
        data, begun = _bytes_of(text), self.begun
        for more in range(1, min(_LONGEST, len(data)) + 1 if begun else 1):
            try:
                character = (begun + data[:more]).decode()
            except UnicodeDecodeError:
                continue
            self.begun = _unfinished(data[more:])
            return character + marked(data[more:])
        both = begun + data
        self.begun = both if begun and _unfinished(both) == both else _unfinished(data)
        return text

    def later(self, texts: Iterable[str]) -> dict[int, str]:
        """Return the texts that differ from those of the tokens alone, by position; go on."""
        pairs = [(text, self.add(text)) for text in texts]
        return {i: joined for i, (text, joined) in enumerate(pairs) if joined != text}


def _unfinished(data: bytes) -> bytes:
    """Return the bytes at the end of `data` that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


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
