"""Final norm and head of a causal LM as data: what its logits are, of which states."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spec_data.capture.hooks import module_at, output_head
from spec_data.models.loading import shares_weight, whole
from spec_data.models.reading import text_config
from spec_data.shards.errors import TargetError
from spec_data.shards.schema import HeadSpec

_NORM_PATHS = (
    "model.norm",
    "model.final_layernorm",
    "model.embedding_norm",
    "model.language_model.norm",
    "language_model.model.norm",
    "model.decoder.final_layer_norm",
    "transformer.ln_f",
    "gpt_neox.final_layer_norm",
    "backbone.norm_f",
)
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_FORMS = (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0))
_MULTIPLIED = {"hyperclovax"}  # model types whose logits_scaling is a factor; elsewhere a divisor


def _final_norm(model: Any) -> nn.Module | None:
    modules = (module_at(model, path) for path in _NORM_PATHS)
    return next((m for m in modules if getattr(m, "weight", None) is not None), None)


@torch.no_grad()
def read_norm(model: Any) -> dict[str, Any]:
    """Return `kind`, `eps` and `offset` of the final norm, as its outputs prove them; else {}."""
    module = _final_norm(model)
    numbers = (getattr(module, name, None) for name in _EPS)
    eps = next((number for number in numbers if isinstance(number, float)), None)
    weight = None if module is None else whole(module, "weight")
    if module is None or eps is None or weight is None:
        return {}
    generator = torch.Generator().manual_seed(0)
    # of the size of eps, so that another eps is seen
    x = torch.randn(4, len(weight), generator=generator) * max(eps, 1e-12) ** 0.5
    x = x.to(weight.device, weight.dtype)
    try:
        actual = module(x).float()
    except Exception:  # another signature
        return {}
    bias = whole(module, "bias")
    allowed = 8 * torch.finfo(weight.dtype).eps
    for kind, offset in _FORMS:
        wide = x.float()
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        expected = expected * (weight.float() + offset) + (0 if bias is None else bias.float())
        scale = expected.abs().amax().clamp_min(1e-6)
        if bool(((actual - expected).abs() <= allowed * scale).all()):
            return {"kind": kind, "eps": eps, "offset": offset}
    return {}


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


def describe_head(model: Any) -> HeadSpec:
    """Return the head as data, from its module and the config fields that scale or cap logits."""
    head, config = output_head(model), text_config(model.config)
    check_head(head)
    vocab_size, hidden_size = head.weight.shape
    return HeadSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tied=shares_weight(head, model.get_input_embeddings()),
        has_bias=getattr(head, "bias", None) is not None,
        scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: Any) -> float:
    """Return the factor on the logits, under the names that families have for it."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None):
            return float(getattr(config, name))
    derived = isinstance(getattr(type(config), "logits_scaling", None), property)
    if derived or not getattr(config, "logits_scaling", None):
        return 1.0  # a derived one (MiniCPM3) scales the states before the head, not the logits
    value = float(config.logits_scaling)
    return value if config.model_type in _MULTIPLIED else 1.0 / value


def head_parts(model: Any, tied: bool) -> dict[str, Tensor]:
    """Return embedding, head and final norm of a model, on the devices of their modules.

    embed_tokens [V, H]; lm_head [V, H] unless it is `tied` to the embedding; lm_head_bias [V] and
    norm [H] if the target has them.
    """
    head, norm = output_head(model), _final_norm(model)
    tensors = {
        "embed_tokens": whole(model.get_input_embeddings(), "weight"),
        "lm_head": None if tied else whole(head, "weight"),
        "lm_head_bias": whole(head, "bias"),
        "norm": None if norm is None else whole(norm, "weight"),
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
