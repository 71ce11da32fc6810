"""What runs inside vLLM's workers: record the states of a forward.

vLLM adds the methods of `CaptureWorker` to its worker class (`worker_extension_cls`), and
`LLM.collective_rpc` calls them in every worker. Hooks record, for the tokens of a forward in vLLM's
order, token ids and positions, the output of each block, and what `compute_logits` hands to the LM
head. vLLM must run eagerly: compiled code calls no hooks.

A block of vLLM often returns (x, residual) and leaves their sum to the next block: the output of
the block is the sum. Tensors are copied at once, because later layers write into them.

Shapes: n tokens of a forward, H hidden size, V vocabulary size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spec_data.capture.hooks import decoder_layers
from spec_data.shards.errors import TargetError
from spec_data.shards.layer_ids import EMBEDDING

_LOGIT_ROWS = 1024  # rows per call of the head


class _HeadReachedError(Exception):
    """Ends `compute_logits` where the input of the head, its argument, is known."""


class Recorder:
    """Records forwards of a model of vLLM.

    Of each one `ids` and `positions`, int64 [n] on the CPU, `final` [n, H], `layers` [n, H] by id,
    and `logits` [n, V], None without `full_logits`.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...]) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.full_logits = False
        self._layers: dict[int, Tensor] = {}
        blocks = decoder_layers(model)
        self._handles = [model.register_forward_hook(self._finish, with_kwargs=True)]
        for k in layers:
            if k == EMBEDDING:
                hook = blocks[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                hook = blocks[k].register_forward_hook(partial(self._keep_output, k))
            self._handles.append(hook)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_input(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep the states that enter block 0: the first [n, H] of floating point."""
        tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        self._layers[EMBEDDING] = next(v for v in tensors if v.is_floating_point()).detach().clone()

    def _keep_output(self, layer: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        self._layers[layer] = block_output(output)

    def _finish(self, model: nn.Module, _args: tuple, kwargs: dict, output: Any) -> None:
        """Record a forward when the model returns; `output` are states [n, H], after the norm."""
        ids, positions = kwargs.get("input_ids"), kwargs.get("positions")
        if ids is None or positions is None:
            raise TargetError("vLLM ran the model with embeddings, not token ids; use --backend hf")
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        positions = positions if positions.dim() == 1 else positions[0]  # all rows of text agree
        self.forwards.append(
            {
                "ids": ids.detach().to("cpu", torch.long, copy=True),
                "positions": positions.detach().to("cpu", torch.long, copy=True),
                "layers": self._layers,
                "final": head_input(model, hidden).detach().clone(),
                "logits": _logits(model, hidden) if self.full_logits else None,
            }
        )
        self._layers = {}


def block_output(output: Any) -> Tensor:
    """Return the raw output [n, H] of a block of vLLM, as a new tensor.

    Raises:
        TargetError: the block returns something else than states, or states and residual.
    """
    states, residual, *_ = (*output, None) if isinstance(output, (tuple, list)) else (output, None)
    if not isinstance(states, Tensor) or not states.is_floating_point():
        raise TargetError(f"a block of vLLM returns {type(states).__name__}; use --backend hf")
    if isinstance(residual, Tensor) and residual.shape == states.shape:
        return (states + residual).detach()
    return states.detach().clone()


def head_input(model: Any, hidden: Tensor) -> Tensor:
    """Return what `compute_logits` hands to the LM head, [n, H], without running the head.

    Raises:
        TargetError: `compute_logits` runs no logits processor.
    """
    processors = [m for m in model.modules() if type(m).__name__.endswith("LogitsProcessor")]

    def stop(_head: Any, states: Tensor, *_args: Any, **_kwargs: Any) -> None:
        raise _HeadReachedError(states)

    for processor in processors:
        processor.forward = stop
    try:
        model.compute_logits(hidden)
    except _HeadReachedError as reached:
        return reached.args[0]
    finally:
        for processor in processors:
            vars(processor).pop("forward", None)
    raise TargetError(f"{type(model).__name__} of vLLM runs no logits processor; use --backend hf")


def _logits(model: Any, hidden: Tensor) -> Tensor | None:
    """Return the model's own logits [n, V]; None in a worker that does not gather them."""
    parts = [model.compute_logits(rows) for rows in hidden.split(_LOGIT_ROWS)]
    return None if parts[0] is None else torch.cat(parts)


class CaptureWorker:
    """Methods that vLLM adds to its workers; `model_runner` and `rank` are those of vLLM."""

    model_runner: Any
    rank: int

    def capture_layers(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """Record these layers from now on; return facts about the model in this worker."""
        if (old := vars(self).pop("_recorder", None)) is not None:
            old.remove()
        model = self.model_runner.get_model()
        self._recorder = Recorder(model, tuple(layers))
        attending = [m for m in model.modules() if callable(getattr(m, "get_attn_backend", None))]
        attention = {module.get_attn_backend().get_name() for module in attending}
        return {"blocks": len(decoder_layers(model)), "attention": sorted(attention)}

    def capture_start(self, full_logits: bool) -> None:
        """Forget recorded forwards; record logits from now on, or not."""
        self._recorder.forwards = []
        self._recorder.full_logits = full_logits

    def capture_clear(self) -> None:
        """Overwrite the key-value cache with zeros; no request may be running."""
        for cache in tree_leaves(self.model_runner.kv_caches):
            cache.zero_()

    def capture_take(self, to_cpu: bool) -> list[dict[str, Any]] | None:
        """Return the recorded forwards, or None in all workers but the first, which have the same.

        With `to_cpu` all tensors are moved to the CPU, so that another process can receive them.
        """
        forwards, self._recorder.forwards = self._recorder.forwards, []
        if self.rank != 0:
            return None
        return tree_map_only(Tensor, Tensor.cpu, forwards) if to_cpu else forwards
