"""`spec-data export`: write a dataset in the layout of another trainer, a file per document.

A file is complete if it exists, so an interrupted run goes on with the first document without one.
`samples` says what the layouts are.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save
from torch import Tensor

from spec_data.conversion.samples import FOLDER, IDS, SPECFORGE_AUX, SPECFORGE_LAST, STATES
from spec_data.generation.units import explained_failures
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import write_atomically, writing
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.shards.position_data import load_positions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.resumable import ResumableDirectory
from spec_data.shards.schema import ALL, FINAL, layer_column
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_data.terminal.progress import progress

_ROWS = 1024  # of a part of the token dataset
_GROUP = 2000  # files of a folder
_ALLOWED = 1e-2  # mean relative difference after an undone norm; rounding to bf16 is 2e-3


@dataclass(frozen=True, kw_only=True)
class ExportedStates(Result):
    """What `export` wrote: `lines` say what the other trainer must be told."""

    path: Path
    to: str
    documents: int
    lines: tuple[str, ...]
    next_command: Sequence[str] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents for {self.to}, in {self.path}", *self.lines]
        return "\n".join(map(wrapped, lines))


class _SpecForge:
    """Writes files that are read as SpecForge's."""

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int]) -> None:
        self._layers = layers
        self.columns = [*(layer_column(k) for k in layers), FINAL]

    def file(self, number: int) -> Path:
        """Return the file of a document, below the directory."""
        first = number // _GROUP * _GROUP
        return Path(f"rows_{first}-{first + _GROUP}") / f"data_{number}.ckpt"

    def encode(self, document: dict[str, Any]) -> bytes:
        """Return its contents."""
        *aux, last = (document[name].bfloat16() for name in self.columns)
        table = {name: document[name].long() for name in ("input_ids", "loss_mask")}
        table |= {SPECFORGE_AUX: torch.cat(aux, -1)[None], SPECFORGE_LAST: last[None]}
        data = io.BytesIO()
        torch.save(table, data)
        return data.getvalue()

    def finish(self, dataset: HiddenStatesDataset, out: Path) -> list[str]:
        """Complete the directory; return lines on what to know about it."""
        self.next_command = (
            "specforge",
            "train",
            "--config",
            "run.yaml",
            f"data.hidden_states_path={out}",
        )
        ids = ",".join(map(str, self._layers))
        return [f"the layers are {ids} (outputs of blocks, as SGLang counts)"]


class _Speculators:
    """speculators reads the state before the final norm: the output of the last block.

    Where it was not captured exactly, the norm is undone if it is an RMSNorm. That forgets the
    length of its input, so any vector of the same direction has the same state after it, and so the
    same logits; a lossy codec of the last block changes them more than that of hidden.final.
    """

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int]) -> None:
        blocks = dataset.manifest.target.num_layers
        raw = blocks - 1 if blocks and blocks - 1 in dataset.manifest.layers else None
        self._layers = [k for k in layers if k != raw]
        if not self._layers:
            raise DatasetError(f"{dataset.path}: no layer but the last block would be written")
        self._worst, self._undo, last = 0.0, None, FINAL
        if raw is None or dataset.declared[layer_column(raw)].lossy:
            try:
                self._undo = _undone_norm(dataset)
            except DatasetError:
                if raw is None:
                    raise
        if raw is not None and self._undo is None:
            last = layer_column(raw)
        self.columns = [*(layer_column(k) for k in self._layers), last]

    def file(self, number: int) -> Path:
        return Path(FOLDER) / f"hs_{number}.safetensors"

    def encode(self, document: dict[str, Any]) -> bytes:
        *aux, last = (document[name] for name in self.columns)
        if self._undo is not None:
            last, difference = self._undo(last)
            self._worst = max(self._worst, difference)
        stacked = torch.stack([s.bfloat16() for s in (*aux, last)], 1).contiguous()  # [T, n + 1, H]
        return save({STATES: stacked, IDS: document["input_ids"]})

    def finish(self, dataset: HiddenStatesDataset, out: Path) -> list[str]:
        count = len(dataset)
        starts = range(0, count, _ROWS)
        parts = [_token_rows(dataset, range(i, min(i + _ROWS, count))) for i in starts]
        rows = datasets.Dataset(pa.concat_tables(parts))
        with writing(out):
            rows.with_format("torch").save_to_disk(str(out))  # the library expects tensors
        ids = list(map(str, as_block_inputs(self._layers)))
        words = ["--verifier-name-or-path", dataset.manifest.target.name, "--data-path", str(out)]
        words += ["--on-missing", "raise", "--target-layer-ids", *ids]
        self.next_command = ("speculators", "train", *words)
        lines = [f"the target layer ids are {' '.join(ids)} (inputs of blocks, as vLLM counts)"]
        if self._undo is not None:
            lines.append(
                "the last state has the direction of the output of the last block, not its length; "
                "after the final norm, those of the documents written now differ from "
                f"hidden.final by at most {self._worst:.1e}, averaged over a document"
            )
        return lines


def _undone_norm(dataset: HiddenStatesDataset) -> Callable[[Tensor], tuple[Tensor, float]]:
    """Return a function that makes states before the final norm of a dataset's target.

    It takes final states [T, H], and returns bf16 [T, H] of which the norm makes them, with the
    mean relative difference. It raises RunError where that is above rounding and a codec's error.
    """
    norm = load_positions(dataset).norm
    weight = load_head_tensors(dataset).get("norm")
    if norm.get("kind") != "rms" or weight is None:
        raise DatasetError(
            f"{dataset.path}: speculators needs the state before the final norm. The dataset "
            "records no RMSNorm that could be undone; capture the last block as well "
            f"(--layers with {dataset.manifest.target.num_layers or 'L'} - 1)"
        )
    weight, eps = weight.float() + float(norm["offset"]), float(norm["eps"])
    error = dataset.declared[FINAL].error
    allowed = _ALLOWED + (error.total if error else 0.0)

    def undo(final: Tensor) -> tuple[Tensor, float]:
        wanted = final.float()
        raw = torch.where(weight.abs() < 1e-6, 0.0, wanted / weight).bfloat16()
        length = raw.float().pow(2).mean(-1, keepdim=True)
        again = raw.float() * torch.rsqrt(length + eps) * weight
        difference = (again - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
        mean = float(difference.mean())
        if not mean <= allowed:
            raise RunError(
                f"the final norm cannot be undone: the difference is {mean:.1e}, more than "
                f"rounding ({allowed:.0e}); capture the last block as well"
            )
        return raw, mean

    return undo


def _token_rows(dataset: HiddenStatesDataset, numbers: range) -> pa.Table:
    """Return rows of the token dataset."""
    lengths = dataset.lengths[numbers.start : numbers.stop]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    documents = [dataset[number] for number in numbers]
    columns = {}
    for name in ("input_ids", "loss_mask"):
        values = torch.cat([document[name].long() for document in documents]).numpy()
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return pa.table(columns | {"seq_len": pa.array(lengths)})


_WRITERS: dict[str, type[_SpecForge] | type[_Speculators]] = {
    "speculators": _Speculators,
    "specforge": _SpecForge,
}


def write_dataset(
    data: str | Path, to: str, out: Path, layers: Sequence[int] | None = None
) -> ExportedStates:
    """Write a dataset for another trainer, or resume a run that was interrupted.

    `to` is "speculators" or "specforge"; `layers` None are all of the dataset.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that the dataset does not have, or another export is in the directory.
        RunError: the disk is full, or another process writes.
    """
    dataset = HiddenStatesDataset(data)
    manifest = dataset.manifest
    chosen = sorted(set(manifest.layers if layers is None else layers))
    if not chosen or not set(chosen) <= set(manifest.layers):
        has = ",".join(map(str, manifest.layers)) or "no layer"
        raise ConfigError(f"layers {','.join(map(str, chosen))}: the dataset has {has}")
    if FINAL not in dataset.columns or dataset.manifest.final != ALL:
        raise DatasetError(
            f"{dataset.path}: other trainers read the final state of every token, and this dataset "
            f"has {'it only where the next is supervised' if FINAL in dataset.columns else 'none'}"
            "; capture with --supervision final-hidden and --final all"
        )
    writer = _WRITERS[to](dataset, chosen)
    work = ResumableDirectory(out, ".export")
    begun = {"to": to, "fingerprint": manifest.fingerprint, "layers": chosen}
    columns = list(dict.fromkeys(["input_ids", "loss_mask", *writer.columns]))
    reader = HiddenStatesDataset(data, columns)
    with work.begun(begun, "Use another --out"), explained_failures(out):
        files = map(writer.file, range(len(dataset)))
        left = [number for number, file in enumerate(files) if not (out / file).is_file()]
        for number in progress(left, desc="export", unit="docs"):
            file = out / writer.file(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, writer.encode(reader[number]))
        lines = writer.finish(HiddenStatesDataset(data, ["input_ids", "loss_mask"]), out)
    work.finish()
    following = writer.next_command
    return ExportedStates(
        path=out, to=to, documents=len(dataset), lines=tuple(lines), next_command=following
    )
