"""Tables of lossy columns: fitted to a sample of states, stored in codec.safetensors.

A sample of fewer tokens than components will do: the eigenvectors that it says nothing about are
then arbitrary. That costs bits and no error, less than shrinking the covariance does.

Shapes: N sampled tokens, H channels, as many components.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spec_data.shards.codecs import LARGEST, Tables
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.schema import CodecError, Column

TABLES = "codec.safetensors"
_MASSIVE = 5.0  # times the median distance from the centre: no part of the statistics
_MOST_MASSIVE = 0.25  # at most this share of tokens
_FLOOR = 1e-3  # deviation of a constant channel, in mean deviations
_USED = 0.8  # of the largest code, by the widest token of the sample
_ROWS = 4096  # tokens at a time


class Basis:
    """The eigenbasis of a column, from which `tables` makes tables of any step."""

    def __init__(self, states: Tensor) -> None:
        """Fit to sampled states [N, H], N >= 1, finite; on their device.

        Massive tokens (attention sinks) are left out: they would be the first component, and their
        channels the widest ones.
        """
        states = _without_massive(states)
        mean = states.mean(0, dtype=torch.float64)
        deviation = sum((part.double() - mean).square().sum(0) for part in states.split(_ROWS))
        deviation = (deviation / len(states)).sqrt()
        least = max(_FLOOR * float(deviation.mean()), 1e-4 * float(mean.abs().mean()), 1e-30)
        weight = deviation.clamp_min(least).rsqrt()
        covariance = sum(
            z.T @ z for z in ((part.double() - mean) * weight for part in states.split(_ROWS))
        )
        variance, vectors = torch.linalg.eigh(covariance / len(states))
        basis = vectors.flip(1).T  # [component, channel], in falling order of variance
        unit = max(float(variance.clamp_min(0).sqrt().mean()), least**0.5)
        quantum = float(basis.abs().max()) / 127
        self._tables = Tables(
            mean.float(),
            (quantum * unit / weight).float(),
            (basis / quantum).round().to(torch.int8),
            torch.ones(len(mean), dtype=torch.int16, device=mean.device),
        )
        self._widest = torch.zeros_like(self._tables.mean)  # coordinates at a step of 1
        for part in states.split(_ROWS):
            coordinates = (part.float() - self._tables.mean) @ self._tables.inverse
            self._widest = torch.maximum(self._widest, coordinates.abs().amax(0))

    def tables(self, step: float) -> Tables:
        """Return tables whose components have `step` times the mean deviation as their step.

        A component that would leave the codes has a multiple of it: its error is still small
        beside its own variance.
        """
        factors = (self._widest / (step * _USED * LARGEST)).ceil().clamp(1, 1 << 14)
        tables = replace(
            self._tables, scale=self._tables.scale * step, factors=factors.to(torch.int16)
        )
        # not inverted again: the basis is the same
        tables.__dict__["inverse"] = self._tables.inverse / step / factors
        return tables


def _without_massive(states: Tensor) -> Tensor:
    """Return the states [n, H] of a sample [N, H] that are no massive activations."""
    centre = states.float().median(0).values
    distance = torch.cat([(part.float() - centre).norm(dim=1) for part in states.split(_ROWS)])
    limit = max(_MASSIVE * distance.median(), distance.quantile(1 - _MOST_MASSIVE))
    return states[distance <= limit]


def save_tables(tables: Mapping[str, Tables]) -> bytes:
    """Return the bytes of codec.safetensors for the tables of every lossy column."""
    return save(
        {
            f"{name}.{part}": getattr(table, part).cpu().contiguous()
            for name, table in sorted(tables.items())
            for part in _PARTS
        }
    )


def load_tables(file: Path, columns: Sequence[Column], sha256: str | None) -> dict[str, Tables]:
    """Read the tables of lossy `columns` from codec.safetensors, by name.

    `sha256` is the file's hash as the manifest has it; None: do not compare.

    Raises:
        MissingError: no such file.
        DatasetError: the file has another hash, or lacks tables that a column can be decoded with.
    """
    if not file.is_file():
        raise MissingError(f"{file}: missing, so lossy columns cannot be decoded; copy it again")
    data = file.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise DatasetError(
            f"{file}: sha256 is {found[:16]}..., the manifest says {sha256[:16]}...: these are the "
            "tables of another dataset, or damaged; copy the file again"
        )
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
    tables = {}
    for column in columns:
        parts = {name: tensors.get(f"{column.name}.{name}") for name in _PARTS}
        for wrong in _impossible(column.width or 1, parts):
            raise DatasetError(
                f"{file}: no tables that decode column {column.name} ({column.codec}): {wrong}; "
                "copy the file again, or generate the dataset again"
            )
        tables[column.name] = Tables(**{k: v for k, v in parts.items() if v is not None})
    return tables


_PARTS = ("mean", "scale", "basis", "factors")


def _impossible(width: int, parts: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Yield what is wrong with the parts of a column's tables: no column has such ones."""
    vector = (width,)
    expected = {
        "mean": (torch.float32, vector),
        "scale": (torch.float32, vector),
        "basis": (torch.int8, (width, width)),
        "factors": (torch.int16, vector),
    }
    for name, part in parts.items():
        kind, shape = expected[name]
        if part is None:
            yield f"{name} is missing"
        elif part.dtype != kind or part.shape != shape:
            found, wanted = (str(k).removeprefix("torch.") for k in (part.dtype, kind))
            yield f"{name} is {found} {list(part.shape)} instead of {wanted} {list(shape)}"
        elif not bool(part.isfinite().all()):
            yield f"{name} is not finite"
        elif name in ("scale", "factors") and bool((part <= 0).any()):
            yield f"{name} is not above 0"


def error_text(codec: str, error: CodecError) -> str:
    """Describe a codec's measured error in one line."""
    kl = f", teacher KL {error.kl:.1e}" if error.kl is not None else ""
    return (
        f"{codec}: {error.bits:.2f} bits a value, error / variance {error.total:.1e} (worst "
        f"channel {error.mse_max:.1e}){kl}, {error.escaped:.2%} of tokens escape"
    )
