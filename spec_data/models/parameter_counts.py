"""How large a target is, from its configuration: no weights are read."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_data.models.reading import text_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def empty_model(config: Any, trust: bool) -> PreTrainedModel:
    """Return the model of a transformers configuration, on the device "meta".

    Raises:
        Exception: any; there are families that cannot be built without weights.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)


def parameter_counts(config: Any, trust: bool) -> dict[str, int]:
    """Return `parameters` of a target, and `active_parameters`, which multiply every token.

    The latter are those of the head and of the blocks, with as many experts as a token has. What is
    not known is left out.
    """
    try:
        model = empty_model(config, trust)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    except Exception:  # see `empty_model`
        return {}
    text = text_config(config)
    count, active = (
        next((n for name in names if isinstance(n := getattr(text, name, None), int)), 0)
        for names in (_EXPERTS, _ACTIVE)
    )
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(weights.values())
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    if experts and not (count and active):
        return {"parameters": total}
    used = total - looked_up - experts + (experts * active // count if experts else 0)
    return {"parameters": total, "active_parameters": used}
