"""`--preset`: settings for a dataset of a given size, as maintainers report them for that size.

Sources of the numbers (read in 2026; a pack holds several samples, so step sizes are compared in
tokens):

- 5k: speculators' tutorial runs (examples/train/*_5k.sh) take 5,000 chats for 5 epochs at 1e-4, a
  draft vocabulary of 32,000 and two packs of 8,192 tokens per step. They call this a check that the
  pipeline learns, not a good draft: an earlier one reports an acceptance length of 1.57 on MT-Bench
  with 3 drafted tokens (Llama-3.1-8B). speculators issue 751 says what such a run is not for.
- 50k: SpecForge's recipes for ShareGPT (examples/configs/*-eagle3-*.yaml) train at 1e-4 with 7
  unroll steps, gradients clipped at 0.5 and 8 samples of up to 4,096 tokens per step, for up to 10
  epochs. DeepSpec issue 84 finds that EAGLE-3 is best after 4.6 epochs and gets worse afterwards,
  so the preset has 6; `best` is chosen by acceptance in any case. A user reports 1.94 on GSM8K
  after 5 epochs of 50,000 chats of ShareGPT (SpecForge issue 128, Qwen2.5-7B).
- 500k: the EAGLE-3 paper (arXiv 2503.01840) uses 532,000 samples of ShareGPT and UltraChat;
  speculators' maintainers (issue 751) 500,000 and more for 2 to 3 epochs. DeepSpec steps over 512
  samples at a time; 64 packs of 2,048 tokens are about a quarter of that. speculators report 1.98
  with 3 drafted tokens for Qwen3-8B on 330,000 samples (MT-Bench), users of DeepSpec 3.3 for
  Qwen3-4B on its own answers to all of open-perfectblend.

Sources of the times. But for `smoke` they are those of other trainers on their GPUs, and no promise
for this one: `--dry-run` measures a few steps of a run on the machine at hand.

- smoke: measured with a random Llama of width 1024 and 151,936 tokens, in 25,000 tokens of data.
- 5k: speculators' tutorial "Train EAGLE-3 Model Offline" (Llama-3.1-8B, 5,000 chats, 5 epochs).
- 50k: SpecForge pull request 37 (stored states of Llama-3.1-8B, 68,000 chats of ShareGPT).
- 500k: the model card of lightseekorg/kimi-k2.5-eagle3, trained by TorchSpec in two phases of
  300,000 chats. Its target has 1,000 billion parameters; no time of a smaller one was found that
  also tells the number of chats and of GPUs.

Presets do not set the learning rate. Its own rule results in 1e-4 at hidden size 4096, as all of
these use (the paper: 5e-5). Nor do they set --seq-len: packs are as long as the longest document
that `spec-data generate` writes by default, and a step has as many tokens as the sources say.
Validation and checkpoints follow from the length of the run. This module must not import torch.
"""

import textwrap
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from spec_data.terminal.config import as_flags, flag_of
from spec_train.options.vocabulary_options import CHOICES

EXCLUSIVE = (frozenset({"steps", "epochs"}), frozenset(CHOICES))
"""Groups of options that exclude each other: setting one of a group overrides all of it."""

_EXCLUSIVE = frozenset().union(*EXCLUSIVE)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values of options, of the trainer and of drafts, and what to expect of such a run.

    `expect` is how good the draft is, `time` how long the run takes, as measured or reported.
    """

    values: dict[str, Any]
    expect: str
    time: str


PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        values={
            "steps": 10,
            "batch_size": 1,
            "accumulation": 1,
            "ttt_steps": 2,
            "draft_vocab_size": 2048,
            "validation_documents": 8,
            "log_every": 5,
        },
        expect="shows that data, draft and disk work together. The draft is no better than an "
        "untrained one",
        time="86 CPU-seconds were measured on one thread at hidden size 1024 (EAGLE-3)",
    ),
    "5k": Preset(
        values={
            "epochs": 5,
            "batch_size": 2,
            "accumulation": 4,
            "warmup_ratio": 0.04,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.05,
        },
        expect="some 1,500 steps. The loss falls and acceptance rises clearly above 1 (speculators "
        "report 1.57 with 3 drafted tokens), enough to trust the pipeline, not to serve",
        time="speculators report 10 minutes on two H100 with the capture (Llama-3.1-8B, 5 epochs)",
    ),
    "50k": Preset(
        values={
            "epochs": 6,
            "batch_size": 4,
            "accumulation": 4,
            "warmup_ratio": 0.02,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.01,
        },
        expect="some 9,000 steps. A useful draft for text like its corpus (a user of SpecForge "
        "reports 1.94 on GSM8K); EAGLE-3 may be at its best before the end, which `best` keeps",
        time="SpecForge reports 30 minutes per epoch of 68,000 chats on eight H100 (Llama-3.1-8B)",
    ),
    "500k": Preset(
        values={
            "epochs": 3,
            "batch_size": 8,
            "accumulation": 8,
            "warmup_ratio": 0.015,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.002,
        },
        expect="some 11,000 steps: what published drafts are made with (acceptance lengths of 2 "
        "with 3 drafted tokens are reported, and above 3 on the target's own answers)",
        time="TorchSpec reports 28 hours for one epoch of 600,000 chats on 16 H200, and 16 more "
        "that run the target (Kimi-K2.5)",
    ),
}


def preset_values(name: str | None, names: Collection[str]) -> dict[str, Any]:
    """Return the values of a preset that a draft with the options `names` takes; {} without one.

    A block draft keeps the target's vocabulary: engines serve its reduced one in part only.
    """
    whole = {"draft_vocab_size"} if "block_size" in names else set()
    found = PRESETS[name].values if name in PRESETS else {}
    return {k: value for k, value in found.items() if k in names and k not in whole}


def as_flags_over_preset(config: Any) -> list[str]:
    """Write a config as command-line words, from which `apply_preset` makes the same config.

    Values of the preset that it names are left out. Defaults that replace one are not, although
    `as_flags` leaves out defaults.
    """
    values = preset_values(config.preset, [field.name for field in fields(config)])
    of_preset, typed = {}, []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in values or value is None:
            continue
        if value == values[field.name]:
            of_preset[field.name] = field.default
        elif value == field.default and not _replaced(config, field.name):
            typed += [flag_of(field), str(value)]
    return as_flags(replace(config, **of_preset)) + typed


def _replaced(config: Any, name: str) -> bool:
    """Whether another option of the group of EXCLUSIVE that `name` is in was set instead of it."""
    others = {other for group in EXCLUSIVE if name in group for other in group - {name}}
    return any(getattr(config, other, None) is not None for other in others)


def apply_preset(
    flags: dict[str, Any], table: dict[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """Merge options: flags override the config file's `table`, which overrides a preset.

    A preset named by a flag (not in the file) overrides the file, because it was typed for this
    run. A preset sets only options in `names`, those that the draft has. A source that sets one
    of a group of EXCLUSIVE removes the group from the sources that it overrides; None sets nothing.
    """
    preset = flags.get("preset", table.get("preset"))
    values = preset_values(preset, names)
    layers = [table, values] if "preset" in flags else [values, table]
    merged: dict[str, Any] = {}
    for source in (*layers, flags):
        layer = {k: v for k, v in source.items() if v is not None or k not in _EXCLUSIVE}
        for group in EXCLUSIVE:
            if layer.keys() & group:
                merged = {name: value for name, value in merged.items() if name not in group}
        merged |= layer
    return merged


def preset_help(names: Collection[str]) -> str:
    """Return the text of --help on presets: what each sets, what to expect of it, and its time.

    `names` are the options that the draft has.
    """
    lines = ["presets (other flags override them):"]
    for name, preset in PRESETS.items():
        flags = " ".join(
            f"--{option.replace('_', '-')} {value}"
            for option, value in preset_values(name, names).items()
        )
        for text in (flags, preset.expect, f"time: {preset.time}"):
            start = f"  {name:<6} " if text is flags else " " * 9
            lines.append(textwrap.fill(text, 90, initial_indent=start, subsequent_indent=" " * 9,
                                       break_on_hyphens=False))  # fmt: skip
    lines.append("  --dry-run measures the time of a run on this machine.")
    return "\n".join(lines)
