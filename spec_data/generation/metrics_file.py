"""--metrics FILE: the status of a generation for a monitoring system, while `generate` runs.

A .prom file is replaced as a whole, in the text format of Prometheus, for the textfile collector
of its node exporter. A .jsonl file grows by one line. Both describe the whole directory, so it does
not matter which of several workers has written last.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from spec_data.generation.status import Status, StatusReader
from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import temporary_name

logger = logging.getLogger(__name__)

METRICS_SECONDS = 10.0
"""Seconds between two writes."""


@contextlib.contextmanager
def metrics_written(file: str | None, out: Path) -> Iterator[None]:
    """Write `file` every ten seconds while the body runs, and once at its end; None: write none."""
    if file is None:
        yield
        return
    reader, stop = StatusReader(out), threading.Event()
    path = Path(file)

    def work() -> None:
        while not stop.wait(METRICS_SECONDS):
            write_metrics(path, reader)

    write_metrics(path, reader)
    thread = threading.Thread(target=work, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        write_metrics(path, reader)


def write_metrics(path: Path, reader: StatusReader) -> None:
    """Write the status now; a failure to do so is logged and stops nothing."""
    try:
        status = reader.read()
    except (SpecDataError, OSError) as error:  # no plan yet, or sealed at this moment
        logger.debug("--metrics %s: %s", path, error)
        return
    try:
        if path.suffix == ".prom":
            temporary = temporary_name(path)
            temporary.write_text(prometheus_text(status), encoding="utf-8")
            temporary.replace(path)
        else:
            line = json.dumps({"time": round(time.time(), 3), **status.facts()}) + "\n"
            with path.open("ab", buffering=0) as target:
                target.write(line.encode())  # one write: lines of several workers do not mix
    except OSError as error:
        logger.warning("--metrics %s: %s", path, error.strerror or error)


def prometheus_text(status: Status) -> str:
    """Return the status in the text format of Prometheus."""
    where = f'dataset="{_escaped(str(status.path))}"'
    lines: list[str] = []

    def add(name: str, help: str, values: list[tuple[str, float]]) -> None:
        lines.append(f"# HELP spec_data_{name} {help}")
        lines.append(f"# TYPE spec_data_{name} gauge")
        for labels, value in values:
            lines.append(f"spec_data_{name}{{{where}{labels}}} {value:g}" if value % 1 else
                         f"spec_data_{name}{{{where}{labels}}} {int(value)}")  # fmt: skip

    add("sealed", "1 if the dataset is complete", [("", int(status.sealed))])
    add("units", "units of the plan", [("", status.units)])
    add("units_done", "finished units", [("", status.units_done)])
    if status.tokens is not None:
        add("tokens", "tokens of the plan", [("", status.tokens)])
    add("tokens_done", "captured tokens", [("", status.tokens_done)])
    add("shard_bytes", "bytes of finished shards", [("", status.bytes)])
    add("tokens_per_second", "tokens per second of all workers", [("", status.tokens_per_second)])
    if status.eta_seconds is not None:
        add("eta_seconds", "seconds that are left at this speed", [("", status.eta_seconds)])
    add("failures", "processes that failed or were killed", [("", len(status.failures))])
    names = [
        (f',worker="{_escaped(w.worker)}",host="{_escaped(w.host)}"', w) for w in status.workers
    ]
    add("worker_up", "1 while the worker runs", [
        (labels, int(w.state in ("loading", "capturing"))) for labels, w in names
    ])  # fmt: skip
    add("worker_units_done", "units that the worker finished", [
        (labels, w.units_done) for labels, w in names
    ])  # fmt: skip
    add("worker_tokens_per_second", "tokens per second of the worker", [
        (labels, w.tokens_per_second) for labels, w in names
    ])  # fmt: skip
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
