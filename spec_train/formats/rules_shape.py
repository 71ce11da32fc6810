"""Rules of engines on the shape of a draft: activation, norms, layers, embedding.

Read in the engines' sources: vLLM's and SGLang's MLPs raise an error for any activation but silu;
llama.cpp always computes silu. A tensor that an engine has no place for is an error in vLLM and
llama.cpp and is silently dropped by SGLang. `docs/drafts.md` has the table. Which engine loads
biases is in `rules_bias.py`; here are only the shapes that exclude them.
"""

from spec_train.formats.preflight_notes import Notes, Subject

_SILU = "it supports only silu"
_REPLACED = "train_embeddings: it always uses the target's embedding instead of the draft's own"


def _activation(notes: Notes, subject: Subject, words: str = _SILU) -> None:
    name = subject.config["hidden_act"]
    notes.refuse(name != "silu", f"hidden_act {name}: {words}")


def _has(subject: Subject, name: str) -> bool:
    return bool(subject.config.get(name))


def vllm_llama(notes: Notes, subject: Subject, qk_norm: bool) -> None:
    """Add the rules of vLLM for EAGLE drafts; `qk_norm`: whether there is a class with q/k norm."""
    _activation(notes, subject)
    if not _has(subject, "qk_norm"):
        return
    notes.refuse(not qk_norm, "qk_norm: its EAGLE-1/2 class has no norms of queries and keys")
    if qk_norm:
        own = "qk_norm: Eagle3Qwen3ForCausalLM, the class that has it,"
        notes.refuse(_has(subject, "attention_bias"), f"{own} has no bias of o_proj")
        notes.refuse(_has(subject, "mlp_bias"), f"{own} has no biases of the MLP")
        notes.warn(True, f"{own} is not in releases before 0.24")


def sglang_llama(notes: Notes, subject: Subject, eagle3: bool) -> None:
    """Add the rules of SGLang for EAGLE drafts; `eagle3`: of EAGLE-3, otherwise of EAGLE-1/2."""
    _activation(notes, subject)
    notes.refuse(_has(subject, "qk_norm"), "qk_norm: it silently drops norms of queries and keys")
    notes.refuse(_has(subject, "train_embeddings"), _REPLACED)
    if not eagle3:
        return
    notes.refuse(_has(subject, "norm_before_residual"), "norm_before_residual: it ignores the key")
    notes.warn(
        subject.blocks > 1 and subject.form != "sglang",
        f"{subject.blocks} layers: needs --format sglang, because it reads hidden_norm in the "
        "layers after the first",
    )


def llama_cpp_llama(notes: Notes, subject: Subject) -> None:
    """Add the rules of llama.cpp for EAGLE-3 drafts."""
    _activation(notes, subject, "it silently computes silu")
    notes.refuse(_has(subject, "qk_norm"), "qk_norm is not supported")


def speculators_llama(notes: Notes, subject: Subject) -> None:
    """Add the rules of the speculators library for EAGLE-3 and P-EAGLE drafts."""
    notes.refuse(
        _has(subject, "qk_norm") and _has(subject, "mlp_bias"),
        "qk_norm with mlp_bias: Qwen3's layer, which has the norms, has no biases of the MLP",
    )


def qwen3_block(notes: Notes, subject: Subject) -> None:
    """Add the rules that every reader of block drafts has, because it has Qwen3's layer."""
    notes.refuse(
        not subject.config.get("qk_norm", True),
        "no q/k norm (--no-qk-norm): its layers always have norms of queries and keys",
    )


def vllm_block(notes: Notes, subject: Subject) -> None:
    """Add the rules of vLLM for block drafts; it keeps an embedding of the draft."""
    qwen3_block(notes, subject)
    _activation(notes, subject)


def sglang_block(notes: Notes, subject: Subject) -> None:
    """Add the rules of SGLang for block drafts."""
    qwen3_block(notes, subject)
    _activation(notes, subject)
    notes.refuse(_has(subject, "train_embeddings"), _REPLACED)


def llama_cpp_block(notes: Notes, subject: Subject) -> None:
    """Add the rules of llama.cpp for block drafts."""
    qwen3_block(notes, subject)
    _activation(notes, subject, "it silently computes silu")
    notes.refuse(
        _has(subject, "train_embeddings") and not subject.reduced,
        "train_embeddings with the full vocabulary: it ties the head, which the file does not "
        "have, to the draft's embedding",
    )
