"""TargetBatch: one target forward in the frame a trainer takes.

Frame (B rows, T slots): aux states and packing metadata stay where they are; `input_ids`, the loss
mask and whatever supervises are moved left by one with zero fill inside each document. So slot t
pairs the state a_t with the known token x_{t+1} and the teacher z_{t+1}.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spec_data.shards.errors import TargetError


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
            bool [B, T], True where the target's argmax lies inside it; or
        final_hidden: [B, T, H], shifted: the head's input.
        target_argmax: int64 [B, T], shifted, over the full vocabulary.
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
    final_hidden: Tensor | None = None

    def __post_init__(self) -> None:
        given = [k for k in ("logits", "target_probs", "final_hidden") if self._has(k)]
        if len(given) != 1:
            raise TargetError(
                "a TargetBatch carries exactly one of logits, target_probs (with position_mask) "
                f"and final_hidden; got {', '.join(given) or 'none'}"
            )
        if self._has("target_probs") != self._has("position_mask"):
            raise TargetError("target_probs and position_mask go together")
        shape = self.input_ids.shape
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.shape[:2] != shape:
                raise TargetError(
                    f"{name} has shape {tuple(value.shape)}; rows and slots must be {tuple(shape)}"
                )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def to_trainer_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the plain-tensor losses (`eagle3_loss` and its siblings)."""
        names = [
            "aux_hidden_states",
            "input_ids",
            "loss_mask",
            "document_ids",
            "position_ids",
            "target_argmax",
            "logits",
            "target_probs",
            "position_mask",
            "final_hidden",
        ]
        return {name: getattr(self, name) for name in names if self._has(name)}
