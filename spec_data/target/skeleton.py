"""A target without its decoder blocks, or with a few of them, for what an engine cannot tell.

An engine runs the target itself. What the dataset also needs comes from transformers: embedding,
head, final norm and rotary modules, and single blocks to prove the states of the engine with. A
skeleton is the model's own class; each block that is not kept is replaced by one that returns its
input, so its weights are never read. It needs the memory of embedding, head and the kept blocks.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from spec_data.models.loading import load_model
from spec_data.shards.errors import TargetError
from spec_data.target.hooks import decoder_layers, output_head

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
