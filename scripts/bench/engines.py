"""The drafts of `drafts.py` in real engines: do these draft and accept as many tokens as we?

    bash scripts/engines_env.sh
    .venv-engines/bin/python scripts/bench/engines.py --target MODEL --prompts FILE --out DIR

Every draft in DIR (made by `drafts.py`) is exported to DIR/NAME-vllm and served by vLLM on the CPU,
greedy, in float32, one prompt at a time. Verification corrects wrong drafts, so equal answers prove
nothing; equal counts of drafted and accepted tokens do. Block drafts that begin at their anchor are
loaded by vLLM's DSpark class and not served: its runner for that needs a GPU (DFlash's published
layout is served in the tests). The speculators library loads all but EAGLE-1/2, every tensor in its
place. `pytest -m engines` proves more of each, on small random targets.
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from spec_data.corpus.template import Template  # noqa: E402
from spec_data.terminal.text_table import text_table  # noqa: E402
from spec_train.evaluation.prompts import read_prompts  # noqa: E402
from tests.engines.engine_tools import (  # noqa: E402
    load_speculators,
    our_counts,
    run_program,
    serve,
)
from tests.spec_train.formats.tools import export  # noqa: E402

SERVED: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
LOADED = {"dflash": {"method": "dspark"}, "dspark": {"method": "dspark"}}
ROOM = 256  # tokens of prompt and answer that serve_vllm.py gives a request
ANSWER = 64  # the answer needs fewer


def main() -> None:
    """Serve every draft that is there, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--drafts", nargs="+", default=[*SERVED, *LOADED])
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens per round")
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here: see the commands above")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    every = read_prompts(str(args.prompts), Template(tokenizer), args.limit)
    prompts = [prompt.ids for prompt in every if len(prompt.ids) <= ROOM - ANSWER]
    if not prompts:
        parser.error(f"--prompts: none has at most {ROOM - ANSWER} tokens")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    rows: list[tuple[str, ...]] = [
        ("draft", "prompts", "same counts", "ours", "vLLM", "vLLM class", "speculators")
    ]
    for name in args.drafts:
        draft = args.out / name / "last"
        if not draft.exists():
            continue
        asked = (SERVED | LOADED)[name] | {
            "model": str(exported(draft, "vllm", args)),
            "num_speculative_tokens": args.depth,
        }
        counted, kind = ("-",) * 4, "-"
        if name in SERVED:
            theirs = serve(args.target, asked, prompts)
            ours = [our_counts(model, draft, ids, args.depth) for ids in prompts]
            same = sum(a == b for a, b in zip(ours, theirs, strict=True))
            lengths = (f"{length(found):.4f}" for found in (ours, theirs))
            counted = str(len(prompts)), str(same), *lengths
        else:
            task = {"model": args.target, "speculative_config": asked}
            found = run_program("load_vllm.py", task)
            check_sums(found["sums"], load_file(Path(asked["model"]) / "model.safetensors"))
            kind = found["class"]
        rows.append((name, *counted, kind, in_speculators(name, draft, args)))
        print(text_table(rows[-1:]), flush=True)
    print(f"\nvLLM with {args.depth} drafted tokens per round\n\n{text_table(rows)}")


def exported(draft: Path, form: str, args: argparse.Namespace) -> Path:
    """Export the draft to a form, replacing an older export."""
    out = args.out / f"{draft.parent.name}-{form}"
    shutil.rmtree(out, ignore_errors=True)
    return export(draft, form, out, args.target)


def check_sums(sums: dict[str, float], tensors: dict[str, torch.Tensor]) -> None:
    """Check that every weight of vLLM's class with a name of the file equals the file's."""
    own = {name: sums[f"model.{name}"] for name in tensors if f"model.{name}" in sums}
    if len(own) < 8:
        raise SystemExit(f"vLLM's class has only {sorted(own)} of the file's tensors")
    for name, total in own.items():
        if abs(total - float(tensors[name].double().sum())) > 1e-3:
            raise SystemExit(f"{name}: vLLM's class holds other weights than the file")


def in_speculators(name: str, draft: Path, args: argparse.Namespace) -> str:
    """Load the draft with the speculators library, if the library knows its kind."""
    if name == "eagle":
        return "-"
    shared = {"embed_tokens.weight", "lm_head.weight"} if name in LOADED else set()
    return type(load_speculators(exported(draft, "speculators", args), frozenset(shared))).__name__


def length(counts: list[dict[str, Any]]) -> float:
    """Return the acceptance length: tokens per round."""
    return 1 + sum(c["accepted"] for c in counts) / sum(c["rounds"] for c in counts)


if __name__ == "__main__":
    main()
