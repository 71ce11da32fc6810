"""EAGLE-1/2: convert our checkpoints to and from the forms of engines.

Our checkpoint is vLLM's form. SGLang reads the same weights under another architecture name. Its
`fc` always has a bias, with random values if the file has none, so we write zeros.
"""

import torch

from spec_data.config import to_dict
from spec_data.shards.errors import DraftError
from spec_train.draft_options import EagleOptions
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.flat import (
    drop_target_head,
    plain_names,
    refuse_sliding,
    section_of,
    shape_of,
    shape_options,
    switches_of,
    with_target_weights,
)
from spec_train.formats.target_facts import TargetFacts

OWN, SGLANG = "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
SHARED = "LlamaForCausalLM"
"""SafeAILab's name of all its drafts, also of EAGLE-3."""
ARCHITECTURES = (OWN, SGLANG, SHARED)
_BIAS = "fc.bias"


def to_sglang(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for SGLang."""
    weight = own.tensors["fc.weight"]
    tensors = own.tensors | {_BIAS: torch.zeros(weight.shape[0], dtype=weight.dtype)}
    return DraftFiles(own.config | {"architectures": [SGLANG], "bias": True}, tensors, own.where)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    Raises:
        DraftError: it computes something that our EAGLE-1/2 does not, or weights are missing.
    """
    what = "an EAGLE-1/2 draft"
    refuse_sliding(files, what)
    tensors, shape = plain_names(files.tensors), shape_of(files)
    bias = tensors.pop(_BIAS, None)
    if bias is not None and bool(bias.any()):
        raise DraftError(
            f"{files.weights_path}: fc has a bias, which neither our EAGLE-1/2 nor vLLM's has"
        )
    if "layers.0.input_layernorm.weight" in tensors:
        raise DraftError(
            f"{files.weights_path}: the first layer normalises its input; in {what} it does not"
        )
    tensors = drop_target_head(tensors, files, target)
    tensors = with_target_weights(tensors, files, target, shape["dtype"], ("embed_tokens.weight",))
    blocks = files.config.get("num_hidden_layers") or 1
    config = shape | switches_of(files)
    config |= {
        "architectures": [OWN],
        "model_type": "llama",
        "num_hidden_layers": blocks,
        "bias": False,
    }
    options = EagleOptions(
        num_layers=blocks, depth=depth or EagleOptions.depth, **shape_options(config)
    )
    config["spec_train"] = section_of(files, "eagle", (), to_dict(options))
    return DraftFiles(config, tensors, files.where)
