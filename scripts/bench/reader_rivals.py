"""The ways hidden states are read in this field, as passes over the same documents.

A `Pass` delivers every document of `rows` once. All passes but those of a DataLoader copy it into a
reused buffer of packs, as a collator must. `torch.save` is the format of other tools and
is used nowhere else in this project; files are read with `weights_only=True`.
"""

import gzip
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, Column
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, BufferOptions

FLOOR, OURS, OTHER, DATALOADER = "floor", "ours", "other", "DataLoader"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One line of the table: `run` reads the first `share` of the packs and returns the tokens."""

    name: str
    kind: str
    run: Callable[[], int]
    disk: float  # bytes per token on disk
    payload: float  # bytes per token delivered


def kind(column: Column) -> torch.dtype:
    """Return the dtype that a trainer uses for a column: bf16 for states of any codec."""
    return torch.bfloat16 if column.name.startswith("hidden.") else column.coder.logical


class Corpus:
    """The documents that every pass reads: a dataset, its plan, its packs, its columns."""

    def __init__(self, path: Path, max_bytes: float, seq_len: int, packs: int) -> None:
        """Take documents of the dataset at `path` until `max_bytes` of payload, in packs."""
        self.dataset = HiddenStatesDataset(path)
        stored = self.dataset.manifest.columns
        self.columns = {c.name: c for c in stored}
        self.payload = sum(
            2 * (c.width or 1) if c.name.startswith("hidden.") else c.bytes_per_token
            for c in stored
        )
        lengths = np.minimum(self.dataset.lengths, seq_len)
        usable = np.cumsum(lengths) * self.payload <= max_bytes
        self.plan = BatchPlan(lengths, usable, seq_len=seq_len, packs_per_batch=packs)
        self.packs = [pack for batch in self.plan.batches(0) for pack in batch]
        self.lengths, self.seq_len, self.batch = lengths, seq_len, packs
        self.tokens = self.plan.tokens
        self.codec = "+".join(
            dict.fromkeys(c.codec for c in stored if c.name.startswith("hidden."))
        )

    def some(self, share: float) -> list[list[int]]:
        """Return the first `share` of the packs."""
        return self.packs[: max(self.batch, int(len(self.packs) * share))]

    def slots(self) -> dict[str, Tensor]:
        """Return a buffer for one batch of packs, in the dtypes of a trainer."""
        count = self.seq_len * self.batch
        return {
            c.name: torch.zeros((count, c.width) if c.width else count, dtype=kind(c))
            for c in self.columns.values()
        }

    def document(self, row: int) -> dict[str, Tensor]:
        """Return a document as other tools store it: aux states concatenated, final ones apart."""
        item = self.dataset[row]
        count = int(self.lengths[row])
        aux = [c for c in self.columns if c.startswith("hidden.") and c != FINAL]
        values = {
            "input_ids": item["input_ids"],
            "loss_mask": item["loss_mask"],
            "aux": torch.cat([item[name] for name in aux], -1),
        }
        if FINAL in item:
            values["final"] = item[FINAL]
        return {name: value[:count].contiguous() for name, value in values.items()}

    def spans(self, packs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
        """Yield `(row, tokens, first slot)` of every document, batch by batch."""
        for number, pack in enumerate(packs):
            start = number % self.batch * self.seq_len
            for row in pack:
                count = int(self.lengths[row])
                yield row, count, start
                start += count


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def floors(corpus: Corpus, work: Path) -> Iterator[Pass]:
    """memcpy and preadv of the same number of bytes, document by document, into reused slots."""
    each = corpus.payload
    starts = np.concatenate([[0], np.cumsum(corpus.lengths[corpus.plan.rows] * each)])
    place = dict(zip(corpus.plan.rows.tolist(), starts.tolist(), strict=False))
    source = torch.randint(-(2**62), 2**62, (int(starts[-1]) // 8 + 1,)).view(torch.uint8)
    slots = torch.zeros(corpus.seq_len * corpus.batch * each, dtype=torch.uint8)
    file = work / "flat.bin"
    source.numpy().tofile(file)

    def copy() -> int:
        for row, count, start in corpus.spans(corpus.packs):
            first, size = place[row], count * each
            slots[start * each : start * each + size].copy_(source[first : first + size])
        return corpus.tokens

    descriptor = os.open(file, os.O_RDONLY)
    view = memoryview(slots.numpy())

    def pread() -> int:
        for row, count, start in corpus.spans(corpus.packs):
            part = view[start * each : (start + count) * each]
            if os.preadv(descriptor, [part], place[row]) != len(part):
                raise OSError(f"{file}: short read")
        return corpus.tokens

    yield Pass(name="memcpy", kind=FLOOR, run=copy, disk=0, payload=each)
    yield Pass(name="preadv, flat file", kind=FLOOR, run=pread, disk=each, payload=each)


def fill_packs(rows: list[int], corpus: Corpus) -> list[list[int]]:
    """Fill packs in this order; a document that does not fit starts a new pack."""
    packs: list[list[int]] = [[]]
    room = corpus.seq_len
    for row in rows:
        count = int(corpus.lengths[row])
        if count > room:
            packs.append([])
            room = corpus.seq_len
        packs[-1].append(row)
        room -= count
    return packs


def ours(corpus: Corpus) -> Iterator[Pass]:
    """`read_into` in the order of the plan and at random, and the whole loader."""
    rng = np.random.default_rng(0)
    rows = corpus.plan.rows.copy()
    rng.shuffle(rows)
    shuffled = fill_packs(rows.tolist(), corpus)
    buffers = [corpus.slots(), corpus.slots()]
    pool = ThreadPoolExecutor(2)

    def read(dataset: HiddenStatesDataset, packs: list[list[int]], out: dict[str, Tensor]) -> None:
        for row, count, start in corpus.spans(packs):
            dataset.read_into(row, out, start, count)

    def one(packs: list[list[int]]) -> int:
        read(corpus.dataset, packs, buffers[0])
        return corpus.tokens

    def two(packs: list[list[int]]) -> int:
        parts = [pool.submit(read, corpus.dataset, packs[i::2], buffers[i]) for i in (0, 1)]
        for part in parts:
            part.result()
        return corpus.tokens

    thorough = HiddenStatesDataset(corpus.dataset.path, check="always")

    def checked() -> int:
        read(thorough, corpus.packs, buffers[0])
        return corpus.tokens

    def reopened() -> int:
        read(HiddenStatesDataset(corpus.dataset.path), corpus.packs, buffers[0])
        return corpus.tokens

    columns = [name for name in corpus.columns if name not in ("input_ids", "loss_mask")]
    stream = BatchStream(
        corpus.dataset,
        corpus.plan,
        columns,
        batch_size=corpus.batch,
        buffers=BufferOptions(dtype=torch.bfloat16),
    )
    steps = len(corpus.plan.batches(0))

    def loader() -> int:
        stream.load_state_dict(corpus.plan.state(0, 0))
        for _ in stream.take(steps):
            pass
        return corpus.tokens

    disk = size_of(corpus.dataset.path / "shards") / int(corpus.dataset.lengths.sum())
    runs: dict[str, Callable[[], int]] = {
        "planned, 1 thread": lambda: one(corpus.packs),
        "planned, every chunk checked": checked,
        "planned, 2 threads": lambda: two(corpus.packs),
        "random, 1 thread": lambda: one(shuffled),
        "random, 2 threads": lambda: two(shuffled),
        "planned, reopened each pass": reopened,
        "whole loader": loader,
    }
    for name, run in runs.items():
        label = f"ours {corpus.codec}, {name}"
        yield Pass(name=label, kind=OURS, run=run, disk=disk, payload=corpus.payload)


def others(corpus: Corpus, work: Path, share: float) -> Iterator[Pass]:
    """Per-document files and padded shards, copied into a reused buffer; slow ones read a part."""
    slots = corpus.slots()
    aux = sum(c.width or 0 for n, c in corpus.columns.items() if n.startswith("hidden."))
    aux -= corpus.columns[FINAL].width or 0 if FINAL in corpus.columns else 0
    slots["aux"] = torch.zeros(corpus.seq_len * corpus.batch, aux, dtype=torch.bfloat16)
    slots["final"] = slots.get(FINAL, torch.zeros(0))
    some = corpus.some(share)

    def every(load: Callable[[int], dict[str, Tensor]], packs: list[list[int]]) -> int:
        tokens = 0
        for row, count, start in corpus.spans(packs):
            for name, values in load(row).items():
                slots[name][start : start + count].copy_(values)
            tokens += count
        return tokens

    layouts = {
        "safetensors per shard, padded": (padded_safetensors(corpus, work / "padded"), some),
        "safetensors per document": (file_safetensors(corpus, work / "st"), corpus.packs),
        "torch.save per document": (file_torch(corpus, work / "pt"), corpus.packs),
        "torch.save per document, gzip": (
            file_torch_gzip(corpus, work / "gz", some),
            corpus.some(share / 4),
        ),
    }
    for name, ((load, disk), packs) in layouts.items():
        yield Pass(
            name=name,
            kind=OTHER,
            run=lambda load=load, packs=packs: every(load, packs),
            disk=disk,
            payload=corpus.payload,
        )
        if name in ("safetensors per document", "torch.save per document"):
            yield from dataloaders(f"DataLoader over {name}", load, corpus, disk, corpus.packs)


Layout = tuple[Callable[[int], dict[str, Tensor]], float]
"""How to load one document, and the bytes per token on disk."""


def padded_safetensors(corpus: Corpus, folder: Path) -> Layout:
    """One file per 64 documents, tensors padded to the longest pack; only real tokens are read."""
    folder.mkdir()
    rows = corpus.plan.rows.tolist()
    files, tokens = [], corpus.tokens
    for first in range(0, len(rows), 64):
        part = [corpus.document(row) for row in rows[first : first + 64]]
        stacked = {
            name: torch.zeros(len(part), corpus.seq_len, *value.shape[1:], dtype=value.dtype)
            for name, value in part[0].items()
        }
        for i, document in enumerate(part):
            for name, value in document.items():
                stacked[name][i, : len(value)] = value
        save_file(stacked, folder / f"{first}.safetensors")
        files.append(safe_open(folder / f"{first}.safetensors", "pt"))
    number = {row: i for i, row in enumerate(rows)}

    def load(row: int) -> dict[str, Tensor]:
        shard, i = divmod(number[row], 64)
        count = int(corpus.lengths[row])
        file = files[shard]
        return {name: file.get_slice(name)[i, :count] for name in file.keys()}  # noqa: SIM118

    return load, size_of(folder) / tokens


def file_safetensors(corpus: Corpus, folder: Path) -> Layout:
    """One safetensors file per document."""
    folder.mkdir()
    for row in corpus.plan.rows.tolist():
        save_file(corpus.document(row), folder / f"{row}.safetensors")
    return lambda row: load_file(folder / f"{row}.safetensors"), size_of(folder) / corpus.tokens


def file_torch(corpus: Corpus, folder: Path) -> Layout:
    """One `torch.save` file per document."""
    folder.mkdir()
    for row in corpus.plan.rows.tolist():
        torch.save(corpus.document(row), folder / f"{row}.pt")

    def load(row: int) -> dict[str, Tensor]:
        return torch.load(folder / f"{row}.pt", weights_only=True)

    return load, size_of(folder) / corpus.tokens


def file_torch_gzip(corpus: Corpus, folder: Path, packs: list[list[int]]) -> Layout:
    """One gzipped `torch.save` file per document (fastest level), of the first packs only."""
    folder.mkdir()
    tokens = 0
    for row in (row for pack in packs for row in pack):
        memory = io.BytesIO()
        torch.save(corpus.document(row), memory)
        (folder / f"{row}.pt.gz").write_bytes(gzip.compress(memory.getvalue(), 1))
        tokens += int(corpus.lengths[row])

    def load(row: int) -> dict[str, Tensor]:
        with gzip.open(folder / f"{row}.pt.gz") as file:
            return torch.load(io.BytesIO(file.read()), weights_only=True)

    return load, size_of(folder) / tokens


class _Documents(Dataset):
    """Map-style dataset over a way to load one document."""

    def __init__(self, load: Callable[[int], dict[str, Tensor]]) -> None:
        self.load = load

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.load(row)


def concatenate(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate by concatenation; restore 16-bit payloads that `datasets` has widened."""
    out = {}
    for name in documents[0]:
        whole = torch.cat([document[name] for document in documents])
        if name.startswith("hidden.") and whole.dtype == torch.int64:
            whole = whole.to(torch.int16).view(torch.bfloat16)
        out[name] = whole
    return out


def dataloaders(
    name: str,
    load: Callable[[int], dict[str, Tensor]],
    corpus: Corpus,
    disk: float,
    packs: list[list[int]],
) -> Iterator[Pass]:
    """The same documents through a DataLoader, a batch of packs at a time, 0 and 2 workers."""
    batches = [
        [row for pack in packs[i : i + corpus.batch] for row in pack]
        for i in range(0, len(packs), corpus.batch)
    ]
    tokens = int(sum(corpus.lengths[batch].sum() for batch in batches))
    for workers in (0, 2):
        loader = DataLoader(
            _Documents(load),
            batch_sampler=batches,
            collate_fn=concatenate,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )

        def run(loader: DataLoader = loader) -> int:
            for _ in loader:
                pass
            return tokens

        label = f"{name}, {workers} workers"
        yield Pass(name=label, kind=DATALOADER, run=run, disk=disk, payload=corpus.payload)


def through_datasets(corpus: Corpus, share: float) -> Iterator[Pass]:
    """`datasets` in torch format, and our documents, in a DataLoader."""
    disk = size_of(corpus.dataset.path / "shards") / int(corpus.dataset.lengths.sum())
    opened = datasets.load_from_disk(str(corpus.dataset.path))
    table = opened.with_format("torch", columns=list(corpus.columns))
    if set(corpus.codec.split("+")) == {"bf16"}:
        yield from dataloaders(
            "DataLoader over datasets (torch)",
            table.__getitem__,
            corpus,
            disk,
            corpus.some(share / 4),
        )

    def load(row: int) -> dict[str, Tensor]:
        item = corpus.dataset[row]
        return {name: item[name] for name in corpus.columns}

    yield from dataloaders("DataLoader over our documents", load, corpus, disk, corpus.packs)
