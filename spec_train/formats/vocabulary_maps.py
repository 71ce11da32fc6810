"""The vocabulary maps of a draft, as any trainer writes them, read into the order of this project.

Row i of a draft's LM head proposes the target token with the id `i + d2t[i]`: `d2t` holds offsets.
`t2d` says for every target token whether the draft can propose it. Our drafts hold the tokens in
ascending order of their ids. Other trainers order them by frequency, for example. Sorting the map
together with the rows of the head changes no probability, so every order can be read.

V / Vd target / draft vocabulary.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError
from spec_train.formats.draft_files import find_weights, read_tensors

log = logging.getLogger(__name__)

ROWS = ("lm_head.weight", "lm_head.bias", "markov_head.markov_w2.weight")
"""Tensors with one row per draft token. They are sorted together with the map."""


def own_vocabulary(
    tensors: dict[str, Tensor], vocab_size: int, draft_vocab_size: int, where: str
) -> dict[str, Tensor]:
    """Return tensors with the maps of our checkpoints, and the rows of `ROWS` in their order.

    The result has no map if Vd = V, and otherwise `d2t` int64 [Vd] (offsets, for ascending ids) and
    `t2d` bool [V]. Call it before tensors of the target are added: their rows are in order already.

    Args:
        tensors: tensors of the file, without the prefix `model.`.
        vocab_size: V.
        draft_vocab_size: Vd.
        where: path of the weights, for messages.

    Raises:
        DraftError: there is no map, it has a wrong length, or it does not name Vd different tokens.
    """
    found = dict(tensors)
    d2t, t2d = found.pop("d2t", None), found.pop("t2d", None)
    full = draft_vocab_size == vocab_size
    if full and d2t is None and t2d is None:
        return found
    if d2t is None and t2d is None:
        raise DraftError(
            f"{where}: has neither d2t nor t2d, so the {draft_vocab_size} tokens of the draft "
            f"vocabulary (of {vocab_size}) are unknown; copy the draft again"
        )
    ids = target_ids(d2t, t2d, vocab_size, draft_vocab_size, where)
    ids, order = ids.sort()
    rows = torch.arange(draft_vocab_size)
    if not torch.equal(order, rows):
        _sort_rows(found, order, where)
    if full:
        return found
    chosen = torch.zeros(vocab_size, dtype=torch.bool)
    chosen[ids] = True
    return found | {"d2t": ids - rows, "t2d": chosen}


def _sort_rows(found: dict[str, Tensor], order: Tensor, where: str) -> None:
    """Sort the rows of `found`, in place, by `order` int64 [Vd]."""
    if ROWS[0] not in found:
        raise DraftError(
            f"{where}: its vocabulary map is not ascending, but it has no lm_head whose rows it "
            "describes; copy the draft again"
        )
    for name in ROWS:
        if name in found and len(found[name]) == len(order):
            found[name] = found[name][order].contiguous()


def target_ids(d2t: Tensor | None, t2d: Tensor | None, vocab: int, size: int, where: str) -> Tensor:
    """Return the target id of every row of the head, int64 [Vd], in any order.

    Args:
        d2t, t2d: the maps of a file, or None.
        vocab, size: V and Vd.
        where: path of the weights, for messages.

    Raises:
        DraftError: they do not name Vd different tokens.
    """
    if d2t is not None and tuple(d2t.shape) != (size,):
        raise DraftError(f"{where}: d2t has shape {list(d2t.shape)}, expected [{size}]")
    if t2d is not None and tuple(t2d.shape) != (vocab,):
        raise DraftError(f"{where}: t2d has shape {list(t2d.shape)}, expected [{vocab}]")
    chosen = None if t2d is None else t2d.cpu().bool().nonzero().flatten()
    if d2t is None:
        return _ids_of_mask(chosen, size, where)
    values = d2t.cpu().long()
    readings = {"offsets": values + torch.arange(size), "ids": values}
    faults = {name: _fault(ids, vocab, chosen) for name, ids in readings.items()}
    if not faults["offsets"]:
        _warn_if_unset(values, vocab, where)
        return readings["offsets"]
    if not faults["ids"]:
        log.warning(
            "warning: %s: d2t holds token ids instead of offsets; engines add the number of the "
            "row, and then propose other tokens. It is read as ids; an export writes offsets",
            where,
        )
        return readings["ids"]
    raise DraftError(
        f"{where}: d2t does not name {size} tokens of the draft vocabulary: read as offsets (token "
        f"= row + d2t[row]) {faults['offsets']}; read as token ids {faults['ids']}. The map is "
        "damaged or belongs to another draft: copy the draft again"
    )


def _ids_of_mask(chosen: Tensor | None, size: int, where: str) -> Tensor:
    """Return the ids that t2d alone names: a mask can only mean rows in ascending order."""
    if chosen is None or len(chosen) != size:
        count = 0 if chosen is None else len(chosen)
        raise DraftError(
            f"{where}: t2d names {count} tokens, but the draft vocabulary has {size}; the map is "
            "damaged or was never filled"
        )
    return chosen


def _fault(ids: Tensor, vocab: int, chosen: Tensor | None) -> str:
    """Return why `ids` int64 [Vd] cannot be the draft vocabulary; "" if they can."""
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    if outside:
        return f"{outside} tokens lie outside 0..{vocab - 1}"
    repeated = len(ids) - len(ids.unique())
    if repeated:
        return f"{repeated} tokens repeat"
    if chosen is not None and not torch.equal(ids.sort().values, chosen):
        return "it names other tokens of the draft vocabulary than t2d"
    return ""


def _warn_if_unset(values: Tensor, vocab: int, where: str) -> None:
    if len(values) < vocab and not bool(values.any()):
        log.warning(
            "warning: %s: d2t is all zero, so the draft vocabulary is the tokens 0 to %d. Some "
            "trainers leave it so if no vocabulary was chosen",
            *(where, len(values) - 1),
        )


# -- vocabulary files ------------------------------------------------------------------------------
# Read a draft vocabulary from a file: a list of token ids, or the maps of any draft.
#
# V / Vd target / draft vocabulary.


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
