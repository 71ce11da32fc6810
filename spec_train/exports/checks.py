"""The preflight: rules of each engine's release, applied to a draft before it is written.

The rules were read in the sources of the releases named here, and those that a CPU can run were
seen (`tests/engines`). An engine that is not named for a kind of draft does not serve it.
"""

from collections.abc import Callable

import torch

from spec_train.exports.findings import OK, REFUSE, Finding, Notes, Subject

VLLM, VLLM_CPU = "vLLM 0.33.0", "vLLM 0.32.0 on a CPU"
SGLANG, LLAMA_CPP = "SGLang 0.5.23", "llama.cpp 0.5.0"
SPECULATORS, DEEPSPEC = "speculators 0.9.0", "DeepSpec"
SPEC_TRAIN = "spec-train"

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_EAGLE3_NAMES = ("eagle-", "eagle3", "dflash", "dspark")


def general(subject: Subject) -> Notes:
    """What holds wherever the draft goes."""
    notes = Notes(SPEC_TRAIN)
    broken = [
        name
        for name, value in subject.own.tensors.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    notes.refuse(bool(broken), f"weights that are not finite: {', '.join(broken)}")
    layers, count = subject.layers, subject.num_layers
    notes.refuse(layers != sorted(set(layers)), f"layers {layers} are not ascending and unique")
    notes.refuse(
        count is not None and bool(layers) and layers[-1] >= count,
        f"layer {layers[-1:]} of a target with {count} blocks (ids count outputs from 0)",
    )
    notes.warn(
        count is None and bool(layers),
        "the number of the target's blocks is unknown, so whether its last one is used was not "
        "checked; give --target DIR",
    )
    notes.warn(
        "origin" in subject.config["spec_train"] and not subject.config["spec_train"]["origin"],
        "the draft does not say which target and chat template it was trained with",
    )
    own_limit, limit = subject.config["max_position_embeddings"], subject.target.max_positions
    notes.warn(
        limit is not None and own_limit < limit,
        f"max_position_embeddings {own_limit} is less than the target's {limit}: engines stop "
        "drafting, or the whole sequence, there",
    )
    _embedding(notes, subject)
    return notes


def _embedding(notes: Notes, subject: Subject) -> None:
    """Engines share or replace the embedding: it must be the target's, bit for bit."""
    own, other = subject.own.tensors.get("embed_tokens.weight"), subject.target.embedding
    if own is None or other is None:
        return
    notes.refuse(
        own.shape != other.shape,
        f"embed_tokens {list(own.shape)}, the target's has {list(other.shape)}: another target",
    )
    if own.shape == other.shape:
        notes.refuse(
            not torch.equal(own, other.to(own.dtype)),
            "embed_tokens is not the target's: a draft of another target, or a trained embedding",
        )
        notes.warn(
            own.dtype != other.dtype,
            f"embed_tokens is the target's rounded from {other.dtype} to {own.dtype}; engines "
            "keep it as one more copy instead of sharing",
        )


def _last_layer(notes: Notes, subject: Subject, text: str) -> None:
    count, layers = subject.num_layers, subject.layers
    used = count is not None and bool(layers) and layers[-1] == count - 1
    notes.refuse(used, text.format(k=layers[-1] if layers else -1))


def vllm_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in vLLM: any layers, any number of states, both runners."""
    notes = Notes(VLLM)
    notes.refuse(bool(subject.config.get("norm_before_fc")), "norm_before_fc is not ours")
    _last_layer(
        notes,
        subject,
        "layer {k} is the target's last: vLLM gives its output before the final norm, datasets "
        "hold it after; fit without that layer",
    )
    notes.warn(
        -1 in subject.layers,
        "layer -1 (the embedding's output) is id 0 there, which drafts seldom use; not tried",
    )
    _vllm_name(notes, subject, "eagle3")
    return notes


def _vllm_name(notes: Notes, subject: Subject, method: str) -> None:
    known = any(part in subject.name.lower() for part in _EAGLE3_NAMES)
    notes.warn(
        subject.form == "vllm" and not known,
        f'the directory name "{subject.name}" does not tell vLLM the method: pass '
        f'"method": "{method}" in --speculative-config',
    )


def vllm_cpu(subject: Subject) -> Notes:
    """vLLM's CPU attention knows few head sizes."""
    notes = Notes(VLLM_CPU)
    size = subject.config["head_dim"]
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    notes.refuse(size not in CPU_HEAD_SIZES, f"head_dim {size}; its CPU attention has {sizes}")
    return notes


def sglang_eagle3(subject: Subject) -> Notes:
    """EAGLE-3 in SGLang: flat form only, the target's embedding always."""
    notes = Notes(SGLANG)
    _last_layer(notes, subject, "layer {k} is the target's last: it captures inputs of blocks only")
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
    _last_layer(
        notes, subject, "layer {k} is the target's last: it silently drafts from other data"
    )
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


Check = Callable[[Subject], Notes]
CHECKS: dict[str, tuple[tuple[str, Check], ...]] = {
    "eagle3": (
        ("vllm", vllm_eagle3),
        ("vllm-cpu", vllm_cpu),
        ("sglang", sglang_eagle3),
        ("llama.cpp", llama_cpp_eagle3),
        ("speculators", speculators_eagle3),
        ("deepspec", deepspec_eagle3),
    ),
}
"""The engines that have code for a kind of draft."""
READERS = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "speculators": ("speculators", "vllm"),
    "deepspec": ("deepspec",),
    "hf": (),
}
"""Whom a format is for: a refusal of these stops the export."""
_NAMES = {
    "vllm": VLLM,
    "vllm-cpu": VLLM_CPU,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "speculators": SPECULATORS,
    "deepspec": DEEPSPEC,
}


def preflight(subject: Subject) -> dict[str, list[Finding]]:
    """Findings by engine, "spec-train" first: what holds everywhere."""
    found = {"spec-train": list(general(subject))}
    checks = dict(CHECKS[subject.kind])
    for engine, name in _NAMES.items():
        if engine in checks:
            found[engine] = list(checks[engine](subject))
        else:
            text = f"has no code for {subject.kind} drafts"
            found[engine] = [Finding(name, REFUSE, text)]
    return found


def refusals(found: dict[str, list[Finding]], form: str) -> list[Finding]:
    """The findings that forbid a format."""
    engines = ("spec-train", *READERS[form])
    return [f for engine in engines for f in found[engine] if f.level == REFUSE]


__all__ = ["CHECKS", "OK", "READERS", "preflight", "refusals"]
