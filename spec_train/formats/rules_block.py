"""What engines make of block drafts: DSpark, and DFlash as its published form."""

from spec_train.formats.dspark import DFLASH
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
    vllm_cpu,
    vllm_name,
)


def _is_dflash(subject: Subject) -> bool:
    return DFLASH in subject.config["architectures"]


def _markov(subject: Subject) -> str | None:
    """The type of the Markov head, None without one."""
    return subject.config["markov_head_type"] if subject.config["markov_rank"] else None


def vllm_block(subject: Subject) -> Notes:
    """Block drafts in vLLM: two methods, one backbone."""
    notes = Notes(VLLM)
    dflash, markov = _is_dflash(subject), _markov(subject)
    notes.refuse(markov not in (None, "vanilla"), f"{markov} Markov head: its class has vanilla")
    notes.warn(
        not dflash and markov is None,
        "a DSpark draft without a Markov head: it loads, with a head of rank 0; drafting with one "
        "was not tried. The layout mask is served as DFlash",
    )
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.warn(
        not dflash and not subject.config["sample_from_anchor"],
        "some earlier releases ignored sample_from_anchor and drafted from the anchor's slot",
    )
    vllm_name(notes, subject, "dflash" if dflash else "dspark")
    return notes


def vllm_cpu_block(subject: Subject) -> Notes:
    """Block drafts in vLLM without a GPU."""
    notes = vllm_cpu(subject)
    dflash = _is_dflash(subject)
    notes.refuse(not dflash, "DSpark runs on its V2 runner, which needs Triton")
    notes.refuse(
        dflash and subject.blocks > 1,
        "its CPU kernel gives the context keys of every layer the k_norm of layer 0",
    )
    return notes


def sglang_block(subject: Subject) -> Notes:
    """Block drafts in SGLang: the target's embedding and head always."""
    notes = Notes(SGLANG)
    notes.refuse(
        subject.reduced,
        "a reduced vocabulary: it skips lm_head and d2t of the draft and uses the target's head",
    )
    notes.warn(uses_last(subject), LAST + "engines disagree about it; not checked there")
    return notes


def llama_cpp_block(subject: Subject) -> Notes:
    """Block drafts in llama.cpp, through its converter."""
    notes = Notes(LLAMA_CPP)
    markov = _markov(subject)
    notes.refuse(markov not in (None, "vanilla"), f"{markov} Markov head: it has vanilla alone")
    notes.refuse(uses_last(subject), LAST + "the process aborts")
    size = subject.config["block_size"]
    count = size if subject.config["sample_from_anchor"] else size - 1
    notes.warn(
        True, f"draft {count} tokens (--draft-max): with fewer it shortens the block it attends to"
    )
    return notes


def speculators_block(subject: Subject) -> Notes:
    """Block drafts in the speculators library."""
    notes = Notes(SPECULATORS)
    notes.refuse(
        subject.config["target_hidden_size"] != subject.config["hidden_size"],
        "its fc takes states of the draft's own width",
    )
    return notes


def deepspec_block(subject: Subject) -> Notes:
    """Block drafts in DeepSpec."""
    notes = Notes(DEEPSPEC)
    notes.refuse(subject.reduced, "a reduced vocabulary: its drafts have the target's head")
    notes.refuse(
        not subject.config["sample_from_anchor"], "in its blocks the anchor's slot drafts, here not"
    )
    return notes
