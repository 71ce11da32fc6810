"""Options of losses and optimizers: mixins of the drafts' options and of `FitConfig`. No torch.

The menu of losses is here, so that `--help` and `losses` read one list. What each loss computes is
described in `losses`; which distribution of the target it uses, in docs/drafts.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.terminal.config import option

KINDS = ("ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda")
TARGETS = ("soft", "hard")
MIXED = "ce+l1"
"""The loss of block drafts as published: cross-entropy and L1, each with its weight."""
AUTO = "auto"
LEARNING = "learning"

_LOSSES = (
    "ce: cross-entropy; kl, reverse-kl: KL divergence from and to the target's distribution; jsd: "
    "Jensen-Shannon divergence; tv: total variation, the probability that a sampled draft is "
    "rejected; lk-alpha, lk-lambda: the acceptance losses of arXiv 2602.23881"
)


def loss_option(default: str = "ce", of: str = "loss of a slot", more: Sequence[str] = ()) -> Any:
    """Return the option that chooses the loss. `more` are names of losses beside KINDS."""
    return option(default, help=f"{of}. {_LOSSES}", choices=(*more, *KINDS))


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The menu of losses, which every draft has."""

    loss: str = loss_option()
    loss_target: str = option(
        "soft",
        help="what the loss compares the draft with. soft: the target's distribution; hard: its "
        "most probable token alone",
        choices=TARGETS,
    )
    lambda_scale: float = option(
        1.0, help="with --loss lk-lambda: scale of the cross-entropy's share, 0 to 1"
    )
    lambda_decay: float = option(
        3.0, help="with --loss lk-lambda: how fast that share falls as acceptance rises"
    )

    def check_loss(self) -> None:
        """Reject values outside their range, and a loss that is infinite."""
        if not 0 <= self.lambda_scale <= 1:  # else a share of the loss is negative
            raise DraftError(f"lambda_scale = {self.lambda_scale}: from 0 to 1")
        if not 0 <= self.lambda_decay < math.inf:
            raise DraftError(f"lambda_decay = {self.lambda_decay}: 0 or more")
        if self.loss == "reverse-kl" and self.loss_target not in ("soft", AUTO):
            raise DraftError(
                f"loss = reverse-kl with loss_target = {self.loss_target}: the reverse KL "
                "divergence from a single token is infinite; use --loss-target soft, or another "
                "loss"
            )


@dataclass(frozen=True, kw_only=True)
class PositionOptions(LossOptions):
    """The menu of losses, of drafts that train several tokens per round."""

    position_weights: str = option(
        AUTO,
        help="weights of the losses of a round's tokens (unroll step, depth, place in the block), "
        "first token first. auto: as published for this draft; one number D above 0 and at most 1: "
        "D ** d for token d, counted from 0; a list such as 1,0.8,0.5: one weight per token",
        metavar="D|W,W,...",
        numbers=True,
    )

    def check_positions(self, count: int) -> None:
        """Refuse position weights that are not those of `count` tokens per round."""
        self.weights_of(count)

    def check_one_rule(self, name: str) -> None:
        """Refuse position weights together with another value than the default of option `name`."""
        value = getattr(self, name)
        if self.position_weights != AUTO and value != getattr(type(self), name):
            raise DraftError(
                f"position_weights = {self.position_weights} and {name} = {value}: both decide the "
                "weights of a round's tokens; give one of them"
            )

    def weights_of(self, count: int) -> tuple[float, ...] | None:
        """Return the weights of the `count` tokens of a round; None: as published.

        Raises:
            DraftError: no such weights.
        """
        if self.position_weights == AUTO:
            return None
        try:
            found = tuple(float(part) for part in self.position_weights.split(","))
        except ValueError:
            raise DraftError(
                f"position_weights = {self.position_weights!r}: expected auto, one decay such as "
                "0.8, or weights with commas such as 1,0.8,0.5"
            ) from None
        if len(found) == 1 and "," not in self.position_weights:
            if not 0 < found[0] <= 1:
                raise DraftError(f"position_weights = {found[0]:g}: a decay is above 0, at most 1")
            return tuple(found[0] ** d for d in range(count))
        if len(found) != count:
            raise DraftError(
                f"position_weights = {self.position_weights}: {len(found)} weights for {count} "
                "tokens per round; name one per token"
            )
        if not all(0 <= weight < math.inf for weight in found) or not any(found):
            raise DraftError(
                f"position_weights = {self.position_weights}: each is 0 or more, and one above 0"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class BlockLossOptions(PositionOptions):
    """The menu of losses of block drafts, with the published mixture as default."""

    loss: str = loss_option(
        MIXED,
        "loss of a draft. ce+l1: --ce-weight times the cross-entropy plus --l1-weight times the L1 "
        "distance, as published; another one replaces both",
        (MIXED,),
    )
    loss_target: str = option(
        AUTO,
        help="what the loss (of ce+l1, its cross-entropy) compares the draft with. soft: the "
        "target's distribution; hard: its most probable token; tokens: the document's token. auto: "
        "--ce-target for cross-entropies, else soft",
        choices=(AUTO, *TARGETS, "tokens"),
    )
    ce_target: str = option(
        "tokens",
        help="cross-entropy with the document's tokens (as published), or with the teacher's "
        "distribution; --loss-target replaces it",
        choices=("tokens", "teacher"),
    )
    ce_weight: float = option(0.1, help="with --loss ce+l1: weight of the cross-entropy")
    l1_weight: float = option(
        0.9, help="with --loss ce+l1: weight of the L1 distance to the target's distribution"
    )

    @property
    def mixed(self) -> bool:
        """Whether the loss is the weighted sum of cross-entropy and L1."""
        return self.loss == MIXED

    @property
    def compared_with(self) -> str:
        """What the loss compares a draft with: "soft", "hard" or "tokens"."""
        if self.loss_target != AUTO:
            return self.loss_target
        return "tokens" if self.loss in (MIXED, "ce") and self.ce_target == "tokens" else "soft"

    def check_mixture(self) -> None:
        """Reject weights and targets that have no effect, or that train nothing."""
        self.check_loss()
        if self.ce_weight == self.l1_weight == 0:
            raise DraftError("ce_weight and l1_weight are both 0: nothing would train the drafts")
        for name in ("ce_weight", "l1_weight"):
            value = getattr(self, name)
            if self.loss != MIXED and value != getattr(type(self), name):
                raise DraftError(
                    f"{name} = {value} has no effect with loss = {self.loss}: it weighs a term of "
                    f"--loss {MIXED}"
                )
        if self.ce_target == "teacher" and self.loss_target not in (AUTO, "soft"):
            raise DraftError(
                f"ce_target = teacher and loss_target = {self.loss_target} contradict each other; "
                "leave ce_target out"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How the weights move: the optimizer, and the learning rate over the steps."""

    optimizer: str = option(
        "adamw",
        help="adamw; muon: torch's Muon for the matrices of the draft's layers, AdamW for "
        "embeddings, heads, norms and biases, both with --lr (Muon's step has AdamW's size)",
        group=LEARNING,
        choices=("adamw", "muon"),
    )
    betas: str = option(
        "0.9,0.95",
        help="decay rates of AdamW's averages of the gradient and of its square",
        group=LEARNING,
        metavar="B1,B2",
    )
    schedule: str = option(
        "cosine",
        help="learning rate after the warm-up: cosine or linear, down to --min-lr-ratio at the "
        "last step, or constant",
        group=LEARNING,
        choices=("cosine", "linear", "constant"),
    )

    def beta_pair(self) -> tuple[float, float]:
        """Return both decay rates.

        Raises:
            ConfigError: they are not two numbers from 0 to below 1.
        """
        try:
            first, second = (float(part) for part in self.betas.split(","))
        except ValueError:
            first = second = math.nan
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ConfigError(
                f"--betas {self.betas}: expected two numbers from 0 to below 1, such as 0.9,0.95"
            )
        return first, second
