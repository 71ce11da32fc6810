"""Which token stands for those not known yet: P-EAGLE's deeper rows, the other slots of a block.

Its embedding is the target's and frozen, so it must be a vector at all: were it zero, the slots of
a block could not be told apart. Beyond that any token does that text does not use: first one that
the tokenizer leaves unused (as DeepSpec does for Qwen3), then a reserved one, then padding, then
one that no answer contains; where answers use the whole vocabulary, the rarest.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.schema import Manifest
from spec_train.drafts.targets import text_config
from spec_train.head import TargetHead

log = logging.getLogger(__name__)

_RESERVED = re.compile(r"reserved|unused|mask|fim_pad|extra_id", re.IGNORECASE)


def settle_mask_token(
    wanted: int,
    target_config: dict[str, Any],
    manifest: Manifest,
    head: TargetHead,
    counts: Tensor | None,
) -> int:
    """The mask token of a new draft for a dataset: `wanted`, or where that is -1 a chosen one.

    Raises:
        DraftError: it is of no use, or none is left to choose.
    """
    if wanted < 0:
        tables = {**text_config(target_config), **target_config}
        folder = Path(manifest.where).parent / "target"
        wanted = choose_mask_token(folder, tables, head.embed_weight, counts)
    check_mask_token(wanted, head.embed_weight)
    return wanted


def choose_mask_token(
    folder: Path, token_ids: dict[str, Any], embedding: Tensor, counts: Tensor | None
) -> int:
    """The mask token of a new draft.

    Args:
        folder: the dataset's copy of the target; its tokenizer.json is read if it is there.
        token_ids: bos, eos and pad ids as the target's config names them.
        embedding: the target's [V, H].
        counts: supervised tokens by id, int64 [V], if known.

    Raises:
        DraftError: no token is fit.
    """
    usable = (embedding.abs().amax(-1) > 0).tolist()
    names = _token_names(folder / "tokenizer.json")
    vocab = len(usable)
    seen = [0] * vocab if counts is None else counts.tolist()
    ends = {i for key in ("bos_token_id", "eos_token_id") for i in _ids(token_ids.get(key))}
    free = [i for i in range(vocab) if usable[i] and not seen[i] and i not in ends]
    kinds: list[tuple[str, list[int]]] = []
    if names:
        kinds.append(("the tokenizer leaves it unused", [i for i in free if i not in names]))
        reserved = [i for i in free if _RESERVED.search(names.get(i, ""))]
        kinds.append(("a reserved token", reserved))
    padding = _ids(token_ids.get("pad_token_id"))
    kinds.append(("the padding token", [i for i in padding if i in set(free)]))
    kinds.append(("no answer has it", free[::-1]))
    rest = sorted((i for i in range(vocab) if usable[i] and i not in ends), key=seen.__getitem__)
    kinds.append(("answers have it, others more often", rest))
    for why, found in kinds:
        if found:
            log.info("mask token %d %s: %s", found[0], names.get(found[0], ""), why)
            return found[0]
    raise DraftError("every embedding of the target is zero: its head.safetensors is damaged")


def check_mask_token(token: int, embedding: Tensor) -> None:
    """Raise DraftError for a mask token of no use; `embedding` is the target's [V, H]."""
    if not 0 <= token < len(embedding):
        raise DraftError(
            f"mask_token_id = {token}: the target's vocabulary has {len(embedding)} tokens"
        )
    if not bool(embedding[token].abs().amax() > 0):
        raise DraftError(
            f"mask_token_id = {token}: its embedding is zero, and rows with it could not be told "
            "apart; choose another, or -1"
        )


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _token_names(path: Path) -> dict[int, str]:
    """Text of every token that a tokenizer.json defines; empty where there is none to read."""
    if not path.is_file():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocab = raw.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: pairs of text and score
        names = {i: str(entry[0]) for i, entry in enumerate(vocab)}
    else:
        names = {int(i): text for text, i in vocab.items()}
    return names | {int(t["id"]): str(t["content"]) for t in raw.get("added_tokens", [])}
