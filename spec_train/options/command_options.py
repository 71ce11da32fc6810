"""The options of `eval` and `export`, one frozen dataclass per command. No torch here."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from spec_data.shards.checking import CHECK_HELP, CHECKS, FIRST
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.shards.turn_masks import check_policy
from spec_data.terminal.config import option
from spec_train.options.batch_options import batch_prompts_option, check_batch_prompts
from spec_train.options.benchmark_options import (
    check_benchmark,
    cost_ratio_option,
    draft_tokens_option,
    prompts_option,
)
from spec_train.options.report_options import markdown_option, report_option, samples_option
from spec_train.options.training import at_least, share

T = TypeVar("T")

LEAST_TEMPERATURE = 1e-6
"""Below this, logits divided by the temperature may overflow, and sampling is greedy anyway."""


def default_lr(hidden_size: int) -> float:
    """Peak learning rate by draft width, to two digits: 1e-4 at 4096, 4e-4 at 1024, at most 4e-3.

    1e-4 is what EAGLE-3 trainers use for targets of 4096 and more; the rate of a matrix under Adam
    goes with 1/width (maximal-update parametrisation, arXiv 2203.03466).
    """
    return float(f"{min(4e-3, 1e-4 * 4096 / hidden_size):.1e}")


def file_option(group: str = "") -> Any:
    """Return the option that reads a vocabulary from a file."""
    return option(
        None,
        help="the tokens that the draft can propose, instead of a size: a JSON list of ids, a "
        "safetensors file of ids or of d2t/t2d, or any draft (its directory, run or weights file)",
        group=group,
        metavar="FILE",
    )


def coverage_option(group: str = "") -> Any:
    """Return the option that sizes a vocabulary by what it covers."""
    return option(
        None,
        help="the smallest vocabulary that holds this share of the supervised tokens, such as "
        "0.99, instead of a size",
        group=group,
        metavar="SHARE",
    )


def source_option(default: str, group: str = "") -> Any:
    """Return the option that says in which data tokens are counted; `default`: without it."""
    return option(
        None,
        help="count tokens in this dataset, or take the counts of a JSON object {token id: count}; "
        f"not given: {default}. A corpus must be captured first",
        group=group,
        metavar="DATA",
    )


def accept_edited_option() -> Any:
    """Return the option, shared by the commands that read a draft, to ignore a broken seal."""
    return option(
        False,
        help="use a draft although its files are not as they were sealed; the differences are "
        "logged. For drafts that were edited on purpose",
        group=FILES,
    )


FILES, DATA, RUNNING, REQUIRED = "files", "data", "where it runs", "required"
_MEASURED = "what is measured"
_DECODING = "decoding"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Options of `spec-train eval`: a draft against a dataset, against its target, or both."""

    draft: str = option(
        help="the draft: a run (its best draft), a checkpoint or a draft directory",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DRAFT,
    )
    data: str | None = option(
        None,
        help="dataset on which acceptance is simulated, without the target: a directory or a URL. "
        "The quick check",
        group=_MEASURED,
        metavar="DIR",
        dataset="read",
        holds=Kind.DATASET,
    )
    accept_edited: bool = accept_edited_option()
    split: str = option(
        "auto",
        help="documents of --data: those that the draft's run held out (validation), the others "
        "(train), or all. auto: validation on the dataset it was trained on, else all",
        group=_MEASURED,
        choices=("auto", "validation", "train", "all"),
    )
    mask: str | None = option(
        None,
        help="with --data: supervised tokens, as --mask of fit (assistant, last-turn, first-N, "
        "roles=A,B, all). Not given: those of the run on its own data, else the stored ones",
        group=_MEASURED,
        metavar="POLICY",
    )
    walk_only: bool = option(
        False,
        help="with --data: leave out the loss and the teacher-forced figures, which take most of "
        "the time",
        group=_MEASURED,
    )
    check: str = option(
        FIRST,
        help=f"with --data: {CHECK_HELP}",
        group=RUNNING,
        choices=CHECKS,
    )
    target: str | None = option(
        None,
        help="model directory or Hub id to decode with for real, together with --prompts. The "
        "figure to trust before serving",
        group=_MEASURED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    prompts: str | None = prompts_option(_MEASURED)
    max_bad_rows: str = option(
        "auto",
        help="stop if more rows of --prompts are bad: a count such as 5, or a share such as 1% or "
        "0.01. auto is 1 %; below 1,000 rows it is 10 rows, but not more than 10 %",
        group=_MEASURED,
        metavar="N|SHARE",
        numbers=True,
    )
    json: str | None = option(
        None, help="write every figure to this file", group=FILES, metavar="FILE"
    )
    markdown: str | None = markdown_option(FILES)
    report: str = report_option(FILES)
    samples: int = samples_option(FILES)
    save_responses: str | None = option(
        None,
        help="write the greedy responses as input_ids and loss_mask: a corpus for `spec-data "
        "generate` in the target's own words",
        group=FILES,
        metavar="FILE",
    )
    temperature: float = option(
        0.0,
        help="0 decodes greedily; above 0 samples, also without changing the target's distribution",
        group=_DECODING,
    )
    max_new_tokens: int = option(256, help="longest response, in tokens", group=_DECODING)
    limit: int = option(
        0,
        help="use only the first N prompts of each source or part of a named set, and the first N "
        "documents; 0 = all",
        group=_MEASURED,
        metavar="N",
    )
    draft_tokens: str = draft_tokens_option(_DECODING)
    cost_ratio: float = cost_ratio_option(_DECODING)
    confidence_threshold: float = option(
        0.0,
        help="end a round's drafts before the first one whose confidence is below P, for drafts "
        "that forecast it (DSpark); 0 = off",
        group=_DECODING,
        metavar="P",
    )
    tree_tokens: int = option(
        0,
        help="decode with dynamic trees (EAGLE-2) of so many drafted tokens, --draft-tokens deep, "
        "instead of chains; 0 = chains. EAGLE-2 and EAGLE-3 use 60",
        group=_DECODING,
        metavar="N",
    )
    tree_topk: int = option(
        10,
        help="with --tree-tokens: nodes expanded per level, and children of each",
        group=_DECODING,
        metavar="K",
    )
    batch_prompts: int = batch_prompts_option(_DECODING)
    seed: int = option(0, help="decides the samples when --temperature is above 0", group=_DECODING)
    dtype: str = option(
        "auto",
        help="dtype of target and draft. auto: the target's own on a GPU, else fp32, in which "
        "greedy decoding can be proven lossless",
        group=RUNNING,
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = option(
        "auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one", group=RUNNING
    )
    attn: str = option(
        "auto",
        help="the target's attention implementation (eager, sdpa, flash_attention_2, ...)",
        group=RUNNING,
    )
    chat_template_kwargs: str | None = option(
        None,
        help='JSON object for the chat template, such as {"enable_thinking": false}; not given: '
        "as the training data was rendered, where that is known",
        group=_DECODING,
        metavar="JSON",
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the target; only for authors you trust",
        group=RUNNING,
    )

    def __post_init__(self) -> None:
        if self.data is None and self.target is None:
            raise ConfigError("nothing to evaluate on: give --data, or --target with --prompts")
        if (self.target is None) != (self.prompts is None):
            given, other = ("--prompts", "--target") if self.prompts else ("--target", "--prompts")
            raise ConfigError(f"{given} needs {other}: real decoding takes both")
        if self.save_responses and (self.target is None or self.temperature > 0):
            raise ConfigError(
                "--save-responses writes greedy responses: it needs --target and temperature 0"
            )
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature {self.temperature}: expected 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE:g}"
            )
        if self.mask is not None:
            check_policy(self.mask)
            if self.data is None:
                raise ConfigError(f"--mask {self.mask} is about --data; give it, or leave it out")
        share(self, "confidence_threshold")
        if self.tree_tokens and self.target is None:
            raise ConfigError(
                "--tree-tokens decodes for real: it needs --target and --prompts (a dataset tells "
                "nothing about branches that were not taken)"
            )
        check_batch_prompts(self.batch_prompts, self.tree_tokens)
        check_benchmark(self.draft_tokens, self.cost_ratio, self.target)
        at_least(self, 0, "limit", "seed", "tree_tokens", "samples")
        at_least(self, 1, "max_new_tokens", "tree_topk")
