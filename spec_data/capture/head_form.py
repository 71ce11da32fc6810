"""The head of a causal LM described as data: what its logits are, from the final hidden state."""

from typing import Any

import torch
from torch import Tensor, nn

from spec_data.capture.hooks import output_head
from spec_data.models.placement import shares_weight, whole
from spec_data.models.quantisation import check_head
from spec_data.models.reading import text_config
from spec_data.shards.schema import HeadSpec

# -- final norm ------------------------------------------------------------------------------------
# Find the final norm of a target and its form: RMSNorm or LayerNorm, eps, offset of the weight.


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


# -- head form -------------------------------------------------------------------------------------


_MULTIPLIED = {"hyperclovax"}  # model types whose logits_scaling is a factor; elsewhere a divisor


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


def head_tensors(model: Any, tied: bool) -> dict[str, Tensor]:
    """Return embedding, head and final-norm tensors on the CPU, in the dtype of the model.

    embed_tokens [V, H]; lm_head [V, H] unless it is tied to the embedding; lm_head_bias [V] and
    norm [H] if the target has them.
    """
    return {k: v.detach().cpu().contiguous() for k, v in head_parts(model, tied).items()}


def head_parts(model: Any, tied: bool) -> dict[str, Tensor]:
    """Return the tensors of `head_tensors` on the devices of their modules.

    `tied`: there is no lm_head.
    """
    head = output_head(model)
    tensors = {"embed_tokens": whole(model.get_input_embeddings(), "weight")}
    if not tied:
        tensors["lm_head"] = whole(head, "weight")
    tensors["lm_head_bias"] = whole(head, "bias")
    norm = final_norm(model)
    if norm is not None:
        tensors["norm"] = whole(norm, "weight")
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
