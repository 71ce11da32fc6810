"""Drafts of trainers that copy their target's config: which keys of it describe the draft.

AutoModel and DeepSpec start from the target's config.json and change a few fields. What they leave
describes the target: its number of blocks, its windows, its experts. Here the keys that their draft
classes read are kept, and the others are dropped.

Sources: AutoModel 0.7, `components/speculative/eagle` (`draft_llama.py`, `draft_llama_v12.py`) and
its recipes; DeepSpec, `modeling/eagle3/qwen3`.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

from spec_train.formats.draft_files import DraftFiles

log = logging.getLogger(__name__)

AUTOMODEL_EAGLE3, AUTOMODEL_EAGLE = "LlamaEagle3DraftModel", "LlamaEagleDraftModel"
DEEPSPEC_EAGLE3 = "Qwen3Eagle3Model"

_SHAPE_TEXT = """
    architectures model_type hidden_size target_hidden_size intermediate_size vocab_size
    draft_vocab_size num_attention_heads num_key_value_heads head_dim rms_norm_eps
    attention_bias max_position_embeddings rope_parameters rope_scaling rope_theta
    partial_rotary_factor original_max_position_embeddings dtype torch_dtype bos_token_id
    eos_token_id pad_token_id
"""
_SHAPE = tuple(_SHAPE_TEXT.split())
_KEPT: dict[str, tuple[str, ...]] = {
    AUTOMODEL_EAGLE3: (
        *(*_SHAPE, "mlp_bias", "hidden_act", "num_aux_hidden_states", "fc_norm", "norm_output"),
        *("parallel_drafting", "mask_token_id", "num_depths", "quantization_config"),
    ),
    # its MLP is always SiLU, and no key counts states
    AUTOMODEL_EAGLE: (*_SHAPE, "mlp_bias", "quantization_config"),
    DEEPSPEC_EAGLE3: (
        *(*_SHAPE, "hidden_act", "target_layer_ids", "num_target_layers", "ttt_length"),
        *("step_loss_decay", "draft_num_hidden_layers", "fc_norm", "fc_norm_perslice"),
    ),
}
"""The keys that each draft class reads."""
_LAYER_IDS = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


def count_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers in a draft's tensors; `midlayer` is the first one."""
    found = {int(m[1]) for name in names if (m := _LAYER.match(name))}
    if any(name.removeprefix("model.").startswith("midlayer.") for name in names):
        found.add(0)
    return len(found)


def class_of(files: DraftFiles) -> str | None:
    """Return the draft class of AutoModel or DeepSpec that wrote the files; None for others."""
    names = files.config.get("architectures") or ()
    return next((name for name in names if name in _KEPT), None)


def draft_keys(files: DraftFiles) -> DraftFiles:
    """Return files with the config keys that describe the draft; others than these two unchanged.

    `num_hidden_layers` becomes the number of layers in the file, and `num_target_layers` what a
    copy of the target's config says.
    """
    writer = class_of(files)
    if writer is None:
        return files
    raw = files.config
    kept: dict[str, Any] = {name: raw[name] for name in _KEPT[writer] if name in raw}
    kept["num_hidden_layers"] = count_layers(files.tensors)
    if writer == AUTOMODEL_EAGLE3:
        if not raw.get("parallel_drafting"):  # P-EAGLE writes the draft's own number
            kept["num_target_layers"] = raw.get("num_hidden_layers")
        if not any(name in raw for name in _LAYER_IDS):
            log.warning(
                "warning: %s: AutoModel writes no layer ids; its default is assumed, the outputs "
                "of blocks 1, L/2-1 and L-4. If aux_layer_ids were given to it, add the key "
                '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [...]} with them',
                files.config_path,
            )
        kept |= {name: raw[name] for name in _LAYER_IDS if name in raw}
    return DraftFiles(kept, files.tensors, files.where)
