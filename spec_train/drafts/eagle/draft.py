"""EAGLE-1/2 in training: the loss (arXiv 2401.15077) of one step, and the draft's class.

Everything is in the token frame (row t of a tensor belongs to token x_t). Slot t reads the state
f_t (plus noise, in training) and the known token x_{t+1}. It predicts f_{t+1} and, through the
target's frozen head, the distribution of x_{t+2}, whose teacher is softmax(head(f_{t+1})). The loss
of a slot is

    regression_weight * mean_H SmoothL1(pred_t, f_{t+1})
    + ce_weight * -sum_v softmax(head(f_{t+1}))_v log softmax(head(pred_t))_v

(or another loss of `losses` in place of this cross-entropy) over the slots with m_{t+1} and
m_{t+2}, divided by their number over the whole optimizer step. Teachers have no noise.

Training looks one token ahead: it is an unroll of one step. In evaluation mode the metrics are
those of `depth` steps, so `best` is chosen by what serving needs: step s reads the prediction of
step s-1 and the document's token x_{t+1+s}, and is compared with f_{t+1+s}. The loss is that of the
first step in both modes. EAGLE-2 (arXiv 2406.16858) differs from EAGLE-1 only in decoding (see
`decoding.trees`): one draft serves both.

B packs, T slots, S steps, n supervised slots of a step, H hidden size, V target vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.data.batch import DraftBatch
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.eagle.model import EagleModel, EagleWithHead
from spec_train.drafts.frames import TokenInputs
from spec_train.drafts.slots import slot_masks, step_masks
from spec_train.drafts.unroll import Unroll
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, RowStats, TeacherRows, head_loss, wide
from spec_train.losses.metrics import chain_sums, summarise


class EagleDraft(EagleModel):
    """The draft that `spec-train fit eagle` trains."""

    @property
    def depth(self) -> int:
        """Number of drafted tokens per round."""
        return self.options.depth

    def drafter(self, head: TargetHead) -> ChainDrafter:
        """Start drafting one sequence with the target's head."""
        return ChainDrafter(EagleWithHead(self, head), self.config.vocab_size, self.new_caches())

    @property
    def _steps(self) -> int:
        """Number of steps that `loss` computes: metrics need more than the loss."""
        return 1 if self.training else self.options.depth

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the supervised slots per step, float64 [1] in training, [depth] otherwise."""
        masks = supervised_slots(batch.loss_mask, batch.document_ids, self._steps)
        return masks.flatten(1).sum(1).double()

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, float64 [1] in training, [depth] otherwise.

        In training mode, noise from torch's generator is added to the input states.
        """
        options, states, noise = self.options, batch.hidden[FINAL], None
        if self.training and options.noise > 0:
            noise = input_noise(states, options.noise)
        return eagle_loss(
            self,
            final_hidden=states,
            input_ids=batch.input_ids,
            loss_mask=batch.loss_mask,
            head=head,
            target_argmax=batch.target_argmax,
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            noise=noise,
            steps=self._steps,
            regression_weight=options.regression_weight,
            ce_weight=options.ce_weight,
            kind=LossKind.of(options),
            counts=counts,
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics, with the means of both loss terms at the first step."""
        first = float(sums["supervised"][0])
        parts = {
            name: float(sums[name][0]) / first if first else None
            for name in ("smooth_l1", "cross_entropy", "distribution_loss")
            if name in sums
        }
        return summarise(sums) | parts


@dataclass(frozen=True, kw_only=True)
class EagleInputs(TokenInputs):
    """Plain tensors of the EAGLE-1/2 loss, in the token frame."""

    final_hidden: Tensor  # f_t [B, T, H]
    noise: Tensor | None = None  # added to f_t as input of the draft [B, T, H]; None: no noise


@dataclass(frozen=True)
class Terms:
    """The two terms of the loss: their weights, and which loss the second one is."""

    regression: float
    cross_entropy: float  # of the second term, also if it has another loss
    kind: LossKind

    @property
    def second(self) -> str:
        """Name of the metric of the second term."""
        return "cross_entropy" if self.kind.name == "ce" else "distribution_loss"


@dataclass(frozen=True)
class StepFigures:
    """One step at its n supervised slots, no gradients."""

    rows: Tensor  # flat slots, int64 [n]
    distance: Tensor  # smooth L1 [n]
    stats: RowStats  # of the head, each [n, 1]
    choice: Tensor  # the target's choice, int64 [n]

    @classmethod
    def empty(cls, device: torch.device) -> "StepFigures":
        """Return the figures of a step without a supervised slot."""
        none = torch.zeros(0, 1, device=device)
        index = none[:, 0].long()
        return cls(index, none[:, 0], RowStats(none, none, none.long()), index)


def input_noise(states: Tensor, width: float) -> Tensor:
    """Return uniform noise in (-width, width), float32, of the shape of `states`.

    Drawn from torch's default generator of their device.
    """
    return (torch.rand(states.shape, device=states.device) * 2 - 1) * width


def supervised_slots(loss_mask: Tensor, document_ids: Tensor, steps: int = 1) -> Tensor:
    """Return the slot masks of all steps, bool [S, B, T], of a `loss_mask` [B, T] of tokens."""
    mask = slot_masks(shift_left(loss_mask, document_ids), document_ids)
    return step_masks(mask, document_ids, steps)


def eagle_loss(
    draft: EagleModel,
    *,
    head: TargetHead,
    steps: int = 1,
    regression_weight: float = 1.0,
    ce_weight: float = 0.1,
    kind: str | LossKind = "ce",
    counts: Tensor | None = None,
    **inputs: Any,
) -> DraftLoss:
    """Compute the EAGLE-1/2 loss of documents in the token frame.

    Args:
        draft: the weights, as `EagleDraft.from_pretrained` reads them.
        head: the target's.
        steps: S; steps after the first have metrics but no loss.
        regression_weight: weight of the smooth L1 term.
        ce_weight: weight of the second term.
        kind: loss of the second term: a name of `losses.KINDS`, or a `LossKind`.
        counts: denominators [S] over the whole optimizer step, of which the first is used; None:
            those of this batch.
        **inputs: the fields of `EagleInputs`, with their shapes there and in `frames.TokenInputs`:
            final_hidden, input_ids, loss_mask; and optionally noise, target_argmax, document_ids,
            position_ids.

    Raises:
        DraftError: inputs of the other frame.
        TypeError: an input is unknown or missing.
    """
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    given, terms = EagleInputs(**inputs), Terms(regression_weight, ce_weight, kind)
    document_ids, position_ids = given.documents()
    masks = supervised_slots(given.loss_mask, document_ids, steps)  # [S, B, T]
    own = masks.flatten(1).sum(1).double()  # [S]
    counts = own if counts is None else counts.to(own)
    fed = given.final_hidden
    if given.noise is not None:
        fed = (wide(fed) + given.noise).to(fed.dtype)
    known = shift_left(given.input_ids, document_ids)  # [B, T]
    states = given.final_hidden.flatten(0, 1)  # [B*T, H]
    unroll: Unroll | None = None
    loss: Tensor | None = None
    figures = []
    for s in range(steps):
        rows = masks[s].flatten().nonzero().squeeze(1)  # [n]
        if not len(rows):
            figures.append(StepFigures.empty(rows.device))
            continue
        unroll = unroll or Unroll(draft, fed, known, document_ids, position_ids)
        predicted = unroll.advance(known).flatten(0, 1)[rows]  # [n, H]
        known = shift_left(known, document_ids)
        following = rows + s + 1  # [n], in the same document: the token there is supervised
        choice = None if given.target_argmax is None else given.target_argmax.flatten()[following]
        factor = (1.0 if s == 0 else 0.0) / counts[s]  # only the first step is trained
        total, distance, stats, best = _step_loss(
            predicted, states[following], head, factor, terms, choice
        )
        loss = total if loss is None else loss
        figures.append(StepFigures(rows, distance, stats, best if choice is None else choice))
    return DraftLoss(draft.zero_loss() if loss is None else loss, _sums(figures, masks, terms))


def _step_loss(
    predicted: Tensor,
    teacher: Tensor,
    head: TargetHead,
    factor: Tensor,
    terms: Terms,
    choice: Tensor | None,
) -> tuple[Tensor, Tensor, RowStats, Tensor]:
    """Return the loss of a step, and what it consists of.

    Args:
        predicted: predicted states [n, H].
        teacher: the target's states [n, H].
        head: the target's.
        factor: the sum over slots is multiplied by it, [].
        terms: of the loss.
        choice: the target's choice, int64 [n]; None: the teacher's.

    Returns:
        The loss [] with a graph, smooth L1 [n], the head's figures, and the teacher's choice, int64
        [n].
    """
    distance = F.smooth_l1_loss(wide(predicted), wide(teacher), reduction="none").mean(-1)  # [n]
    best: list[Tensor] = []

    def distribution(part: slice) -> TeacherRows:
        logits = head.logits(teacher[part])
        best.append(logits.argmax(-1))
        rows = TeacherRows.of_logits(logits, None)  # the draft has the full vocabulary
        return rows.labelled(best[-1] if choice is None else choice[part])

    entropy, stats = head_loss(
        predicted[:, None].to(head.head_weight.dtype),
        head.head_weight,
        distribution,
        (terms.cross_entropy * factor).to(distance.dtype).expand(len(distance), 1),
        terms.kind,
        bias=head.head_bias,
        spec=head.spec,
    )
    total = entropy + (terms.regression * factor).to(distance.dtype) * distance.sum()
    return total, distance.detach(), stats, torch.cat(best)


@torch.no_grad()
def _sums(figures: list[StepFigures], masks: Tensor, terms: Terms) -> dict[str, Tensor]:
    """Return the additive metrics of a batch (see `metrics`), and those of both loss terms.

    Args:
        figures: of the S steps.
        masks: slot masks of all steps, bool [S, B, T].
        terms: of the loss.
    """
    own = masks.flatten(1).sum(1).double()  # [S]
    trained = torch.zeros_like(own)
    trained[0] = 1.0  # the loss is that of the first step
    hits = torch.zeros_like(masks).flatten(1)  # [S, B*T]
    for s, step in enumerate(figures):
        hits[s, step.rows] = step.stats.best[:, 0] == step.choice
    distance = torch.stack([step.distance.double().sum() for step in figures])
    entropy = torch.stack([step.stats.loss.double().sum() for step in figures])
    return {
        "loss": terms.regression * distance + terms.cross_entropy * entropy,
        "smooth_l1": distance,
        terms.second: entropy,
        "supervised": own,
        "weighted": own * trained,
        "drafted": own,
        "hits": hits.sum(1).double(),
        "acceptance": torch.stack([step.stats.acceptance.double().sum() for step in figures]),
        **chain_sums(hits.view_as(masks), masks),
    }
