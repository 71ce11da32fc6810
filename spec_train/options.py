"""The options of `spec-train`: one frozen dataclass per command; those of the drafts join in.

No torch here, so `--help` is instant. `fit_config(draft)` joins FitConfig with the options of one
draft into a single class, which is the command line of `spec-train fit DRAFT` and the flat table
in a run's fit.json; `split_config` takes the two parts out again.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from spec_data.config import from_dict, option
from spec_data.shards.errors import ConfigError
from spec_train.data_option import parse_sources
from spec_train.draft_options import draft_options
from spec_train.presets import PRESETS, apply_preset

T = TypeVar("T")

LEAST_TEMPERATURE = 1e-6
"""Below this, logits divided by the temperature may overflow, and sampling is greedy anyway."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Options of `spec-train fit` that every draft shares."""

    data: str | tuple[str, ...] = option(
        help="dataset directory made by `spec-data generate`; several are mixed, and DIR:2 or "
        "DIR:0.25 shows each of its documents twice or every fourth time per epoch",
        metavar="DIR[:WEIGHT]",
    )
    follow: bool = option(
        False,
        help="train while `spec-data generate` still writes --data: units are used in their order "
        "as they appear, shuffled inside windows of --window-tokens",
    )
    follow_timeout: float = option(
        3600.0, help="seconds that --follow waits for a unit before it gives up", metavar="SECONDS"
    )
    follow_keep: int = option(
        0,
        help="with --follow, where the disk is short: keep at most so many units, DELETING each "
        "after it was used for all --epochs; generation waits meanwhile, and the directory never "
        "becomes a dataset. 0 deletes nothing",
        metavar="N",
    )
    out: str = option(
        help="run directory; the same command again goes on where it stopped", metavar="RUN"
    )
    preset: str | None = option(
        None,
        help="settings for a dataset of about so many documents, listed below; other flags go over "
        "them",
        choices=tuple(PRESETS),
    )
    steps: int | None = option(
        None, help="optimizer steps in all; 0 writes the untrained draft", metavar="N"
    )
    epochs: int | None = option(
        None, help="passes over the training split, instead of --steps; 3 if neither is given"
    )
    batch_size: int = option(4, help="packs per micro-batch: lower it when memory runs out")
    accumulation: int = option(
        1,
        help="micro-batches per optimizer step and process; the step is that of one big batch of "
        "--batch-size x --accumulation x processes packs",
    )
    sharding: str = option(
        "ddp",
        help="with several processes. ddp: each holds the whole draft; fsdp2: weights, gradients "
        "and optimizer are split among them",
        choices=("ddp", "fsdp2"),
    )
    seq_len: int = option(2048, help="tokens per pack; longer documents are cut to it, and counted")
    lr: float | None = option(
        None,
        help="peak learning rate; not given: 1e-4 at hidden size 4096 (the EAGLE-3 recipe), "
        "growing with 1/(hidden size) to at most 4e-3 for small drafts",
    )
    warmup_ratio: float = option(0.02, help="share of the steps that warm up linearly")
    min_lr_ratio: float = option(0.05, help="where the cosine ends, as a share of --lr")
    weight_decay: float = option(0.0, help="AdamW decay of matrices; never of norms and biases")
    clip: float = option(0.5, help="largest gradient norm; 0 turns clipping off")
    seed: int = option(0, help="decides initial weights, order and validation split")
    validation: float = option(
        0.02, help="share of documents held out, chosen by a hash of the document id"
    )
    validation_documents: int = option(
        512, help="at most so many held-out documents are measured each time; 0 = all"
    )
    window_tokens: int = option(
        4_194_304, help="documents are shuffled inside windows of so many tokens"
    )
    dtype: str = option(
        "auto",
        help="arithmetic; weights and optimizer are fp32 always. auto: bf16 on a GPU, else fp32",
        choices=("auto", "fp32", "bf16"),
    )
    device: str = option("auto", help="cpu, cuda, cuda:1 ...; auto: a GPU where there is one")
    init_from: str | None = option(
        None,
        help="start from the weights of this draft: a run, a checkpoint, or a draft directory in "
        "any form that `spec-train export` writes, whoever trained it",
    )
    log_every: int = option(10, help="steps between lines of metrics.jsonl")
    eval_every: int = option(500, help="steps between validations (also before the first step)")
    save_every: int = option(500, help="steps between checkpoints")
    keep: int = option(2, help="checkpoints kept, besides the best draft")
    track: str | None = option(
        None,
        help="show the figures elsewhere too: tensorboard (into RUN), wandb, or what else "
        "accelerate knows, several with commas; metrics.jsonl has them always",
        metavar="NAMES",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.data, str) and len(self.data) == 1:
            object.__setattr__(self, "data", self.data[0])
        self._require_preset()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"--steps {self.steps} and --epochs {self.epochs}: give one or the other"
            )
        if self.follow and (
            not isinstance(self.data, str) or parse_sources(self.data)[0].weight != 1
        ):
            raise ConfigError("--follow takes one --data without a weight")
        if self.follow_keep and (not self.follow or self.steps is not None):
            raise ConfigError(
                f"--follow-keep {self.follow_keep}: needs --follow, and --epochs rather than "
                "--steps: they say when a unit was used often enough"
            )
        _at_least(self, 0, "follow_keep", "follow_timeout")
        _at_least(self, 0, "steps", "clip", "weight_decay", "validation_documents", "seed")
        _at_least(self, 1, "epochs", "batch_size", "accumulation", "window_tokens", "keep")
        _at_least(self, 1, "log_every", "eval_every", "save_every")
        _at_least(self, 4, "seq_len")
        _share(self, "warmup_ratio", "min_lr_ratio", "validation")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr}: a learning rate is above 0")

    def _require_preset(self) -> None:
        """Refuse a preset that was named and not applied: it would have no effect."""
        if self.preset not in PRESETS:
            return
        defaults = {f.name: f.default for f in dataclasses.fields(FitConfig)}
        names = [name for name in PRESETS[self.preset].values if name in defaults]
        if all(getattr(self, name) == defaults[name] for name in names):
            raise ConfigError(
                f"preset {self.preset!r} has no effect: every option that it sets has its default. "
                "A preset is applied by `spec-train fit --preset`, spec_train.fit(..., preset=...) "
                "and spec_train.options.resolve_fit, not by FitConfig itself"
            )

    def packs_per_step(self, world_size: int = 1) -> int:
        """Packs of one optimizer step of `world_size` processes, whatever the micro-batch size."""
        return self.batch_size * self.accumulation * world_size


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{_flag(name)} {value}: expected at least {least}")


def _share(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{_flag(name)} {value}: expected a share from 0 to below 1")


@functools.cache
def fit_config(draft: str) -> type:
    """Return the class whose fields are FitConfig's followed by those of the named draft.

    Raises:
        DraftError: there is no such draft.
    """
    options = draft_options(draft)
    return dataclasses.make_dataclass(
        "Fit" + options.__name__,
        [],
        bases=(options, FitConfig),
        frozen=True,
        kw_only=True,
    )


def part(cls: type[T], joined: Any) -> T:
    """The `cls` part of a joined config."""
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: getattr(joined, name) for name in names})


def split_config(draft: str, joined: Any) -> tuple[FitConfig, Any]:
    """The (FitConfig, draft options) parts of a `fit_config(draft)` instance."""
    return part(FitConfig, joined), part(draft_options(draft), joined)


def resolve_fit(
    draft: str,
    given: dict[str, Any],
    table: dict[str, Any] | None = None,
    where: str = "the command line",
) -> Any:
    """Build the joined config of `fit DRAFT`: `given` over `table` over a preset over defaults.

    The command line and the Python API both come through here, so a preset works in both.
    `given` holds what the caller typed, `table` the content of a config file, and `where` names
    their place in errors. `split_config` takes the result apart.

    Raises:
        DraftError: an unknown draft, or a bad value of one of its options.
        ConfigError: an unknown option, or a value of the wrong type or range.
    """
    cls = fit_config(draft)
    names = {field.name for field in dataclasses.fields(cls)}
    return from_dict(cls, apply_preset(given, table or {}, names), where=where)


def default_lr(hidden_size: int) -> float:
    """Peak learning rate by draft width, to two digits: 1e-4 at 4096, 4e-4 at 1024, at most 4e-3.

    1e-4 is what EAGLE-3 trainers use for targets of 4096 and more; the rate of a matrix under Adam
    goes with 1/width (maximal-update parametrisation, arXiv 2203.03466).
    """
    return float(f"{min(4e-3, 1e-4 * 4096 / hidden_size):.1e}")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Options of `spec-train eval`: a draft against a dataset, against its target, or both."""

    draft: str = option(help="draft directory, checkpoint or run (its best draft)", metavar="DIR")
    data: str | None = option(
        None, help="dataset to simulate acceptance on, without the target", metavar="DIR"
    )
    split: str = option(
        "auto",
        help="documents of --data: those the run of this draft held out (validation), the others, "
        "or all. auto: validation on the dataset it was trained on, else all",
        choices=("auto", "validation", "train", "all"),
    )
    target: str | None = option(
        None, help="model directory or name, to decode with for real", metavar="MODEL"
    )
    prompts: str | None = option(
        None, help="JSONL rows with messages, prompt or turns, for --target", metavar="FILE"
    )
    json: str | None = option(None, help="write every figure to this file", metavar="FILE")
    save_responses: str | None = option(
        None,
        help="write the greedy responses as input_ids and loss_mask, a corpus for `spec-data "
        "generate` in the target's own words",
        metavar="FILE",
    )
    temperature: float = option(0.0, help="0 decodes greedily; above 0 samples, losslessly too")
    max_new_tokens: int = option(256, help="tokens of a response at most")
    limit: int = option(0, help="first N prompts and first N documents only; 0 = all", metavar="N")
    draft_tokens: int = option(
        0, help="tokens drafted per round; 0 = the unroll steps the draft was trained with"
    )
    confidence_threshold: float = option(
        0.0,
        help="end a round's drafts before the first whose confidence is below this, of drafts "
        "that forecast it (DSpark); 0 = off",
        metavar="P",
    )
    tree_tokens: int = option(
        0,
        help="decode with dynamic trees (EAGLE-2) of so many drafted tokens, --draft-tokens deep, "
        "instead of chains; 0 = chains. EAGLE-2 and EAGLE-3 use 60",
        metavar="N",
    )
    tree_topk: int = option(
        10, help="likeliest nodes expanded per level of a tree, and children of each", metavar="K"
    )
    seed: int = option(0, help="decides the samples when --temperature is above 0")
    dtype: str = option(
        "auto",
        help="of target and draft. auto: the target's own on a GPU, else fp32, in which greedy "
        "decoding can be proven lossless",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = option("auto", help="cpu, cuda, cuda:1 ...; auto: a GPU where there is one")
    attn: str = option(
        "auto", help="the target's attention implementation (eager, sdpa, flash_attention_2 ...)"
    )
    chat_template_kwargs: str | None = option(
        None,
        help='JSON object for the chat template, such as {"enable_thinking": false}; not given: '
        "as the training data was rendered, where that is known",
        metavar="JSON",
    )
    trust_remote_code: bool = option(False, help="run model code that comes with the target")

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
        _share(self, "confidence_threshold")
        if self.tree_tokens and self.target is None:
            raise ConfigError(
                "--tree-tokens decodes for real: it needs --target and --prompts (a dataset tells "
                "nothing about branches that were not taken)"
            )
        _at_least(self, 0, "limit", "draft_tokens", "seed", "tree_tokens")
        _at_least(self, 1, "max_new_tokens", "tree_topk")


FORMATS = ("vllm", "sglang", "speculators", "deepspec", "hf")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of `spec-train export`: a draft in the form of an engine or another trainer."""

    draft: str = option(
        help="draft directory, checkpoint or run (its best draft), in any of the formats",
        metavar="DIR",
    )
    format: str | None = option(
        None,
        help="whom it is for: vllm and sglang (also llama.cpp's converter) read flat directories, "
        "speculators its own envelope, deepspec its classes; hf is spec-train's own checkpoint",
        choices=FORMATS,
    )
    out: str | None = option(None, help="new directory to write", metavar="DIR")
    target: str | None = option(
        None,
        help="the draft's target: a directory lets its embedding, layers and lengths be checked; "
        "its name is written where a format names the target",
        metavar="MODEL",
    )
    check: bool = option(
        False, help="report what every engine would make of the draft; without --out, only that"
    )

    def __post_init__(self) -> None:
        if self.out is None and not self.check:
            raise ConfigError("nothing to do: give --out with --format, or --check")
        if self.out is not None and self.format is None:
            raise ConfigError(f"--out {self.out} needs --format: {', '.join(FORMATS)}")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Options of `spec-train replay`: the batch that stopped a run, once more."""

    data: str | None = option(
        None,
        help="the run's dataset, where it is not in its old place; manifest.json and target/ of it "
        "are enough",
        metavar="DIR",
    )
    device: str = option("auto", help="cpu, cuda, cuda:1 ...; auto: a GPU where there is one")
    json: str | None = option(None, help="write every figure to this file", metavar="FILE")
