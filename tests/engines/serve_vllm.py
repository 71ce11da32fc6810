"""Serve prompts with real vLLM on a CPU, one at a time, and report what it counted, as JSON.

A program of its own: vLLM's state is global, so every served model gets a fresh process.
    python serve_vllm.py '{"model": ..., "speculative_config": ..., "prompts": [[ids]], ...}'
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

COUNTS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def counts(llm: LLM) -> dict[str, int]:
    """Totals so far."""
    metrics = {m.name: m for m in llm.get_metrics() if isinstance(m, (Counter, Vector))}
    return {key: int(metrics[name].value) for key, name in COUNTS.items()}


def engine(task: dict[str, Any]) -> tuple[LLM, SamplingParams]:
    """Return vLLM in float32, one request at a time, and greedy decoding of `tokens` tokens."""
    options = (
        {"speculative_config": task["speculative_config"]} if task["speculative_config"] else {}
    )
    llm = LLM(
        model=task["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=task["tokens"], ignore_eos=True, detokenize=False
    )
    return llm, greedy


def main(task: dict[str, Any]) -> None:
    """Answer greedily in float32, `tokens` tokens for every prompt."""
    llm, greedy = engine(task)
    results, before = [], counts(llm)
    for prompt in task["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        after = counts(llm)
        result = {key: after[key] - before[key] for key in after}
        results.append(result | {"tokens": list(answer.outputs[0].token_ids)})
        before = after
    print("\nRESULT " + json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
