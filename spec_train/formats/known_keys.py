"""What the keys of a published config.json do: those that are read, harmless ones, refused ones.

A key that changes the arithmetic of a draft must not be dropped without a word. So every key that
the known trainers write is in one of three tables here. A key in none of them is reported: when the
draft is read, and by `export --check`.

Sources: SafeAILab's EAGLE, SpecForge 0.2, speculators 0.9, NVIDIA's AutoModel 0.7 and ModelOpt
0.47, DeepSpec, TorchSpec, and transformers 5.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION

# -- foreign ---------------------------------------------------------------------------------------
# Drafts of trainers that copy their target's config: which keys of it describe the draft.
#
# AutoModel and DeepSpec start from the target's config.json and change a few fields. What they
# leave describes the target: its number of blocks, its windows, its experts. Here the keys that
# their draft classes read are kept, and the others are dropped.
#
# Sources: AutoModel 0.7, `components/speculative/eagle` (`draft_llama.py`, `draft_llama_v12.py`)
# and its recipes; DeepSpec, `modeling/eagle3/qwen3`.


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


# -- known keys ------------------------------------------------------------------------------------


_READ = """
    architectures model_type hidden_size target_hidden_size intermediate_size vocab_size
    draft_vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps hidden_act hidden_activation attention_bias mlp_bias qkv_bias qk_norm bias
    max_position_embeddings rope_parameters rope_scaling rope_theta rotary_emb_base
    partial_rotary_factor rotary_pct original_max_position_embeddings layer_types sliding_window
    use_sliding_window tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
    pad_token_id num_aux_hidden_states eagle_aux_hidden_state_layer_ids eagle_config
    target_layer_ids num_target_layers norm_before_residual norm_before_fc fc_norm
    fc_norm_perslice use_aux_norm norm_output return_hidden_post_norm embed_requires_grad
    ttt_length step_loss_decay draft_num_hidden_layers train_embeddings mask_token_id
    dspark_noise_token_id pard_token ptd_token_id parallel_drafting num_depths block_size
    dspark_block_size dflash_config dspark_target_layer_ids aux_hidden_state_layer_ids
    sample_from_anchor markov_rank markov_head_type enable_confidence_head use_confidence_head
    confidence_head_with_markov is_causal causal use_swa swa_window_size
    sliding_window_non_causal num_anchors target_num_hidden_layers target_model_name_or_path
    dspark_bonus_anchor shift_label
"""
READ = frozenset(_READ.split())
"""Keys that the readers use."""
_HARMLESS = """
    transformers_version _name_or_path name_or_path use_cache return_dict output_attentions
    output_hidden_states torchscript use_bfloat16 pruned_heads chunk_size_feed_forward
    is_decoder is_encoder_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder decoder_start_token_id finetuning_task id2label label2id problem_type
    task_specific_params tokenizer_class prefix sep_token_id auto_map _attn_implementation
    _attn_implementation_autoset attn_implementation max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss keys_to_ignore_at_inference initializer_range
    initializer_factor attention_dropout hidden_dropout embd_pdrop resid_pdrop dropout
    use_return_dict gradient_checkpointing pretraining_tp loss_type down_sample_ratio
    down_sample_ratio_min target_model_type max_window_layers num_local_experts
    experts_per_token num_experts_per_tok num_experts moe_intermediate_size norm_topk_prob
    decoder_sparse_step router_aux_loss_coef output_router_logits mlp_only_layers use_qk_norm
    shared_expert_intermediate_size reuse_target_lm_head speculators_version
    speculators_model_type speculators_config algorithm base_model_ep_plan enable_sp_ulysses
    has_no_defaults_at_init has_embed_tokens max_anchors loss_decay_gamma confidence_head_alpha
    enable_d2_feature d2_prefix_weight_base ce_loss_alpha l1_loss_alpha _torchspec_version emb_dim
    backbone_rotary_base mrope_section mrope_interleaved
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of libraries, of training, and about the target, which no forward pass of a draft reads.

`pretraining_tp` only splits sums. Experts have tensors of their own, by which they are refused.
"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_last_layernorm": (True,),  # ModelOpt, of EAGLE-3
    "use_input_layernorm_in_first_layer": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
    "parallel_draft_heads_num_layers": (0, 1),
    "has_lm_head": (False, True),
    "additional_fc": (False,),
    "use_aux_hidden_state": (True,),
    "quantization_config": (),
    "compression_config": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "position_embedding_type": ("rope", "absolute"),  # BERT's default, which Llama ignores
    "rotary_embedding_type": ("rope",),
    "rope_interleaved": (False,),
    "swiglu_limit": (),
    "attention_sink_bias": (False,),  # of block drafts, in `dflash_config`
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "attention_k_eq_v": (False,),
    "attn_output_gate": (False,),
    "output_multiplier": (1,),
    "input_embedding_scale": (1,),
    "is_neox_style": (True,),
    "kv_lora_rank": (),
    "attention_mode": ("gqa", "mha"),
    "causal_head": (False,),
    "projector_type": ("dflash", "dspark"),
    "gru_hidden_dim": (),
    "pure_draft_prefix_len": (0, 1),
    "selector_rank": (),
    "selector_top_k": (),
    "conv_kernel_size": (),
    "conv_group_size": (),
    "draft_ffn_type": ("dense",),
    "use_heterogeneous_kv": (False,),
    "hc_mult": (1,),
}
"""Keys that change the arithmetic, with the values (besides null) that change nothing here."""
_SCALES = {"query_pre_attn_scalar": 1.0, "attention_multiplier": -0.5}
"""Keys of the attention's scale: neutral at this power of the head size."""
KNOWN = READ | HARMLESS | _NEUTRAL.keys() | _SCALES.keys()
"""All of them."""
NESTED = ("eagle_config", "transformer_layer_config", "dflash_config")


def refuse_arithmetic(files: DraftFiles, what: str, but: tuple[str, ...] = ()) -> None:
    """Refuse a config with a key that changes the arithmetic in a way that `what` does not have.

    `but` are keys that `what` reads.

    Raises:
        DraftError: names the keys and their values.
    """
    raw = files.config
    size = raw.get("head_dim") or raw.get("hidden_size", 0) // raw.get("num_attention_heads", 1)
    faults = []
    for name, value, known in _leaves(raw):
        if name in _SCALES and value not in (None, size ** _SCALES[name]):
            faults.append(f"{known} = {value}")
        if name in but or name not in _NEUTRAL:
            continue
        if value is not None and value not in _NEUTRAL[name]:
            shown = "..." if isinstance(value, dict) else value
            faults.append(f"{known} = {shown}")
    if faults:
        raise DraftError(
            f"{files.config_path}: {', '.join(faults)} cannot be represented: {what} of spec-train "
            "has no such arithmetic"
        )


def unread_keys(files: DraftFiles) -> list[str]:
    """Return the keys of a published config, sorted, of which it is unknown what they change.

    Null values are left out. Drafts of this project have other checks, and a config that is a copy
    of the target's may have any key: its draft class reads a few of them.
    """
    if SECTION in files.config or class_of(files) is not None:
        return []
    return sorted(
        path
        for name, value, path in _leaves(files.config)
        if value is not None and name not in KNOWN
    )


def unread_text(names: list[str]) -> str:
    """Return a sentence about keys that were not read."""
    return (
        f"keys of unknown meaning were not read: {', '.join(names)}. If one of them changes what "
        "the draft computes, it is read as another draft than the one that was trained"
    )


def _leaves(raw: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (name, value, path) of the keys at the top and in the tables `NESTED`."""
    found = [(name, value, name) for name, value in raw.items() if name not in NESTED]
    for table in NESTED:
        if isinstance(raw.get(table), dict):
            found += [(name, value, f"{table}.{name}") for name, value in raw[table].items()]
    return found
