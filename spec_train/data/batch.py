"""DraftBatch: several packs of documents as tensors, in the token frame.

Nothing here is shifted, projected or mapped to a draft vocabulary: row t holds x_t, m_t, the
captured states at t and what the target predicts for x_{t+1}. Each draft shifts for itself.

Shapes: B packs, T slots of a pack, H hidden size. Padding has input id 0, loss mask False,
document id -1, position 0 and zero states.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_data.shards.coded import CodedRows
from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import PADDING
from spec_data.shards.schema import layer_column

PLAIN = (
    *("input_ids", "loss_mask", "position_ids", "document_ids"),
    *("target_argmax", "target_logsumexp"),
)
"""Fields that are one tensor [B, T] each."""


@dataclass(kw_only=True)
class DraftBatch:
    """Packs of one micro-batch. `rows[b]` lists the dataset rows of pack b, left to right."""

    input_ids: Tensor  # int64 [B, T]
    loss_mask: Tensor  # bool [B, T]
    position_ids: Tensor  # int64 [B, T], restart at 0 in every document
    document_ids: Tensor  # int64 [B, T], 0, 1, ... within a pack, -1 in padding
    hidden: dict[str, Tensor]  # dataset column -> [B, T, H]
    target_argmax: Tensor  # int64 [B, T]
    target_logsumexp: Tensor  # float32 [B, T]
    rows: list[list[int]]
    coded: dict[str, CodedRows] = field(default_factory=dict)  # hidden columns that `to` decodes

    @property
    def tokens(self) -> int:
        """Number of slots that hold a token."""
        return int((self.document_ids != PADDING).sum())

    def aux(self, layers: Iterable[int]) -> Tensor:
        """Captured layers concatenated in ascending layer id, [B, T, n*H].

        Raises:
            DatasetError: a layer that this batch does not carry.
        """
        names = [layer_column(layer) for layer in sorted(layers)]
        missing = [name for name in names if name not in self.hidden]
        if missing or not names:
            raise DatasetError(
                f"batch has no column {', '.join(missing) or '(no layers asked for)'}; "
                f"it carries {', '.join(self.hidden) or 'none'}"
            )
        return torch.cat([self.hidden[name] for name in names], dim=-1)

    def without_hidden(self) -> "DraftBatch":
        """The same batch without its states: enough to count supervised slots, cheap to move."""
        return dataclasses.replace(self, hidden={}, coded={})

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> "DraftBatch":
        """The batch on `device`, `hidden.*` in `dtype`; tensors already there are not copied.

        Columns that were read as codes are decoded there, to what the reader would have decoded.
        """

        def move(values: Tensor, kind: torch.dtype | None = None) -> Tensor:
            return values.to(device, kind or values.dtype, non_blocking=non_blocking)

        plain = {name: move(getattr(self, name)) for name in PLAIN}
        hidden = {
            name: move(values, dtype if name.startswith("hidden.") else None)
            for name, values in self.hidden.items()
        }
        packs, slots = self.input_ids.shape
        for name, rows in self.coded.items():
            states = rows.states(packs * slots, device, dtype or torch.bfloat16, non_blocking)
            hidden[name] = states.view(packs, slots, -1)
        return DraftBatch(**plain, hidden=hidden, rows=self.rows, coded={})


def padding_batch(device: torch.device | str = "cpu", slots: int = 4) -> DraftBatch:
    """One pack of nothing but padding, without states: what a rank without a batch counts."""
    ids = torch.zeros(1, slots, dtype=torch.int64, device=device)
    return DraftBatch(
        input_ids=ids,
        loss_mask=ids.bool(),
        position_ids=ids,
        document_ids=ids + PADDING,
        hidden={},
        target_argmax=ids,
        target_logsumexp=ids.float(),
        rows=[[]],
    )
