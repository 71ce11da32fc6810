"""Which states are these? What another program captured is compared with what the target computes.

Each captured chunk (a layer, or the last state) of a few documents is compared with every state
that the target computes for them: the embedding, the output of each block, the final state, at the
token itself and at its neighbours. The nearest one is what the chunk is. A chunk that is near none,
or near a state of another token, is refused, and so is a layer id that was recorded otherwise.

Shapes: T tokens of a document, n captured layers, H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spec_data.capture.hooks import States
from spec_data.capture.proofs import FLOOR, token_errors
from spec_data.capture.skeleton import embedded, load_skeleton, run_block, run_norm
from spec_data.shards.errors import RunError
from spec_data.shards.layer_ids import EMBEDDING
from spec_data.terminal.progress import progress
from spec_data.terminal.types import comma_list

# Relative differences. A dataset stores states in bf16: two that differ by less are the same there.
_SAME = torch.finfo(torch.bfloat16).eps / 2
# Two forwards in bf16, and the rounding to 8-bit floats with 3 bits behind the point.
ROUNDING = FLOOR[torch.bfloat16] + torch.finfo(torch.float8_e4m3fn).eps / 2
_ALLOWED = 0.35  # an engine that runs quantised weights; a state of another target differs by 1
SHIFTS = (0, -1, 1)
"""Row t of a chunk may be the state of token t + shift."""


class SampleStates(NamedTuple):
    """The states of a sample: `aux` [T, n, H] in the stored order, and `last` [T, H]."""

    aux: Tensor
    last: Tensor


def target_states(
    path: Path, documents: Sequence[Tensor], blocks: int, *, dtype: str, trust: bool
) -> list[States]:
    """Compute the states [T, H] of documents, int64 [T] each, on the CPU, block after block.

    The output of each block is the input of the next one, so the weights of the target are read
    from disk once, and it need not fit in memory. `dtype` "auto" is that of the checkpoint; `trust`
    runs code that comes with the model.

    Raises:
        MissingError, TargetError: the target cannot be loaded, or its blocks cannot be left out.
    """
    skeleton = load_skeleton(path, (), dtype=dtype, trust=trust)
    computed = [States(layers={EMBEDDING: embedded(skeleton, ids)}) for ids in documents]
    for k in progress(range(blocks), desc="run the target", unit="blocks", leave=False):
        model = load_skeleton(path, (k,), dtype=dtype, trust=trust)
        for ids, states in zip(documents, computed, strict=True):
            states.layers[k] = run_block(model, ids, k, states.layers[k - 1])
    for ids, states in zip(documents, computed, strict=True):
        states.final = run_norm(skeleton, ids, states.layers[blocks - 1])
    return computed


# -- what the stored chunks are --------------------------------------------------------------------

AFTER, BEFORE = "after", "before"
"""Whether the last stored state is the one after or before the final norm."""
FINAL_STATE = "final"
"""Name of the state after the final norm, beside the layer ids."""


class Convention(NamedTuple):
    """What a chunk may be: a state (a layer id or `FINAL_STATE`), of the token `shift` further."""

    state: int | str
    shift: int = 0

    def text(self, blocks: int) -> str:
        """Return it in words; `blocks` is the number of the target's blocks."""
        text = {EMBEDDING: "the embedding output", FINAL_STATE: "the state after the final norm"}
        words = text.get(self.state, f"the output of block {self.state}")
        if self.state == blocks - 1:
            words += " (the last one, before the final norm)"
        return words + {0: "", 1: " of the next token", -1: " of the previous token"}[self.shift]


class Match(NamedTuple):
    """What a stored chunk is: the nearest convention, and the relative difference from it.

    `worst` is the difference of the document that differs most.
    """

    chunk: str
    convention: Convention
    difference: float
    worst: float


_Pair = tuple[list[Tensor], list[Tensor]]  # stored [T, H] of the documents, and computed ones


def matches(
    stored: Sequence[SampleStates],
    normed: Sequence[Tensor],
    computed: Sequence[States],
    blocks: int,
) -> list[Match]:
    """Compare every chunk of some documents with every state of the target.

    The output of the last block is recognised by what the final norm makes of it, because its
    length does not matter: `normed`, [T, H] each. Return a match for each layer, in the stored
    order, and one for the last state.
    """
    states: dict[int | str, list[Tensor]] = {
        k: [document.layers[k] for document in computed] for k in computed[0].layers
    }
    finals = states[FINAL_STATE] = [document.final for document in computed]
    layers = []
    for number in range(stored[0].aux.shape[1]):
        chunks = [document.aux[:, number] for document in stored]
        pairs = {state: (chunks, values) for state, values in states.items()}
        layers.append(_nearest(f"stored layer {number + 1}", pairs))
    last = [document.last for document in stored]
    pairs = {state: (last, values) for state, values in states.items()}
    pairs[blocks - 1] = (list(normed), finals)
    # A norm of ones changes nothing that it has normed before: such a state is one after it. What
    # is stored may change by more than rounding: the norm takes out the part of a codec's error, or
    # of a quantised target's, that lies along the state: 1/sqrt(H) of it, an eighth for H = 64.
    changed, error = (float(_differences(last, x, 0).mean()) for x in (list(normed), finals))
    if changed <= max(_SAME, error / 4):
        del pairs[blocks - 1]
    return [*layers, _nearest("the last state", pairs)]


def _nearest(chunk: str, pairs: dict[int | str, _Pair]) -> Match:
    """Return what a chunk is; `pairs` has what is compared for each state that it may be."""
    differences = {
        Convention(state, shift): _differences(*pair, shift)
        for state, pair in pairs.items()
        for shift in SHIFTS
    }
    best = min(differences, key=lambda convention: float(differences[convention].mean()))
    documents = differences[best]
    return Match(chunk, best, float(documents.mean()), float(documents.max()))


def _differences(chunks: list[Tensor], expected: list[Tensor], shift: int) -> Tensor:
    """Return the relative difference of row t from the state of token t + shift, by document."""
    means = []
    for chunk, state in zip(chunks, expected, strict=True):
        first, stop = max(0, -shift), len(chunk) - max(0, shift)
        means.append(token_errors(chunk[first:stop], state[first + shift : stop + shift]).mean())
    return torch.stack(means)


def check_matches(
    chunks: Sequence[Match], recorded: Sequence[int] | None, tool: str, blocks: int
) -> tuple[list[int], str]:
    """Return the layer ids in the stored order, and the side of the final norm.

    Raises:
        RunError: the chunks are no states from which a dataset can be made, or not the recorded
            ones.
    """
    *layers, last = [match.convention.state for match in chunks]
    norms = {FINAL_STATE: AFTER, blocks - 1: BEFORE}
    unusable = FINAL_STATE in layers or len(set(layers)) < len(layers) or last not in norms
    problem = None
    if any(match.worst > _ALLOWED for match in chunks):
        problem = (
            "At least one is no state of this target: give the --target that was captured, with "
            "the same weights, or another --from"
        )
    elif any(match.convention.shift for match in chunks):
        problem = (
            "The states are shifted against the token ids, so each token has those of a "
            "neighbour. Write them again with the ids that the target was given"
        )
    elif unusable:
        problem = (
            "A layer is stored twice, or after the final norm, or the last state is that of "
            "another block. Capture again"
        )
    elif recorded is not None and layers != list(recorded):
        problem = (
            f"{tool} recorded the layers {comma_list(recorded)}, and these are "
            f"{comma_list(layers)}. If the record is wrong, correct it in its manifest"
        )
    if problem is not None:
        lines = [
            f"{match.chunk}: nearest to {match.convention.text(blocks)} (relative difference "
            f"{match.difference:.2g}, at most {match.worst:.2g} of a sample)"
            for match in chunks
        ]
        raise RunError(
            "the stored states are not what a dataset needs. Compared with what the target "
            "computes:\n  " + "\n  ".join(lines) + f"\n{problem}. Nothing was written"
        )
    return [int(layer) for layer in layers], norms[last]
