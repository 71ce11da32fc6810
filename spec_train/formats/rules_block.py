"""Rules of engines for block drafts: DSpark, and DFlash in its published form."""

from spec_train.formats import rules_shape
from spec_train.formats.dspark import DFLASH
from spec_train.formats.preflight_notes import Notes, Subject
from spec_train.formats.rules import (
    DEEPSPEC,
    LAST,
    LAST_VLLM,
    LLAMA_CPP,
    SGLANG,
    SPECULATORS,
    TRANSFORMERS,
    VLLM,
    uses_last,
    vllm_cpu,
)
from spec_train.formats.rules_windows import (
    ignored_windows,
    llama_cpp_block_windows,
    speculators_block_windows,
    vllm_block_windows,
)


def _is_dflash(subject: Subject) -> bool:
    return DFLASH in subject.config["architectures"]


def _markov(subject: Subject) -> str | None:
    """Return the type of the Markov head; None without one."""
    return subject.config["markov_head_type"] if subject.config["markov_rank"] else None


def vllm_block(subject: Subject) -> Notes:
    """Check block drafts for vLLM, which has two methods for them."""
    notes = Notes(VLLM)
    rules_shape.vllm_block(notes, subject)
    dflash, markov = _is_dflash(subject), _markov(subject)
    notes.refuse(
        markov not in (None, "vanilla"), f"{markov} Markov head: its class supports only vanilla"
    )
    notes.warn(
        not dflash and markov is None,
        "a DSpark draft without a Markov head: it loads with a head of rank 0; drafting with such "
        "a head was not tested. A draft with the layout mask is served as DFlash",
    )
    notes.refuse(uses_last(subject), LAST_VLLM)
    notes.warn(
        not dflash and not subject.config["sample_from_anchor"],
        "some earlier releases ignored sample_from_anchor and drafted from the anchor's slot",
    )
    vllm_block_windows(notes, subject)
    return notes


def vllm_cpu_block(subject: Subject) -> Notes:
    """Check block drafts for vLLM without a GPU."""
    notes = vllm_cpu(subject)
    dflash = _is_dflash(subject)
    notes.refuse(not dflash, "DSpark uses its V2 runner, which needs Triton")
    notes.refuse(
        dflash and subject.blocks > 1,
        "its CPU kernel applies the k_norm of layer 0 to the context keys of every layer",
    )
    return notes


def sglang_block(subject: Subject) -> Notes:
    """Check block drafts for SGLang, which always uses the target's embedding and head."""
    notes = Notes(SGLANG)
    rules_shape.sglang_block(notes, subject)
    notes.refuse(
        subject.reduced,
        "a reduced vocabulary: it ignores lm_head and d2t of the draft and uses the target's head",
    )
    notes.warn(uses_last(subject), LAST + "engines treat it differently; not checked for this one")
    return notes


def llama_cpp_block(subject: Subject) -> Notes:
    """Check block drafts for llama.cpp, after its converter."""
    notes = Notes(LLAMA_CPP)
    rules_shape.llama_cpp_block(notes, subject)
    markov = _markov(subject)
    notes.refuse(markov not in (None, "vanilla"), f"{markov} Markov head: it supports only vanilla")
    confidence = subject.config["enable_confidence_head"]
    notes.refuse(
        confidence and bool(markov) and not subject.config["confidence_head_with_markov"],
        "confidence_head_with_markov = false: it always feeds the Markov embedding to the "
        "confidence head",
    )
    notes.refuse(uses_last(subject), LAST + "the process aborts")
    llama_cpp_block_windows(notes, subject)
    return notes


def speculators_block(subject: Subject) -> Notes:
    """Check block drafts for the speculators library."""
    notes = Notes(SPECULATORS)
    rules_shape.qwen3_block(notes, subject)
    notes.refuse(
        subject.config["target_hidden_size"] != subject.config["hidden_size"],
        "its fc needs target states of the draft's hidden size",
    )
    notes.refuse(
        _markov(subject) == "rnn" and not subject.config["sample_from_anchor"],
        "rnn Markov head in the layout mask: it advances the state over the anchor's slot, too",
    )
    speculators_block_windows(notes, subject)
    return notes


def deepspec_block(subject: Subject) -> Notes:
    """Check block drafts for DeepSpec."""
    notes = Notes(DEEPSPEC)
    rules_shape.qwen3_block(notes, subject)
    notes.refuse(subject.reduced, "a reduced vocabulary: its drafts use the target's full head")
    notes.refuse(
        not subject.config["sample_from_anchor"],
        "it drafts from the anchor's slot (layout anchor), this draft does not (layout mask)",
    )
    ignored_windows(notes, subject)
    return notes


def transformers_block(subject: Subject) -> Notes:
    """Check DFlash drafts for transformers' one class of them, the assistant of Muse Glimmer."""
    notes = Notes(TRANSFORMERS)
    rules_shape.qwen3_block(notes, subject)
    notes.refuse(not _is_dflash(subject), "layout anchor: its class drafts in the layout mask only")
    notes.refuse(subject.reduced, "a reduced vocabulary: it uses the target's head")
    notes.refuse(
        bool(subject.config.get("train_embeddings")),
        "an embedding of its own: it uses the target's",
    )
    notes.refuse(
        subject.config["target_hidden_size"] != subject.config["hidden_size"],
        "its fc needs target states of the draft's hidden size",
    )
    notes.refuse(
        bool(subject.config.get("sliding_window_non_causal")),
        "sliding layers that see later slots of their block",
    )
    return notes
