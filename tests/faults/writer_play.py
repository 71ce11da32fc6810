"""What the writer thread of a run does in three steps, without training: for `odd_disk`.

    python -m tests.faults.writer_play OUT DRAFT

Every step has a best draft, its held-out figures and a checkpoint, as `Trainer` writes them; the
weights of the draft say the step. It goes on from what is in OUT.
"""

import json
import sys

import torch

from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import write_once
from spec_data.terminal.console import in_words
from spec_train import load_draft
from spec_train.training.run_directory import RunDirectory
from spec_train.training.saving import Saver

STEPS = 3


def main(words: list[str]) -> int:
    """Write three steps; print the step of the best draft that the run believes in, or an error."""
    out, given = words
    try:
        with torch.no_grad():
            print(json.dumps({"best": _play(out, given)}))
    except (SpecDataError, OSError) as error:
        code, message = in_words(error, str)
        print(message, file=sys.stderr)
        return code
    return 0


def _play(out: str, given: str) -> int | None:
    run = RunDirectory(out)
    run.record({"lr": 0.1}, lambda: STEPS)
    run.write_options({"steps": STEPS})
    saved = run.load_newest()
    best = None if saved is None else saved.state["best"]
    if saved is None:
        run.begin()
    else:
        run.truncate_metrics(saved.step)
    draft = load_draft(given)
    trained = [p for _, p in draft.named_parameters() if p.requires_grad]
    saver = Saver(run, draft, torch.float32)
    try:
        for step in range(1 if saved is None else saved.step + 1, STEPS + 1):
            saver.check()
            for weight in trained:
                weight.fill_(step)
            saver.metrics({"step": step, "split": "train"})
            saver.check(wait=True)
            held = saver.hold((f"master.{n}", p) for n, p in draft.named_parameters())
            best = {"step": step, "loss": 1.0 / step}
            saver.best(step, {"loss": 1.0 / step}, {"samples": [step]})
            saver.checkpoint(step, held, {"best": best, "tokens": step})
        saver.check(wait=True)
    finally:
        saver.close()
    write_once(run.path / "done.json", "{}")
    run.close()
    return None if best is None else best["step"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
