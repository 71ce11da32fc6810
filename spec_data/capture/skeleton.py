"""A target without its decoder blocks, or with a few of them, for states that come from elsewhere.

An engine, or another trainer, ran the blocks. What a dataset also needs comes from transformers:
embedding, head, final norm and rotary modules, and single blocks to prove the states with. A
skeleton is the model's own class; each block that is not kept is replaced by one that returns its
input, so its weights are never read. It needs the memory of embedding, head and the kept blocks.

Shapes: T tokens of a document, H hidden size.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.capture.hooks import States, capturing, decoder_layers, output_head
from spec_data.capture.model import Target
from spec_data.capture.proofs import FLOOR, token_errors
from spec_data.models.loading import load_model
from spec_data.models.reading import text_config
from spec_data.models.streams import check_one_stream
from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.layer_ids import EMBEDDING

_TOKENS = 2  # of the forward that shows what blocks return


class IdentityBlock(nn.Module):
    """A decoder block that returns its input, and has the plain attributes of the block."""

    as_tuple = False  # whether it returns a tuple, as the blocks of some families do

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        plain = {n: v for n, v in vars(block).items() if n[0] != "_" and n != "training"}
        self.__dict__.update(plain)  # such as `attention_type`, which models read of their blocks

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return `hidden_states` [B, T, H]."""
        return (hidden_states,) if self.as_tuple else hidden_states


def load_skeleton(
    path: str | Path, blocks: Collection[int], *, dtype: str | torch.dtype, trust: bool = False
) -> Any:
    """Load a target on the CPU with only these decoder `blocks`.

    Raises:
        MissingError, TargetError: see `load_model`; or its blocks cannot be left out.
    """

    def strip(model: Any) -> None:
        """Replace the other decoder blocks, wherever the model holds them."""
        others = {id(b) for k, b in enumerate(decoder_layers(model)) if k not in blocks}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in others:  # code of families finds their class in its module
                    kind = type(child)
                    named = type(kind.__name__, (IdentityBlock,), {"__module__": kind.__module__})
                    setattr(parent, name, named(child))

    with suppress(AttributeError):  # of a family whose code looks into all blocks (Falcon-H1)
        model = load_model(str(path), dtype=dtype, device="cpu", trust=trust, change=strip)
        identities = [block for block in decoder_layers(model) if isinstance(block, IdentityBlock)]
        for as_tuple in (False, True):
            for block in identities:
                block.as_tuple = as_tuple
            if _runs(model):
                return model
    raise TargetError(
        f"{path}: the blocks of this target cannot be left out, so its head and its positions "
        "cannot be read without loading it; capture it by `spec-data generate --backend hf`"
    )


def _runs(model: Any) -> bool:
    """Whether a forward of a few tokens reaches the head with one state per token."""
    try:
        final = _run(model, torch.zeros(_TOKENS, dtype=torch.long))
    except Exception:  # the code of a family that is given another form than it expects
        return False
    return tuple(final.shape) == (_TOKENS, output_head(model).weight.shape[1])


@torch.no_grad()
def _run(
    model: Any,
    ids: Tensor,
    layer: int = 0,
    states: Tensor | None = None,
    until: int | None = None,
) -> Tensor:
    """Run int64 [T]; return the output [T, H] of block `until`, or the input of the LM head.

    The input of block `layer` is replaced by `states` [T, H], if they are given. `until` may be the
    embedding output.
    """

    def inject(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if states is None:
            return None
        given = states.to(next(model.parameters()).dtype)[None]  # [1, T, H]
        return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

    hook = decoder_layers(model)[layer].register_forward_pre_hook(inject, with_kwargs=True)
    with capturing(model, () if until is None else (until,)) as captured:
        try:
            model(input_ids=ids[None], use_cache=False)
        finally:
            hook.remove()
    return (captured.final if until is None else captured.layers[until])[0]


def run_block(model: Any, ids: Tensor, layer: int, states: Tensor) -> Tensor:
    """Return what a block of a skeleton makes of its input `states` [T, H], in the model's dtype.

    The skeleton keeps the block; `ids` are the tokens of the document, int64 [T].
    """
    return _run(model, ids, layer, states, layer)


def run_norm(model: Any, ids: Tensor, states: Tensor) -> Tensor:
    """Return the input of the LM head [T, H], of the output `states` [T, H] of the last block."""
    return _run(model, ids, len(decoder_layers(model)) - 1, states)


def embedded(model: Any, ids: Tensor) -> Tensor:
    """Return the embedding output (the input of block 0) of tokens int64 [T], as [T, H]."""
    return _run(model, ids, until=EMBEDDING)


class SkeletonTarget(Target):
    """A target whose states come from elsewhere: with head, final norm and positions alone."""

    def __init__(
        self, path: str | Path, layers: Sequence[int], dtype: str, trust: bool, **options: Any
    ) -> None:
        """Load them as `load_skeleton` does; `layers` are the ids to capture."""
        skeleton = load_skeleton(path, (), dtype=dtype, trust=trust)
        check_one_stream(str(path), text_config(skeleton.config), "states of another program")
        super().__init__(skeleton, sorted(layers), **options)

    def move_to(self, device: torch.device) -> None:
        """Move the skeleton; states and logits are then on `device`."""
        self.model.to(device)
        self.device = self.input_device = device

    def normed(self, ids: Tensor, last: Tensor) -> Tensor:
        """Return the final states [T, H] of the output `last` [T, H] of the last block.

        `ids` are its tokens, int64 [T].
        """
        return run_norm(self.model, ids.to(self.device), last.to(self.device, self.dtype))

    def received(
        self, ids: Tensor, stored: Sequence[int], aux: Tensor, last: Tensor, before: bool
    ) -> States:
        """Return states that came from elsewhere, of the tokens `ids`, int64 [T].

        `aux` [T, n, H] are those of the layers `stored`, in that order, and `last` [T, H] the final
        ones, or those `before` the final norm: the last block's output.
        """
        aux, last = (states.to(self.device, self.dtype) for states in (aux, last))
        final = self.normed(ids, last) if before else last
        known = {self.num_layers - 1: last} if before else {}
        known |= dict(zip(stored, aux.unbind(1), strict=True))
        return States(layers={k: known[k] for k in self.layers}, final=final)

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        """Return None: what is large runs elsewhere, in memory that it reserves by itself."""
        return None


# -- block proof -----------------------------------------------------------------------------------
# The engine's input of a block, run through that block of transformers with the weights from disk,
# must be the engine's output of the block: that proves the layer id, the weights, the mask and the
# rotary positions. The error is relative to what the block adds to its input, because layers next
# to each other differ by little more than that. The embedding output must be the embedding's, and
# the engine's last state, run through the final norm, must be the engine's input of the LM head: so
# a state before the norm is never taken for one after it. One block is in memory at a time.


_CHECKED_TOKENS = 2048  # of the proof, unless the longest document has more
# Largest error of a block, relative to what it adds: rounding takes a larger share of a small
# update, and the block of another layer adds something else altogether (1.0 and more).
_OF_UPDATE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.25}
_QUANTISED = 0.35  # another kernel multiplies rounded weights with rounded inputs

_Document = tuple[Tensor, dict[int, Tensor], Tensor]  # ids [T], layers [T, H] by id, final [T, H]


def needed_layers(layers: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Return the layers to capture for the proof of `layers`: their inputs, and the last one."""
    wanted = {*layers, blocks - 1}
    return tuple(sorted(wanted | {k - 1 for k in wanted if k != EMBEDDING}))


def prove_states(
    path: str | Path,
    documents: Sequence[_Document],
    layers: Sequence[int],
    *,
    blocks: int,
    dtype: torch.dtype,
    quantised: bool = False,
    trust: bool = False,
) -> dict[str, float]:
    """Prove layers and final state of an engine.

    Args:
        path: the model directory.
        documents: token ids, int64 [T]; the states [T, H] of `needed_layers` by id; and the input
            of the LM head [T, H].
        layers: the layers to prove; blocks: the number of decoder blocks.
        dtype: of the engine; quantised: whether it runs quantised weights.

    Returns:
        The error by name: "layer k", "embedding" and "final".

    Raises:
        RunError: an error is too large, or no document begins with finite states.
    """
    few, last = _finite_beginnings(documents), blocks - 1
    skeleton, errors = load_skeleton(path, (), dtype=dtype, trust=trust), dict[str, float]()

    def check(name: str, what: str, allowed: float, triples: Sequence[tuple[Tensor, ...]]) -> None:
        errors[name] = error = float(torch.cat([token_errors(*t) for t in triples]).mean())
        if error > allowed:
            raise RunError(
                f"what the engine returns as {what} (relative error {error:.1e}, allowed "
                f"{allowed:.0e}): the states of this engine cannot be used. Use --backend hf, or "
                "another release of the engine"
            )

    small = _QUANTISED if quantised else FLOOR.get(dtype, 3e-2)
    if EMBEDDING in layers:
        what = "the embedding output is not that of the embedding"
        pairs = [(states[EMBEDDING], embedded(skeleton, ids)) for ids, states, _ in few]
        check("embedding", what, small, pairs)
    what = "the input of the LM head is not the final norm of its last block"
    pairs = [(final, run_norm(skeleton, ids, states[last])) for ids, states, final in few]
    check("final", what, small, pairs)
    # The last block is always proven: the final state follows from it.
    for k in sorted({*layers, last} - {EMBEDDING}):
        model, triples = load_skeleton(path, (k,), dtype=dtype, trust=trust), []
        for ids, states, _ in few:
            expected = run_block(model, ids, k, states[k - 1])
            triples.append((states[k], expected, expected.float() - states[k - 1].float()))
        allowed = _QUANTISED if quantised else _OF_UPDATE[dtype]
        check(f"layer {k}", f"layer {k} is not the output of that block", allowed, triples)
    return errors


def _finite_beginnings(documents: Sequence[_Document]) -> list[_Document]:
    """Return documents up to a state that is not finite, the longest first (for its windows)."""
    order = sorted(range(len(documents)), key=lambda d: (-len(documents[d][0]), d))
    some, left = [], max(_CHECKED_TOKENS, len(documents[order[0]][0]))
    for d in order:
        ids, states, final = documents[d]
        finite = torch.stack([torch.isfinite(v).all(-1) for v in (final, *states.values())]).all(0)
        length = int(finite.cpu().long().cumprod(0).sum())
        if 0 < length <= left:
            beginnings = {k: v[:length].cpu() for k, v in states.items()}
            some.append((ids[:length], beginnings, final[:length].cpu()))
            left -= length
    if not some:
        raise RunError(
            "the states of the engine are not finite, so nothing can be proven: try --dtype float32"
        )
    return some
