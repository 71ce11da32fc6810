"""A target without its decoder blocks, or with a few of them, for what an engine cannot tell.

An engine runs the target itself. What the dataset also needs comes from transformers: embedding,
head, final norm and rotary modules, and single blocks to prove the states of the engine with. A
skeleton is the model's own class; each block that is not kept is replaced by one that returns its
input, so its weights are never read. It needs the memory of embedding, head and the kept blocks.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from spec_data.capture.hooks import decoder_layers, output_head
from spec_data.capture.proofs import FLOOR
from spec_data.models.loading import load_model
from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.layer_ids import EMBEDDING

_TOKENS = 2  # of the forward that shows what blocks return


class Through(nn.Module):
    """A decoder block that returns its input, and has the plain attributes of the block.

    Attributes:
        as_tuple: whether it returns a tuple, as the blocks of some families do.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        plain = {n: v for n, v in vars(block).items() if n[0] != "_" and n != "training"}
        self.__dict__.update(plain)  # such as `attention_type`, which models read of their blocks
        self.as_tuple = False

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return `hidden_states` [B, T, H]."""
        return (hidden_states,) if self.as_tuple else hidden_states


def load_skeleton(
    path: str | Path, kept: Collection[int], *, dtype: str | torch.dtype, trust: bool = False
) -> Any:
    """Load a target on the CPU with only the decoder blocks `kept`.

    Raises:
        MissingError, TargetError: see `load_model`; or its blocks cannot be left out.
    """
    with _quiet():
        model = load_model(
            str(path),
            dtype=dtype,
            device="cpu",
            trust=trust,
            change=lambda made: _strip(made, kept),
        )
    through = [block for block in decoder_layers(model) if isinstance(block, Through)]
    for as_tuple in (False, True):
        for block in through:
            block.as_tuple = as_tuple
        if _runs(model):
            return model
    raise TargetError(
        f"{path}: the blocks of {type(model).__name__} cannot be left out, so its head and its "
        "positions cannot be read without loading it; use --backend hf"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no bar of transformers: a proof loads a skeleton for each layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _strip(model: Any, kept: Collection[int]) -> None:
    """Replace the decoder blocks that are not kept."""
    gone = {id(b): b for k, b in enumerate(decoder_layers(model)) if k not in kept}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in gone:
                setattr(parent, name, _through(child))


def _through(block: nn.Module) -> Through:
    """Return what replaces a block; its class is found in the module of the family's code."""
    kind = type(block)
    return type(kind.__name__, (Through,), {"__module__": kind.__module__})(block)


@torch.no_grad()
def _runs(model: Any) -> bool:
    """Whether a forward of a few tokens reaches the head with one state per token."""
    seen: list[tuple[int, ...]] = []
    head = output_head(model)
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    try:
        model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False)
    except Exception:  # the code of a family that is given another form than it expects
        return False
    finally:
        handle.remove()
    return seen == [(1, _TOKENS, head.weight.shape[1])]


@torch.no_grad()
def run_from(model: Any, ids: Tensor, layer: int, states: Tensor, until: int | None) -> Tensor:
    """Run a skeleton whose block `layer` receives `states`, and return what follows from them.

    Args:
        model: a skeleton that keeps at most the block `layer`.
        ids: the tokens of a document, int64 [T].
        layer: the block.
        states: its input [T, H].
        until: return the output of this block; None: the input of the LM head.

    Returns:
        States [T, H] in the dtype of the model.
    """
    blocks, found = decoder_layers(model), []
    states = states.to(next(model.parameters()).dtype)[None]  # [1, T, H]

    def inject(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    def keep(_module: nn.Module, _args: tuple, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    def keep_input(_module: nn.Module, args: tuple) -> None:
        found.append(args[0])

    handles = [blocks[layer].register_forward_pre_hook(inject, with_kwargs=True)]
    if until is None:
        handles.append(output_head(model).register_forward_pre_hook(keep_input))
    else:
        handles.append(blocks[until].register_forward_hook(keep))
    _run(model, ids, handles)
    return found[0][0]


def embedded(model: Any, ids: Tensor) -> Tensor:
    """Return the embedding output (the input of block 0) of tokens int64 [T], as [T, H]."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handle = decoder_layers(model)[0].register_forward_pre_hook(keep, with_kwargs=True)
    _run(model, ids, [handle])
    return found[0][0]


@torch.no_grad()
def _run(model: Any, ids: Tensor, handles: list[Any]) -> None:
    """Run a forward of int64 [T], then remove the hooks."""
    try:
        model(input_ids=ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


# -- block proof -----------------------------------------------------------------------------------
# Prove that the states of an engine are what their names say, with transformers, block by block.
#
# The engine's input of a block, run through that block of transformers with the weights from disk,
# must be the engine's output of the block: that proves the layer id, the weights, the mask and the
# rotary positions. The error is relative to what the block adds to its input, because layers next
# to each other differ by little more than that. The embedding output must be the embedding's, and
# the engine's last state, run through the final norm, must be the engine's input of the LM head: so
# a state before the norm is never taken for one after it. One block is in memory at a time.
#
# Shapes: T tokens of a document, H hidden size.


_CHECKED_TOKENS = 2048  # of the proof, unless the longest document has more
# Largest error of a block, relative to what it adds: rounding takes a larger share of a small
# update, and the block of another layer adds something else altogether (1.0 and more).
_OF_UPDATE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.25}
_QUANTISED = 0.35  # another kernel multiplies rounded weights with rounded inputs
_MOST = 2.0  # what one token counts at most, so that a massive activation does not decide


def needed_layers(layers: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Return the layers to capture for the proof of `layers`: their inputs, and the last one."""
    wanted = {*layers, blocks - 1}
    return tuple(sorted(wanted | {k - 1 for k in wanted if k != EMBEDDING}))


def prove_states(
    path: str | Path,
    documents: Sequence[Tensor],
    states: Sequence[tuple[dict[int, Tensor], Tensor]],
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
        documents: token ids, int64 [T] each.
        states: of each document, the states [T, H] of `needed_layers` by id, and the input of the
            LM head [T, H].
        layers: the layers to prove; blocks: the number of decoder blocks.
        dtype: of the engine; quantised: whether it runs quantised weights.
        trust: run code that comes with the model.

    Returns:
        The error by name: "layer k", "embedding" and "final".

    Raises:
        RunError: an error is too large, or no document begins with finite states.
    """
    few = _first(documents, states)
    last = blocks - 1
    found = _ends(few, load_skeleton(path, (), dtype=dtype, trust=trust), layers, last)
    for name, error in found.items():
        _check(name, error, _QUANTISED if quantised else FLOOR.get(dtype, 3e-2))
    # The last block is always proven: the final state follows from it.
    for k in sorted({*layers, last} - {EMBEDDING}):
        name, model = f"layer {k}", load_skeleton(path, (k,), dtype=dtype, trust=trust)
        found[name] = _worst(few, partial(_of_update, model, k))
        _check(name, found[name], _QUANTISED if quantised else _OF_UPDATE[dtype])
    return found


def _ends(
    documents: list[tuple[Tensor, Any]], skeleton: Any, layers: Sequence[int], last: int
) -> dict[str, float]:
    """Return the errors of the final state and, if it is captured, of the embedding output."""

    def embedding(ids: Tensor, own: dict[int, Tensor], _final: Tensor) -> Tensor:
        return _relative(own[EMBEDDING], embedded(skeleton, ids))

    def final(ids: Tensor, own: dict[int, Tensor], final: Tensor) -> Tensor:
        return _relative(final, run_from(skeleton, ids, last, own[last], None))

    found = {"embedding": _worst(documents, embedding)} if EMBEDDING in layers else {}
    return found | {"final": _worst(documents, final)}


def _first(documents: Sequence[Tensor], states: Sequence[Any]) -> list[tuple[Tensor, Any]]:
    """Return documents up to a state that is not finite, the longest first (for its windows).

    Raises:
        RunError: there is none.
    """
    order = sorted(range(len(documents)), key=lambda d: (-len(documents[d]), d))
    found, left = [], max(_CHECKED_TOKENS, len(documents[order[0]]))
    for d in order:
        (layers, final), length = states[d], _finite(states[d])
        if 0 < length <= left:
            kept = {k: v[:length].cpu() for k, v in layers.items()}
            found.append((documents[d][:length], (kept, final[:length].cpu())))
            left -= length
    if not found:
        raise RunError(
            "the states of the engine are not finite, so nothing can be proven: try --dtype float32"
        )
    return found


def _finite(states: tuple[dict[int, Tensor], Tensor]) -> int:
    """Return the number of tokens before the first one with a state that is not finite."""
    layers, final = states
    good = torch.stack([torch.isfinite(v).all(-1) for v in (final, *layers.values())]).all(0)
    return int(good.cpu().long().cumprod(0).sum())


def _worst(
    documents: list[tuple[Tensor, Any]],
    error: Callable[[Tensor, dict[int, Tensor], Tensor], Tensor],
) -> float:
    """Return the mean error of the tokens, each [T] of `error` counting `_MOST` at most."""
    found = torch.cat([error(ids, layers, final) for ids, (layers, final) in documents])
    return float(found.nan_to_num(_MOST).clamp(max=_MOST).mean())


def _relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the relative difference of states [T, H], float32 [T]."""
    actual, expected = actual.float(), expected.float()
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)


def _of_update(
    model: Any, layer: int, ids: Tensor, own: dict[int, Tensor], _final: Tensor
) -> Tensor:
    """Return the error of a block relative to what it adds to its input, float32 [T]."""
    before, after = own[layer - 1], own[layer]
    expected = run_from(model, ids, layer, before, layer).float()
    update = (expected - before.float()).norm(dim=-1).clamp_min(1e-30)
    return (after.float() - expected).norm(dim=-1) / update


def _check(name: str, error: float, allowed: float) -> None:
    """Raise RunError if an error is too large."""
    if error <= allowed:
        return
    kind = {
        "final": "what the engine returns as the input of the LM head is not the final norm of its "
        "last block",
        "embedding": "what the engine returns as the embedding output is not that of the embedding",
    }.get(name, f"what the engine returns as {name} is not the output of that block")
    raise RunError(
        f"{kind} (relative error {error:.1e}, allowed {allowed:.0e}): the states of this engine "
        "cannot be used. Use --backend hf, or another release of the engine"
    )
