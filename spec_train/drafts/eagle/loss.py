"""The EAGLE-1/2 loss of plain tensors (arXiv 2401.15077).

In: documents in the token frame (row t of a tensor belongs to token x_t). Out: a `DraftLoss`. Slot
t reads the state f_t (plus noise, in training) and the known token x_{t+1}. It predicts f_{t+1}
and, through the target's frozen head, the distribution of x_{t+2}, whose teacher is
softmax(head(f_{t+1})). The loss of a slot is

    regression_weight * mean_H SmoothL1(pred_t, f_{t+1})
    + ce_weight * -sum_v softmax(head(f_{t+1}))_v log softmax(head(pred_t))_v

(or another loss of `losses` in place of this cross-entropy)
over the slots with m_{t+1} and m_{t+2} ("serving") or with m_{t+1} only ("shifted"), divided by
their number over the whole optimizer step. Teachers have no noise.

Further steps are measured but not trained: step s reads the prediction of step s-1 and the
document's token x_{t+1+s}, and is compared with f_{t+1+s}.

B packs, T slots, S steps, n supervised slots of a step, H hidden size, V target vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import StepQueries, default_backend, narrowed_pairs
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts, first_slots, greedy_chains
from spec_train.drafts.eagle.model import EagleModel
from spec_train.drafts.frames import TokenInputs
from spec_train.drafts.layers import argmax_by_chunks
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import (
    document_lengths,
    document_offsets,
    gather_slots,
    rope_lengths,
    slot_masks,
    step_masks,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, RowStats, TeacherRows, head_loss, wide
from spec_train.losses.metrics import chain_sums

# -- unroll ----------------------------------------------------------------------------------------
# The EAGLE-1/2 draft over packs (arXiv 2401.15077): one step for training, more for chains.
#
# In: final hidden states and known tokens. Out: the predicted states of every step. Step 0 of slot
# t is the row (x_{t+1}, f_t), causal in its document; training needs no other. Step s continues
# from every slot at once, as serving would: the row (a known token of position t+1+s, the state
# that step s-1 predicted) at RoPE position t + s. It sees the step-0 rows of slots <= t of its
# document, and of the later steps the rows of slot t only; a layer's window limits both.
#
# B packs, T slots, H hidden size, h / g query / key-value heads, d head size.


class _Steps:
    """Attention of one layer over the steps: keeps the keys and values [B, g, T, d] of each step.

    A later step's key is seen by its own slot only (a diagonal). See `layers.Attend` for shapes.
    """

    def __init__(self, queries: StepQueries, scale: float, window: int | None) -> None:
        self._queries, self._scale, self._window = queries, scale, window
        self._first: tuple[Tensor, Tensor] | None = None
        self._diagonal: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._first is None:
            self._first = k, v
        else:
            self._diagonal.append((k, v))
        first, diagonal = self._first, self._diagonal
        return self._queries.attend(q, *first, diagonal, self._scale, self._window)

    def narrow(self, queries: StepQueries, part: Tensor) -> None:
        """Go on with the slots `part` of the queries, int64 [B, A]; `queries` are theirs."""
        self._queries = queries
        self._diagonal = narrowed_pairs(self._diagonal, part)


class EagleUnroll:
    """The unrolled draft over one batch: `advance` returns the predictions of the next step."""

    def __init__(
        self, draft: EagleModel, states: Tensor, document_ids: Tensor, position_ids: Tensor
    ) -> None:
        """Start before step 0.

        Args:
            draft: the model.
            states: final hidden states f_t (with their noise, if any) [B, T, H].
            document_ids: int64 [B, T], -1 in padding.
            position_ids: int64 [B, T].
        """
        self.draft = draft
        self._positions = position_ids
        self._lengths = rope_lengths(draft.rotary, document_ids)  # [B, T]
        self.carried = draft.cast(states)
        backend = draft.attention_backend
        if backend == "auto":
            kind = self.carried.device.type, self.carried.dtype, draft.config.head_dim
            backend = default_backend(*kind)
        every = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
        first = every - document_offsets(document_ids)  # [B, T]: the document's first slot
        self._queries = StepQueries(first, every.expand_as(first), len(every), backend)
        scale, windows = draft.scale, draft.config.windows
        self._layers = [_Steps(self._queries, scale, window) for window in windows]
        self._steps = 0

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens, int64 [B, T]; return predictions [B, T, H]."""
        draft = self.draft
        positions = self._positions + self._steps
        cos, sin = draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        x = draft.fuse(token_ids, self.carried)
        for layer, steps in zip(draft.layers, self._layers, strict=True):
            x = layer(x, cos, sin, steps)
        self._steps += 1
        self.carried = draft.predict(x)
        return self.carried

    def narrow(self, part: Tensor) -> None:
        """Go on with some of the slots only: their indices, int64 [B, A]. Not before step 0."""
        self._queries = self._queries.narrowed(part)
        for steps in self._layers:
            steps.narrow(self._queries, part)
        self._positions = self._positions.gather(1, part)
        if self._lengths is not None:
            self._lengths = self._lengths.gather(1, part)
        self.carried = gather_slots(self.carried, part)


@torch.no_grad()
def serving_chains(
    draft: EagleModel,
    batch: DraftBatch,
    states: Tensor,
    head: TargetHead,
    depth: int,
    counted: CountedDrafts | None = None,
) -> Tensor:
    """Draft greedy chains from every slot; each step reads the draft's own last token and state.

    Args:
        draft: the model.
        batch: documents in the token frame.
        states: the final hidden states of the documents [B, T, H].
        head: the target's.
        depth: tokens per chain.
        counted: leave out the drafts that it does not count.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    unroll = EagleUnroll(draft, states, batch.document_ids, batch.position_ids)
    first = first_slots(known, counted)
    started = False

    def step(tokens: Tensor) -> Tensor:
        nonlocal started
        unroll.advance(tokens)
        if not started:  # step 0 makes the keys of every slot
            unroll.narrow(first)
            started = True
        return argmax_by_chunks(head.logits, unroll.carried)

    return greedy_chains(step, unroll.narrow, known, depth, counted)


# -- loss ------------------------------------------------------------------------------------------


NOISE_LENGTH = 512  # document length for which "length" noise is as wide as "fixed" noise


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


def input_noise(states: Tensor, document_ids: Tensor, width: float, scale: str) -> Tensor:
    """Return uniform noise in (-width, width), float32 [B, T, H], from torch's generator.

    Args:
        states: final hidden states [B, T, H]; only their shape counts.
        document_ids: int64 [B, T].
        width: half the width of the interval.
        scale: "fixed", or "length" to multiply by 512 / tokens of the slot's document.
    """
    noise = (torch.rand(states.shape, device=states.device) * 2 - 1) * width
    if scale == "length":
        noise *= (NOISE_LENGTH / document_lengths(document_ids))[..., None]
    return noise


def supervised_slots(loss_mask: Tensor, document_ids: Tensor, slots: str, steps: int = 1) -> Tensor:
    """Return the slot masks of all steps, bool [S, B, T].

    `loss_mask` [B, T] is in the token frame; `slots` is "serving" or "shifted".
    """
    mask = slot_masks(shift_left(loss_mask, document_ids), document_ids, slots)
    return step_masks(mask, document_ids, steps)


def eagle_loss(
    draft: EagleModel,
    *,
    head: TargetHead,
    slots: str = "serving",
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
        slots: "serving" or "shifted".
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
        DraftError: an unknown `slots`, or inputs of the other frame.
        TypeError: an input is unknown or missing.
    """
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    given, terms = EagleInputs(**inputs), Terms(regression_weight, ce_weight, kind)
    document_ids, position_ids = given.documents()
    masks = supervised_slots(given.loss_mask, document_ids, slots, steps)  # [S, B, T]
    own = masks.flatten(1).sum(1).double()  # [S]
    counts = own if counts is None else counts.to(own)
    fed = given.final_hidden
    if given.noise is not None:
        fed = (wide(fed) + given.noise).to(fed.dtype)
    unroll = EagleUnroll(draft, fed, document_ids, position_ids)
    states, known = given.final_hidden.flatten(0, 1), given.input_ids  # [B*T, H], [B, T]
    loss: Tensor | None = None
    figures = []
    for s in range(steps):
        rows = masks[s].flatten().nonzero().squeeze(1)  # [n]
        if not len(rows):
            figures.append(StepFigures.empty(rows.device))
            continue
        known = shift_left(known, document_ids)
        predicted = unroll.advance(known).flatten(0, 1)[rows]  # [n, H]
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
