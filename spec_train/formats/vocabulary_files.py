"""Read a draft vocabulary from a file: a list of token ids, or the maps of any draft.

V / Vd target / draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError
from spec_train.formats.draft_files import find_weights, read_tensors
from spec_train.formats.vocabulary_maps import target_ids

_MAPS = ("d2t", "t2d")


def read_vocabulary(path: str | Path, vocab_size: int) -> Tensor:
    """Return the target ids of a draft vocabulary, int64 [Vd], ascending.

    `path` is a JSON list of ids, a file of tensors, or a draft: its directory, or a run. Of a file
    of tensors, `d2t` and `t2d` are used or, where there are none, its only tensor: ids int64 [Vd]
    or a mask bool [V].

    Args:
        vocab_size: V.

    Raises:
        MissingError: no such file. DraftError: it does not name different tokens of the target.
    """
    path = Path(path)
    file = _file_of(path)
    if file is None:
        raise MissingError(
            f"--draft-vocab {path}: no such file, and no directory of a draft with its weights"
        )
    named = f"--draft-vocab {file}"
    if file.suffix == ".json" and not file.name.endswith(".index.json"):
        ids = _listed(file, named)
    else:
        ids = _mapped(read_tensors(file), vocab_size, named)
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside or not len(ids):
        raise DraftError(
            f"{named}: {outside or 'no'} ids outside 0..{vocab_size - 1}, the target's vocabulary"
            if outside
            else f"{named}: names no token"
        )
    found = ids.unique()  # sorted
    if len(found) < len(ids):
        raise DraftError(f"{named}: {len(ids) - len(found)} tokens repeat; name each once")
    return found


def _file_of(path: Path) -> Path | None:
    if path.is_file():
        return path
    places = (path, path / "best", path / "last")
    return next((file for place in places if (file := find_weights(place)) is not None), None)


def _listed(file: Path, named: str) -> Tensor:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DraftError(f"{named}: not valid JSON ({error})") from None
    if not isinstance(found, list) or not all(type(item) is int for item in found):
        raise DraftError(f"{named}: expected a JSON list of token ids")
    if any(abs(item) > 2**31 for item in found):
        raise DraftError(f"{named}: holds numbers that are no token ids")
    return torch.tensor(found, dtype=torch.int64)


def _mapped(tensors: dict[str, Tensor], vocab_size: int, named: str) -> Tensor:
    """Return the ids that tensors name, int64 [Vd], in any order."""
    plain = {name.removeprefix("model."): value for name, value in tensors.items()}
    d2t, t2d = (plain.get(name) for name in _MAPS)
    if d2t is not None or t2d is not None:
        size = len(d2t) if d2t is not None else int(t2d.bool().sum()) if t2d is not None else 0
        return target_ids(d2t, t2d, vocab_size, size, named)
    if len(tensors) != 1:
        raise DraftError(
            f"{named}: has neither d2t nor t2d. A draft without them proposes every token: use "
            "--draft-vocab-size 0"
        )
    [value] = tensors.values()
    if value.dtype == torch.bool and value.shape == (vocab_size,):
        return value.nonzero().flatten()
    if value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        raise DraftError(
            f"{named}: its only tensor is {value.dtype} {list(value.shape)}; expected token ids, "
            f"integers [Vd], or a mask, bool [{vocab_size}]"
        )
    return value.long()
