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
from dataclasses import dataclass, fields, replace
from typing import Any

from spec_train.options.vocabulary_options import CHOICES

OF_DRAFTS = ("ttt_steps", "draft_vocab_size")
"""Options of drafts that presets set."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values of options, of the trainer and of drafts, and what to expect of such a run.

    `brief` and `expect` say how good the draft is, `time` how long the run takes, as measured or
    reported.
    """

    values: dict[str, Any]
    brief: str
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
        brief="to see in a minute that everything works",
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
        brief="enough to trust the pipeline, not to serve",
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
        brief="a useful draft for text like its corpus",
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
        brief="what published drafts are made with",
        expect="some 11,000 steps: what published drafts are made with (acceptance lengths of 2 "
        "with 3 drafted tokens are reported, and above 3 on the target's own answers)",
        time="TorchSpec reports 28 hours for one epoch of 600,000 chats on 16 H200, and 16 more "
        "that run the target (Kimi-K2.5)",
    ),
}


def training_values(name: str | None) -> dict[str, Any]:
    """Return what a preset sets of the options of training; {} without one."""
    values = PRESETS[name].values if name in PRESETS else {}
    return {key: value for key, value in values.items() if key not in OF_DRAFTS}


def with_preset(options: Any, name: str | None) -> Any:
    """Return the options of a draft with what a preset sets of them, where they have defaults.

    A block draft keeps the target's vocabulary: engines serve its reduced one in part only. A
    vocabulary that another option chooses has no size.
    """
    values = PRESETS[name].values if name in PRESETS else {}
    default = {field.name: field.default for field in fields(options)}
    chosen = any(getattr(options, other, None) is not None for other in CHOICES[1:])
    skipped = {"draft_vocab_size"} if chosen or "block_size" in default else set()
    changes = {
        key: values[key]
        for key in OF_DRAFTS
        if key in values and key in default and key not in skipped
        if getattr(options, key) == default[key]
    }
    return replace(options, **changes)


def preset_help() -> str:
    """Return the text of --help on presets: what each sets, what to expect of it, and its time."""
    lines = ["presets, for a dataset of about so many documents:"]
    for name, preset in PRESETS.items():
        steps = ", ".join(
            f"{preset.values[n]} {n}" for n in ("steps", "epochs") if n in preset.values
        )
        lines.append(f"  {name:<6} {steps}, {preset.brief}")
    lines += ["", "presets in detail (other options replace their values):"]
    for name, preset in PRESETS.items():
        flags = " ".join(
            f"--{option.replace('_', '-')} {value}" for option, value in preset.values.items()
        )
        for text in (flags, preset.expect, f"time: {preset.time}"):
            start = f"  {name:<6} " if text is flags else " " * 9
            lines.append(textwrap.fill(text, 80, initial_indent=start, subsequent_indent=" " * 9,
                                       break_on_hyphens=False))  # fmt: skip
    lines.append("  --dry-run measures the time of a run on this machine.")
    return "\n".join(lines)
