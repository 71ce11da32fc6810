"""The options of `spec-train fit` that every draft shares. No torch here: `--help` is instant."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from spec_data.shards.checking import CHECK_HELP, CHECKS, FIRST
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.shards.turn_masks import check_policy
from spec_data.terminal.config import DOCUMENT_LENGTH, option
from spec_train.options.data_option import parse_sources
from spec_train.options.loss_options import LEARNING, OptimizerOptions
from spec_train.options.presets import PRESETS
from spec_train.options.shape_options import SHAPE

REQUIRED = "required"
LENGTH = "how long, how large"
DATA = "data and order"
RUNNING = "where it runs"
FOLLOW = "training while the dataset is generated"
FILES = "files and figures"

BATCH = 4
"""Packs per micro-batch for a dataset that has enough tokens."""


def accept_edited_option() -> Any:
    """Return the option, shared by the commands that read a draft, to ignore a broken seal."""
    return option(
        False,
        help="use a draft although its files are not as they were sealed; the differences are "
        "logged. For drafts that were edited on purpose",
        group=FILES,
    )


@dataclass(frozen=True, kw_only=True)
class FitConfig(OptimizerOptions):
    """Options of `spec-train fit` that every draft shares."""

    data: str | tuple[str, ...] = option(
        help="dataset that `spec-data generate` has written: a directory, or a URL such as "
        "s3://bucket/data (docs/remote.md). Several are mixed: DIR:2 shows each document twice per "
        "epoch, DIR:0.25 every fourth time",
        group=REQUIRED,
        metavar="DIR[:WEIGHT]",
        dataset="read",
    )
    follow: bool = option(
        False,
        help="train while `spec-data generate` still writes --data; it may begin later, too. Units "
        "are used in their order as they appear, shuffled inside windows of --window-tokens",
        group=FOLLOW,
    )
    follow_timeout: float = option(
        3600.0,
        help="with --follow: stop with an error after waiting so many seconds for one unit, or "
        "for generation to begin",
        group=FOLLOW,
        metavar="SECONDS",
    )
    follow_keep: int = option(
        0,
        help="with --follow, for a small disk: keep at most N units on disk. Each is DELETED after "
        "its last epoch; generation pauses meanwhile; the directory cannot be sealed. 0 deletes "
        "nothing",
        group=FOLLOW,
        metavar="N",
    )
    out: str = option(
        help="run directory; the same command resumes an interrupted run in it",
        group=REQUIRED,
        metavar="RUN",
    )
    preset: str | None = option(
        None,
        help="settings for a dataset of about so many documents, listed below; other flags replace "
        "them. Start with smoke, to see within a minute that everything works",
        group=LENGTH,
        choices=tuple(PRESETS),
    )
    steps: int | None = option(
        None,
        help="optimizer steps in all; 0 writes the untrained draft. Not given: --epochs decides",
        group=LENGTH,
        metavar="N",
    )
    epochs: int | None = option(
        None,
        help="passes over the training documents, instead of --steps. Neither given: 3, and up to "
        "20 for a dataset so small that the run would have under 1,500 steps",
        group=LENGTH,
    )
    batch_size: int | None = option(
        None,
        help="packs per micro-batch. Halve it and double --accumulation when memory runs out: the "
        "result is the same. Not given: 4, and fewer for a dataset so small that an epoch would "
        "have under 100 steps",
        group=LENGTH,
        metavar="N",
    )
    accumulation: int = option(
        1,
        help="micro-batches per optimizer step and process. A step sees --batch-size x "
        "--accumulation x processes packs",
        group=LENGTH,
    )
    sharding: str = option(
        "ddp",
        help="with several processes. ddp: each holds the whole draft, the faster choice; fsdp2: "
        "weights, gradients and optimizer are split among them, for drafts that do not fit one GPU",
        group=RUNNING,
        choices=("ddp", "fsdp2"),
    )
    seq_len: int = option(
        DOCUMENT_LENGTH,
        help="tokens per pack; longer documents are cut to it, and counted. Set it to the "
        "--max-length of the dataset to lose nothing; memory grows with it",
        group=LENGTH,
    )
    lr: float | None = option(
        None,
        help="peak learning rate. Not given: 1e-4 at hidden size 4096 (the EAGLE-3 recipe), "
        "growing with 1/(hidden size) to at most 4e-3 for small drafts. Lower it if the loss jumps",
        group=LEARNING,
    )
    warmup_ratio: float = option(
        0.02, help="share of the steps in which the rate rises linearly to --lr", group=LEARNING
    )
    min_lr_ratio: float = option(
        0.05,
        help="rate at the last step of --schedule cosine or linear, as a share of --lr",
        group=LEARNING,
    )
    weight_decay: float = option(
        0.0, help="decoupled decay of matrices; never of norms and biases", group=LEARNING
    )
    clip: float = option(
        0.5, help="largest gradient norm of a step; 0 turns clipping off", group=LEARNING
    )
    seed: int = option(
        0,
        help="decides the initial weights and the order; the same seed repeats a run",
        group=DATA,
    )
    split_seed: int | None = option(
        None,
        help="decides which documents are held out. --seed does not, so runs of different seeds "
        "are measured on the same documents. Not given: 0",
        group=DATA,
        metavar="N",
    )
    validation: float = option(
        0.02,
        help="share of the documents held out for validation, chosen by a hash of the document id; "
        "8 documents at least, or a tenth if that is less. 0: none",
        group=DATA,
    )
    validation_documents: int = option(
        512,
        help="measure at most so many held-out documents at each validation; 0 = all. Lower it "
        "where validation takes long",
        group=DATA,
    )
    mask: str | None = option(
        None,
        help="supervised tokens, from the stored turns: assistant (every turn), last-turn, first-N "
        "(turns, such as first-2), roles=A,B (such as roles=text), or all. Not given: as generated",
        group=DATA,
        metavar="POLICY",
    )
    window_tokens: int = option(
        4_194_304,
        help="documents are shuffled inside windows of so many tokens: a larger window mixes "
        "better, a smaller one reads the disk in longer runs",
        group=DATA,
    )
    check: str = option(
        FIRST,
        help=CHECK_HELP,
        group=DATA,
        choices=CHECKS,
    )
    dtype: str = option(
        "auto",
        help="dtype of the arithmetic; weights and optimizer are always fp32. auto: bf16 on a GPU, "
        "fp32 elsewhere",
        group=RUNNING,
        choices=("auto", "fp32", "bf16"),
    )
    device: str = option(
        "auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one", group=RUNNING
    )
    init_from: str | None = option(
        None,
        help="start from the weights and the shape of this draft: a run, a checkpoint, or a draft "
        "directory of any trainer in docs/published-drafts.md. Not given: random weights, or the "
        "target's where a draft says so",
        group=LEARNING,
        metavar="DIR",
        holds=Kind.DRAFT,
    )
    draft_config: str | None = option(
        None,
        help="shape of the draft from a config.json with keys of transformers, any subset, such as "
        "that of a published draft. A flag replaces its key; a key that contradicts the target is "
        "an error",
        group=SHAPE,
        metavar="FILE",
    )
    accept_edited: bool = accept_edited_option()
    log_every: int = option(10, help="steps between lines of metrics.jsonl", group=FILES)
    eval_every: int | None = option(
        None,
        help="steps between validations (one also before the first step). Not given: a fifth of "
        "the run, at most 500",
        group=FILES,
        metavar="N",
    )
    save_every: int | None = option(
        None,
        help="steps between checkpoints. Lower it where runs are often interrupted without "
        "SIGTERM. Not given: a fifth of the run, at most 500",
        group=FILES,
        metavar="N",
    )
    keep: int = option(2, help="checkpoints that stay on disk, besides the best draft", group=FILES)
    track: str | None = option(
        None,
        help="also send the figures to tensorboard (into RUN), wandb, or another tracker of "
        "accelerate; several with commas. metrics.jsonl always has them",
        group=FILES,
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
        if self.mask is not None:
            check_policy(self.mask)
        if self.mask is not None and self.follow:
            raise ConfigError(
                f"--mask {self.mask} and --follow: the masks of all documents are needed first; "
                "train on the sealed dataset, or generate with the mask that you want"
            )
        at_least(self, 0, "follow_keep", "follow_timeout")
        at_least(self, 0, "steps", "clip", "weight_decay", "validation_documents", "seed")
        at_least(self, 0, "split_seed")
        at_least(self, 1, "epochs", "batch_size", "accumulation", "window_tokens", "keep")
        at_least(self, 1, "log_every", "eval_every", "save_every")
        at_least(self, 4, "seq_len")
        self.beta_pair()
        share(self, "warmup_ratio", "min_lr_ratio", "validation")
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
        """Return the number of packs of one optimizer step of `world_size` processes."""
        return self.micro_batch * self.accumulation * world_size

    @property
    def micro_batch(self) -> int:
        """Number of packs of a micro-batch."""
        return self.batch_size or BATCH


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def at_least(config: Any, least: int, *names: str) -> None:
    """Refuse the named options of `config` below `least`; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{_flag(name)} {value}: expected at least {least}")


def share(config: Any, *names: str) -> None:
    """Refuse the named options of `config` that are no share from 0 to below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{_flag(name)} {value}: expected a share from 0 to below 1")
