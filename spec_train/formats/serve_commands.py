"""How each engine is started with an exported draft: the commands, ready to be copied.

The flags are those of the releases in `rules`. A test runs the lines for transformers. vLLM and
llama.cpp have served exports on CPUs with these settings, but not through these very lines. The
flags of SGLang follow its documentation and sources.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spec_train.formats.preflight_notes import OF_TARGET, REFUSE, Finding, Subject
from spec_train.formats.read_forms import unread_form
from spec_train.formats.rules import LLAMA_CPP, SGLANG, TRANSFORMERS, VLLM

TARGET = "TARGET"
"""Stands in a command for a target whose name is not known."""


@dataclass(frozen=True)
class Serving:
    """How one engine's release serves an export: lines of `language`, which is sh or python."""

    engine: str
    lines: tuple[str, ...]
    language: str = "sh"
    note: str = ""


def servings(
    subject: Subject, found: dict[str, list[Finding]], folder: str, drafted: int
) -> list[Serving]:
    """Return how the engines that read an export and do not refuse its draft serve it.

    The engine that the form is named after is the first.

    Args:
        subject: the draft, its target and the form that was written.
        found: the findings of the preflight.
        folder: the directory of the export, as it is typed.
        drafted: tokens that the draft is trained to propose per round.
    """
    target = subject.target.name or TARGET
    result = []
    for engine in sorted(_ENGINES, key=lambda name: name != subject.form):  # the form's own first
        make = _ENGINES[engine]
        if engine != "transformers" and subject.form in ("hf", "deepspec", "transformers"):
            continue  # not written for serving
        refused = any(finding.level == REFUSE for finding in found.get(engine, ()))
        if engine in found and not refused and unread_form(engine, subject) is None:
            serving = make(subject, target, folder, drafted)
            doubts = [finding.text for finding in found[engine] if finding.rule == OF_TARGET]
            notes = [serving.note, *(f"Not certain: {text}." for text in doubts)]
            result.append(replace(serving, note=" ".join(filter(None, notes))))
    return result


def vllm_config(subject: Subject, folder: str, drafted: int) -> dict[str, Any]:
    """Return vLLM's `--speculative-config`. The method is always given: else the name decides."""
    method = {"peagle": "eagle3"}.get(subject.kind, subject.kind)
    if subject.kind == "dflash" and subject.config["sample_from_anchor"]:
        method = "dspark"  # the layout anchor is DSpark's
    how = {"model": folder, "method": method, "num_speculative_tokens": drafted}
    return how | ({"parallel_drafting": True} if subject.kind == "peagle" else {})


def _vllm(subject: Subject, target: str, folder: str, drafted: int) -> Serving:
    config = json.dumps(vllm_config(subject, folder, drafted))
    words = ["vllm", "serve", target, "--speculative-config", config]
    note = ""
    if subject.form == "speculators" and subject.kind in ("eagle3", "peagle"):
        note = f"`{shlex.join(['vllm', 'serve', folder])}` does the same: the form names its target"
    return Serving(VLLM, (shlex.join(words),), note=note)


def _sglang(subject: Subject, target: str, folder: str, drafted: int) -> Serving:
    algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3"}.get(subject.kind, "DSPARK")
    if subject.kind == "dflash" and not subject.config["sample_from_anchor"]:
        algorithm = "DFLASH"
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder]
    if algorithm.startswith("EAGLE"):  # blocks take their size from the draft's config
        words += ["--speculative-num-steps", str(drafted), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(drafted + 1)]
    return Serving(SGLANG, (shlex.join(words),))


def _llama_cpp(subject: Subject, target: str, folder: str, drafted: int) -> Serving:
    block = "draft-dspark" if subject.config.get("sample_from_anchor") else "draft-dflash"
    kind = {"eagle3": "draft-eagle3", "dspark": "draft-dspark"}.get(subject.kind, block)
    convert = ["python", "convert_hf_to_gguf.py"]
    serve = ["llama-server", "-m", "target.gguf", "-md", "draft.gguf", "--spec-type", kind]
    lines = (
        [*convert, target, "--outfile", "target.gguf"],
        [*convert, folder, "--target-model-dir", target, "--outfile", "draft.gguf"],
        [*serve, "--spec-draft-n-max", str(drafted)],
    )
    note = "The converter needs the target as a directory. Without --spec-draft-n-max it drafts 3, "
    note += "and a block that is shorter than in training drafts other tokens."
    return Serving(LLAMA_CPP, tuple(shlex.join(line) for line in lines), note=note)


def _transformers(subject: Subject, target: str, folder: str, drafted: int) -> Serving:
    lines = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, MuseGlimmerAssistantModel",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
        f"target = AutoModelForCausalLM.from_pretrained({target!r})",
        f"draft = MuseGlimmerAssistantModel.from_pretrained({folder!r}, dtype=target.dtype)",
        'inputs = tokenizer("Hello", return_tensors="pt")',
        "options = dict(max_new_tokens=64, do_sample=False)",
        "out = target.generate(",
        '    **inputs, assistant_model=draft, speculation_type="dflash", **options',
        ")",
        "print(tokenizer.decode(out[0]))",
    )
    return Serving(TRANSFORMERS, lines, language="python")


_ENGINES: dict[str, Callable[[Subject, str, str, int], Serving]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
