"""The held-out documents: figures of training (teacher-forced) and of serving (see simulation).

Batches and random numbers are the same in every validation. Every rank executes the same calls.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from spec_train.data.batch import DraftBatch
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, Step
from spec_train.drafts import Draft
from spec_train.head import TargetHead
from spec_train.metrics import Sums, add_sums, summarise_parts
from spec_train.simulation.batch_walk import serving_sums
from spec_train.simulation.parting import uncut_length
from spec_train.simulation.walk import ServingSums
from spec_train.training.failure import arithmetic
from spec_train.training.ranks import Ranks
from spec_train.training.seeds import seed_place


def slot_counts(draft: Draft, step: Step, kind: str, seed: int, device: torch.device) -> Tensor:
    """Return the loss denominators of this rank's micro-batches of a step, float64 [S].

    Seeded like the losses, so that a draft that samples slots counts the slots it will use.

    Args:
        kind: "train" or "validation". seed: of the run. device: where to count.
    """
    parts = []
    for i, batch in enumerate(step.batches):
        seed_place(seed, kind, step.epoch, step.numbers[i])
        parts.append(draft.slot_counts(batch.without_hidden().to(device, non_blocking=True)))
    return torch.stack(parts).sum(0)


class Validation:
    """Measures the held-out documents of a run."""

    def __init__(
        self,
        draft: Draft,
        loss: nn.Module,
        head: TargetHead,
        stream: BatchStream,
        plan: BatchPlan,
        ranks: Ranks,
        *,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        """Keep what is measured with.

        Args:
            loss: `LossOnRanks` of the draft, as wrapped by `ranks`.
            stream, plan: the held-out documents.
            seed: of the run. dtype: of the forward pass.
        """
        self.draft, self.head, self.plan = draft, head, plan
        self._loss, self._stream, self._ranks = loss, stream, ranks
        self._seed, self._dtype = seed, dtype

    def figures(self) -> dict[str, Any]:
        """Return the figures of the draft as it is; empty if no document is held out.

        Beside those of `metrics.summarise_parts`, of the walk: "serving_like_length", its
        acceptance length, "serving_like_uncut", the same without the ends of answers (see
        `uncut_length`), both None without a round, and "serving_like_rounds", their number.
        """
        if not len(self.plan.rows):
            return {}
        sums, walk = self._sums()
        served = walk.walk_figures()
        uncut = uncut_length(served.accept_rate) if served.rounds else None
        return summarise_parts(sums, self.draft.summarise) | {
            "serving_like_length": served.acceptance_length,
            "serving_like_uncut": uncut,
            "serving_like_rounds": served.rounds,
        }

    @torch.no_grad()
    def _sums(self) -> tuple[dict[str, Sums], ServingSums]:
        """Return teacher-forced sums by dataset, and the walk of all, over all ranks."""
        total: dict[str, Sums] = {}
        walk = ServingSums.zero(self.draft.depth)
        device = self._ranks.device
        self._stream.load_state_dict(self.plan.state(0, 0))
        self.draft.eval()
        steps = self._stream.take(len(self.plan.batches(0)))
        with contextlib.closing(steps), arithmetic(device, self._dtype):
            for step in steps:
                # for the unused loss
                counts = slot_counts(self.draft, step, "validation", self._seed, device)
                part = self.plan.part_of(step.index)
                for i, batch in enumerate(step.batches):
                    seed_place(self._seed, "validation", step.epoch, step.numbers[i])
                    there = batch.to(device, self._dtype, non_blocking=True)
                    sums = self._loss(there, self.head, counts)[1]
                    total[part] = add_sums([total.get(part, {}), sums])
                    walk += self._walked(there)
        self._ranks.release(self._loss)
        self.draft.train()
        return {part: self._ranks.sum_all(sums) for part, sums in total.items()}, self._all(walk)

    def _walked(self, batch: DraftBatch) -> ServingSums:
        """Walk the documents of a batch, which the loss has just read: its weights are gathered."""
        depth = self.draft.depth
        if not batch.tokens:  # of a rank without documents
            return ServingSums.zero(depth)
        return serving_sums(batch, self.draft.chains(batch, self.head, depth, counted_only=True))

    def _all(self, walk: ServingSums) -> ServingSums:
        """Return the sum over the ranks."""
        counts = torch.from_numpy(walk.as_array()).double()
        return ServingSums.from_array(self._ranks.sum(counts).numpy())
