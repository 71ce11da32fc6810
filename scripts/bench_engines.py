"""The drafts of bench_drafts in real vLLM: are as many tokens drafted and accepted as by us?

    bash scripts/engines_env.sh
    .venv-engines/bin/python scripts/bench_engines.py --target MODEL --prompts FILE --out DIR

Every draft in DIR (made by bench_drafts) is exported to DIR/NAME-vllm and served by vLLM on the
CPU, greedy, in float32, a prompt at a time. Verification repairs wrong drafts, so equal answers
prove nothing; counts of drafted and accepted tokens do. DSpark's runner needs a GPU, and the CPU
build reads DFlash drafts of one layer only: see `pytest -m engines` for what is proven of these.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from spec_data.report import table  # noqa: E402
from spec_train.prompts import read_prompts, render, render_text  # noqa: E402
from tests.engines.engine_tools import our_counts, serve  # noqa: E402
from tests.spec_train.export_tools import export  # noqa: E402

SERVED: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
ROOM = 256  # tokens of prompt and answer that serve_vllm.py gives a request
ANSWER = 64  # of which the answer takes fewer


def main() -> None:
    """Serve every draft that is there, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens per round")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    every = [
        render(p.messages, tokenizer, {}) if p.messages else render_text(p.text or "", tokenizer)
        for p in read_prompts(args.prompts, args.limit)
    ]
    prompts = [ids for ids in every if len(ids) <= ROOM - ANSWER]
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    rows: list[tuple[str, ...]] = [("draft", "prompts", "same counts", "ours", "vLLM")]
    for name, how in SERVED.items():
        draft, out = args.out / name / "last", args.out / f"{name}-vllm"
        if not draft.exists():
            continue
        if not out.exists():
            export(draft, "vllm", out, args.target)
        asked = how | {"model": str(out), "num_speculative_tokens": args.depth}
        theirs = serve(args.target, asked, prompts)
        ours = [our_counts(model, draft, ids, args.depth) for ids in prompts]
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        lengths = (f"{length(found):.4f}" for found in (ours, theirs))
        rows.append((name, str(len(prompts)), str(same), *lengths))
        print(table(rows[-1:]), flush=True)
    print(f"\nvLLM with {args.depth} drafted tokens per round\n\n{table(rows)}")


def length(counts: list[dict[str, Any]]) -> float:
    """Acceptance length: tokens per round."""
    return 1 + sum(c["accepted"] for c in counts) / sum(c["rounds"] for c in counts)


if __name__ == "__main__":
    main()
