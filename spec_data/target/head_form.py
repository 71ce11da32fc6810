"""The head of a causal LM described as data: what its logits are, from the final hidden state."""

from typing import Any

from torch import Tensor

from spec_data.models.placement import shares_weight, whole
from spec_data.models.quantisation import check_head
from spec_data.models.reading import text_config
from spec_data.shards.head_spec import HeadSpec
from spec_data.target.final_norm import final_norm
from spec_data.target.hooks import output_head

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
