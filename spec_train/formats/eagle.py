"""EAGLE-1/2: convert our checkpoints to and from the forms of engines.

Our checkpoint is vLLM's form. SGLang reads the same weights under another architecture name. Its
`fc` always has a bias, with random values if the file has none, so we write zeros.
"""

import torch

from spec_data.shards.errors import DraftError
from spec_data.terminal.config import to_dict
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.eagle_parts import (
    eagle_tensors,
    has_norms,
    layers_of,
    no_bias,
    with_whole_biases,
)
from spec_train.formats.flat import (
    drop_target_head,
    refuse_set,
    section_of,
    shape_of,
    shape_options,
    switches_of,
    with_target_weights,
)
from spec_train.formats.known_keys import AUTOMODEL_EAGLE, draft_keys, refuse_arithmetic
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.windows import windows_of
from spec_train.options.draft_options import EagleOptions

OWN, SGLANG = "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
SHARED = "LlamaForCausalLM"
"""SafeAILab's name of all its drafts, also of EAGLE-3."""
ARCHITECTURES = (OWN, SGLANG, SHARED, AUTOMODEL_EAGLE)
WHAT = "an EAGLE-1/2 draft"
_BIAS = "fc.bias"
_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")


def to_sglang(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for SGLang."""
    weight = own.tensors["fc.weight"]
    bias = own.tensors.get(_BIAS, torch.zeros(weight.shape[0], dtype=weight.dtype))
    config = own.config | {"architectures": [SGLANG], "bias": True}
    return DraftFiles(config, own.tensors | {_BIAS: bias}, own.where)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    Raises:
        DraftError: it computes something that our EAGLE-1/2 does not, or weights are missing.
    """
    files = draft_keys(files)
    shape, tensors = shape_of(files), eagle_tensors(files, WHAT)
    refuse_arithmetic(files, WHAT, but=_NORMS)
    norms = ("norm_before_residual", "norm_output", "return_hidden_post_norm")
    refuse_set(files, WHAT, **dict.fromkeys(norms, False))
    tensors, fields = with_whole_biases(tensors, files)
    fields = switches_of(files) | fields | {"qk_norm": has_norms(tensors, files)["qk_norm"]}
    bias = tensors.get(_BIAS)
    if files.config.get("bias") and bias is None:
        raise DraftError(
            f"{files.config_path}: bias = true, but {files.weights_path} has no {_BIAS}, for which "
            "SGLang uses random values; copy the draft again, or set it to false"
        )
    if no_bias(bias):
        tensors.pop(_BIAS, None)
    blocks = layers_of(tensors, files)
    tensors = drop_target_head(tensors, files, target)
    tensors = with_target_weights(tensors, files, target, shape["dtype"], ("embed_tokens.weight",))
    config = shape | fields | windows_of(files, blocks).keys()
    config |= {
        "architectures": [OWN],
        "model_type": "llama",
        "num_hidden_layers": blocks,
        "bias": _BIAS in tensors,
        _NORMS[0]: "layers.0.input_layernorm.weight" in tensors,
        _NORMS[1]: "norm.weight" in tensors,
    }
    options = EagleOptions(
        num_layers=blocks, depth=depth or EagleOptions.depth, **shape_options(config, EagleOptions)
    )
    config["spec_train"] = section_of(files, "eagle", (), to_dict(options))
    return DraftFiles(config, tensors, files.where)
