"""Run conformance vectors in real vLLM on a CPU, and note what it drafts and accepts.

vLLM's state is global, so each run is a process of its own, forked after the slow imports.
    python vectors_vllm.py '[{"model": ..., "speculative_config": ..., "prompts": [[ids]], ...}]'
"""

import json
import os
import sys
from typing import Any

from serve_vllm import counts, engine  # it sets the environment of vLLM first
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DRAFTED: list[list[int]] = []
_PROPOSE = GPUModelRunner.propose_draft_token_ids


def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draft, and note the drafted tokens of the one request."""
    found = _PROPOSE(self, *args, **kwargs)
    rows = found if isinstance(found, list) else found.tolist()
    DRAFTED.extend(rows[:1])
    return found


def run(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer greedily in float32, step by step."""
    GPUModelRunner.propose_draft_token_ids = propose
    llm, greedy = engine(task)
    lines = []
    for i, prompt in enumerate(task["prompts"]):
        DRAFTED.clear()
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        accepted, before, output = [], counts(llm), []
        while llm.llm_engine.has_unfinished_requests():
            for answer in llm.llm_engine.step():
                output = list(answer.outputs[0].token_ids)
            after = counts(llm)
            if after["rounds"] > before["rounds"]:
                accepted.append(after["accepted"] - before["accepted"])
            before = after
        line = {"vector": task["vector"], "prompt": i, "output": output, "accepted": accepted}
        lines.append(line | {"drafted": DRAFTED[: len(accepted)]})
    return lines


def forked(task: dict[str, Any]) -> dict[str, Any]:
    """Run in a process of its own; EOFError if that ends without an answer."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.wait()
        if not text:
            raise EOFError(task["run"])
        return {"run": task["run"], "lines": json.loads(text)}
    with os.fdopen(writer, "w") as pipe:
        pipe.write(json.dumps(run(task)))
    os._exit(0)


if __name__ == "__main__":
    print("\nRESULT " + json.dumps([forked(task) for task in json.loads(sys.argv[1])]))
