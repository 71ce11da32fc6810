"""What rows far above --max-row-bytes, and long chats, cost to read: memory beyond the imports.

    python scripts/bench/long_rows.py --target MODEL    # rows of 1 GB, a chat of 4,000 turns
    python scripts/bench/long_rows.py --bytes 1e8       # rows of 100 MB, no chat

Every figure is that of a process of its own.
"""

import argparse
import gzip
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.record_reader import CorpusReader
from spec_data.models.tokenizer import load_tokenizer

PIECE = 1 << 20
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux
AROUND = {
    "line.jsonl.gz": ('{"text": "first"}\n{"text": "', '"}\n{"text": "last"}\n'),
    "cell.csv.gz": ('text\nfirst\n"', '"\nlast\n'),
    "element.json.gz": ('[{"text": "first"}, {"text": "', '"}, {"text": "last"}]'),
    "paragraph.txt.gz": ("first\n\n", "\n\nlast\n"),
}


def write(folder: Path, size: int, turns: int) -> list[Path]:
    """Write a file of each kind with one row of `size` bytes, and a chat of `turns` messages."""
    paths = [folder / name for name in (*AROUND, "row.parquet", "chat.jsonl")]
    for name, (head, tail) in AROUND.items():
        with gzip.open(folder / name, "wb", 1) as file:
            file.write(head.encode())
            for _ in range(size // PIECE):
                file.write(b"x" * PIECE)
            file.write(tail.encode())
    table = pa.table({"text": ["first", "x" * size, "last"]})
    pq.write_table(table, paths[-2], row_group_size=1, compression="zstd")
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": f"Turn {i}."} for i in range(turns)]
    paths[-1].write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    return paths


def read(path: Path, target: str | None) -> dict[str, float]:
    """Read a corpus as `generate` does; return rows, bad rows, documents, GB and seconds."""
    renderer = None
    if target is not None:
        renderer = Renderer(load_tokenizer(Path(target)), longest=2048)
    reader = CorpusReader([str(path)], max_bad_rows=parse_limit("100%"))
    RESET.write_text("5", encoding="ascii")
    before, start, documents = _peak(), time.monotonic(), 0
    for record in reader:
        documents += len(renderer.render(record).documents) if renderer else 0
    (report,) = reader.reports
    taken, seconds = _peak() - before, time.monotonic() - start
    counts = {"rows": report.rows, "bad": report.bad, "documents": documents}
    return {**counts, "GB": taken / 1e9, "seconds": seconds}


def _peak() -> int:
    """Return the most bytes of memory since the peak was reset."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Write the files, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--target", help="whose tokenizer renders the chat; without: no chat")
    given = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), int(given.bytes), given.turns):
            chat = path.name.startswith("chat")
            if chat and given.target is None:
                continue
            with ProcessPoolExecutor(1, fresh) as one:
                found = one.submit(read, path, given.target if chat else None).result()
            facts = "  ".join(f"{name} {value:.3g}" for name, value in found.items())
            print(f"{path.name:18} {path.stat().st_size / 1e3:,.0f} kB  {facts}", flush=True)


if __name__ == "__main__":
    main()
