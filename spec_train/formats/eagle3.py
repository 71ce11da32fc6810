"""EAGLE-3: convert our checkpoints to and from the forms of engines and trainers.

Our checkpoint is the flat form that vLLM, SGLang and llama.cpp read, with both keys for the layer
ids. DeepSpec's class normalises queries and keys and has no draft vocabulary, so it cannot hold our
draft.
"""

from spec_data.config import to_dict
from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_train.draft_options import Eagle3Options
from spec_train.formats import speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.flat import (
    INPUT_KEY,
    aux_layers,
    plain_names,
    refuse_set,
    refuse_sliding,
    section_of,
    shape_of,
    shape_options,
    switches_of,
    with_target_weights,
)
from spec_train.formats.layer_order import sort_states
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary

OWN = "LlamaForCausalLMEagle3"
ARCHITECTURES = (
    *(OWN, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    *("Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model"),
)
_OURS, _THEIRS = "midlayer.", "layers.0."


def to_flat(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for vLLM, SGLang and llama.cpp: they read our checkpoint unchanged."""
    return own


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library, which vLLM reads too."""
    raw = own.config
    config = speculators.wrap(
        raw,
        "eagle3",
        "Eagle3DraftModel",
        raw["spec_train"]["options"]["ttt_steps"],
        target,
        embed_requires_grad=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=raw["fc_norm"],
        norm_output=raw["norm_output"],
        target_hidden_size=raw["target_hidden_size"],
        **{INPUT_KEY: raw[INPUT_KEY]},
    )
    # vLLM reads the number of states here and assumes 3 without it
    config[speculators.LAYER]["num_aux_hidden_states"] = len(raw["spec_train"]["layers"])
    tensors = {name.replace(_OURS, _THEIRS): value for name, value in own.tensors.items()}
    return DraftFiles(config, tensors, own.where)


def to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Refuse: DeepSpec's class computes a different function.

    Raises:
        DraftError: always.
    """
    raise DraftError(
        f"{own.where}: DeepSpec's EAGLE-3 normalises queries and keys (q_norm, k_norm), this draft "
        "does not, and no values of those weights make the two equal. Use --format hf, vllm or "
        "speculators"
    )


def from_speculators(flat: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint."""
    if "norm_before_residual" not in flat.config:
        raise DraftError(
            f"{flat.config_path}: has no norm_before_residual; vLLM then assumes true and the "
            "speculators library false. Add the value that it was trained with"
        )
    return from_flat(flat, depth, target)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    `depth` is the number of tokens it drafts per round, None if unknown.

    Raises:
        DraftError: it computes something that our EAGLE-3 does not, or weights are missing.
    """
    what = "an EAGLE-3 draft"
    refuse_set(files, what, num_hidden_layers=1, tie_word_embeddings=False)
    refuse_sliding(files, what)
    shape, tensors = shape_of(files), plain_names(files.tensors)
    sizes = shape["vocab_size"], shape["draft_vocab_size"]
    tensors = own_vocabulary(tensors, *sizes, files.weights_path)
    layers, tensors = sort_states(tensors, aux_layers(files, target), files.config_path)
    tensors = {name.replace(_THEIRS, _OURS): value for name, value in tensors.items()}
    shared = ["embed_tokens.weight"]
    if shape["draft_vocab_size"] == shape["vocab_size"]:
        shared += ["lm_head.weight"]
    tensors = with_target_weights(tensors, files, target, shape["dtype"], tuple(shared))
    raw = files.config
    config = shape | switches_of(files)
    config |= {
        "architectures": [OWN],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "fc_norm": bool(raw.get("fc_norm", False)),
        "norm_output": bool(raw.get("norm_output", False)),
        INPUT_KEY: as_block_inputs(layers),
    }
    options = Eagle3Options(
        layers=",".join(map(str, layers)),
        draft_vocab_size=shape["draft_vocab_size"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        ttt_steps=depth or Eagle3Options.ttt_steps,
        **shape_options(config),
    )
    config["spec_train"] = section_of(files, "eagle3", layers, to_dict(options))
    return DraftFiles(config, tensors, files.where)
