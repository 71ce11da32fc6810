"""What all campaigns share: how many trials, their seeds, and trials that may kill a process."""

import collections
import json
import os
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator

import numpy as np

TIMES = float(os.environ.get("SPEC_FAULTS", "1"))
SEED = int(os.environ.get("SPEC_FAULTS_SEED", "0"))


def count(default: int) -> int:
    """How many trials a campaign runs: `default`, times SPEC_FAULTS."""
    return max(1, round(default * TIMES))


def trials(name: str, default: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Yield the number of every trial of campaign `name`, and its own generator."""
    print(f"campaign {name}: {count(default)} trials, SPEC_FAULTS_SEED={SEED}")
    for trial in range(count(default)):
        yield trial, np.random.default_rng([zlib.crc32(name.encode()), SEED, trial])


def report(name: str, outcomes: collections.Counter) -> None:
    """Print what became of the trials."""
    found = ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items()))
    print(f"campaign {name}: {found}")


def survived(run: Callable[[int], str], number: int) -> list[str]:
    """Run trials 0 to `number` in a process of their own; return the result of each.

    A trial that kills the process has the result "killed by SIGSEGV" (or another signal), and one
    that raises has its traceback; the others follow in a new process.
    """
    results: list[str] = []
    while len(results) < number:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _send_all(run, range(len(results), number), writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            results += [json.loads(line) for line in stream if line.endswith(b"\n")]
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            results.append(f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
        elif status:
            results.append(f"exit status {os.waitstatus_to_exitcode(status)}")
    return results


def _send_all(run: Callable[[int], str], numbers: range, writing: int) -> None:
    """Send the results of trials to the parent, a JSON line each; leave without its clean-up."""
    with os.fdopen(writing, "wb") as stream:
        for trial in numbers:
            try:
                result = run(trial)
            except BaseException:
                result = traceback.format_exc()
            stream.write(json.dumps(result).encode() + b"\n")
            stream.flush()
    os._exit(0)
