"""TargetBatch: one target forward, as the inputs of a trainer's loss.

In the token frame (B rows, T slots), slot t holds the state a_t, the token x_t, its loss mask m_t
and the teacher z_t. In the shifted frame, all but states and layout is moved left by one inside
each document, and its last slot is zero: slot t pairs the state a_t with the known token x_{t+1}
and the teacher z_{t+1}.

A loss reads one of the two frames. Data of the other frame has the same shapes and would train
another, wrong objective, so `to_trainer_inputs` names the frame and every loss refuses the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spec_data.shards.errors import TargetError
from spec_data.shards.packing import PADDING, row_layout, shift_left

_UNMOVED = ("aux_hidden_states", "document_ids", "position_ids")


@dataclass(frozen=True, kw_only=True)
class TargetBatch:
    """Aux states with one supervision encoding, in the token frame; padding means nothing.

    Attributes:
        aux_hidden_states: [B, T, n*H], captured layers in ascending layer id.
        input_ids: int64 [B, T]. loss_mask: bool [B, T].
        document_ids: int64 [B, T], -1 in padding. position_ids: int64 [B, T].
        target_argmax: int64 [B, T], over the full vocabulary.
        logits: [B, T, V]; or
        target_probs: float32 [B, T, Vd] over a draft vocabulary, with position_mask: bool [B, T],
            True where the target's argmax lies inside it, and target_mass: float32 [B, T], the
            target's probability of the draft vocabulary; or
        final_hidden: [B, T, H], the head's input, with target_logsumexp: float32 [B, T], that of
            the logits over the full vocabulary.
    """

    aux_hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    target_argmax: Tensor
    logits: Tensor | None = None
    target_probs: Tensor | None = None
    position_mask: Tensor | None = None
    target_mass: Tensor | None = None
    final_hidden: Tensor | None = None
    target_logsumexp: Tensor | None = None

    def to_trainer_inputs(
        self, frame: Literal["shifted", "token"] = "shifted", *, aux: bool = True
    ) -> dict[str, Any]:
        """Return the keyword arguments of a plain-tensor loss, with the `frame` they are in.

        | loss | arguments |
        | --- | --- |
        | `eagle3_loss`, `peagle_loss` | `to_trainer_inputs()` |
        | `dspark_loss` (of all block drafts) | `to_trainer_inputs("token")` |
        | `eagle_loss` | `to_trainer_inputs("token", aux=False)` |

        `head`, and what a loss draws at random, are passed beside them. Each loss raises DraftError
        for inputs of the frame that is not its own. In both frames, padding is zero.

        Args:
            frame: "shifted" or "token", see the module.
            aux: whether to include `aux_hidden_states`; `eagle_loss` reads the final states alone.

        Raises:
            TargetError: an unknown frame, or the token frame of a batch with `target_probs`.
        """
        if frame not in ("shifted", "token"):
            raise TargetError(f"frame {frame!r}: shifted or token")
        if frame == "token" and self.target_probs is not None:
            raise TargetError(
                "target_probs exist in the shifted frame alone; losses of the token frame read "
                "final_hidden or logits: make the Target with one of these as supervision"
            )
        inputs: dict[str, Any] = {"frame": frame}
        padding = self.document_ids == PADDING  # [B, T]
        for name, value in vars(self).items():
            if name in _UNMOVED:
                inputs[name] = value
            elif value is not None and frame == "shifted":
                inputs[name] = shift_left(value, self.document_ids)
            elif value is not None:
                empty = padding.view(*padding.shape, *[1] * (value.ndim - 2))
                inputs[name] = value.masked_fill(empty, 0)
        if not aux:
            del inputs["aux_hidden_states"]
        return inputs


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
    rows = [[n] for n in used] if seq_lens is None else seq_lens
    lengths = [[int(n) for n in row if int(n) > 0] for row in rows]
    totals = [sum(row) for row in lengths]
    if totals != used:
        raise TargetError(f"seq_lens add up to {totals}, the attention mask has {used} tokens")
    document_ids, positions = row_layout(lengths, input_ids.shape[1])
    if not torch.equal(document_ids >= 0, attention_mask.bool().cpu()):
        raise TargetError("rows must be right-padded: real tokens first")
    return lengths, document_ids, positions
