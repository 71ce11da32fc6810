"""Find the final norm of a target and its form: RMSNorm or LayerNorm, eps, offset of the weight."""

from typing import Any

import torch
from torch import nn

from spec_data.models.placement import whole

NORM_PATHS = (
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


def final_norm(model: Any) -> nn.Module | None:
    """Return the norm before the LM head, None if it is in no known place."""
    for path in NORM_PATHS:
        module: Any = model
        for name in path.split("."):
            module = getattr(module, name, None)
        if getattr(module, "weight", None) is not None:
            return module
    return None


@torch.no_grad()
def read_norm(model: Any) -> dict[str, Any]:
    """Return `kind`, `eps` and `offset` of the final norm, as its outputs prove them; else {}.

    The norm is called with random vectors. A form is proven if it computes the same, but for
    rounding.
    """
    module = final_norm(model)
    if module is None:
        return {}
    eps = next((float(getattr(module, n)) for n in _EPS if _is_number(module, n)), None)
    if eps is None:
        return {}
    weight = whole(module, "weight")
    if weight is None:
        return {}
    generator = torch.Generator().manual_seed(0)
    # of the size of eps, so that another eps is seen
    x = torch.randn(4, len(weight), generator=generator) * max(eps, 1e-12) ** 0.5
    x = x.to(weight.device, weight.dtype)
    try:
        found = module(x).float()
    except Exception:  # another signature
        return {}
    bias = whole(module, "bias")
    allowed = 8 * torch.finfo(weight.dtype).eps
    for kind, offset in _FORMS:
        wide = x.float()
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        own = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        own = own * (weight.float() + offset) + (0 if bias is None else bias.float())
        scale = own.abs().amax().clamp_min(1e-6)
        if bool(((found - own).abs() <= allowed * scale).all()):
            return {"kind": kind, "eps": eps, "offset": offset}
    return {}


def _is_number(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), float)
