"""Tables of the lossy codecs: made from a sample of states, stored in codec.safetensors.

The statistics are reproducible: numpy sums in a fixed order, so the same states produce the same
tables with any number of threads. Tokens with massive activations are excluded from mean and
deviation; otherwise one such token would inflate the deviation of its channel and pass as normal.

Shapes: N sampled tokens, H channels.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spec_data.shards.codecs import ESCAPE_FACTOR, LOSSY, LossyCodec, Tables
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.schema import CodecError, Column

TABLES = "codec.safetensors"
_CHANNELS = 256  # channels processed together: bounds memory at any sample size
_MOST_OUTLIERS = 0.25  # at most this share of tokens is excluded from the statistics
_SHARES = (0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3)
"""Shares of the sample that may be stored in bf16; the smallest one that suffices is used."""
_RAW = 100  # times a channel's bound: a token with such an error is stored in bf16, however rare
_MARGIN = 0.6  # of the bound of a codec, which is checked later on other documents
_IQR = 1.3489795003921634  # interquartile range of a standard Gaussian


def make_tables(states: Tensor, codec: str) -> Tables:
    """Make the tables of a codec from sampled states [N, H] (N >= 1, finite, on the CPU).

    A first, robust standardisation (median, quartiles) finds massive tokens. A second one, without
    these tokens, is stored. `limit` is 8 times the median RMS of a token under the second one.
    In short documents more than a tenth of the tokens may be massive, as delimiters are.
    """
    low, middle, high = (torch.from_numpy(q) for q in _quartiles(states))
    spread = ((high - low) / _IQR).numpy()
    plain = _moments(states, np.ones(len(states), bool))[1]
    first = _rms(states, middle.numpy(), np.where(spread > 0, spread, plain))
    keep = first <= max(ESCAPE_FACTOR * np.median(first), np.quantile(first, 1 - _MOST_OUTLIERS))
    mean, std = _moments(states, keep)
    limit = np.float32(ESCAPE_FACTOR * np.median(_rms(states, mean, std)))
    tables = Tables(
        torch.from_numpy(mean), torch.from_numpy(std), float(limit) or 1.0, _levels(codec)
    )
    return replace(tables, worst=_worst_error(states, tables, LOSSY[codec]))


def _worst_error(states: Tensor, tables: Tables, codec: LossyCodec) -> float:
    """Return the largest squared error that a token may have in a channel without escaping.

    It is infinite if the sample [N, H] is well within the bound of the codec and has no token far
    above it, or if no share of escaped tokens brings it there (then the bound is missed later).
    Documents have about as many tokens far above the bound (their first one) however long they are.
    """
    errors = codec.sample_errors(states, tables).numpy()  # float32 [n, H], of coded tokens
    if not len(errors):
        return math.inf
    worst = errors.max(axis=1)  # [n]
    order = np.argsort(-worst, kind="stable")
    raw = _RAW * codec.bound.worst
    most = raw if worst.max() > raw else math.inf
    for share in _SHARES:
        count = math.ceil(share * len(order))
        mean = errors[order[count:]].mean(axis=0, dtype=np.float64)  # [H]
        mean = mean[tables.std.numpy() > 0]
        if not len(mean):
            return math.inf
        within = mean.max() <= _MARGIN * codec.bound.worst
        if within and np.median(mean) <= _MARGIN * codec.bound.median:
            return min(most, float(worst[order[count]]) if count else math.inf)
    return math.inf


def _parts(states: Tensor) -> list[tuple[slice, np.ndarray]]:
    """Split states [N, H] into groups of channels: (channels, float32 [N, <= 256])."""
    width = states.shape[1]
    slices = [slice(c, min(c + _CHANNELS, width)) for c in range(0, width, _CHANNELS)]
    return [(s, states[:, s].float().contiguous().numpy()) for s in slices]


def _quartiles(states: Tensor) -> np.ndarray:
    """Return the quartiles of every channel, float32 [3, H]."""
    found = [np.quantile(block, [0.25, 0.5, 0.75], axis=0) for _, block in _parts(states)]
    return np.concatenate(found, axis=1).astype(np.float32)


def _moments(states: Tensor, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of the tokens `keep` (bool [N]), float32 [H]; 0 if constant."""
    means, deviations = [], []
    for _, block in _parts(states):
        kept = block[keep]
        mean = kept.mean(axis=0, dtype=np.float64).astype(np.float32)
        constant = (kept == kept[:1]).all(axis=0)
        mean = np.where(constant, kept[0], mean)
        square = np.square(kept - mean, out=kept).mean(axis=0, dtype=np.float64)
        means.append(mean)
        deviations.append(np.sqrt(square).astype(np.float32))
    return np.concatenate(means), np.concatenate(deviations)


def _rms(states: Tensor, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the RMS of every token after standardisation, float64 [N]; 0 for constant channels."""
    total = np.zeros(len(states))
    inverse = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)
    for part, block in _parts(states):
        z = (block - mean[part]) * inverse[part]
        total += np.square(z, out=z).sum(axis=1, dtype=np.float64)
    return np.sqrt(total / states.shape[1])


def _levels(codec: str) -> Tensor | None:
    """Return the levels of a codec by code, float32 [L]; None for int8c, which has none."""
    if codec == "fp8":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return None if codec == "int8c" else gaussian_levels(1 << LOSSY[codec].bits)


def gaussian_levels(count: int) -> Tensor:
    """Return the Lloyd-Max levels of a standard Gaussian, ascending, float32 [count].

    `count` is even.
    """
    half = (np.arange(count // 2) + 0.5) * (8 / count)
    for _ in range(20_000):
        borders = np.concatenate([[0.0], (half[1:] + half[:-1]) / 2, [math.inf]])
        density = np.exp(-(borders**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(b / math.sqrt(2))) for b in borders])
        centroids = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        moved = float(np.abs(centroids - half).max())
        half = centroids
        if moved < 1e-12:
            break
    return torch.from_numpy(np.concatenate([-half[::-1], half]).astype(np.float32))


def channel_error(states: Tensor, decoded: Tensor, tables: Tables) -> np.ndarray:
    """Return the mean squared error of every channel divided by its variance, float64 [H].

    A constant channel has no variance: its entry is NaN if it was decoded exactly, else infinite.

    Args:
        states: original states [N, H].
        decoded: the same states after encoding and decoding, [N, H].
        tables: the codec's tables, which hold the deviations.
    """
    error = np.empty(states.shape[1])
    for part, block in _parts(states):
        difference = block - decoded[:, part].float().numpy()
        error[part] = np.square(difference, out=difference).mean(axis=0, dtype=np.float64)
    std = tables.std.numpy().astype(np.float64)
    constant = std == 0
    error[~constant] /= std[~constant] ** 2
    error[constant] = np.where(error[constant] > 0, np.inf, np.nan)
    return error


def save_tables(tables: Mapping[str, Tables]) -> bytes:
    """Return the bytes of codec.safetensors for the tables of every lossy column."""
    tensors: dict[str, Tensor] = {}
    for name, table in sorted(tables.items()):
        tensors[f"{name}.mean"], tensors[f"{name}.std"] = table.mean, table.std
        tensors[f"{name}.limit"] = torch.tensor([table.limit], dtype=torch.float32)
        if table.levels is not None:
            tensors[f"{name}.levels"] = table.levels
        if table.worst < math.inf:
            tensors[f"{name}.worst"] = torch.tensor([table.worst], dtype=torch.float32)
    return save({name: t.contiguous() for name, t in tensors.items()})


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
        for wrong in _impossible(column, parts):
            raise DatasetError(
                f"{file}: no tables that decode column {column.name} ({column.codec}): {wrong}; "
                "copy the file again, or generate the dataset again"
            )
        mean, std, limit, levels, worst = parts.values()
        assert mean is not None and std is not None and limit is not None
        most = math.inf if worst is None else float(worst.item())
        tables[column.name] = Tables(mean, std, float(limit.item()), levels, most)
    return tables


_PARTS = ("mean", "std", "limit", "levels", "worst")


def _impossible(column: Column, parts: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Yield what is wrong with the parts of a column's tables: no codec makes such ones."""
    width, codec = column.width or 1, LOSSY[column.codec]
    shapes = dict.fromkeys(_PARTS, (1,)) | dict.fromkeys(("mean", "std"), (width,))
    shapes["levels"] = (1 << codec.bits,)
    optional = {"worst"} | ({"levels"} if codec.name == "int8c" else set())
    for name, part in parts.items():
        if part is None:
            if name not in optional:
                yield f"{name} is missing"
        elif part.dtype != torch.float32 or part.shape != shapes[name]:
            found = f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
            yield f"{name} is {found} instead of float32 {list(shapes[name])}"
        elif codec.name == "fp8" and name == "levels":
            continue  # has codes that are no number
        elif not bool(part.isfinite().all()):
            yield f"{name} is not finite"
        elif name in ("std", "limit", "worst") and bool((part < 0).any()):
            yield f"{name} is below 0"


def error_text(codec: str, error: CodecError) -> str:
    """Describe a codec's measured error in one line: error / variance, KL, escaped tokens."""
    kl = f", teacher KL {error.kl:.1e}" if error.kl is not None else ""
    return (
        f"{codec}: error / channel variance {error.mse_median:.1e} (worst channel "
        f"{error.mse_max:.1e}){kl}, {error.escaped:.2%} of tokens escape"
    )
