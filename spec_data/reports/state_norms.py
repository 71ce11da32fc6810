"""How large the captured states are: norms of tokens, and channels that stand out.

Shapes: T tokens of a document, H channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_data.progress import progress
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import predicts_supervised

OUTLIER = 10.0
"""A channel stands out if its root mean square is so many times the median channel's."""


@dataclass(frozen=True, kw_only=True)
class ColumnNorms:
    """The states of one column in sampled documents.

    Attributes:
        name: of the column. tokens: how many were measured.
        median, high, largest: L2 norms of tokens: median, 99th percentile, maximum.
        channels: the channels of the largest root mean square, as (channel, times the median
            channel's), largest first.
        outliers: how many channels have at least `OUTLIER` times the median.
    """

    name: str
    tokens: int
    median: float
    high: float
    largest: float
    channels: tuple[tuple[int, float], ...]
    outliers: int


def column_norms(
    dataset: HiddenStatesDataset, documents: Sequence[int], most: int = 3
) -> list[ColumnNorms]:
    """Measure the columns of states in some documents.

    Args:
        dataset: with all columns. documents: numbers of documents, at least one.
        most: channels that are named per column.

    Returns:
        One entry per column of states, in the order of the dataset.

    Raises:
        DatasetError: damage.
    """
    columns = [c for c in dataset.manifest.columns if c.name.startswith("hidden.")]
    reader = HiddenStatesDataset(dataset.path, ["loss_mask", *(c.name for c in columns)])
    norms: dict[str, list[np.ndarray]] = {c.name: [] for c in columns}
    squares = {c.name: np.zeros(c.width or 1) for c in columns}
    for number in progress(list(documents), desc="norms", unit="docs", leave=False):
        row = reader[int(number)]
        mask = row["loss_mask"].numpy()
        stored = predicts_supervised(mask, np.array([0, len(mask)]))
        for column in columns:
            states = row[column.name].double().numpy()  # [T, H]
            states = states[stored] if column.sparse else states
            norms[column.name].append(np.sqrt((states**2).sum(1)))
            squares[column.name] += (states**2).sum(0)
    return [_summary(name, np.concatenate(norms[name]), squares[name], most) for name in norms]


def _summary(name: str, norms: np.ndarray, squares: np.ndarray, most: int) -> ColumnNorms:
    """Summarise the norms [N] of one column, and the sums of squares [H] of its channels."""
    if not len(norms):
        return ColumnNorms(
            name=name, tokens=0, median=0, high=0, largest=0, channels=(), outliers=0
        )
    size = np.sqrt(squares / len(norms))  # [H]
    middle = float(np.median(size))
    ratio = size / middle if middle else np.where(size > 0, np.inf, 0.0)
    first = np.argsort(-ratio, kind="stable")[:most]
    return ColumnNorms(
        name=name,
        tokens=len(norms),
        median=float(np.median(norms)),
        high=float(np.quantile(norms, 0.99)),
        largest=float(norms.max()),
        channels=tuple((int(c), float(ratio[c])) for c in first),
        outliers=int((ratio >= OUTLIER).sum()),
    )
