"""What a dataset records of its target's positions and final norm: target/positions.safetensors.

`generate` reads inverse frequencies from the modules of the loaded target, and proves that cosines
and sines computed from them are those of the modules. So a draft needs no code for the target's
family. Where nothing is proven, it takes the rope settings of config.json. r rotary dimensions.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import PositionsRecord, RopeRecord

POSITIONS = "target/positions.safetensors"
FULL = "full_attention"
OF_DRAFTS = (FULL, "main")
"""Whose rotary embedding a draft has, if layers have several; "main": DeepSeek-V4's, of tokens that
are not compressed."""
ROPE, LEARNED, UNKNOWN = "rope", "learned", "unknown"
SHORT, LONG = "short", "long"
_SHORT, _LONG = "inv_freq", "long_inv_freq"  # names of tensors, after the table's name and a dot


@dataclass(frozen=True, kw_only=True)
class RopeTable:
    """The rotary embedding of one kind of layer.

    Attributes:
        inv_freq: inverse frequencies, float32 [r/2]; with longrope the short ones.
        factor: of cosines and sines.
        long_inv_freq: the long ones of longrope, float32 [r/2].
        limit: tokens of the longest document of the short ones; None without longrope.
        factors: "short" or "long" where every document has these; None: each by its own length.
    """

    inv_freq: Tensor
    factor: float = 1.0
    long_inv_freq: Tensor | None = None
    limit: int | None = None
    factors: str | None = None

    @property
    def size(self) -> int:
        """Rotary dimensions r."""
        return 2 * len(self.inv_freq)

    def equals(self, other: "RopeTable") -> bool:
        """Return whether both have the same frequencies, bit for bit, and the same factor."""
        parts = (
            (t.inv_freq, t.inv_freq if t.long_inv_freq is None else t.long_inv_freq)
            for t in (self, other)
        )
        return (
            all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*parts, strict=True))
            and abs(self.factor - other.factor) <= 1e-6 * abs(self.factor)
            and self.limit == other.limit
        )


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How a target tells positions apart, and the form of its final norm.

    The fields are those of the manifest (FORMAT.md); `tables` is by layer type, and one table for
    all layers has the name "full_attention".
    """

    kind: str = UNKNOWN
    proven: bool = False
    reason: str = ""
    proven_to: int = 0
    difference: float = 0.0
    tables: dict[str, RopeTable] = field(default_factory=dict)
    norm: dict[str, Any] = field(default_factory=dict)

    @property
    def of_draft(self) -> RopeTable | None:
        """The table that a draft uses: one of `OF_DRAFTS`, or the only one."""
        own = next((self.tables[name] for name in OF_DRAFTS if name in self.tables), None)
        return own or (next(iter(self.tables.values())) if len(self.tables) == 1 else None)

    def record(self) -> PositionsRecord:
        """Return the manifest's `positions`."""
        tables = {
            name: RopeRecord(dimensions=t.size, factor=t.factor, limit=t.limit, factors=t.factors)
            for name, t in self.tables.items()
        }
        return PositionsRecord(**vars(self) | {"tables": tables})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the file: frequencies, float32 [r/2]."""
        return {
            f"{name}.{kind}": value.detach().cpu().contiguous()
            for name, table in self.tables.items()
            for kind, value in ((_SHORT, table.inv_freq), (_LONG, table.long_inv_freq))
            if value is not None
        }


def load_positions(dataset: HiddenStatesDataset) -> Positions:
    """Read what a dataset records of its target's positions.

    Raises:
        MissingError, DatasetError: the file is missing or not what the manifest describes.
    """
    record, tables = structs.asdict(dataset.manifest.positions), {}
    if dataset.manifest.positions.tables:
        file = dataset.file(POSITIONS)
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
        for name, row in dataset.manifest.positions.tables.items():
            short, long = tensors.get(f"{name}.{_SHORT}"), tensors.get(f"{name}.{_LONG}")
            wanted = (torch.float32, (row.dimensions // 2,))
            for value in (short, long if row.limit else short):
                if value is None or (value.dtype, tuple(value.shape)) != wanted:
                    raise DatasetError(
                        f"{file}: the frequencies of {name} are not float32 {list(wanted[1])}, as "
                        "the manifest says; generate the dataset again"
                    )
            assert short is not None
            fields = structs.asdict(row)
            del fields["dimensions"]
            tables[name] = RopeTable(inv_freq=short, long_inv_freq=long, **fields)
    return Positions(**record | {"tables": tables})
