"""How fast hidden states are read: memcpy, this project's reader and loader, and other layouts.

    python scripts/bench/reader.py                    the table, on synthetic data
    python scripts/bench/reader.py --data DIR ...     and on these datasets too, any codec

Every pass delivers the same documents once. Passes are interleaved, files are in the page cache,
figures are medians of rounds, and ratios are medians of the ratios inside a round. Processor time
includes child processes; everything runs with one torch thread. malloc keeps what is freed, so that
no layout pays page faults for new batches in every pass: ours reuses its buffers anyway.
"""

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.schema import (
    FINAL,
    FORMAT,
    FORMAT_VERSION,
    Column,
    HeadSpec,
    Manifest,
    ShardRecord,
    token_columns,
)
from spec_data.shards.seal import seal
from spec_data.shards.writer import UnitData, write_shard
from spec_data.terminal.command import keep_freed_memory
from spec_data.terminal.text_table import text_table
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, BufferOptions

MEAN_TOKENS, LONGEST, PACKS = 300, 1024, 4


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="datasets to read as well")
    parser.add_argument("--size", type=float, default=0.6, help="GB of states per pass")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not keep_freed_memory():
        raise SystemExit("this benchmark needs glibc, and no MALLOC_* in the environment")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="bench_reader_") as folder:
        bench_passes(Path(folder), args)


def cpu_seconds() -> float:
    """Return CPU-seconds of this process and of its finished children."""
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(process)[:2]) for process in processes)


# -- passes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One line of the table: `run` delivers every document and returns how many tokens it read."""

    name: str
    run: Callable[[], int]
    disk: float  # bytes per token on disk


class Corpus:
    """The documents that every pass reads: a dataset, its plan, its packs, its columns."""

    def __init__(self, path: Path, max_bytes: float) -> None:
        """Take documents of the dataset at `path` until `max_bytes` of states, in packs."""
        self.dataset = HiddenStatesDataset(path)
        self.columns = {c.name: c for c in self.dataset.manifest.columns}
        self.states = [name for name in self.columns if name.startswith("hidden.")]
        each = sum(2 * (self.columns[name].width or 1) for name in self.states)
        self.lengths = np.minimum(self.dataset.lengths, LONGEST)
        rows = np.flatnonzero(np.cumsum(self.lengths) * each <= max_bytes)
        self.plan = BatchPlan(self.lengths, rows, seq_len=LONGEST, packs_per_batch=PACKS)
        self.packs = [pack for batch in self.plan.batches(0) for pack in batch]
        self.tokens = sum(int(self.lengths[pack].sum()) for pack in self.packs)
        self.payload = each
        self.disk = size_of(path / "shards") / int(self.dataset.lengths.sum())

    def slots(self) -> dict[str, Tensor]:
        """Return a buffer for one batch of packs, in the dtypes of a trainer."""
        return {
            name: torch.zeros(
                (LONGEST * PACKS, c.width) if c.width else LONGEST * PACKS,
                dtype=torch.bfloat16 if name in self.states else c.coder.logical,
            )
            for name, c in self.columns.items()
        }

    def document(self, row: int) -> dict[str, Tensor]:
        """Return a document as other tools store it: aux states concatenated, final ones apart."""
        item, count = self.dataset[row], int(self.lengths[row])
        aux = torch.cat([item[name] for name in self.states if name != FINAL], -1)
        values = {name: item[name] for name in ("input_ids", "loss_mask")}
        values |= {"aux": aux, "final": item[FINAL]}
        return {name: value[:count].contiguous() for name, value in values.items()}

    def spans(self, packs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
        """Yield `(row, tokens, first slot)` of every document, batch by batch."""
        for number, pack in enumerate(packs):
            start = number % PACKS * LONGEST
            for row in pack:
                count = int(self.lengths[row])
                yield row, count, start
                start += count


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def memcpy(corpus: Corpus) -> Pass:
    """Copies of the same number of bytes, document by document, into reused slots."""
    each = corpus.payload
    source = torch.randint(-(2**62), 2**62, (corpus.tokens * each // 8 + 1,)).view(torch.uint8)
    slots = torch.zeros(LONGEST * PACKS * each, dtype=torch.uint8)

    def copy() -> int:
        done = 0
        for _, count, start in corpus.spans(corpus.packs):
            size = count * each
            slots[start * each : start * each + size].copy_(source[done : done + size])
            done += size
        return corpus.tokens

    return Pass(name="memcpy", run=copy, disk=0)


def ours(corpus: Corpus) -> Iterator[Pass]:
    """`read_into` in the order of the plan, and the whole loader."""
    buffers = [corpus.slots(), corpus.slots()]
    pool = ThreadPoolExecutor(2)
    path = corpus.dataset.path

    def read(dataset: HiddenStatesDataset, packs: list[list[int]], out: dict[str, Tensor]) -> int:
        for row, count, start in corpus.spans(packs):
            dataset.read_into(row, out, start, count)
        return corpus.tokens

    def two_threads() -> int:
        parts = [pool.submit(read, corpus.dataset, corpus.packs[i::2], buffers[i]) for i in (0, 1)]
        return max(part.result() for part in parts)

    columns = [name for name in corpus.columns if name not in ("input_ids", "loss_mask")]
    options = BufferOptions(dtype=torch.bfloat16)
    stream = BatchStream(corpus.dataset, corpus.plan, columns, batch_size=PACKS, buffers=options)

    def loader() -> int:
        stream.load_state_dict(corpus.plan.state(0, 0))
        return sum(
            batch.tokens for s in stream.take(len(corpus.plan.batches(0))) for batch in s.batches
        )

    codec = "+".join(dict.fromkeys(corpus.columns[name].codec for name in corpus.states))
    for name, run in {
        "one thread": lambda: read(corpus.dataset, corpus.packs, buffers[0]),
        "one thread, opened again: every chunk is checked": lambda: read(
            HiddenStatesDataset(path), corpus.packs, buffers[0]
        ),
        "two threads": two_threads,
        "whole loader": loader,
    }.items():
        yield Pass(name=f"ours {codec}, {name}", run=run, disk=corpus.disk)


def others(corpus: Corpus, folder: Path) -> Iterator[Pass]:
    """One safetensors file per document, and `datasets` in torch format, through a DataLoader."""
    folder.mkdir()
    for row in corpus.plan.rows.tolist():
        save_file(corpus.document(row), folder / f"{row}.safetensors")
    batches = [
        [row for pack in corpus.packs[i : i + PACKS] for row in pack]
        for i in range(0, len(corpus.packs), PACKS)
    ]
    disk = size_of(folder) / corpus.tokens
    files = [load_file, [folder / f"{row}.safetensors" for row in range(len(corpus.lengths))]]
    for workers in (0, 2):
        name = f"safetensors per document, DataLoader, {workers} workers"
        yield Pass(name=name, run=dataloader(files, batches, corpus, workers), disk=disk)
    opened = datasets.load_from_disk(str(corpus.dataset.path))
    table = opened.with_format("torch", columns=list(corpus.columns))
    part = batches[: max(1, len(batches) // 8)]  # it is slow
    rows = [table.__getitem__, range(len(table))]
    name = "datasets in torch format, DataLoader, 0 workers"
    yield Pass(name=name, run=dataloader(rows, part, corpus, 0), disk=corpus.disk)


def dataloader(
    source: list, batches: list[list[int]], corpus: Corpus, workers: int
) -> Callable[[], int]:
    """Return a pass of a DataLoader over a list that `source` = [load, names] reads."""
    load, names = source

    class Documents(torch.utils.data.Dataset):
        def __getitem__(self, row: int) -> dict[str, Tensor]:
            return load(names[row])

    loader = DataLoader(
        Documents(),
        batch_sampler=batches,
        collate_fn=lambda rows: {n: torch.cat([row[n] for row in rows]) for n in rows[0]},
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    tokens = int(sum(corpus.lengths[batch].sum() for batch in batches))

    def run() -> int:
        for _ in loader:
            pass
        return tokens

    return run


def bench_passes(work: Path, args: argparse.Namespace) -> None:
    """Time interleaved passes of every layout and print the table."""
    tokens = args.size * 1e9 / (8 * args.hidden)
    lengths = log_normal_lengths(int(tokens / MEAN_TOKENS), MEAN_TOKENS, LONGEST)
    made = synthetic_dataset(work / "synthetic", lengths, hidden=args.hidden)
    corpora = [Corpus(path, 1.05 * args.size * 1e9) for path in [made, *args.data]]
    passes = [memcpy(corpora[0])]
    for corpus in corpora:
        passes += ours(corpus)
    passes += others(corpora[0], work / "files")
    for one in passes:
        one.run()
    rounds = [[timed(one) for one in passes] for _ in range(args.rounds)]
    rows: list[tuple] = [("layout", "tokens per CPU-second", "disk bytes/token", "of memcpy")]
    for i, one in enumerate(passes):
        speed = statistics.median(line[i] for line in rounds)
        ratio = statistics.median(line[i] / line[0] for line in rounds)
        rows.append((one.name, f"{speed:,.0f}", f"{one.disk:,.0f}", f"{ratio:.2f}"))
    print(f"{corpora[0].tokens:,} tokens, hidden {args.hidden}, {args.rounds} rounds")
    print(text_table(rows))


def timed(one: Pass) -> float:
    """Return tokens per CPU-second."""
    before = cpu_seconds()
    return one.run() / (cpu_seconds() - before)


# -- sealed datasets of random states: no target is run, everything else is real -------------------

SHARD_TOKENS = 1 << 14


def log_normal_lengths(count: int, mean: float, longest: int, seed: int = 0) -> np.ndarray:
    """Return lengths of `count` documents with about this mean, from 2 to `longest`."""
    spread = 0.7
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(mean) - spread**2 / 2, spread, count))
    return np.clip(lengths, 2, longest).astype(np.int64)


def synthetic_dataset(
    path: Path,
    lengths: np.ndarray,
    *,
    hidden: int,
    layers: tuple[int, ...] = (1, 2, 3),
    vocab: int = 1024,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
) -> Path:
    """Write and seal a dataset of documents with these `lengths`; return `path`."""
    (path / "shards").mkdir(parents=True)
    columns = token_columns(layers, hidden, "final-hidden", vocab)
    noise = _noise(columns, shard_tokens + int(lengths.max()), seed)
    records: list[ShardRecord] = []
    first = 0
    while first < len(lengths):
        last = first + int(np.searchsorted(np.cumsum(lengths[first:]), shard_tokens)) + 1
        unit = _unit(columns, noise, lengths[first:last], first, vocab, seed)
        file = path / "shards" / f"unit-{len(records):05d}.arrow"
        records.append(write_shard(file, unit, columns))
        first = last
    head = _head(path / "target", layers, vocab, hidden, seed)
    seal(path, _manifest(columns, layers, head, len(lengths)), records)
    return path


def _noise(columns: tuple[Column, ...], tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Encoded random states of every wide column; shards share them, shifted."""
    generator = torch.Generator().manual_seed(seed)
    return {
        c.name: c.coder.encode(torch.randn(tokens, c.width, generator=generator))
        for c in columns
        if c.width
    }


def _unit(
    columns: tuple[Column, ...],
    noise: dict[str, np.ndarray],
    lengths: np.ndarray,
    first: int,
    vocab: int,
    seed: int,
) -> UnitData:
    rng = np.random.default_rng((seed, first))
    count = len(lengths)
    ids = [f"{value:032x}" for value in rng.integers(0, 2**62, count).tolist()]
    turns = [
        [("user", 0, length // 2), ("assistant", length // 2, length)]
        for length in lengths.tolist()
    ]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    unit = UnitData(ids, ["synthetic"] * count, turns, offsets)
    inside = np.arange(total) - np.repeat(offsets[:-1], lengths)
    random = {
        "input_ids": rng.integers(0, vocab, total, dtype=np.int32),
        "loss_mask": (inside >= np.repeat(lengths // 2, lengths)).astype(np.uint8),
        "target_argmax": rng.integers(0, vocab, total, dtype=np.int32),
        "target_logsumexp": np.full(total, np.log(vocab), np.float32),
    }
    unit.tokens = {c.name: noise[c.name][:total] if c.width else random[c.name] for c in columns}
    return unit


def _head(folder: Path, layers: tuple[int, ...], vocab: int, hidden: int, seed: int) -> HeadSpec:
    """Write target/ of a Llama of this shape: config.json and head.safetensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": max(layers) + 2,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": min(64, hidden),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed_tokens": torch.randn(vocab, hidden, generator=generator),
        "lm_head": torch.randn(vocab, hidden, generator=generator) / hidden**0.5,
        "norm": torch.ones(hidden),
    }
    save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, folder / "head.safetensors")
    return HeadSpec(vocab_size=vocab, hidden_size=hidden, tied=False)


def _manifest(
    columns: tuple[Column, ...], layers: tuple[int, ...], head: HeadSpec, documents: int
) -> Manifest:
    draft = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": {},
        "target": {"name": "random states", "dtype": "bfloat16", "num_layers": max(layers) + 2},
        "corpus": [{"source": "synthetic"}],
        "layers": list(layers),
        "supervision": "final-hidden",
        "columns": plain(columns),
        "head": plain(head),
        "packing": {"form": "rows"},
        "policy": "off-policy",
        "documents": {"read": documents},
    }
    return Manifest.of(draft)


if __name__ == "__main__":
    main()
