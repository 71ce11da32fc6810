"""What a draft remembers of a sequence: keys and values of the rows that its layers have processed.

B sequences, n new rows, h / g query / key-value heads, d head size.
"""

import torch
from torch import Tensor

from spec_train.attention.plain import attend_cached


class DraftCache:
    """Keys and values [B, g, length, d] of the rows that a layer has processed, in order."""

    def __init__(self) -> None:
        """Start without rows."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of rows."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows; there must be some."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows [B, g, n, d]; return all rows, [B, g, length, d]."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        seen: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Append rows and attend from them to all rows.

        Args:
            q: queries of the new rows [B, h, n, d].
            k, v: their keys and values [B, g, n, d]; g divides h.
            scale: factor on the attention scores.
            seen: whether a new row sees a row, bool [n, length] or [B, 1, n, length]; None: causal.
            window: number of positions that a row of this layer sees; None: no limit.

        Returns:
            Heads [B, h, n, d].
        """
        k, v = self.append(k, v)
        return attend_cached(q, k, v, scale, seen, window)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class LayerCaches:
    """One `DraftCache` per layer, for a draft with `count` layers."""

    def __init__(self, count: int) -> None:
        """Start without rows."""
        self.layers = [DraftCache() for _ in range(count)]

    @classmethod
    def of(cls, layers: list[DraftCache]) -> "LayerCaches":
        """Return the caches of these layers."""
        found = cls(0)
        found.layers = layers
        return found

    @property
    def length(self) -> int:
        """Number of rows, the same in every layer."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        for layer in self.layers:
            layer.crop(length)
