"""How a draft is trained: the options of `spec-train fit` for every draft. No torch here."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter
from msgspec import Meta

from spec_data.shards.errors import ConfigError
from spec_data.shards.turn_masks import check_policy
from spec_data.terminal.config import DOCUMENT_LENGTH, check_bounds
from spec_data.terminal.given import Options
from spec_data.terminal.rules import Excludes, Needs, OneOf, Rule
from spec_data.terminal.types import JOINED, Count, Holds, Positive, more
from spec_train.options.data_option import parse_sources
from spec_train.options.loss_function import named_loss
from spec_train.options.presets import OF_PRESETS, of_training

SIZE, DATA, LEARNING = more("how long, how large"), more("data and order"), more("learning")
RUNNING, FILES = more("where it runs"), more("files and figures")
FOLLOW = more("training while the dataset is generated")

if TYPE_CHECKING:
    LossChoice = str | Callable[..., Any]
else:
    LossChoice = str  # the text of a function: see `named_loss`

_Share = Annotated[float, Meta(ge=0, lt=1)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """How a draft is trained: the options that `fit` and the runs of `search` share."""

    data: Annotated[
        Sequence[str] | str,
        Holds(dataset="read"),
        Parameter(metavar="DIR[:WEIGHT]", consume_multiple=1),
    ]
    """Dataset that `spec-data generate` has written: a directory, or a URL such as s3://bucket/data
    (docs/remote.md); DIR@FINGERPRINT is that very dataset or an error. Several are mixed: DIR:2
    shows each document twice per epoch, DIR:0.25 every fourth time."""
    out: Annotated[str, Parameter(metavar="RUN")]
    """Run directory; the same command resumes an interrupted run in it."""
    preset: Literal["smoke", "5k", "50k", "500k"] | None = None
    """Settings for a dataset of about so many documents, listed below; other options replace them.
    Start with smoke, to see within a minute that everything works."""
    steps: Count | None = None
    """Optimizer steps in all; 0 writes the untrained draft. Not given: --epochs decides."""
    epochs: Annotated[Positive | None, Parameter(metavar="N")] = 3
    """Passes over the training documents, instead of --steps. Not given: up to 20 for a dataset so
    small that the run would have under 1,500 steps."""
    batch_size: Positive = 4
    """Packs per micro-batch. Halve it and double --accumulation when memory runs out: a step has
    the same packs, but drafts that draw noise, blocks or samples draw others. Not given: fewer for
    a dataset so small that an epoch would have under 100 steps."""
    accumulation: Annotated[Positive, SIZE] = 1
    """Micro-batches per optimizer step and process. A step sees --batch-size x --accumulation x
    processes packs. Not given: fewer than the preset's for a small dataset."""
    sharding: Annotated[Literal["ddp", "fsdp2"], RUNNING] = "ddp"
    """With several processes. ddp: each holds the whole draft, the faster choice; fsdp2: weights,
    gradients and optimizer are split among them, for drafts that do not fit one GPU. It gathers
    the layers of peagle (without --segments) and of block drafts one by one, and again for the
    backward pass; with --accumulation, it frees none before the last micro-batch."""
    exchange: Annotated[Literal["fp32", "bf16"], RUNNING] = "fp32"
    """What several processes send each other: gradients, and the weights that fsdp2 gathers, as
    they are; or rounded to bf16, which is half of the bytes (weights only if --dtype is bfloat16).
    With bf16, fsdp2 also adds up the gradients of --accumulation in bf16."""
    seq_len: Annotated[int, Meta(ge=4)] = DOCUMENT_LENGTH
    """Tokens per pack; longer documents are cut to it, and counted. Set it to the --max-length of
    the dataset to lose nothing; memory grows with it."""
    lr: Annotated[float, Meta(gt=0)] | None = None
    """Peak learning rate. Not given: with muon, 1e-3 at hidden size 4096, and for narrower targets
    more, with the root of the width, to at most 5e-3; with adamw, 1e-4, with the width, to at most
    4e-3. A run of under 400 steps from random weights has 400 / steps times that, at most 4 times.
    Lower it if the loss jumps."""
    optimizer: Annotated[Literal["muon", "adamw"], LEARNING] = "muon"
    """Muon: Muon for the matrices of the draft's layers, AdamW for embeddings, heads, norms and
    biases, both with --lr (Muon's step has AdamW's size; the tables of DSpark's Markov head learn
    faster, the more so the lower their rank); or adamw for all."""
    schedule: Annotated[Literal["cosine", "linear", "constant"], LEARNING] = "cosine"
    """Learning rate after the warm-up: cosine or linear, down to a twentieth of --lr at the last
    step, or constant."""
    warmup_ratio: Annotated[_Share, LEARNING] = 0.02
    """Share of the steps in which the rate rises linearly to --lr."""
    min_lr_ratio: Annotated[_Share, LEARNING] = 0.05
    """Rate at the last step of --schedule cosine or linear, as a share of --lr."""
    weight_decay: Annotated[float, Meta(ge=0), LEARNING] = 0.0
    """Decoupled decay of matrices; never of norms and biases."""
    clip: Annotated[float, Meta(ge=0), LEARNING] = 0.5
    """Largest gradient norm of a step; 0 turns clipping off."""
    seed: Annotated[Count, DATA] = 0
    """Decides the initial weights and the order; the same seed repeats a run."""
    split_seed: Annotated[Count, DATA] = 0
    """Decides which documents are held out. --seed does not, so runs of different seeds are
    measured on the same documents."""
    validation: Annotated[_Share, DATA] = 0.02
    """Share of the documents held out for validation, chosen by a hash of the document id; 8
    documents at least, or a tenth if that is less. 0: none."""
    validation_documents: Annotated[Count, DATA] = 512
    """Measure at most so many held-out documents at each validation; 0 = all. Lower it where
    validation takes long."""
    mask: Annotated[str | None, DATA, Parameter(metavar="POLICY")] = None
    """Supervised tokens, from the stored turns: assistant (every turn), last-turn, first-N (turns,
    such as first-2), roles=A,B (such as roles=text), or all. Not given: as generated."""
    window_tokens: Annotated[Positive, DATA] = 4_194_304
    """Documents are shuffled inside windows of so many tokens: a larger window mixes better, a
    smaller one reads the disk in longer runs."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], RUNNING] = "auto"
    """Dtype of the arithmetic; weights and optimizer are always float32. auto: bfloat16 on
    a GPU, float32 elsewhere."""
    device: Annotated[str, RUNNING] = "auto"
    """Cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""
    loss_fn: Annotated[LossChoice | None, LEARNING, Parameter(metavar="FILE.py:NAME")] = None
    """A loss of one's own instead of the draft's --loss: FILE.py:NAME or MODULE:NAME, or in Python
    a function (docs/own-loop.md). A run that resumes must have the same source of it."""
    init_from: Annotated[str | None, Parameter(metavar="DIR")] = None
    """Start from the weights and the shape of this draft: a run, a checkpoint, or a draft directory
    of any trainer in docs/published-drafts.md. Not given: random weights, or the target's where a
    draft says so."""
    shape_of: Annotated[str | None, LEARNING, Parameter(metavar="FILE")] = None
    """Shape of the draft: what the config.json of a published draft states, in any form of
    docs/published-drafts.md, where no other option states it. `--config FILE` does the same."""
    accept_edited: Annotated[bool, FILES] = False
    """Use a draft although its files are not as they were sealed; the differences are logged. For
    drafts that were edited on purpose."""
    log_every: Annotated[Positive, FILES] = 10
    """Steps between lines of metrics.jsonl."""
    save_every: Annotated[Positive | None, FILES] = None
    """Steps between checkpoints. Lower it where runs are often interrupted without SIGTERM. Not
    given: a fifth of the run, at most 500."""
    keep: Annotated[Positive, FILES] = 2
    """Checkpoints that stay on disk, besides the best draft."""
    track: Annotated[str | None, FILES, JOINED, Parameter(metavar="NAMES")] = None
    """Also send the figures to tensorboard (into RUN), wandb, or another tracker of accelerate;
    several with commas. metrics.jsonl always has them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        OneOf(("steps", "epochs"), "{given}: give one or the other"),
        Excludes(
            "min_lr_ratio",
            "schedule=constant",
            "--min-lr-ratio {min_lr_ratio} is where the rate ends, and --schedule constant keeps "
            "it; give one of them",
            idle=0.05,
        ),
        *(
            Excludes(
                name,
                "validation=0",
                f"--{name.replace('_', '-')} {{{name}}} is about held-out documents, and "
                "--validation 0 holds out none; give one of them",
                idle=idle,
            )
            for name, idle in {"validation_documents": 512, "split_seed": 0}.items()
        ),
        Needs(
            "accept_edited",
            "init_from",
            "--accept-edited is about the draft of --init-from; add it",
        ),
    )

    def fill(self, made_of: Options | None) -> None:
        """Fill in what a preset decides; --steps or --epochs alone decides the length."""
        self.check_rules()
        values = self.of_preset
        if made_of is not None and made_of.values().get("preset") != self.preset:
            values = _DEFAULTS | values
        for name in values.keys() - self.given:
            self._set(name, values[name])
        if self.steps is not None:
            self._set("epochs", None)

    @property
    def of_preset(self) -> dict[str, Any]:
        """What the preset sets of these options, without what was given."""
        left = self.given | ({"steps", "epochs"} if {"steps", "epochs"} & self.given else set())
        return {n: v for n, v in of_training(self.preset).items() if n not in left}

    def validate(self) -> None:
        """Reject values outside their range."""
        given = [self.data] if isinstance(self.data, (str, os.PathLike)) else self.data
        sources = tuple(os.fspath(source) for source in given)
        self._set("data", sources[0] if len(sources) == 1 else sources)
        if self.shape_of is not None and self.init_from is not None:
            raise ConfigError(
                f"--shape-of {self.shape_of} and --init-from {self.init_from}: both bring a shape; "
                "give one of them"
            )
        if self.loss_fn is not None:
            self._set("loss_fn", named_loss(self.loss_fn))
        if self.mask is not None:
            check_policy(self.mask)
        check_bounds(self)

    def packs_per_step(self, world_size: int = 1) -> int:
        """Return the number of packs of one optimizer step of `world_size` processes."""
        return self.batch_size * self.accumulation * world_size


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Training(RunOptions):
    """How a draft is trained: the options of `spec-train fit` that every draft shares."""

    follow: Annotated[bool, FOLLOW] = False
    """Train while `spec-data generate` still writes --data; it may begin later, too. Units are used
    in their order as they appear, shuffled inside windows of --window-tokens."""
    follow_timeout: Annotated[float, Meta(ge=0), FOLLOW] = 3600.0
    """With --follow: stop with an error after waiting so many seconds for one unit, or for
    generation to begin."""
    eval_every: Annotated[Positive | None, FILES] = None
    """Steps between validations (one also before the first step). Not given: a fifth of the run, at
    most 500."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *RunOptions.rules,
        Excludes(
            "mask",
            "follow",
            "--mask {mask} and --follow: the masks of all documents are needed first; train on the "
            "sealed dataset, or generate with the mask that you want",
        ),
        Excludes(
            "eval_every",
            "validation=0",
            "--eval-every {eval_every} is about held-out documents, and --validation 0 holds out "
            "none; give one of them",
        ),
        Needs(
            "follow_timeout",
            "follow",
            "--follow-timeout goes with --follow; add it",
            idle=3600.0,  # as every fit.json has it, which --config takes
        ),
    )

    def validate(self) -> None:
        """Reject values outside their range, and what a growing dataset cannot have."""
        super().validate()
        if self.follow and (
            not isinstance(self.data, str) or parse_sources(self.data)[0].weight != 1
        ):
            raise ConfigError("--follow takes one --data without a weight")


_DEFAULTS = {field.name: field.default for field in fields(RunOptions) if field.name in OF_PRESETS}
