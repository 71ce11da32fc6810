"""`--preset`: settings for a dataset of a given size, as maintainers report them for that size.

Sources of the numbers (read in 2026; a pack holds several samples, so step sizes are compared in
tokens):

- 5k: speculators' tutorial runs (examples/train/*_5k.sh) take 5,000 chats for 5 epochs at 1e-4, a
  draft vocabulary of 32,000 and two packs of 8,192 tokens per step. They call this a check that the
  pipeline learns, not a good draft.
- 50k: SpecForge's recipes for ShareGPT (examples/configs/*-eagle3-*.yaml) train at 1e-4 with 7
  unroll steps, gradients clipped at 0.5 and 8 samples of up to 4,096 tokens per step, for up to 10
  epochs. DeepSpec issue 84 finds that EAGLE-3 is best after 4.6 epochs and gets worse afterwards,
  so the preset has 6; `best` is chosen by acceptance in any case.
- 500k: the EAGLE-3 paper (arXiv 2503.01840) uses 532,000 samples of ShareGPT and UltraChat;
  speculators' maintainers (issue 751) 500,000 and more for 2 to 3 epochs. DeepSpec steps over 512
  samples at a time; 64 packs of 2,048 tokens are about a quarter of that.

Presets do not set the learning rate. Its own rule results in 1e-4 for AdamW at hidden size 4096, as
all of these used (the paper: 5e-5), and in 1e-3 for Muon, as speculators takes it now. Nor do they
set --seq-len: packs are as long as the longest document that `spec-data generate` writes by
default, and a step has as many tokens as the sources say. Validation and checkpoints follow from
the length of the run. This module must not import torch.
"""

import textwrap
from typing import Any

from spec_data.terminal.config import options_text
from spec_data.terminal.given import changed, free
from spec_train.options.draft_options import VOCABULARY_CHOICES, DraftOptions

OF_DRAFTS = ("ttt_steps", "draft_vocab_size")
"""Options of drafts that presets set."""

_SERVED: dict[str, Any] = {"ttt_steps": 7, "draft_vocab_size": 32000}

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "steps": 10,
        "batch_size": 1,
        "accumulation": 1,
        "ttt_steps": 2,
        "draft_vocab_size": 2048,
        "validation_documents": 8,
        "log_every": 5,
    },
    "5k": {
        "epochs": 5,
        "batch_size": 2,
        "accumulation": 4,
        "warmup_ratio": 0.04,
        **_SERVED,
        "validation": 0.05,
    },
    "50k": {
        "epochs": 6,
        "batch_size": 4,
        "accumulation": 4,
        "warmup_ratio": 0.02,
        **_SERVED,
        "validation": 0.01,
    },
    "500k": {
        "epochs": 3,
        "batch_size": 8,
        "accumulation": 8,
        "warmup_ratio": 0.015,
        **_SERVED,
        "validation": 0.002,
    },
}
"""Values of options, of the trainer and of drafts."""

_EXPECT = {
    "smoke": "to see in a minute that everything works",
    "5k": "enough to trust the pipeline, not to serve",
    "50k": "a useful draft for text like its corpus (1.94 on GSM8K is reported)",
    "500k": "what published drafts are made with (about 2 with 3 drafted tokens is reported)",
}


OF_PRESETS = {name for values in PRESETS.values() for name in values} | {"steps", "epochs"}
"""Every option that a preset may set."""


def of_training(name: str | None) -> dict[str, Any]:
    """Return what a preset sets of the options of training; {} without one."""
    values = PRESETS.get(name or "", {})
    return {key: value for key, value in values.items() if key not in OF_DRAFTS}


def of_draft(options: DraftOptions, name: str | None) -> dict[str, Any]:
    """Return what a preset sets of the options of a draft, without what was given.

    A block draft keeps the target's vocabulary: engines serve its reduced one in part only. A
    vocabulary that another option chooses has no size.
    """
    values = PRESETS.get(name or "", {})
    chosen = any(getattr(options, other, None) is not None for other in VOCABULARY_CHOICES)
    skipped = {"draft_vocab_size"} if chosen or "block_size" in options.values() else set()
    own = {key: values[key] for key in OF_DRAFTS if key in values and key not in skipped}
    return free(options, own)


def with_preset(options: DraftOptions, name: str | None) -> Any:
    """Return the options of a draft with what a preset sets of them."""
    return changed(options, **of_draft(options, name))


def preset_help() -> str:
    """Return the text of --help on presets: what to expect of each, and what it sets."""
    lines = ["presets, for a dataset of about so many documents; options that are given stay:"]
    for name, values in PRESETS.items():
        text = f"{_EXPECT[name]}: {options_text(values)}"
        lines += textwrap.wrap(text, 80, initial_indent=f"  {name:<6} ", subsequent_indent=" " * 9,
                               break_on_hyphens=False)  # fmt: skip
    return "\n".join([*lines, "  --dry-run measures the time of a run on this machine."])
