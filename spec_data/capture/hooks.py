"""Find the decoder blocks and the head of a causal LM, and capture states with forward hooks.

Hooks are used instead of `output_hidden_states` because they keep only the wanted layers in memory.
Layer id k is the output of decoder block k, counted from 0; -1 is the embedding output (the input
of block 0).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.models.reading import check_one_stream, text_config
from spec_data.shards.errors import TargetError
from spec_data.shards.layer_ids import EMBEDDING, check_layers
from spec_data.shards.schema import FINAL, layer_column

_LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "language_model.layers",
    "model.decoder.layers",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
    "backbone.layers",
    "layers",
)


def module_at(model: Any, path: str) -> Any:
    """Return the module at a path such as "model.layers", None if there is none."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder blocks of a causal LM in order.

    Raises:
        TargetError: no known layout matches with as many blocks as the config has.
    """
    expected = getattr(text_config(getattr(model, "config", None)), "num_hidden_layers", None)
    for path in _LAYER_PATHS:
        blocks = module_at(model, path)
        if isinstance(blocks, nn.ModuleList) and blocks and expected in (None, len(blocks)):
            return list(blocks)
    raise TargetError(
        f"{type(model).__name__}: no decoder blocks found (looked for {', '.join(_LAYER_PATHS)}"
        f" with {expected} blocks); only decoder-only causal language models can be captured"
    )


def output_head(model: Any) -> Any:
    """Return the LM head module, whose input is the final hidden state; TargetError without one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or getattr(head, "weight", None) is None:
        raise TargetError(f"{type(model).__name__} has no LM head; is it a causal language model?")
    return head


@dataclass(kw_only=True)
class States:
    """The states of one forward, unshifted, in the dtype and on the device of the target.

    Either of all slots of a batch, [B, T, H] each, or of its N real tokens in order, [N, H].

    Attributes:
        layers: the raw output of decoder block k by layer id; -1 is the embedding output.
        final: the input of the LM head (after the final norm); empty before it was captured.
        logits: the model's own logits, V wide; None unless they were asked for.
    """

    layers: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor | None = None

    @property
    def columns(self) -> dict[str, Tensor]:
        """The layers and the final states, by the names of their columns."""
        return {layer_column(k): v for k, v in self.layers.items()} | {FINAL: self.final}


@contextmanager
def capturing(
    model: Any,
    layers: Sequence[int],
    *,
    skip_head: bool = True,
    device: torch.device | None = None,
) -> Iterator[States]:
    """Capture the outputs of `layers` and the input of the head during forwards in the context.

    The states are moved to `device`; None leaves each on the device of its block.

    With `skip_head` the head receives only the first slot of each row ([B, 1, H]), so no [B, T, V]
    logits exist and the logits that the model returns are not usable. The hooks are removed when
    the context ends, also after an exception.

    Raises:
        TargetError: invalid layer ids (raised before any hook is registered).
    """
    blocks = decoder_layers(model)
    check_layers(layers, len(blocks))
    captured = States()

    def moved(states: Tensor) -> Tensor:
        states = states.detach()
        return states if device is None else states.to(device)

    def keep_output(layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        captured.layers[layer] = moved(output[0] if isinstance(output, tuple) else output)

    def keep_embedding(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        captured.layers[EMBEDDING] = moved(args[0] if args else kwargs["hidden_states"])

    def keep_final(_module: nn.Module, args: tuple) -> tuple | None:
        captured.final = moved(args[0])  # [B, T, H]
        return (args[0][:, :1], *args[1:]) if skip_head else None

    with ExitStack() as handles:
        for layer in layers:
            if layer == EMBEDDING:
                handle = blocks[0].register_forward_pre_hook(keep_embedding, with_kwargs=True)
            else:
                handle = blocks[layer].register_forward_hook(partial(keep_output, layer))
            handles.callback(handle.remove)
        handles.callback(output_head(model).register_forward_pre_hook(keep_final).remove)
        yield captured


def check_captured(captured: States, layers: Sequence[int], shape: tuple[int, int, int]) -> None:
    """Raise TargetError unless every layer was captured, in the shape (B, T, H)."""
    missing = [k for k in layers if k not in captured.layers]
    if missing or not captured.final.numel():
        raise TargetError(
            f"the forward produced no states for {missing or 'the final hidden'}: the target skips "
            "these blocks or runs them outside torch modules, so it cannot be captured"
        )
    states = {f"layer {k}": captured.layers[k] for k in layers} | {"final hidden": captured.final}
    for name, value in states.items():
        if value.dim() > 3:
            check_one_stream(name, value.numel() // (shape[0] * shape[1] * shape[2]))
        if tuple(value.shape) != shape:
            raise TargetError(
                f"{name} has shape {tuple(value.shape)}, but a dataset holds one state of the "
                f"hidden size per token: {shape}"
            )
