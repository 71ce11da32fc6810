"""Run conformance vectors in real llama.cpp, and note what it answers and accepts.

`scripts/engines_env.sh` installs its bindings, and its converter beside them.
    python vectors_llama.py '[{"model": ..., "draft": ..., "type": "EAGLE3", "prompts": [[ids]]}]'
"""

import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import xllamacpp as llama

CONVERTER = Path(sys.prefix) / "llama.cpp"
EVENT = re.compile(r"draft candidate +0, pos +\d+: +(\d+) |accepted (\d+)/\d+ draft tokens")


def convert(source: str, out: Path, *words: str) -> str:
    """Write a target or a draft as GGUF, in float32; return its path.

    The converter knows tokenizers by a hash, and that of the vectors is not among them.
    """
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    script = str(CONVERTER / "convert_hf_to_gguf.py")
    sys.argv = [script, source, "--outtype", "f32", "--outfile", str(out), *words]
    runpy.run_path(script, run_name="__main__")
    return str(out)


def run(task: dict[str, Any], target: str, draft: str) -> list[dict[str, Any]]:
    """Answer greedily in float32: in 16 bits, or with flash attention, near choices differ."""
    given = llama.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.warmup = target, 256, 1, False
    given.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.cpuparams.n_threads, given.verbosity = 1, 9
    kinds = llama.common_speculative_type
    given.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{task['type']}")]
    drafting, depth, count = given.speculative.draft, task["depth"], task["tokens"]
    drafting.mparams.path, drafting.n_max, drafting.p_min = draft, depth, 0.0
    for cached in (given, drafting):
        cached.cache_type_k = cached.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    past = count + 2 * depth + 2  # near its limit, it drafts fewer tokens
    greedy = {"n_predict": past, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    server, lines, shown = llama.Server(given), [], os.dup(2)
    for i, prompt in enumerate(task["prompts"]):
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            found = server.handle_completions({"prompt": prompt, "cache_prompt": False, **greedy})
            os.dup2(shown, 2)
            log.seek(0)
            rounds = rounds_of(log.read().decode(errors="replace"))
        tokens = [one["id"] for one in found["choices"][0]["logprobs"]["content"]]
        total, steps = 1, 0
        while total < count:
            total, steps = total + rounds[steps][1] + 1, steps + 1
        drafted, accepted = zip(*rounds[:steps], strict=True)
        line = {"vector": task["vector"], "prompt": i, "output": tokens[:count]}
        lines.append(line | {"drafted": drafted, "accepted": accepted})
    return lines


def rounds_of(log: str) -> list[tuple[list[int], int]]:
    """Return the drafted tokens of each round, and how many were accepted, from a verbose log."""
    rounds, drafted = [], []
    for token, accepted in EVENT.findall(log):
        if token:
            drafted.append(int(token))
        else:
            rounds.append((drafted, int(accepted)))
            drafted = []
    return rounds


def main() -> None:
    """Print what each task found: the lines of its log."""
    sys.path[:0] = [str(CONVERTER), str(CONVERTER / "gguf-py")]
    tasks, targets, done = json.loads(sys.argv[1]), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, task in enumerate(tasks):
            model = task["model"]
            if model not in targets:
                targets[model] = convert(model, Path(folder) / f"target-{len(targets)}.gguf")
            words = "--target-model-dir", model
            draft = convert(task["draft"], Path(folder) / f"draft-{number}.gguf", *words)
            done.append({"run": task["draft"], "lines": run(task, targets[model], draft)})
    print("\nRESULT " + json.dumps(done))


if __name__ == "__main__":
    main()
