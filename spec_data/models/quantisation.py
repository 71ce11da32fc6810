"""Quantised checkpoints: what they are, and whether this machine can load them."""

from typing import Any

from msgspec.structs import replace
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spec_data.models.reading import text_config
from spec_data.shards.errors import TargetError
from spec_data.shards.schema import Quantised


def quantisation_of(config: Any) -> Quantised | None:
    """Return how a checkpoint with this transformers configuration is quantised, if it is."""
    if not (table := _table(config)):
        return None
    method = table.get("quant_method")
    return Quantised(method=str(getattr(method, "value", method)))


def loaded_quantisation(config: Any, model: Any) -> Quantised | None:
    """Return the quantisation of a checkpoint (`config`) as `model` runs it, with `dequantised`.

    transformers runs some checkpoints in the dtype of their other weights where the device has no
    kernel (fp8 on a CPU). The states are then not those of a GPU, which rounds activations too.
    """
    quantised = quantisation_of(config)
    return quantised and replace(quantised, dequantised=not _table(model.config))


def check_quantisation(path: str, config: Any) -> None:
    """Raise TargetError, before anything is read, if this machine cannot load quantised weights."""
    quantised = quantisation_of(config)
    if quantised is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(_table(config), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise TargetError(
            f"{path}: its weights are quantised ({quantised}), and cannot be loaded here: {reason}"
        ) from None


def check_head(head: Any) -> None:
    """Raise TargetError for a quantised LM head: logits are computed from the one that is stored.

    Its weight must be a plain tensor of a floating dtype of 2 or 4 bytes.
    """
    weight = head.weight
    kind = type(weight.data)
    plain = weight.is_floating_point() and weight.element_size() > 1
    wrapped = is_traceable_wrapper_subclass(weight.data)  # as of torchao; torch's own are DTensors
    if not plain or (wrapped and kind.__module__.partition(".")[0] != "torch"):
        raise TargetError(
            f"the LM head of this target is quantised ({kind.__name__}, {weight.dtype}); a dataset "
            "holds the head as it is served, so quantise the checkpoint without lm_head"
        )


def _table(config: Any) -> dict[str, Any]:
    """Return `quantization_config` as a dict, empty if there is none."""
    for holder in (config, text_config(config)):
        table = getattr(holder, "quantization_config", None)
        if table:
            return table.to_dict() if hasattr(table, "to_dict") else dict(table)
    return {}
