"""Rules of engines for EAGLE drafts: EAGLE-1/2, EAGLE-3 and P-EAGLE."""

from spec_train.formats import rules_shape
from spec_train.formats.eagle3 import deepspec_faults
from spec_train.formats.preflight_notes import Notes, Subject
from spec_train.formats.rules import (
    DEEPSPEC,
    LAST,
    LAST_VLLM,
    LLAMA_CPP,
    SGLANG,
    SPECULATORS,
    VLLM,
    uses_last,
)
from spec_train.formats.rules_windows import (
    ignored_windows,
    sglang_eagle3_windows,
    speculators_eagle3_windows,
    vllm_eagle3_windows,
    vllm_eagle_windows,
)


def vllm_eagle(subject: Subject) -> Notes:
    """Check EAGLE-1/2 for vLLM."""
    notes = Notes(VLLM)
    notes.refuse(bool(subject.config.get("bias")), "a bias of fc: its class has none")
    rules_shape.vllm_llama(notes, subject, qk_norm=False)
    _refuse_norms(notes, subject)
    vllm_eagle_windows(notes, subject)
    return notes


def sglang_eagle(subject: Subject) -> Notes:
    """Check EAGLE-1/2 for SGLang."""
    notes = Notes(SGLANG)
    _refuse_norms(notes, subject)
    ignored_windows(notes, subject)
    rules_shape.sglang_llama(notes, subject, eagle3=False)
    notes.warn(
        subject.form not in ("sglang",),
        "needs --format sglang: its fc has a bias, which is random if the file has none",
    )
    return notes


def _refuse_norms(notes: Notes, subject: Subject) -> None:
    """Refuse the norms of AutoModel's EAGLE-1/2: engines have neither."""
    for key, words in (
        ("use_input_layernorm_in_first_layer", "a norm before the first layer's attention"),
        ("use_last_layernorm", "a norm of the prediction"),
    ):
        notes.refuse(bool(subject.config.get(key)), f"{words} is not supported")


def vllm_eagle3(subject: Subject) -> Notes:
    """Check EAGLE-3 for vLLM: any layers, any number of states, both runners."""
    notes = Notes(VLLM)
    rules_shape.vllm_llama(notes, subject, qk_norm=True)
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.warn(
        -1 in subject.layers,
        "layer -1 (the embedding's output) has the id 0 there, which few drafts use; not tested",
    )
    vllm_eagle3_windows(notes, subject)
    return notes


def vllm_peagle(subject: Subject) -> Notes:
    """Check P-EAGLE for vLLM: served as EAGLE-3 with parallel drafting, V1 runner only."""
    notes = Notes(VLLM)
    rules_shape.vllm_llama(notes, subject, qk_norm=True)
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.refuse(not subject.has("mask_hidden"), "a draft without mask_hidden does not load")
    vllm_eagle3_windows(notes, subject)
    return notes


def sglang_eagle3(subject: Subject) -> Notes:
    """Check EAGLE-3 for SGLang: flat form only, always with the target's embedding."""
    notes = Notes(SGLANG)
    rules_shape.sglang_llama(notes, subject, eagle3=True)
    notes.warn(uses_last(subject), LAST + "engines treat it differently; not checked for this one")
    sglang_eagle3_windows(notes, subject)
    count = len(subject.layers)
    one_width = subject.config["target_hidden_size"] == subject.config["hidden_size"]
    notes.refuse(
        count == 1 and one_width,
        "1 aux state: it takes a state of the draft's width for the draft's own, and skips fc",
    )
    notes.warn(count != 3, f"{count} aux states: earlier releases support only 3")
    notes.warn(
        bool(subject.config.get("fc_norm") or subject.config.get("norm_output")),
        "this release reads fc_norm and norm_output (EAGLE-3.1); earlier ones silently ignore them",
    )
    return notes


def llama_cpp_eagle3(subject: Subject) -> Notes:
    """Check EAGLE-3 for llama.cpp, after its converter."""
    notes = Notes(LLAMA_CPP)
    rules_shape.llama_cpp_llama(notes, subject)
    count = len(subject.layers)
    notes.refuse(subject.blocks != 1, f"{subject.blocks} layers: it supports exactly one")
    notes.refuse(count != 3, f"{count} aux states: it reads exactly 3")
    for name in ("fc_norm", "norm_output"):
        notes.refuse(bool(subject.config.get(name)), f"{name} (EAGLE-3.1) is not supported")
    ignored_windows(notes, subject)
    notes.refuse(uses_last(subject), LAST + "it silently reads other states")
    return notes


def speculators_eagle3(subject: Subject) -> Notes:
    """Check EAGLE-3 for the speculators library."""
    notes = Notes(SPECULATORS)
    rules_shape.speculators_llama(notes, subject)
    notes.refuse(
        subject.config["target_hidden_size"] != subject.config["hidden_size"],
        "its fc needs target states of the draft's hidden size",
    )
    speculators_eagle3_windows(notes, subject)
    return notes


def deepspec_eagle3(subject: Subject) -> Notes:
    """Check EAGLE-3 for DeepSpec, whose class norms queries and keys and has all tokens."""
    notes = Notes(DEEPSPEC)
    for fault in deepspec_faults(subject.config):
        notes.refuse(True, fault)
    notes.warn(
        len(subject.layers) != 5,
        f"{len(subject.layers)} layers: it trains drafts of exactly 5, but loads others",
    )
    notes.warn(
        subject.has("lm_head.weight"),
        "its trainer uses the draft's LM head for the teacher too: to train there, put the "
        "target's head back",
    )
    return notes
