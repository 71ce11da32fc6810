"""The held-out documents: figures of training (teacher-forced) and of serving (see simulation).

Batches and random numbers are the same in every validation. Every rank executes the same calls.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from spec_data.shards.packing import even_sample
from spec_train.data.splits import Splits
from spec_train.data.stream import BatchStream, Step
from spec_train.data.upload import Uploads
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import Sums, add_sums, summarise_parts
from spec_train.simulation.breakdown import Breakdown
from spec_train.simulation.modes import DocumentModes
from spec_train.simulation.samples import token_texts, tokenizer_of
from spec_train.simulation.simulated_decoding import documents_of, uncut_length
from spec_train.training.loss import arithmetic, seed_micro_batch, slot_counts
from spec_train.training.ranks import Ranks

SAMPLES = 6
"""Held-out documents whose drafted tokens are kept."""


@dataclass
class Validation:
    """Measures the held-out documents of `splits`.

    `loss` is `LossOnRanks` of the draft, as wrapped by `ranks`. `seed` is that of the run.
    """

    draft: Draft
    loss: nn.Module
    head: TargetHead
    splits: Splits
    stream: BatchStream
    ranks: Ranks
    seed: int

    def measure(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure the draft as it is; both results are empty if no document is held out.

        Returns:
            The line of metrics.jsonl: the figures of `metrics.summarise_parts` and, of simulated
            decoding, "serving_like_length", its acceptance length, with its 95 % interval over
            documents, "serving_like_interval" (None for fewer than eight); "serving_like_rounds",
            the number of verifications; and "every_slot_length", that of the draft's own chains
            from every slot (see `train_serve_gap`), None as the first without a verification.
            The simulated decoding as `eval --data` measures it (see `Breakdown.figures`), with
            sampled documents.
        """
        if not len(self.splits.measured):
            return {}, {}
        sums, breakdown = self._measure()
        report = breakdown.figures()
        simulated = report["simulated"]
        every = uncut_length(simulated["every_slot_rate"]) if simulated["rounds"] else None
        figures = summarise_parts(sums, self.draft.summarise) | {
            "serving_like_length": simulated["acceptance_length"],
            "serving_like_interval": simulated["interval"],
            "serving_like_rounds": simulated["rounds"],
            "every_slot_length": every,
        }
        texts = token_texts(report["samples"], self._tokenizer) if self.ranks.is_main else {}
        where = {"path": self.stream.dataset.location, "split": "validation"}
        return figures, where | report | {"texts": texts}

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.stream.dataset.target_dir)

    @cached_property
    def _modes(self) -> DocumentModes:
        return DocumentModes(self.stream.dataset, self._tokenizer)

    def _steps(self) -> Generator[tuple[str, Step], None, None]:
        """Yield every step, with the name of its dataset."""
        for part, plan in self.splits.validation.items():
            self.stream.restart(plan)
            with contextlib.closing(self.stream.take(len(plan.batches(0)))) as steps:
                for step in steps:
                    yield part, step

    @torch.no_grad()
    def _measure(self) -> tuple[dict[str, Sums], Breakdown]:
        """Return teacher-forced sums by dataset, and simulated decoding of all, over all ranks."""
        total: dict[str, Sums] = {}
        dtype, device = self.stream.buffer_options.dtype, self.ranks.device
        uploads = Uploads(device, dtype)
        sampled, depth = even_sample(self.splits.measured.tolist(), SAMPLES), self.draft.depth
        mine, all_ranks = Breakdown(depth, sampled), Breakdown(depth, sampled)
        self.draft.eval()
        with (
            contextlib.closing(self._steps()) as steps,
            self.ranks.assembled(self.loss),
            arithmetic(device, dtype),
        ):
            for part, step in steps:
                # for the unused loss
                counts = slot_counts(self.draft, step, "validation", self.seed, uploads)
                batches = uploads.batches(step, self.stream.peek)
                for number, host in zip(step.numbers, step.batches, strict=True):
                    seed_micro_batch(self.seed, "validation", step.epoch, number)
                    batch = next(batches)
                    sums = self.loss(batch, self.head, counts)[1]
                    total[part] = add_sums([total.get(part, {}), sums])
                    if host.tokens:  # else of a rank without documents
                        chains = self.draft.chains(batch, self.head, depth, scored_only=True)
                        for document, arrays in documents_of(batch, chains):
                            if not arrays[3].any():  # left out by the capture: it has no states
                                continue
                            source = self.stream.dataset.source_of(document)
                            mine.add(document, source, arrays, self._modes.of(document, arrays))
        self.draft.train()
        for other in self.ranks.gather(mine.as_json()):
            all_ranks.add_all(other)
        return {part: self.ranks.sum_all(sums) for part, sums in total.items()}, all_ranks
