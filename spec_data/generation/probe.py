"""What `generate` would take: bytes beside the shards, and of --probe speed, time and memory."""

import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from spec_data.generation.batch_size import choose_batch_tokens, in_memory, largest_batch
from spec_data.generation.calibrate import calibrate
from spec_data.generation.capture import forward_columns
from spec_data.generation.plan import BATCH_TOKENS, Plan
from spec_data.generation.proof import (
    GENERATION_CONFIG,
    LONGEST,
    documents_to_prove,
    load_target,
    measure_documents,
    tokenizer_files,
)
from spec_data.generation.setup import Setup, config_json, find_positions
from spec_data.models.devices import DTYPES, peak_memory
from spec_data.models.loading import count_parameters
from spec_data.models.mtp import mtp_bytes
from spec_data.models.reading import text_config
from spec_data.shards.files import dump_json
from spec_data.shards.packing import sample_documents
from spec_data.shards.schema import Column
from spec_data.terminal.parts import parts

_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe measured.

    Attributes:
        tokens, tokens_per_second: of timed forwards with logits; encoding and writing run beside.
        seconds: of the whole plan at that speed, for one worker.
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
        return [
            ("probe", f"{self.tokens:,} tokens on {self.device}, {self.form}"),
            ("tokens per forward", f"{self.batch_tokens:,}"),
            ("tokens per second", f"{self.tokens_per_second:,.0f} (one worker)"),
        ]


def run_probe(setup: Setup, plan: Plan) -> tuple[Probe, tuple[Column, ...]]:
    """Load the target, prove a mask form, and time a few batches of the plan after a warm-up.

    Return that, and the columns as `generate` would store them, with the bits of lossy ones.

    Raises:
        TargetError, RunError: the target cannot be loaded, or no mask form is proven.
    """
    options = setup.options
    with parts("probe"), closing(load_target(setup, plan)) as target:
        find_positions(setup, plan, target)
        _, documents = documents_to_prove(setup, plan)
        form = target.prove(documents, plan.pack_length, options.packing).form
        asked = options.tokens_per_forward
        batch_tokens = choose_batch_tokens(target, plan, form, setup.columns, asked)

        def fill(size: int) -> None:  # as much memory as any forward takes; and a warm-up
            largest = largest_batch(plan, form, size)
            supervised = np.zeros(largest.tokens, np.int64)
            forward_columns(target, largest, form, setup.columns, supervised)

        _, batch_tokens = in_memory(fill, target, plan, form, setup.columns, batch_tokens)
        sample = sample_documents(plan.lengths, _BATCHES * batch_tokens)
        given = (batch_tokens, options.temperature)
        start = time.perf_counter()
        measure_documents(plan, target, form, sample, *given, setup.columns)
        elapsed = time.perf_counter() - start
        tokens = int(np.minimum(plan.lengths[sample], LONGEST).sum())
        probe = Probe(
            tokens=tokens,
            tokens_per_second=tokens / elapsed,
            seconds=plan.tokens * elapsed / tokens,
            memory_bytes=peak_memory(target.device),
            device=str(target.device),
            form=form,
            batch_tokens=batch_tokens,
        )
        return probe, calibrate(setup, plan, target, form, batch_tokens, None)[0]


def process_memory(setup: Setup, plan: Plan) -> tuple[int, int] | None:
    """Return about how many bytes the weights, and a forward of the longest document, take in each
    process of --context-parallel; None without it.
    """
    options, dtype = setup.options, _dtype(setup)
    if options.context_parallel == 1:
        return None
    from spec_data.capture.context_parallel import forward_bytes  # with all of a target

    tokens = max(int(plan.lengths.max()), options.tokens_per_forward or BATCH_TOKENS)
    weights = dtype.itemsize * count_parameters(setup.model_config, options.trust_remote_code)
    given = (tokens, options.context_parallel, len(setup.layers) + 1, dtype.itemsize)
    return weights, forward_bytes(setup.model_config, *given)


# -- disk bytes ------------------------------------------------------------------------------------
# What a dataset needs on disk beside its shards, from config and tokenizer files alone: to within
# 1 % and 64 KB. Manifest and card are approximated, everything else is sized as it will be.


_INDEX_ROW = 4 + 4 + 5 * 4 + 8  # two text offsets, five int32, a checksum
_MANIFEST, _OF_A_SHARD, _CARD = 9_000, 330, 3_000
_SAFETENSORS_ENTRY, _ARROW_SCHEMA = 110, 2_000


def other_files(setup: Setup, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything but the shards, by kind: head, target, index, rest.

    An MTP block belongs to the target, and is counted where its weights are here.
    """
    documents, dtype = plan.documents, _dtype(setup)
    configs = setup.model_config, text_config(setup.model_config)  # the outer one decides
    name = "tie_word_embeddings"
    tied = next((getattr(config, name) for config in configs if hasattr(config, name)), False)
    matrices = 1 if tied else 2  # and a norm
    head = (matrices * setup.vocab_size + 1) * setup.target["hidden_size"] * dtype.itemsize
    generation = setup.model_dir / GENERATION_CONFIG
    target = sum(map(len, tokenizer_files(setup).values())) + len(config_json(setup, dtype))
    target += mtp_bytes(setup.model_dir, text_config(setup.model_config).num_hidden_layers)
    widths = [c.width or 1 for c in setup.columns if c.lossy]
    tables = sum(10 * width + width**2 + 4 * _SAFETENSORS_ENTRY for width in widths)
    shards = len(plan.units) * _OF_A_SHARD
    return {
        "head": head + 3 * _SAFETENSORS_ENTRY,
        "target": target + (generation.stat().st_size if generation.is_file() else 0),
        "index": documents.text_bytes + len(documents) * _INDEX_ROW + _ARROW_SCHEMA,
        "rest": tables + shards + _MANIFEST + _CARD + len(dump_json(plan.settings)),
    }


def _dtype(setup: Setup) -> torch.dtype:
    """Return the dtype that the target will have, by --dtype or its config."""
    configs = setup.model_config, text_config(setup.model_config)
    stored = next((c.dtype for c in configs if getattr(c, "dtype", None)), torch.float32)
    name = setup.options.dtype if setup.options.dtype != "auto" else str(stored)
    return DTYPES.get(name.removeprefix("torch."), torch.float32)
