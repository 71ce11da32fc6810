"""Rules of engines for drafts with sliding windows: who serves them, and where they mean the same.

Read in the sources of vLLM 0.33.0, SGLang 0.5.23, llama.cpp 0.5.0 and speculators 0.9.0; see
`docs/windows.md`. Every function adds findings only if the draft has a sliding layer.
"""

from spec_train.formats.dspark import DFLASH
from spec_train.formats.preflight_notes import Notes, Subject
from spec_train.options.shape_options import FULL, SLIDING


def _types(subject: Subject) -> set[str]:
    """Return the types of the draft's layers; only full ones if it has no window."""
    types = set(subject.config.get("layer_types") or ())
    return types if SLIDING in types else {FULL}


def vllm_eagle_windows(notes: Notes, subject: Subject) -> None:
    """vLLM's EAGLE-1 class indexes `layer_types` with the target's layers added."""
    notes.refuse(
        SLIDING in _types(subject),
        "sliding windows: its EAGLE-1/2 class fails on layer_types, and without them it has none",
    )


def ignored_windows(notes: Notes, subject: Subject) -> None:
    """Refuse: the engine reads neither `layer_types` nor `sliding_window` of such a draft."""
    notes.refuse(
        SLIDING in _types(subject), "sliding windows: it ignores them and attends to everything"
    )


def vllm_eagle3_windows(notes: Notes, subject: Subject) -> None:
    """vLLM reads the window of every layer; its V1 runner needs one cache group for a draft."""
    notes.warn(
        len(_types(subject)) > 1,
        "sliding and full layers in one draft: its V1 runner needs them in one KV cache group; "
        "start it with --disable-hybrid-kv-cache-manager (not tested)",
    )


def sglang_eagle3_windows(notes: Notes, subject: Subject) -> None:
    """SGLang has one window for all layers of an EAGLE-3 draft, from the command line."""
    types, window = _types(subject), subject.config.get("sliding_window") or 0
    notes.refuse(
        len(types) > 1, "sliding and full layers in one draft: it has one window for all layers"
    )
    notes.warn(
        types == {SLIDING},
        "it does not read the window from the files: start it with "
        f"--speculative-draft-window-size {window - 1} (positions before the token itself)",
    )


def speculators_eagle3_windows(notes: Notes, subject: Subject) -> None:
    """Name how the library's masks differ from serving: its trainer would continue with them."""
    if SLIDING not in _types(subject):
        return
    window, options = subject.config["sliding_window"], subject.config["spec_train"]["options"]
    steps = options.get("ttt_steps", 1)
    notes.warn(
        subject.kind == "eagle3" and steps > 1,
        "sliding windows: its trainer counts the window of every unroll step from the slot, so "
        f"step s sees s positions more than in serving (up to {steps - 1} of {window})",
    )
    depths = options.get("depths", 1)
    notes.warn(
        subject.kind == "peagle" and depths > window,
        f"sliding windows: in its trainer a depth sees all earlier ones of its chain, {depths} of "
        f"them, beyond the window of {window} positions that serving has",
    )


def vllm_block_windows(notes: Notes, subject: Subject) -> None:
    """vLLM reads window and causality of every layer, the latter from `is_causal` first."""
    types = _types(subject)
    causal = not subject.config.get("sliding_window_non_causal", False)
    dflash = DFLASH in subject.config["architectures"]
    notes.refuse(
        len(types) > 1 and causal and dflash and subject.form == "speculators",
        "sliding and full layers in a DFlash draft of the speculators form: it reads "
        "sliding_window_non_causal = false as causal attention in the full layers too; serve "
        "--format vllm",
    )
    notes.warn(
        len(types) > 1 and dflash,
        "sliding and full layers in one draft: start it with VLLM_USE_V2_MODEL_RUNNER=1",
    )


def llama_cpp_block_windows(notes: Notes, subject: Subject) -> None:
    """llama.cpp reads the window of every layer, and one causality for all of them."""
    causal = not subject.config.get("sliding_window_non_causal", False)
    notes.refuse(
        len(_types(subject)) > 1 and causal,
        "sliding layers that are causal inside a block beside full ones that are not: it has one "
        "rule for all layers, and slots would see later slots in all of them",
    )


def speculators_block_windows(notes: Notes, subject: Subject) -> None:
    """Name how the library's mask differs from serving: its trainer would continue with it."""
    window = subject.config.get("sliding_window")
    notes.warn(
        SLIDING in _types(subject),
        f"sliding windows: in its trainer every slot sees the {window} positions before the "
        f"anchor; in serving slot k sees k + 1 fewer, {window} with its own block",
    )
