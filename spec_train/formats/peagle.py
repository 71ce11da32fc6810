"""P-EAGLE: convert our checkpoints to and from the forms of engines and trainers.

Our checkpoint is vLLM's flat form (no other engine drafts in parallel), under a name of EAGLE-3:
for `method: eagle3` vLLM puts "Eagle3" in front of any other name, and then finds no such class.
The speculators library has a form of its own. In both, `mask_hidden`, the learned states of unknown
tokens, is an input of `fc`.
"""

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.terminal.config import to_dict
from spec_train.formats import speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.eagle3 import named_class
from spec_train.formats.eagle_parts import has_own_embedding
from spec_train.formats.flat import (
    INPUT_KEY,
    MASK_KEYS,
    aux_layers,
    plain_names,
    section_of,
    shape_of,
    shape_options,
    sizes_of_weights,
    switches_of,
    with_target_weights,
)
from spec_train.formats.known_keys import draft_keys, refuse_arithmetic
from spec_train.formats.layer_order import sort_states
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import windows_of
from spec_train.options.draft_options import PeagleOptions

OWN = "Eagle3LlamaForCausalLM"
ARCHITECTURES = (
    *("PeagleLlamaForCausalLM", "PEagleDraftModel", "PEagleSpeculator"),
    "PeagleQwen3ForCausalLM",
)
"""Names that no EAGLE-3 has. Drafts with EAGLE-3's names are recognised by MASK_STATES."""
MASK_STATES = "mask_hidden"
_TRAINED = "embed_requires_grad"
"""Whether the embedding was trained, in the speculators form."""


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library, which vLLM reads too."""
    raw = own.config
    config = speculators.wrap(
        raw,
        "peagle",
        "PEagleDraftModel",
        raw["spec_train"]["options"]["depths"],
        target,
        embed_requires_grad=raw.get("train_embeddings", False),
        norm_before_residual=raw["norm_before_residual"],
        norm_before_fc=raw["norm_before_fc"],
        fc_norm=raw["fc_norm"],
        norm_output=False,
        mask_token_id=raw["mask_token_id"],
        target_hidden_size=raw["target_hidden_size"],
        **{INPUT_KEY: raw[INPUT_KEY]},
    )
    # vLLM reads these two only from the layer config; it assumes 3 states and no norms otherwise
    config[speculators.LAYER]["num_aux_hidden_states"] = len(raw["spec_train"]["layers"])
    config[speculators.LAYER]["fc_norm"] = raw["fc_norm"]
    return DraftFiles(config, own.tensors, own.where)


def from_speculators(flat: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint."""
    raw = {_TRAINED: True} | flat.config  # the library's default for P-EAGLE
    return from_flat(DraftFiles(raw, flat.tensors, flat.where), depth, target)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    `depth` is the number of tokens it drafts per round, None if unknown.

    Raises:
        DraftError: it computes something that our P-EAGLE does not, or weights are missing.
    """
    files = draft_keys(files)
    refuse_arithmetic(files, "a P-EAGLE draft")
    raw = sizes_of_weights(files)
    files = DraftFiles(raw, files.tensors, files.where)
    mask = next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)
    blocks = raw.get("num_hidden_layers")
    if raw.get("tie_word_embeddings") and "lm_head.weight" not in plain_names(files.tensors):
        raise DraftError(
            f"{files.config_path}: tie_word_embeddings = true, and the file has no lm_head.weight: "
            "P-EAGLE drafts of spec-train have a head of their own"
        )
    if mask is None or blocks is None or MASK_STATES not in files.tensors:
        raise DraftError(
            f"{files.where}: a P-EAGLE draft needs num_hidden_layers, a mask token "
            f"({', '.join(MASK_KEYS)}) and the tensor {MASK_STATES}"
        )
    shape, windows = shape_of(files), windows_of(files, blocks)
    full = shape["draft_vocab_size"] == shape["vocab_size"]
    shared = ("embed_tokens.weight", *(("lm_head.weight",) if full else ()))
    tensors = plain_names(files.tensors)
    own_embedding = has_own_embedding(tensors, files, target)
    sizes = shape["vocab_size"], shape["draft_vocab_size"]
    tensors = own_vocabulary(tensors, *sizes, files.weights_path)
    layers, tensors = sort_states(
        tensors,
        aux_layers(files, target),
        files.config_path,
        collected="speculators_version" in raw,  # its states come from vLLM, which sorts them
    )
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    tensors[MASK_STATES] = tensors[MASK_STATES].reshape(1, 1, -1)
    tensors = with_target_weights(tensors, files, target, shape["dtype"], shared)
    config = shape | switches_of(files) | windows.keys()
    config |= {
        **named_class(config, OWN),
        "num_hidden_layers": blocks,
        "mask_token_id": mask,
        "fc_norm": bool(raw.get("fc_norm", False)),
        "norm_output": False,  # nothing is fed back, so it has no effect
        "train_embeddings": own_embedding,
        INPUT_KEY: as_block_inputs(layers),
    }
    options = PeagleOptions(
        layers=",".join(map(str, layers)),
        draft_vocab_size=shape["draft_vocab_size"],
        depths=depth or raw.get("num_depths") or PeagleOptions.depths,
        draft_layers=blocks,
        mask_token_id=mask,
        fc_norm=config["fc_norm"],
        **shape_options(config, PeagleOptions),
    )
    config["spec_train"] = section_of(files, "peagle", layers, to_dict(options))
    return DraftFiles(config, tensors, files.where)
