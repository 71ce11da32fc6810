"""The vocabulary maps of a draft, as any trainer writes them, read into the order of this project.

Row i of a draft's LM head proposes the target token with the id `i + d2t[i]`: `d2t` holds offsets.
`t2d` says for every target token whether the draft can propose it. Our drafts hold the tokens in
ascending order of their ids. Other trainers order them by frequency, for example. Sorting the map
together with the rows of the head changes no probability, so every order can be read.

V / Vd target / draft vocabulary.
"""

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.file_system import followed
from spec_data.shards.regular_files import read_bounded
from spec_train.formats.draft_files import find_weights, read_tensors
from spec_train.formats.kind_files import every_kind
from spec_train.formats.names import plain_names

log = logging.getLogger(__name__)

ROWS = ("lm_head.weight", "lm_head.bias", "markov_head.markov_w2.weight")
"""Tensors with one row per draft token. They are sorted together with the map."""
_INT32 = msgspec.Meta(ge=-(2**31), le=2**31)


def own_vocabulary(
    tensors: dict[str, Tensor],  # tensors of the file, without the prefix `model.`
    vocab_size: int,  # V
    draft_vocab_size: int,  # Vd
    where: str,  # path of the weights, for messages
) -> dict[str, Tensor]:
    """Return tensors with the maps of our checkpoints, and the rows of `ROWS` in their order.

    The result has no map if Vd = V, and otherwise `d2t` int64 [Vd] (offsets, for ascending ids) and
    `t2d` bool [V]. Call it before tensors of the target are added: their rows are in order already.

    Raises:
        DraftError: there is no map, it has a wrong length, or it does not name Vd different tokens.
    """
    result = dict(tensors)
    d2t, t2d = result.pop("d2t", None), result.pop("t2d", None)
    full = draft_vocab_size == vocab_size
    if d2t is None and t2d is None:
        if full:
            return result
        raise DraftError(
            f"{where}: has neither d2t nor t2d, so the {draft_vocab_size} tokens of the draft "
            f"vocabulary (of {vocab_size}) are unknown; copy the draft again"
        )
    ids, order = target_ids(d2t, t2d, vocab_size, draft_vocab_size, where).sort()
    rows = torch.arange(draft_vocab_size)
    if not torch.equal(order, rows):
        if ROWS[0] not in result:
            raise DraftError(
                f"{where}: its vocabulary map is not ascending, but it has no lm_head whose rows "
                "it describes; copy the draft again"
            )
        of_kinds = {name for one in every_kind().values() for name in one.token_rows}
        if stage := sorted(of_kinds & result.keys()):
            raise DraftError(
                f"{where}: its vocabulary map is not ascending, and in which order the rows of "
                f"{stage[0]} are is not known"
            )
        for name in ROWS:
            if name in result and len(result[name]) == len(order):
                result[name] = result[name][order].contiguous()
    if full:
        return result
    chosen = torch.zeros(vocab_size, dtype=torch.bool)
    chosen[ids] = True
    return result | {"d2t": ids - rows, "t2d": chosen}


def target_ids(d2t: Tensor | None, t2d: Tensor | None, vocab: int, size: int, where: str) -> Tensor:
    """Return the target id of every row of the head, int64 [Vd], in any order.

    `vocab` and `size` are V and Vd; `where` is the path of the weights, for messages.

    Raises:
        DraftError: they do not name Vd different tokens.
    """
    for name, tensor, length in (("d2t", d2t, size), ("t2d", t2d, vocab)):
        if tensor is not None and tuple(tensor.shape) != (length,):
            raise DraftError(f"{where}: {name} has shape {list(tensor.shape)}, expected [{length}]")
    chosen = None if t2d is None else t2d.cpu().bool().nonzero().flatten()
    if d2t is None:  # a mask can only mean rows in ascending order
        if chosen is None or len(chosen) != size:
            raise DraftError(
                f"{where}: t2d names {0 if chosen is None else len(chosen)} tokens, but the draft "
                f"vocabulary has {size}; the map is damaged or was never filled"
            )
        return chosen
    values = d2t.cpu().long()
    offsets = values + torch.arange(size)
    fault = _fault(offsets, vocab, chosen)
    if not fault:
        if size < vocab and not bool(values.any()):
            log.warning(
                "warning[vocabulary-map]: %s: d2t is all zero, so the draft vocabulary is the "
                "tokens 0 to %d. Some trainers leave it so if no vocabulary was chosen",
                *(where, size - 1),
                extra={"failure": "vocabulary-map"},
            )
        return offsets
    if other_fault := _fault(values, vocab, chosen):
        raise DraftError(
            f"{where}: d2t does not name {size} tokens of the draft vocabulary: read as offsets "
            f"(token = row + d2t[row]) {fault}; read as token ids {other_fault}. The map is "
            "damaged or belongs to another draft: copy the draft again"
        )
    log.warning(
        "warning[vocabulary-map]: %s: d2t holds token ids instead of offsets; engines add the "
        "number of the row, "
        "and then propose other tokens. It is read as ids; an export writes offsets",
        where,
        extra={"failure": "vocabulary-map"},
    )
    return values


def _fault(ids: Tensor, vocab: int, chosen: Tensor | None) -> str:
    """Return why `ids` int64 [Vd] cannot be the draft vocabulary; "" if they can."""
    if outside := int(((ids < 0) | (ids >= vocab)).sum()):
        return f"{outside} tokens lie outside 0..{vocab - 1}"
    if repeated := len(ids) - len(ids.unique()):
        return f"{repeated} tokens repeat"
    if chosen is not None and not torch.equal(ids.sort().values, chosen):
        return "it names other tokens of the draft vocabulary than t2d"
    return ""


# -- vocabulary files ------------------------------------------------------------------------------


def read_vocabulary(path: str | Path, vocab_size: int) -> Tensor:
    """Return the target ids of a draft vocabulary, int64 [Vd], ascending.

    `path` is a JSON list of ids, a file of tensors, or a draft: its directory, or a run. Of a file
    of tensors, `d2t` and `t2d` are used or, where there are none, its only tensor: ids int64 [Vd]
    or a mask bool [V]; `vocab_size` is V.

    Raises:
        MissingError: no such file. DraftError: it does not name different tokens of the target.
    """
    path = Path(path)
    folders = (followed(path), followed(path / "best"), followed(path / "last"))
    file = path if path.is_file() else next(filter(None, map(find_weights, folders)), None)
    if file is None:
        raise MissingError(
            f"--draft-vocab {path}: no such file, and no directory of a draft with its weights"
        )
    where = f"--draft-vocab {file}"
    if file.suffix == ".json" and not file.name.endswith(".index.json"):
        ids = _listed(file, where)
    elif file.suffix in (".safetensors", ".bin", ".pt", ".json"):
        ids = _mapped(read_tensors(file), vocab_size, where)
    else:
        raise DraftError(f"{where}: expected a .json, .safetensors, .bin or .pt file, or a draft")
    if not len(ids):
        raise DraftError(f"{where}: names no token")
    if fault := _fault(ids, vocab_size, None):
        raise DraftError(f"{where}: {fault}; it must name tokens of the target, each once")
    return ids.sort().values


def _listed(file: Path, where: str) -> Tensor:
    try:
        ids = msgspec.json.decode(read_bounded(file), type=list[Annotated[int, _INT32]])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DraftError(f"{where}: expected a JSON list of token ids ({error})") from None
    return torch.tensor(ids, dtype=torch.int64)


def _mapped(tensors: dict[str, Tensor], vocab_size: int, where: str) -> Tensor:
    """Return the ids that tensors name, int64 [Vd], in any order."""
    plain = plain_names(tensors, where)
    d2t, t2d = plain.get("d2t"), plain.get("t2d")
    if d2t is not None or t2d is not None:
        size = len(d2t) if d2t is not None else int(t2d.bool().sum()) if t2d is not None else 0
        return target_ids(d2t, t2d, vocab_size, size, where)
    if len(tensors) != 1:
        raise DraftError(
            f"{where}: has neither d2t nor t2d. A draft without them proposes every token: use "
            "--draft-vocab-size 0"
        )
    [value] = tensors.values()
    if value.dtype == torch.bool and value.shape == (vocab_size,):
        return value.nonzero().flatten()
    if value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        raise DraftError(
            f"{where}: its only tensor is {value.dtype} {list(value.shape)}; expected token ids, "
            f"integers [Vd], or a mask, bool [{vocab_size}]"
        )
    return value.long()
