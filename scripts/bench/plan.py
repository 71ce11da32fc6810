"""Planning: seconds, documents per second and memory, for 1 and 2 processes and the slow path.

    python scripts/bench/plan.py --target MODEL --documents 100000

Makes a corpus of short conversations and plans it in a fresh process per case, one after the other:
`one by one` (every render tokenised by itself, everything in memory: `plan_reference.py`), and the
product with 1 and more processes. All of them must find the same documents. CPU seconds are those
of all processes together; memory is the peak of the planning process above what it holds before.
"""

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = (
    "the of a to in is that it was for on are with as they be at one have this from by hot word "
    "but what some can out other were all there when up use your how said an each she which do "
    "their time if will way about many then them write would like so these her long make thing "
    "see him two has look more day could go come did number sound no most people my over know"
)


def write_corpus(path: Path, documents: int, answers: int) -> None:
    """Write conversations of about 25 words per message."""
    rng, choice = random.Random(0), TEXT.split()
    with path.open("w", encoding="utf-8") as file:
        for i in range(documents):
            messages = []
            for turn in range(answers):
                for role in ("user", "assistant"):
                    words = " ".join(rng.choices(choice, k=rng.randint(10, 40)))
                    content = f"{i} {turn} {words}"
                    messages.append({"role": role, "content": content})
            file.write(json.dumps({"messages": messages}) + "\n")


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def one_case(target: str, corpus: str, processes: int) -> dict:
    """Plan in this process; 0 processes: the slow path."""
    from plan_reference import one_by_one, slow_renderer

    from spec_data.corpus.record_reader import CorpusReader
    from spec_data.generation.plan import end_token_ids
    from spec_data.generation.setup import (
        AnswerOptions,
        CaptureOptions,
        CorpusRows,
        RenderOptions,
        RunOptions,
        make_plan,
        set_up,
    )

    setup = set_up(
        target,
        CorpusRows(sources=(corpus,)),
        RenderOptions(),
        CaptureOptions(),
        RunOptions(device="cpu"),
        AnswerOptions(),
        weights=False,
    )
    before, cpu, wall = peak_bytes(), cpu_seconds(), time.monotonic()
    if processes:
        plan = make_plan(setup, processes)
        documents, tokens, ids = len(plan.documents), plan.tokens, plan.documents.doc_ids()
    else:
        renderer = slow_renderer(
            setup.tokenizer,
            eot_token_ids=end_token_ids(setup.model_dir),
            vocab_size=setup.vocab_size,
        )
        found = one_by_one(CorpusReader([corpus]), renderer, setup.rendering.max_length)
        documents, tokens, ids = len(found.ids), sum(map(len, found.ids)), iter(found.doc_ids)
    took = time.monotonic() - wall, cpu_seconds() - cpu, peak_bytes() - before
    same = hashlib.sha256("".join(ids).encode()).hexdigest()
    return {"documents": documents, "tokens": tokens, "took": took, "same": same}


def main() -> None:
    """Run every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--answers", type=int, default=1, help="answers of a conversation")
    parser.add_argument("--processes", default="0,1,2", help="0 is the slow path")
    parser.add_argument("--folder", help="where the corpus is written")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        corpus, processes = given.case.rsplit(":", 1)
        print(json.dumps(one_case(given.target, corpus, int(processes))))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        corpus = Path(folder) / "chats.jsonl"
        write_corpus(corpus, given.documents, given.answers)
        print(f"{given.documents:,} conversations, {corpus.stat().st_size:,} bytes of JSONL")
        print("| path | seconds | CPU-s | documents/s | documents/CPU-s | MB | bytes/document |")
        print("| --- | --: | --: | --: | --: | --: | --: |")
        results = set()
        for processes in map(int, given.processes.split(",")):
            case = f"{corpus}:{processes}"
            command = [sys.executable, __file__, "--target", given.target, "--case", case]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            seconds, cpu, memory = found["took"]
            count = found["documents"]
            results.add((count, found["tokens"], found["same"]))
            name = f"{processes} processes" if processes else "one by one"
            print(
                f"| {name} | {seconds:.1f} | {cpu:.1f} | {count / seconds:,.0f} | "
                f"{count / cpu:,.0f} | {memory / 1e6:,.0f} | {memory / count:,.0f} |",
                flush=True,
            )
    if len(results) != 1:
        sys.exit(f"the plans differ: {results}")
    (same,) = results
    print(f"equal plans: {same[0]:,} documents, {same[1]:,} tokens")


if __name__ == "__main__":
    main()
