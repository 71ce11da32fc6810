"""Options of losses: mixins of the drafts' options. No torch.

The menu of losses is here, so that `--help` and `losses` read one list. What each loss computes is
described in `losses`; which distribution of the target it uses, in docs/drafts.md.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from cyclopts import Parameter

from spec_data.shards.errors import DraftError
from spec_data.terminal.types import ONE_TOKEN, more

TARGETS = ("soft", "hard")
MIXED = "ce+l1"
"""The loss of block drafts as published: cross-entropy and L1, each with its weight."""
AUTO = "auto"
DRAFT = more("the draft")

Kind = Literal["ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda"]
BlockKind = Literal["ce+l1", "ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda"]

KINDS = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The menu of losses, which every draft has."""

    loss: Annotated[Kind, DRAFT] = "ce"
    """Loss of a slot. ce: cross-entropy; kl, reverse-kl: KL divergence from and to the target's
    distribution; jsd: Jensen-Shannon divergence; tv: total variation, the probability that a
    sampled draft is rejected; lk-alpha, lk-lambda: the acceptance losses of arXiv 2602.23881."""
    loss_target: Annotated[Literal["soft", "hard"], DRAFT] = "soft"
    """What the loss compares the draft with. soft: the target's distribution; hard: its most
    probable token alone."""

    def check_loss(self) -> None:
        """Reject a loss that is infinite."""
        if self.loss == "reverse-kl" and self.loss_target not in ("soft", AUTO):
            raise DraftError(
                f"loss = reverse-kl with loss_target = {self.loss_target}: the reverse KL "
                "divergence from a single token is infinite; use --loss-target soft, or another "
                "loss"
            )


@dataclass(frozen=True, kw_only=True)
class PositionOptions(LossOptions):
    """The menu of losses, of drafts that train several tokens per round."""

    position_weights: Annotated[str, DRAFT, ONE_TOKEN, Parameter(metavar="D|W,W,...")] = "auto"
    """Weights of the losses of a round's tokens (unroll step, depth, place in the block), first
    token first. auto: as published for this draft; one number D above 0 and at most 1: D ** d for
    token d, counted from 0; a list such as 1,0.8,0.5: one weight per token."""

    def check_positions(self, count: int) -> None:
        """Refuse position weights that are not those of `count` tokens per round."""
        self.weights_of(count)

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

    loss: Annotated[BlockKind, DRAFT] = "ce+l1"  # type: ignore[assignment]
    """Loss of a draft. ce+l1: cross-entropy and L1 distance to the target's distribution, with the
    published weights; another one replaces both. ce: cross-entropy; kl, reverse-kl: KL
    divergence from and to the target's distribution; jsd: Jensen-Shannon divergence; tv: total
    variation, the probability that a sampled draft is rejected; lk-alpha, lk-lambda: the acceptance
    losses of arXiv 2602.23881."""
    loss_target: Annotated[Literal["auto", "soft", "hard", "tokens"], DRAFT] = "auto"  # type: ignore[assignment]
    """What the loss (of ce+l1, its cross-entropy) compares the draft with. soft: the target's
    distribution; hard: its most probable token; tokens: the document's token. auto: tokens for
    cross-entropies, as published, else soft."""
    ce_weight: ClassVar[float] = 0.1
    l1_weight: ClassVar[float] = 0.9

    @property
    def mixed(self) -> bool:
        """Whether the loss is the weighted sum of cross-entropy and L1."""
        return self.loss == MIXED

    @property
    def compared_with(self) -> str:
        """What the loss compares a draft with: "soft", "hard" or "tokens"."""
        if self.loss_target != AUTO:
            return self.loss_target
        return "tokens" if self.loss in (MIXED, "ce") else "soft"
