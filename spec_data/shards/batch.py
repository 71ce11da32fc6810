"""DraftBatch: several packs of documents as tensors, in the token frame.

Nothing here is shifted, projected or mapped to a draft vocabulary. Slot t holds x_t, its loss mask,
the captured states at t, and what the target predicts for x_{t+1}. Each draft does its own shift.
It is read from a dataset, or made by a target that runs (`capture.model.Target.generate_batch`).

Shapes: B packs, T slots per pack, H hidden size. Padding has input id 0, loss mask False, document
id -1, position 0 and zero states.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.documents import Origin
from spec_data.shards.errors import DatasetError, TargetError
from spec_data.shards.packing import PADDING, row_layout
from spec_data.shards.schema import FINAL, layer_column
from spec_data.shards.shard import CodedRows

PLAIN = (
    *("input_ids", "loss_mask", "position_ids", "document_ids"),
    *("target_argmax", "target_logsumexp"),
)
"""The fields that are one tensor [B, T] each."""
PROBABILITIES, MASS = "target_probs", "target_mass"
"""Columns of a running target alone: its probabilities over a draft vocabulary, float32 [B, T, Vd],
which add up to 1, and how much of its full distribution they are, float32 [B, T]."""

_SUPERVISIONS = (FINAL, "logits", "topk_logits", PROBABILITIES)
"""The encodings of what the target predicts."""


@dataclass(kw_only=True)
class DraftBatch:
    """The packs of one micro-batch. `rows[b]` lists the documents of pack b, left to right."""

    input_ids: Tensor  # int64 [B, T]
    loss_mask: Tensor  # bool [B, T]
    position_ids: Tensor  # int64 [B, T], restarting at 0 in every document
    document_ids: Tensor  # int64 [B, T], 0, 1, ... within a pack, -1 in padding
    hidden: dict[str, Tensor]  # dataset column -> [B, T, H]
    target_argmax: Tensor  # int64 [B, T]
    target_logsumexp: Tensor | None = None  # float32 [B, T]; None: the column was not read
    rows: list[list[int]] = field(default_factory=list)  # of a dataset
    coded: dict[str, CodedRows] = field(default_factory=dict)  # hidden columns that `to` decodes
    origin: Origin | None = None  # of a dataset: where the target's head is
    seed: int | None = None  # of the numbers that a draft draws with it; None: torch's next ones

    def __post_init__(self) -> None:
        """Check the batch.

        Raises:
            DatasetError: tensors of other rows and slots, or several encodings of the teacher: a
                loss would read one of them, and nobody could say which.
        """
        shape = self.input_ids.shape
        for name, values in (self.plain() | self.hidden).items():
            if values.shape[:2] != shape:
                raise DatasetError(
                    f"{name} has shape {tuple(values.shape)}; rows and slots must be {tuple(shape)}"
                )
        if len(given := self.supervisions) > 1:
            raise DatasetError(f"a batch has one of {', '.join(given)}, and not several")

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "DraftBatch":
        """Return the batch of columns [B, T, ...]: `PLAIN` by name, and those of `hidden`.

        Raises:
            DatasetError: see the class; or the batch has no teacher.
        """
        plain: dict[str, Any] = {n: v for n, v in columns.items() if n in PLAIN}
        batch = cls(**plain, hidden={n: v for n, v in columns.items() if n not in PLAIN})
        if len(batch.supervisions) != 1:
            raise DatasetError(
                f"a batch of a target has exactly one of {', '.join(_SUPERVISIONS)}, and this one "
                "has none"
            )
        return batch

    @property
    def supervisions(self) -> list[str]:
        """The columns that the teacher is made from; a batch without states has none."""
        return [name for name in _SUPERVISIONS if name in self.hidden or name in self.coded]

    @property
    def tokens(self) -> int:
        """Number of slots that hold a token, i.e. are not padding."""
        return int((self.document_ids != PADDING).sum())

    def aux(self, layers: Iterable[int]) -> Tensor:
        """Concatenate n captured layers in ascending layer id: [B, T, n*H].

        Raises:
            DatasetError: the batch does not have one of the layers.
        """
        names = [layer_column(layer) for layer in sorted(layers)]
        missing = [name for name in names if name not in self.hidden]
        if missing or not names:
            raise DatasetError(
                f"batch has no column {', '.join(missing) or '(no layers asked for)'}; "
                f"it has {', '.join(self.hidden) or 'none'}"
            )
        return torch.cat([self.hidden[name] for name in names], dim=-1)

    def plain(self) -> dict[str, Tensor]:
        """Return the fields `PLAIN` by name, without one that was not read."""
        fields = {name: getattr(self, name) for name in PLAIN}
        return {name: values for name, values in fields.items() if values is not None}

    def without_hidden(self) -> "DraftBatch":
        """Return the batch without states: enough to count supervised slots, and cheap to move."""
        return dataclasses.replace(self, hidden={}, coded={})

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> "DraftBatch":
        """Move the batch to `device`, with `hidden.*` in `dtype`; tensors already there are shared.

        Columns that were read as codes are decoded on the device, to the same values that the
        reader decodes to.
        """

        plain: dict[str, Any] = {
            name: values.to(device, non_blocking=non_blocking)
            for name, values in self.plain().items()
        }
        hidden = self.hidden_on(device, dtype, non_blocking)
        return dataclasses.replace(self, **plain, hidden=hidden, coded={})

    def pin_memory(self) -> "DraftBatch":
        """Return the batch with page-locked tensors; a DataLoader with `pin_memory` asks for it."""
        plain: dict[str, Any] = {name: values.pin_memory() for name, values in self.plain().items()}
        hidden = {name: values.pin_memory() for name, values in self.hidden.items()}
        return dataclasses.replace(self, **plain, hidden=hidden)

    def hidden_on(
        self, device: torch.device | str, dtype: torch.dtype | None, non_blocking: bool = False
    ) -> dict[str, Tensor]:
        """Return the columns `hidden` and `coded` on a device, as `to` does."""
        hidden = {}
        for name, values in self.hidden.items():
            kind = (dtype if name.startswith("hidden.") else None) or values.dtype
            hidden[name] = values.to(device, kind, non_blocking=non_blocking)
        packs, slots = self.input_ids.shape
        for name, rows in self.coded.items():
            # [B * T, H]: rows are numbered over all packs
            states = rows.states(packs * slots, device, dtype or torch.bfloat16, non_blocking)
            hidden[name] = states.view(packs, slots, -1)  # [B, T, H]
        return hidden


def padding_batch(device: torch.device | str = "cpu") -> DraftBatch:
    """Return one pack of padding only, without states, for a rank that has no micro-batch."""
    ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
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


def one_document(batch: DraftBatch, pack: int, number: int) -> DraftBatch:
    """Return a decoded batch with only document `number` of `pack`, B = 1."""
    span = (batch.document_ids[pack] == number).nonzero().flatten()
    plain: dict[str, Any] = {n: v[pack, span][None] for n, v in batch.plain().items()}
    plain["document_ids"] = torch.zeros_like(plain["document_ids"])
    hidden = {name: values[pack, span][None] for name, values in batch.hidden.items()}
    return DraftBatch(**plain, hidden=hidden, rows=[[batch.rows[pack][number]]])


def as_rows(name: str, values: Any) -> Tensor:
    """Return a tensor, an array or lists as a tensor [B, T] of whole numbers.

    Raises:
        TargetError: it is none, such as lists of several lengths.
    """
    try:
        rows = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"{name}: expected a tensor [rows, tokens], or as many numbers in every row ({error})"
        ) from None
    mask = name.endswith("mask")
    if mask and rows.is_floating_point() and bool(((rows == 0) | (rows == 1)).all()):
        rows = rows.bool()
    if rows.ndim != 2 or rows.is_floating_point() or rows.is_complex():
        raise TargetError(
            f"{name}: expected {'0 and 1' if mask else 'token ids'} [rows, tokens], not "
            f"{rows.dtype} {list(rows.shape)}"
        )
    return rows


def batch_layout(
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    seq_lens: Sequence[Sequence[int]] | Tensor | None,
) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Return document lengths per row, and the columns of a batch that need no target.

    Those are input_ids, loss_mask, document_ids and position_ids [B, T] on the CPU, as `DraftBatch`
    has them. Arguments are those of `capture.model.Target.generate_batch`, as tensors [B, T].

    Raises:
        TargetError: shapes differ, lengths do not add up to the attention mask, or a row is not
            right-padded.
    """
    for name, values in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        if values.shape != input_ids.shape:
            raise TargetError(
                f"input_ids {tuple(input_ids.shape)} and {name} {tuple(values.shape)} must have "
                "the same shape"
            )
    used = attention_mask.bool().sum(1).tolist()
    rows = [[n] for n in used] if seq_lens is None else seq_lens
    try:
        given = [[int(n) for n in row] for row in rows]
    except (TypeError, ValueError):
        given = [[-1]]
    if any(n < 0 for row in given for n in row):
        raise TargetError(f"seq_lens {seq_lens!r}: expected lengths per row, as in [[3, 2], [5]]")
    lengths = [[n for n in row if n] for row in given]  # a tensor is padded with zeros
    totals = [sum(row) for row in lengths]
    if totals != used:
        raise TargetError(f"seq_lens add up to {totals}, the attention mask has {used} tokens")
    document_ids, positions = row_layout(lengths, input_ids.shape[1])
    padding = document_ids == PADDING
    if not torch.equal(~padding, attention_mask.bool().cpu()):
        raise TargetError("rows must be right-padded: real tokens first")
    return lengths, {
        "input_ids": input_ids.cpu().long().masked_fill(padding, 0),
        "loss_mask": loss_mask.cpu().bool() & ~padding,
        "document_ids": document_ids,
        "position_ids": positions,
    }
