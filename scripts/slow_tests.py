#!/usr/bin/env python3
"""Choose the tests that are long, from what each took in a whole run: writes tests/long.txt.

    bash scripts/test.sh -m '' --junitxml=times.xml    # all tests, on an idle machine
    python scripts/slow_tests.py times.xml --minutes 7

Of every test function at least the quickest row stays in the suite that CI runs; a test that is no
row of a table also stays if it holds a promise or plants a failure (tests/promises.toml,
planted.toml). Of the others the slowest are listed until what stays fits. What a module marks by
itself (`pytest.mark.long`) is long in any case, and is not counted.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "long.txt"
PINNED = ("tests/test_",)
"""Beginnings of the names of tests that always stay: what holds for the whole project."""
HELD = ("promises.toml", "planted.toml")
QUICK = 0.3
"""Seconds below which nothing is listed."""


def read_times(junit: Path) -> dict[str, float]:
    """Return what every test of a run took, in seconds, by its name as pytest prints it."""
    times = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        parts = str(case.get("classname")).split(".")
        of = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts))  # a class
        name = "::".join(["/".join(parts[:of]) + ".py", *parts[of:], str(case.get("name"))])
        times[name] = float(case.get("time", 0))
    return times


def choose(times: dict[str, float], seconds: float) -> list[str]:
    """Return the tests to list, so that the others take `seconds` together, if that is possible."""
    texts = "".join((ROOT / "tests" / name).read_text() for name in HELD)
    held = set(re.findall(r"tests/[\w/]+\.py::\w+", texts))
    functions = defaultdict(list)
    for name in times:
        functions[name.partition("[")[0]].append(name)
    kept = set()
    for function, rows in functions.items():
        if len(rows) > 1 or function in held:
            kept.add(min(rows, key=lambda row: times[row]))
    total, chosen = sum(times.values()), []
    for name in sorted(times.keys() - kept, key=lambda name: -times[name]):
        if total <= seconds or times[name] < QUICK:
            break
        if not name.startswith(PINNED):
            chosen.append(name)
            total -= times[name]
    return sorted(chosen)


def marked() -> set[str]:
    """Return the tests that their own modules mark as long: those that no list is needed for."""
    before, heading = LIST.read_text(), LIST.read_text().splitlines()[0]
    LIST.write_text(heading + "\n")
    try:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        LIST.write_text(before)
    return {line for line in done.stdout.splitlines() if "::" in line}


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("junit", type=Path, help="what pytest --junitxml wrote of a whole run")
    parser.add_argument("--minutes", type=float, default=7.0, help="of the suite (default: 7)")
    parser.add_argument("--workers", type=int, default=2, help="that run it (default: 2)")
    given = parser.parse_args()
    own, times = marked(), read_times(given.junit)
    times = {name: took for name, took in times.items() if name not in own}
    chosen = choose(times, given.minutes * 60 * given.workers)
    heading = LIST.read_text().splitlines()[0]
    LIST.write_text("\n".join([heading, *chosen]) + "\n")
    left = sum(times.values()) - sum(times[name] for name in chosen)
    print(f"{len(chosen)} of {len(times)} tests are long now; the others take {left:.0f} s")


if __name__ == "__main__":
    main()
