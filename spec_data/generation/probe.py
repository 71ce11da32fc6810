"""`estimate --probe`: run the target on a sample, to tell speed, time, memory and bytes."""

import resource
import sys
import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from spec_data.generation.batch_size import choose_batch_tokens
from spec_data.generation.calibrate import calibrate
from spec_data.generation.plan import Plan
from spec_data.generation.proof import documents_to_prove, load_target
from spec_data.generation.sample_check import LONGEST, measure_documents
from spec_data.generation.setup import Setup, find_positions
from spec_data.shards.even_sample import sample_documents
from spec_data.shards.schema import Column
from spec_data.terminal.progress import size

_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe measured.

    Attributes:
        tokens: tokens of the timed batches.
        tokens_per_second: of forward and logits; encoding and writing run beside them.
        seconds: of the whole plan at that speed, for one worker.
        memory_bytes: largest memory of the device in use; on a CPU, that of the process.
        device: where it ran.
        form: the mask form that was proven.
        batch_tokens: tokens per forward, as `generate` would choose them.
    """

    tokens: int
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    device: str
    form: str
    batch_tokens: int

    def lines(self) -> list[tuple[str, str]]:
        """Return the figures as names and values, in words."""
        memory = "of the process" if self.device == "cpu" else f"of {self.device}"
        return [
            ("probe", f"{self.tokens:,} tokens on {self.device}, {self.form}"),
            ("tokens per forward", f"{self.batch_tokens:,}"),
            ("tokens per second", f"{self.tokens_per_second:,.0f} (one worker)"),
            ("time to capture", f"about {self.seconds / 3600:,.2f} hours"),
            (f"memory {memory}", f"{size(self.memory_bytes)} at its peak"),
        ]


def run_probe(setup: Setup, plan: Plan) -> tuple[Probe, tuple[Column, ...]]:
    """Load the target, prove a mask form, and time a few batches of the plan after a warm-up.

    Return that, and the columns as `generate` would store them, with the bits of lossy ones.

    Raises:
        TargetError, RunError: the target cannot be loaded, or no mask form is proven.
    """
    options = setup.options
    with closing(load_target(setup, plan)) as target:
        find_positions(setup, plan, target)
        _, documents = documents_to_prove(setup, plan)
        form = target.prove(documents, plan.pack_length, options.packing).form
        asked = options.tokens_per_forward
        batch_tokens = choose_batch_tokens(target, plan, form, setup.columns, asked)
        sample = sample_documents(plan.lengths, _BATCHES * batch_tokens)
        given = (batch_tokens, options.own_temperature)
        measure_documents(plan, target, form, sample[:1], *given)  # warm-up
        start = time.perf_counter()
        measure_documents(plan, target, form, sample, *given)
        elapsed = time.perf_counter() - start
        tokens = int(np.minimum(plan.lengths[sample], LONGEST).sum())
        probe = Probe(
            tokens=tokens,
            tokens_per_second=tokens / elapsed,
            seconds=plan.tokens * elapsed / tokens,
            memory_bytes=_memory(target.device),
            device=str(target.device),
            form=form,
            batch_tokens=batch_tokens,
        )
        return probe, calibrate(setup, plan, target, form, batch_tokens, None)[0]


def _memory(device: torch.device) -> int:
    """Return the largest memory in use so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
