"""`--preset`: settings for a dataset of a given size, as maintainers report them for that size.

Where the numbers come from (read in 2026; a pack here holds several samples, so steps are counted
in tokens):

- 5k: speculators' tutorial runs (examples/train/*_5k.sh) take 5,000 chats for 5 epochs at 1e-4, a
  draft vocabulary of 32,000 and two packs of 8,192 tokens per step, and call it a check that the
  pipeline learns, not a good draft: an earlier one reports an acceptance length of 1.57 on MT-Bench
  with 3 drafted tokens (Llama-3.1-8B). What such a run is not for: speculators issue 751.
- 50k: SpecForge's recipes for ShareGPT (examples/configs/*-eagle3-*.yaml) train at 1e-4 with 7
  unroll steps, gradients clipped at 0.5 and 8 samples of up to 4,096 tokens per step, for up to 10
  epochs. DeepSpec issue 84 finds EAGLE-3 at its best after 4.6 epochs and worse from there on, so
  6 are planned here: `best` is kept by acceptance anyway.
- 500k: the EAGLE-3 paper (arXiv 2503.01840) uses 532,000 samples of ShareGPT and UltraChat;
  speculators' maintainers (issue 751) 500,000 and more for 2 to 3 epochs. DeepSpec steps over 512
  samples at a time; 32 packs of 4,096 tokens are about a quarter of that. speculators report 1.98
  with 3 drafted tokens for Qwen3-8B on 330,000 samples (MT-Bench), users of DeepSpec 3.3 for
  Qwen3-4B on its own answers to all of open-perfectblend.

The learning rate is left to its own rule, which is the 1e-4 of all of these at hidden size 4096
(the paper: 5e-5). No torch here.
"""

import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

HOW_LONG = frozenset({"steps", "epochs"})
"""Options that exclude each other: whoever gives one of them decides about both."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Options by name, of the trainer and of drafts that have them, and what to expect of them."""

    values: dict[str, Any]
    expect: str


PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        values={
            "steps": 20,
            "batch_size": 1,
            "accumulation": 1,
            "seq_len": 256,
            "ttt_steps": 2,
            "draft_vocab_size": 2048,
            "validation_documents": 8,
            "log_every": 5,
            "eval_every": 20,
            "save_every": 20,
        },
        expect="a minute on a CPU, up to about hidden size 1024: proves that data, draft and disk "
        "work together. The draft is as good as untrained",
    ),
    "5k": Preset(
        values={
            "epochs": 5,
            "batch_size": 1,
            "accumulation": 4,
            "seq_len": 4096,
            "warmup_ratio": 0.04,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.05,
            "eval_every": 100,
            "save_every": 250,
        },
        expect="some 1,500 steps. The loss falls and acceptance rises clearly above 1 (speculators "
        "report 1.57 with 3 drafted tokens), enough to trust the pipeline, not to serve",
    ),
    "50k": Preset(
        values={
            "epochs": 6,
            "batch_size": 2,
            "accumulation": 4,
            "seq_len": 4096,
            "warmup_ratio": 0.02,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.01,
            "eval_every": 500,
            "save_every": 500,
        },
        expect="some 9,000 steps. A useful draft for text like its corpus; EAGLE-3 may be at its "
        "best before the end, which `best` keeps",
    ),
    "500k": Preset(
        values={
            "epochs": 3,
            "batch_size": 4,
            "accumulation": 8,
            "seq_len": 4096,
            "warmup_ratio": 0.015,
            "ttt_steps": 7,
            "draft_vocab_size": 32000,
            "validation": 0.002,
            "eval_every": 500,
            "save_every": 500,
        },
        expect="some 11,000 steps: what published drafts are made with (acceptance lengths of 2 "
        "with 3 drafted tokens are reported, and above 3 on the target's own answers)",
    ),
}


def apply_preset(
    flags: dict[str, Any], table: dict[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """Options from flags over the config file's `table` over a preset over defaults.

    A preset that the flags name goes over the file: who types it means it. A preset sets those of
    its options that are in `names`, which a draft has. Who says how long replaces both --steps and
    --epochs of what it goes over.
    """
    preset = flags.get("preset", table.get("preset"))
    found = PRESETS[preset].values if preset in PRESETS else {}
    values = {name: value for name, value in found.items() if name in names}
    layers = [table, values] if "preset" in flags else [values, table]
    merged: dict[str, Any] = {}
    for layer in (*layers, flags):
        if layer.keys() & HOW_LONG:
            merged = {name: value for name, value in merged.items() if name not in HOW_LONG}
        merged |= layer
    return merged


def preset_help(names: Collection[str]) -> str:
    """What every preset sets and what to expect of it, for --help.

    `names` are the options that a draft has.
    """
    lines = ["presets (any flag given too goes over them):"]
    for name, preset in PRESETS.items():
        flags = " ".join(
            f"--{option.replace('_', '-')} {value}"
            for option, value in preset.values.items()
            if option in names
        )
        for text in (flags, preset.expect):
            start = f"  {name:<6} " if text is flags else " " * 9
            lines.append(textwrap.fill(text, 90, initial_indent=start, subsequent_indent=" " * 9,
                                       break_on_hyphens=False))  # fmt: skip
    return "\n".join(lines)
