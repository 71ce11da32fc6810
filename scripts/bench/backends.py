"""CPU-seconds per token of the forwards of each backend, on the same documents.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=0 python scripts/bench/backends.py \\
        --target MODEL --corpus FILE [--dtype bfloat16]

For an environment with vLLM (scripts/engines_env.sh makes one). Both backends are in one process,
and their rounds follow each other in turn. The corpus is JSON lines with `messages`. Loading and
proofs are not in the figures; the time of vLLM's proof is printed.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from spec_data.capture.backend import BackendOptions, open_backend
from spec_data.generation.capture import forward_batches

BATCH_TOKENS, PACK, ROUNDS, PROVEN = 8192, 2048, 5, 16


def documents(target: str, corpus: str, limit: int) -> list[np.ndarray]:
    """Return the token ids of the first conversations, int64 [T] each."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    with Path(corpus).open(encoding="utf-8") as lines:
        rows = [json.loads(line)["messages"] for line in itertools.islice(lines, limit)]
    made = [tokenizer.apply_chat_template(r, tokenize=True, return_dict=False) for r in rows]
    return [np.array(ids[: PACK - 1]) for ids in made]


def seconds(backend: Any, form: str, offsets: np.ndarray, ids: np.ndarray) -> float:
    """Return the CPU-seconds of one pass over the documents."""
    start = time.process_time()
    for batch in forward_batches(offsets, ids, form, PACK, BATCH_TOKENS):
        backend.capture(batch, form)
    return time.process_time() - start


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=200)
    given = parser.parse_args()
    found = documents(given.target, given.corpus, given.limit)
    offsets, ids = np.concatenate([[0], np.cumsum([len(d) for d in found])]), np.concatenate(found)
    options = BackendOptions(
        path=given.target, dtype=given.dtype, device="cpu", longest=PACK, batch_tokens=BATCH_TOKENS
    )
    backends = {name: open_backend(name, options) for name in ("hf", "vllm")}
    forms = {}
    for name, backend in backends.items():
        start = time.process_time()
        forms[name] = backend.prove([torch.from_numpy(d) for d in found[:PROVEN]], PACK).form
        print(f"{name}: proof of {forms[name]}, {time.process_time() - start:.1f} CPU-seconds")
        seconds(backend, forms[name], offsets, ids)  # warm-up
    rounds: dict[str, list[float]] = {name: [] for name in backends}
    for _, (name, backend) in itertools.product(range(ROUNDS), backends.items()):
        rounds[name].append(seconds(backend, forms[name], offsets, ids))
    print(f"{given.dtype}, {len(ids):,} tokens, {torch.get_num_threads()} threads")
    for name, values in rounds.items():
        each = [f"{1e6 * value / len(ids):.1f}" for value in sorted(values)]
        print(f"{name}: {1e6 * statistics.median(values) / len(ids):.1f} µs per token ({each})")


if __name__ == "__main__":
    main()
