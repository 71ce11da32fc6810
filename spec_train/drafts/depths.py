"""What drafts share that draft D tokens from one slot: slots with a loss, counts, loss and drafts.

Slot t knows the target's states up to t and the tokens up to x_{t+1}. Depth d, counted from 0, is
the draft for x_{t+2+d}; its teacher is what the target says there, given the document. A slot has a
loss at depth d if x_{t+2+d} and the token before it are supervised, as in serving.

A draft gives what enters its head at some slots and a depth; everything else is here.

B packs, T slots, D depths, n slots of a depth, H hidden size, V / Vd target / draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.schema import FINAL
from spec_train.attention.unrolled import active_slots
from spec_train.drafts.draft import Draft, DraftLoss, FinalDraft
from spec_train.drafts.drafting import Drafter, Proposal
from spec_train.drafts.frames import slot_mask_of, teacher_of
from spec_train.drafts.slots import ScoredSlots, empty_chains, first_slots, step_masks
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, head_loss
from spec_train.losses.metrics import chain_sums
from spec_train.losses.sampling import Sampler
from spec_train.losses.teacher_rows import SlotRows

AtDepth = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Flat slots int64 [n] (b * T + t) and a depth -> the states [n, H] that enter the head of that
depth, and the weight of the head [Vd, H]."""


class HeadsDraft(FinalDraft):
    """A draft with a head per drafted token, all of which read the slot's final hidden state.

    A subclass makes its modules, and says what `at_depth` makes of states.
    """

    @abstractmethod
    def at_depth(self, states: Tensor) -> AtDepth:
        """Return what enters the heads at slots of states [B*T, H], and the heads."""

    @property
    def shares(self) -> Sequence[float] | None:
        """Weights of the losses of the depths, in any unit; None: equal ones."""
        return None

    @property
    def max_depth(self) -> int | None:
        return int(self.options.round_length)

    def slot_counts(self, batch: DraftBatch) -> Tensor:
        return depth_counts(self, batch)

    def batch_loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        inputs = self.at_depth(batch.hidden[FINAL].flatten(0, 1))
        return depth_loss(self, batch, head, counts, inputs, self.shares)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        inputs = self.at_depth(batch.hidden[FINAL].flatten(0, 1))
        return depth_chains(self, batch, inputs, depth, scored_only)

    def drafter(self, head: TargetHead) -> "HeadsDrafter":
        return HeadsDrafter(self)


def _slots(draft: Draft, batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """Return the slots of every depth that have a draft, and of these those that train it.

    Both are bool [D, B*T]. The target's choice may be outside of the draft vocabulary: such a draft
    trains nothing and is a miss.
    """
    first = slot_mask_of(batch)
    masks = step_masks(first, batch.document_ids, draft.options.round_length).flatten(1)
    if draft.full_vocabulary:
        return masks, masks
    known = draft.draft_index[batch.target_argmax] >= 0  # [B, T]: at the slot that the target reads
    shifted = torch.zeros_like(masks)
    for depth in range(len(masks)):
        shifted[depth, : -depth - 1] = known.flatten()[depth + 1 :]
    return masks, masks & shifted


@torch.no_grad()
def depth_counts(draft: Draft, batch: DraftBatch) -> Tensor:
    """Return the slots that train each depth, float64 [D]: for `Draft.slot_counts`."""
    return _slots(draft, batch)[1].sum(1).double()


def depth_loss(
    draft: Draft,
    batch: DraftBatch,
    head: TargetHead,
    counts: Tensor | None,
    at_depth: AtDepth,
    shares: Sequence[float] | None = None,
) -> DraftLoss:
    """Return the loss of a batch: for `Draft.batch_loss`, whose arguments are passed on.

    The loss of a slot is --loss. Logits exist a few rows at a time.

    Args:
        at_depth: what enters the head, and the head; called once per depth that has slots.
        shares: weights of the D depths, in any unit; None: equal ones.
    """
    kind, (masks, trained) = LossKind.of(draft.options), _slots(draft, batch)
    supervised = trained.sum(1).double()  # [D]
    counts = supervised if counts is None else counts.to(supervised)
    share = torch.tensor(shares or [1.0] * len(masks), dtype=torch.float64).to(counts.device)
    factors = torch.where(counts > 0, share / share.sum() / counts.clamp_min(1), 0.0)
    teacher, choices = teacher_of(draft, batch, head, 1), batch.target_argmax.flatten()
    hits = torch.zeros_like(masks)
    losses, acceptance = torch.zeros_like(supervised), torch.zeros_like(supervised)
    measured = torch.zeros_like(supervised)
    total: Tensor | None = None
    for depth in range(len(masks)):
        rows = masks[depth].nonzero().squeeze(1)  # [n]
        if not len(rows):
            continue
        choice = choices[rows + depth + 1]  # the target's, in the same document
        if not draft.full_vocabulary:
            choice = draft.draft_index[choice]
        states, weight = at_depth(rows, depth)

        def taught(part: slice, rows: Tensor = rows + depth, choice: Tensor = choice) -> SlotRows:
            found = teacher(rows[part])
            return found.labelled(choice[part]) if kind.hard else found

        used = trained[depth, rows]
        weights = (used * factors[depth]).to(torch.promote_types(states.dtype, torch.float32))
        loss, stats = head_loss(states[:, None], weight, taught, weights[:, None], kind)
        total = loss if total is None else total + loss
        hits[depth, rows] = stats.best[:, 0] == choice
        kept = ~stats.acceptance[:, 0].isnan()
        losses[depth] = (stats.loss[:, 0].double() * used).sum()
        acceptance[depth] = stats.acceptance[:, 0][kept].double().sum()
        measured[depth] = kept.sum()
    sums = {
        "loss": losses,
        "supervised": supervised,
        "weighted": supervised * share / share.sum(),
        "acceptance": acceptance,
        "measured": measured,
        **chain_sums(hits, masks),
    }
    return DraftLoss(draft.zero_loss() if total is None else total, sums)


@torch.no_grad()
def depth_chains(
    draft: Draft, batch: DraftBatch, at_depth: AtDepth, depth: int, scored_only: bool
) -> Tensor:
    """Return greedy drafts of all slots: for `Draft.chains`, whose arguments are passed on."""
    scored = ScoredSlots(batch) if scored_only else None
    chains, active = empty_chains(batch.input_ids, depth), first_slots(batch.input_ids, scored)
    packs, slots = batch.input_ids.shape
    starts = torch.arange(packs, device=active.device)[:, None] * slots
    for number in range(depth):
        states, weight = at_depth((active + starts).flatten(), number)
        few = states.split(max(1, (1 << 24) // len(weight)))
        best = torch.cat([(some @ weight.T).argmax(-1) for some in few]).view_as(active)
        tokens = best if draft.proposed_ids is None else draft.proposed_ids[best]  # [B, A]
        chains[..., number].scatter_(1, active, tokens)
        if scored is None or number + 1 == depth:
            continue
        going = scored.go_on(active, tokens)
        if not bool(going.any()):
            break
        active = active.gather(1, active_slots(going))
    return chains


class HeadsDrafter(Drafter):
    """Drafts every token of a round from the target's last state alone."""

    def __init__(self, draft: HeadsDraft) -> None:
        """Start a sequence."""
        self._draft = draft

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Draft `count` tokens from the last of the verified states."""
        size, ids = self._draft.config.vocab_size, self._draft.proposed_ids
        ids = torch.arange(size, device=states.device) if ids is None else ids
        inputs, only = self._draft.at_depth(states[0, -1:]), torch.zeros_like(ids[:1])
        drafted: list[Tensor] = []
        distributions: list[Any] = []
        for depth in range(count):
            entering, weight = inputs(only, depth)
            token, q = sampler.draft((entering @ weight.T)[0], ids, size)
            drafted.append(token)
            distributions.append(q)
        self.passes += 1
        return torch.stack(drafted), distributions
