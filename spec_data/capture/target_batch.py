"""TargetBatch: one target forward, as the inputs of a trainer's loss.

Its fields are in the shifted frame (B rows, T slots): aux states and packing metadata stay where
they are; `input_ids`, the loss mask and the teacher are moved left by one inside each document, and
its last slot is zero. So slot t pairs the state a_t with the known token x_{t+1} and the teacher
z_{t+1}. In the token frame nothing is moved: slot t holds a_t, x_t, m_t and z_t.

A loss reads one of the two frames. Data of the other frame has the same shapes and would train
another, wrong objective, so `to_trainer_inputs` names the frame and every loss refuses the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spec_data.shards.errors import TargetError
from spec_data.shards.packing import PADDING, row_layout

Frame = Literal["shifted", "token"]

_SHIFTED = (
    *("input_ids", "loss_mask", "target_argmax", "target_logsumexp"),
    *("logits", "final_hidden"),
)
_SHIFTED_ONLY = ("target_probs", "position_mask", "target_mass")
_UNMOVED = ("aux_hidden_states", "document_ids", "position_ids")


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the first slot of every document, bool [B, T]; document_ids int64 [B, T]."""
    first = document_ids != PADDING
    first[:, 1:] &= document_ids[:, 1:] != document_ids[:, :-1]
    return first


@dataclass(frozen=True, kw_only=True)
class TargetBatch:
    """Aux states with exactly one supervision encoding, validated when it is built.

    Attributes:
        aux_hidden_states: [B, T, n*H], captured layers in ascending layer id, unshifted.
        input_ids: int64 [B, T], shifted. loss_mask: bool [B, T], shifted.
        attention_mask: bool [B, T], True at real tokens. position_ids: int64 [B, T].
        document_ids: int64 [B, T], -1 in padding. doc_remaining: int64 [B, T], real tokens after
            each slot in its document.
        seq_lens: document lengths per row when packed, else None.
        logits: [B, T, V], shifted; or
        target_probs: float32 [B, T, Vd] over a draft vocabulary, shifted, with position_mask:
            bool [B, T], True where the target's argmax lies inside it, and target_mass: float32
            [B, T], the target's probability of the draft vocabulary; or
        final_hidden: [B, T, H], shifted: the head's input, with target_logsumexp: float32 [B, T],
            shifted, that of the logits over the full vocabulary.
        target_argmax: int64 [B, T], shifted, over the full vocabulary.
        starts: what the shift moves out of each of the D documents: the value at its first token,
            [D, ...] by name. The token frame is made with it; None: there is no token frame.
    """

    aux_hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    doc_remaining: Tensor
    target_argmax: Tensor
    seq_lens: list[list[int]] | None = None
    logits: Tensor | None = None
    target_probs: Tensor | None = None
    position_mask: Tensor | None = None
    target_mass: Tensor | None = None
    final_hidden: Tensor | None = None
    target_logsumexp: Tensor | None = None
    starts: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        given = [k for k in ("logits", "target_probs", "final_hidden") if self._has(k)]
        if len(given) != 1:
            raise TargetError(
                "a TargetBatch carries exactly one of logits, target_probs (with position_mask) "
                f"and final_hidden; got {', '.join(given) or 'none'}"
            )
        if len({self._has(name) for name in ("target_probs", "position_mask", "target_mass")}) > 1:
            raise TargetError("target_probs, position_mask and target_mass go together")
        shape = self.input_ids.shape
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.shape[:2] != shape:
                raise TargetError(
                    f"{name} has shape {tuple(value.shape)}; rows and slots must be {tuple(shape)}"
                )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def to_trainer_inputs(self, frame: Frame = "shifted", *, aux: bool = True) -> dict[str, Any]:
        """Return the keyword arguments of a plain-tensor loss, with the `frame` they are in.

        | loss | arguments |
        | --- | --- |
        | `eagle3_loss`, `peagle_loss` | `to_trainer_inputs()` |
        | `dspark_loss` (DSpark and DFlash) | `to_trainer_inputs("token")` |
        | `eagle_loss` | `to_trainer_inputs("token", aux=False)` |

        `head`, and what a loss draws at random, are passed beside them. Each loss raises DraftError
        for inputs of the frame that is not its own.

        Args:
            frame: "shifted" or "token", see the module.
            aux: whether to include `aux_hidden_states`; `eagle_loss` reads the final states alone.

        Raises:
            TargetError: an unknown frame, or a batch that has no token frame: one with
                `target_probs`, or one that was built without `starts`.
        """
        if frame not in ("shifted", "token"):
            raise TargetError(f"frame {frame!r}: shifted or token")
        names = [name for name in _UNMOVED if aux or name != "aux_hidden_states"]
        inputs = {"frame": frame} | {name: getattr(self, name) for name in names}
        if frame == "token":
            return inputs | self._token_frame()
        moved = (*_SHIFTED, *_SHIFTED_ONLY)
        return inputs | {name: getattr(self, name) for name in moved if self._has(name)}

    def _token_frame(self) -> dict[str, Tensor]:
        """Undo the shift: new tensors, zero in padding."""
        if self.starts is None:
            raise TargetError(
                "this TargetBatch was built without `starts`, so its first tokens are unknown: "
                "make it with Target.generate_batch, or use frame='shifted'"
            )
        if self._has("target_probs"):
            raise TargetError(
                "target_probs exist in the shifted frame alone; losses of the token frame read "
                "final_hidden or logits: make the Target with one of these as supervision"
            )
        first, padding = document_starts(self.document_ids), self.document_ids == PADDING
        moved = {}
        for name in filter(self._has, _SHIFTED):
            values = moved[name] = getattr(self, name).roll(1, 1)
            values[first] = self.starts[name]
            values[padding] = 0
        return moved


def layout_of(
    input_ids: Tensor, attention_mask: Tensor, seq_lens: Sequence[Sequence[int]] | Tensor | None
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return document lengths per row, document ids and position ids of a batch, int64 [B, T].

    Raises:
        TargetError: shapes differ, lengths do not add up to the attention mask, or a row is not
            right-padded.
    """
    if input_ids.shape != attention_mask.shape:
        raise TargetError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask "
            f"{tuple(attention_mask.shape)} must have the same shape"
        )
    used = attention_mask.bool().sum(1).tolist()
    if seq_lens is None:
        lengths = [[int(n)] if n else [] for n in used]
    else:
        lengths = [[int(n) for n in row if int(n) > 0] for row in seq_lens]
    totals = [sum(row) for row in lengths]
    if totals != used:
        raise TargetError(f"seq_lens add up to {totals}, the attention mask has {used} tokens")
    document_ids, positions = row_layout(lengths, input_ids.shape[1])
    if not torch.equal(document_ids >= 0, attention_mask.bool().cpu()):
        raise TargetError("rows must be right-padded: real tokens first")
    return lengths, document_ids, positions
