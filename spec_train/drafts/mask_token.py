"""Choosing the mask token: the token id that marks tokens which are not known yet.

P-EAGLE's elements deeper than 0 and the slots of a block after its anchor hold it. In: the target's
tokenizer.json, special ids and embedding, and counts of supervised tokens. Out: one token id, or
those that trainers choose.

The embedding is the target's and frozen, so the mask token must have a nonzero embedding: with a
zero one, the slots of a block could not be told apart. Otherwise any token is good that the text
does not use. The order of preference: a token that the tokenizer leaves unused (as DeepSpec does
for Qwen3), a reserved token, the padding token, another special one, a token that no answer
contains. Reserved and special are only tokens that the tokenizer adds to its vocabulary: its words
may be named "mask" or "unused" as well. If answers contain every token, the rarest one is taken.

V target vocabulary, H hidden size.
"""

import logging
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_data.models.families import text_table
from spec_data.shards.errors import DraftError
from spec_data.shards.files import read_object

log = logging.getLogger(__name__)

_RESERVED = re.compile(r"reserved|unused|mask|fim_pad|extra_id", re.IGNORECASE)
_SPECIAL = ("mask", "pad", "eos", "bos", "unk")


def settle_mask_token(
    wanted: int,  # the option
    folder: Path,  # the dataset's copy of the target; its tokenizer.json is optional
    target_config: dict[str, Any],  # the target's config.json
    embedding: Tensor,  # the target's [V, H]
    counts: Tensor | None,  # supervised tokens by id, int64 [V], if known
) -> int:
    """Return the mask token of a new draft: `wanted`, or a chosen one if it is -1.

    Raises:
        DraftError: `wanted` cannot be a mask token, or no token can.
    """
    if wanted < 0:
        tables = {**text_table(target_config), **target_config}
        wanted = choose_mask_token(folder, tables, embedding, counts)
    require_in_vocabulary(wanted, len(embedding))
    if not bool(embedding[wanted].abs().amax() > 0):
        raise DraftError(
            f"mask_token_id = {wanted}: its embedding is zero, so the draft could not tell the "
            "rows with it apart; choose another token, or -1"
        )
    return wanted


def choose_mask_token(
    folder: Path, token_ids: dict[str, Any], embedding: Tensor, counts: Tensor | None
) -> int:
    """Choose the mask token; `token_ids` are bos, eos and pad ids under their keys of a config.

    Raises:
        DraftError: every embedding is zero.
    """
    names, added = _token_names(folder / "tokenizer.json")
    for why, ids in _preferred(names, added, token_ids, embedding, counts):
        if ids:
            log.info("mask token %d %s: %s", ids[0], names.get(ids[0], ""), why)
            return ids[0]
    raise DraftError(
        f"every embedding of the target is zero: {folder / 'head.safetensors'} is damaged; "
        "generate the dataset again"
    )


def _preferred(
    names: dict[int, str],
    added: dict[int, str],
    token_ids: dict[str, Any],
    embedding: Tensor,
    counts: Tensor | None,
) -> list[tuple[str, list[int]]]:
    """Return kinds of tokens and their ids, the best kind first (see `choose_mask_token`)."""
    usable = (embedding.abs().amax(-1) > 0).tolist()
    vocab = len(usable)
    seen = [0] * vocab if counts is None else counts.tolist()
    ends = {i for key in ("bos_token_id", "eos_token_id") for i in _ids(token_ids.get(key))}
    free = [i for i in range(vocab) if usable[i] and not seen[i] and i not in ends]
    kinds: list[tuple[str, list[int]]] = []
    if names:
        kinds.append(("the tokenizer leaves it unused", [i for i in free if i not in names]))
        reserved = [i for i in free if _RESERVED.search(added.get(i, ""))]
        kinds.append(("a reserved token", reserved))
    padding = _ids(token_ids.get("pad_token_id"))
    kinds.append(("the padding token", [i for i in padding if i in set(free)]))
    kinds.append(("a special token that no answer contains", [i for i in free if i in added]))
    kinds.append(("no answer contains it", free[::-1]))
    rest = sorted((i for i in range(vocab) if usable[i] and i not in ends), key=seen.__getitem__)
    kinds.append(("the rarest token of the answers", rest))
    return kinds


def usual_mask_tokens(
    folder: Path, token_ids: dict[str, Any], embedding: Tensor, counts: Tensor | None
) -> dict[int, str]:
    """Return the ids that trainers and programs take as mask token, and why; likeliest first.

    SpecForge takes the mask token, else the unused id, else pad, eos or unk.
    """
    vocab, (names, added) = len(embedding), _token_names(folder / "tokenizer.json")
    special = _special_names(folder / "tokenizer_config.json")
    kinds = _preferred(names, added, token_ids, embedding, counts)
    reasons = [(ids[0], "the choice of spec-train") for _, ids in kinds if ids][:1]
    if names:
        unused = next((i for i in range(vocab) if i not in names), vocab)
        reasons.append((unused, "the first id that the tokenizer leaves unused"))
    for kind in _SPECIAL:
        ids = _ids(token_ids.get(f"{kind}_token_id"))
        ids += [i for i, text in names.items() if text == special.get(kind)]
        reasons += [(i, f"the {kind} token") for i in ids]
    reserved = [i for i, text in sorted(added.items()) if _RESERVED.search(text)]
    reasons += [(i, "a reserved token") for i in (*reserved[:1], *reserved[-1:])]
    reasons += [(0, "the first id of the vocabulary"), (vocab - 1, "the last id of the vocabulary")]
    usual: dict[int, str] = {}
    for token, why in reasons:
        if 0 <= token < vocab:
            usual.setdefault(token, why)
    return usual


def require_in_vocabulary(token: int, vocab_size: int) -> None:
    """Raise DraftError unless the mask token is one of the target's `vocab_size` tokens."""
    if not 0 <= token < vocab_size:
        raise DraftError(
            f"mask_token_id = {token}: the target's vocabulary has {vocab_size} tokens; choose an "
            "id below that, or -1"
        )


def _ids(value: Any) -> list[int]:
    """Return the integers of a list, or of a single value."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _special_names(path: Path) -> dict[str, str]:
    """Return the texts of the special tokens of a tokenizer_config.json, by `_SPECIAL`."""
    if not path.is_file():
        return {}
    raw = read_object(path, DraftError)
    tokens = {kind: raw.get(f"{kind}_token") for kind in _SPECIAL}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}


def _token_names(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return the texts of a tokenizer.json by id, and of those tokens that it adds to its model's.

    Both are empty if there is no file.
    """
    if not path.is_file():
        return {}, {}
    raw = read_object(path, DraftError)
    vocab = raw.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: pairs of text and score
        names = {i: str(entry[0]) for i, entry in enumerate(vocab)}
    else:
        names = {int(i): text for text, i in vocab.items()}
    added = {int(t["id"]): str(t["content"]) for t in raw.get("added_tokens", [])}
    return names | added, added
