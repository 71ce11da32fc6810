"""The held-out documents: figures of training (teacher-forced) and of serving (see simulation).

Batches and random numbers are the same in every validation. Every rank executes the same calls.
"""

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.even_sample import even_sample
from spec_train.data.batch import DraftBatch
from spec_train.data.mixture import Documents
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, Step
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import Sums, add_sums, summarise_parts
from spec_train.simulation.breakdown import Breakdown
from spec_train.simulation.samples import token_texts, tokenizer_of
from spec_train.simulation.simulated_decoding import documents_of
from spec_train.simulation.train_serve_gap import uncut_length
from spec_train.training.failure import arithmetic, seed_place
from spec_train.training.ranks import Ranks

SAMPLES = 6
"""Held-out documents whose drafted tokens are kept."""


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


@dataclass(kw_only=True)
class Validation:
    """Measures the held-out documents of a run: `stream` and `plan` of `dataset`.

    `loss` is `LossOnRanks` of the draft, as wrapped by `ranks`. `seed` is that of the run, `dtype`
    that of the forward pass.
    """

    draft: Draft
    loss: nn.Module
    head: TargetHead
    dataset: Documents
    stream: BatchStream
    plan: BatchPlan
    ranks: Ranks
    seed: int
    dtype: torch.dtype

    def measure(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure the draft as it is; both results are empty if no document is held out.

        Returns:
            The line of metrics.jsonl: the figures of `metrics.summarise_parts` and, of the walk,
            "serving_like_length", its acceptance length, with its 95 % interval over documents,
            "serving_like_interval" (None for fewer than eight); "serving_like_uncut", it without
            the ends of answers (see `uncut_length`), both None without a round, and
            "serving_like_rounds", their number.
            The walk as `eval --data` measures it (see `Breakdown.figures`), with sampled documents.
        """
        if not len(self.plan.rows):
            return {}, {}
        sums, breakdown = self._sums()
        found = breakdown.figures()
        walk = found["simulated"]
        figures = summarise_parts(sums, self.draft.summarise) | {
            "serving_like_length": walk["acceptance_length"],
            "serving_like_interval": walk["interval"],
            "serving_like_uncut": uncut_length(walk["accept_rate"]) if walk["rounds"] else None,
            "serving_like_rounds": walk["rounds"],
        }
        texts = token_texts(found["samples"], self._tokenizer) if self.ranks.is_main else {}
        place = {"path": self.dataset.place, "split": "validation"}
        return figures, place | found | {"texts": texts}

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.dataset.target_dir)

    @torch.no_grad()
    def _sums(self) -> tuple[dict[str, Sums], Breakdown]:
        """Return teacher-forced sums by dataset, and the walk of all, over all ranks."""
        total: dict[str, Sums] = {}
        rows = self.plan.rows.tolist()
        sampled = even_sample(rows, SAMPLES)
        own, walk = (Breakdown(self.draft.depth, sampled) for _ in range(2))
        device = self.ranks.device
        self.stream.load_state_dict(self.plan.state(0, 0))
        self.draft.eval()
        steps = self.stream.take(len(self.plan.batches(0)))
        with contextlib.closing(steps), arithmetic(device, self.dtype):
            for step in steps:
                # for the unused loss
                counts = slot_counts(self.draft, step, "validation", self.seed, device)
                part = self.plan.part_of(step.index)
                for i, batch in enumerate(step.batches):
                    seed_place(self.seed, "validation", step.epoch, step.numbers[i])
                    there = batch.to(device, self.dtype, non_blocking=True)
                    sums = self.loss(there, self.head, counts)[1]
                    total[part] = add_sums([total.get(part, {}), sums])
                    self._walk(there, own)
        self.ranks.release(self.loss)
        self.draft.train()
        for other in self.ranks.gather(own.as_json()):
            walk.add_all(other)
        return {part: self.ranks.sum_all(sums) for part, sums in total.items()}, walk

    def _walk(self, batch: DraftBatch, found: Breakdown) -> None:
        """Walk the documents of a batch, which the loss has just read: its weights are gathered."""
        if not batch.tokens:  # of a rank without documents
            return
        chains = self.draft.chains(batch, self.head, self.draft.depth, scored_only=True)
        for document, arrays in documents_of(batch, chains):
            found.add(document, self.dataset.source_of(document), arrays)
