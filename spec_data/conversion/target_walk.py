"""The states that the target itself computes for a few documents, one block at a time.

The output of each block is the input of the next one, so the weights of the target are read from
disk once, and it need not fit in memory. Everything is computed on the CPU.

Shapes: T tokens of a document, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from spec_data.progress import progress
from spec_data.shards.layer_ids import EMBEDDING
from spec_data.target.skeleton import embedded, load_skeleton, run_from


@dataclass(frozen=True, kw_only=True)
class OwnStates:
    """The states of a document: outputs of blocks [T, H] by layer id, and the final state [T, H].

    The final state is the one after the final norm, which enters the LM head.
    """

    layers: dict[int, Tensor]
    final: Tensor


def walk(
    path: Path, documents: Sequence[Tensor], blocks: int, *, dtype: str, trust: bool
) -> list[OwnStates]:
    """Compute the states of documents, int64 [T] each, one block after the other.

    Args:
        path: the model directory.
        documents: token ids.
        blocks: the number of decoder blocks.
        dtype: in which the target runs; "auto" is that of the checkpoint.
        trust: run code that comes with the model.

    Raises:
        MissingError, TargetError: the target cannot be loaded, or its blocks cannot be left out.
    """
    skeleton = load_skeleton(path, (), dtype=dtype, trust=trust)
    states = [{EMBEDDING: embedded(skeleton, ids)} for ids in documents]
    for k in progress(range(blocks), desc="run the target", unit="blocks", leave=False):
        model = load_skeleton(path, (k,), dtype=dtype, trust=trust)
        for ids, own in zip(documents, states, strict=True):
            own[k] = run_from(model, ids, k, own[k - 1], k)
    last = blocks - 1
    return [
        OwnStates(layers=own, final=run_from(skeleton, ids, last, own[last], None))
        for ids, own in zip(documents, states, strict=True)
    ]
