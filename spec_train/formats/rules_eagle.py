"""What engines make of EAGLE drafts: 1 and 2, 3, and P-EAGLE."""

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
    vllm_name,
)


def vllm_eagle(subject: Subject) -> Notes:
    """EAGLE-1/2 in vLLM."""
    notes = Notes(VLLM)
    named = "eagle-" in subject.name.lower() and "eagle3" not in subject.name.lower()
    notes.warn(
        subject.form == "vllm" and not named,
        f'the directory name "{subject.name}" does not tell vLLM the method: pass '
        '"method": "eagle" in --speculative-config',
    )
    return notes


def sglang_eagle(subject: Subject) -> Notes:
    """EAGLE-1/2 in SGLang."""
    notes = Notes(SGLANG)
    notes.warn(
        subject.form not in ("sglang",),
        "needs its own form (--format sglang): it has a bias in fc, random when the file has none",
    )
    return notes


def vllm_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in vLLM: any layers, any number of states, both runners."""
    notes = Notes(VLLM)
    notes.refuse(bool(subject.config.get("norm_before_fc")), "norm_before_fc is not ours")
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.warn(
        -1 in subject.layers,
        "layer -1 (the embedding's output) is id 0 there, which drafts seldom use; not tried",
    )
    vllm_name(notes, subject, "eagle3")
    return notes


def vllm_peagle(subject: Subject) -> Notes:
    """P-EAGLE in vLLM: as EAGLE-3 drafting in parallel, on the V1 runner alone."""
    notes = Notes(VLLM)
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.refuse(not subject.has("mask_hidden"), "without mask_hidden it does not load")
    notes.warn(
        subject.form == "vllm",
        'pass "method": "eagle3" and "parallel_drafting": true in --speculative-config, whatever '
        "the directory is called",
    )
    return notes


def sglang_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in SGLang: flat form only, the target's embedding always."""
    notes = Notes(SGLANG)
    notes.warn(uses_last(subject), LAST + "engines disagree about it; not checked there")
    count = len(subject.layers)
    notes.warn(count != 3, f"{count} aux states: releases before this one made its fc for 3")
    notes.warn(
        bool(subject.config.get("fc_norm") or subject.config.get("norm_output")),
        "fc_norm and norm_output (EAGLE-3.1) are read by this release; older ones ignore them "
        "silently",
    )
    return notes


def llama_cpp_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in llama.cpp, through its converter."""
    notes = Notes(LLAMA_CPP)
    count = len(subject.layers)
    notes.refuse(subject.blocks != 1, f"{subject.blocks} layers: it runs drafts of exactly one")
    notes.refuse(count != 3, f"{count} aux states: it reads exactly 3")
    for name in ("fc_norm", "norm_output"):
        notes.refuse(bool(subject.config.get(name)), f"{name} (EAGLE-3.1) is not computed there")
    notes.refuse(uses_last(subject), LAST + "it silently drafts from other data")
    return notes


def speculators_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in the speculators library."""
    notes = Notes(SPECULATORS)
    notes.refuse(
        subject.config["target_hidden_size"] != subject.config["hidden_size"],
        "its fc takes states of the draft's own width",
    )
    return notes


def deepspec_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in DeepSpec."""
    notes = Notes(DEEPSPEC)
    notes.refuse(True, "its EAGLE-3 norms queries and keys, this draft does not")
    return notes
