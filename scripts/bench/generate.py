"""Tokens per second of generate's capture against a bare forward of the same packs.

Both run in this process, interleaved, on the same batches with the same masks. The bare forward is
the model's own decoder without hooks, head, checks, encoding or writing; the capture adds hooks,
argmax and logsumexp over the vocabulary, checks, bf16 encoding, and writes shards while the next
forward runs.

    python scripts/bench/generate.py --target MODEL --corpus FILE [--limit 512]
"""

import argparse
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from spec_data.generate_options import GenerateConfig
from spec_data.generation.capture import CaptureSettings, capture_unit, forward_batches
from spec_data.generation.loaded_target import backend_options
from spec_data.generation.plan import Plan
from spec_data.generation.planning import make_plan
from spec_data.generation.replica import prove_target
from spec_data.generation.setup import set_up
from spec_data.generation.unit_size import BATCH_TOKENS
from spec_data.shards.files import unit_name
from spec_data.shards.writer import write_shard
from spec_data.target.hf_backend import HFBackend
from spec_data.target.mask_forms import ROWS, SINGLE, packed_mask
from spec_data.target.model import Target


@torch.inference_mode()
def bare_forward(target: Target, plan: Plan, unit: int, form: str, batch_tokens: int) -> None:
    """The decoder alone, with the mask of the capture."""
    ids = plan.unit_tokens(unit)["input_ids"]
    offsets = plan.unit_documents(unit, ()).offsets
    for packed in forward_batches(offsets, ids, form, plan.pack_length, batch_tokens):
        documents = packed.document_ids.to(target.device)
        if bool((documents == 0).all()):  # one document fills each row
            mask = {"attention_mask": None}
        elif form in (ROWS, SINGLE):
            mask = {"attention_mask": (documents >= 0).long()}
        else:
            mask = packed_mask(form, target.config, target.attn, documents, target.dtype)
        target.model.base_model(
            input_ids=packed.input_ids.to(target.device),
            position_ids=packed.position_ids.to(target.device),
            use_cache=False,
            **mask,
        )
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    config = GenerateConfig(
        target=args.target,
        corpus=(args.corpus,),
        out=str(work),
        limit=args.limit,
        max_shard_size="20MB",
        codec="bf16",
        device=args.device,
    )
    setup = set_up(config)
    plan = make_plan(setup)
    backend = HFBackend.open(backend_options(setup, plan))
    (work / ".generate").mkdir()
    form = prove_target(setup, plan, backend, work)["packing"]["form"]
    settings = CaptureSettings(columns=setup.columns, form=form, batch_tokens=BATCH_TOKENS)
    units = range(len(plan.units))
    ratios, bare_rates, rates = [], [], []
    with ThreadPoolExecutor(1) as writer:
        for _ in range(args.rounds):
            start = time.perf_counter()
            for unit in units:
                bare_forward(backend.target, plan, unit, form, BATCH_TOKENS)
            bare = time.perf_counter() - start
            start, pending = time.perf_counter(), None
            for unit in units:
                done = capture_unit(backend, plan, unit, settings)
                if pending is not None:
                    pending.result()
                pending = writer.submit(
                    write_shard, work / f"{unit_name(unit)}.arrow", done.data, setup.columns
                )
            if pending is not None:
                pending.result()
            full = time.perf_counter() - start
            ratios.append(bare / full)
            bare_rates.append(plan.tokens / bare)
            rates.append(plan.tokens / full)
    shutil.rmtree(work)
    print(
        f"{plan.tokens:,} tokens in {len(plan.units)} shards, {form}, {backend.dtype}, "
        f"{backend.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print(f"bare forward       {statistics.median(bare_rates):12,.0f} tokens/s")
    print(f"generate           {statistics.median(rates):12,.0f} tokens/s")
    print(
        f"generate / bare    {statistics.median(ratios):12.3f}  "
        f"(from {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
