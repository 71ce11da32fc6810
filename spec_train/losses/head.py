"""The target's frozen head and embeddings, read from a dataset.

Logits are recomputed from final hidden states with the same `apply_head` that generation proved
against the model. A draft vocabulary is a selection of rows of the head. Selecting once per run
costs one copy of these rows and saves the full-vocabulary product at every step.

V / Vd target / draft vocabulary, H hidden size.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from msgspec import structs
from torch import Tensor, nn

from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import HeadSpec, apply_head
from spec_train.losses.tiles import wide


class TargetHead(nn.Module):
    """The target's frozen `embed_tokens` and `lm_head`.

    Both are buffers that are not saved with a draft. With tied embeddings they are one tensor.
    """

    embed_weight: Tensor
    head_weight: Tensor
    head_bias: Tensor | None

    def __init__(
        self,
        spec: HeadSpec,
        embed_weight: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None = None,
    ) -> None:
        """Use `embed_weight` [V, H], `head_weight` [V, H] and `head_bias` [V] or None."""
        super().__init__()
        self.spec = spec
        self.register_buffer("embed_weight", embed_weight, persistent=False)
        self.register_buffer("head_weight", head_weight, persistent=False)
        self.register_buffer("head_bias", head_bias, persistent=False)
        self._selection: tuple[Tensor, int, Tensor, Tensor | None] | None = None

    @classmethod
    def from_dataset(
        cls,
        dataset: HiddenStatesDataset | str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "TargetHead":
        """Read the head of a dataset.

        Raises:
            MissingError, DatasetError: the head is missing or not what the manifest describes.
        """
        if isinstance(dataset, str | Path):
            dataset = HiddenStatesDataset(dataset, ())
        spec, tensors = dataset.manifest.head, load_head_tensors(dataset)
        embed = tensors["embed_tokens"].to(device, dtype)
        head = embed if spec.tied else tensors["lm_head"].to(device, dtype)
        bias = tensors["lm_head_bias"].to(device, dtype) if spec.has_bias else None
        return cls(spec, embed, head, bias)

    @classmethod
    def from_model(cls, model: Any, spec: Mapping[str, Any] | None = None) -> "TargetHead":
        """Share the weights of a loaded HF model.

        `spec` is the HeadSpec of a dataset, as a draft's origin stores it. Without it, the head is
        treated as a plain product; no greedy choice depends on the difference.
        """
        embed = model.get_input_embeddings().weight.data
        linear = model.get_output_embeddings()
        weight, bias = linear.weight.data, getattr(linear, "bias", None)
        vocab, hidden = weight.shape
        head = HeadSpec(
            vocab_size=vocab, hidden_size=hidden, tied=weight is embed, has_bias=bias is not None
        )
        if spec is not None:
            head = structs.replace(head, scale=spec["scale"], softcap=spec.get("softcap"))
        return cls(head, embed, weight, None if bias is None else bias.data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module: tied weights stay one tensor, and the selected rows are dropped."""
        tied = self.head_weight is self.embed_weight
        self._selection = None
        super()._apply(fn, recurse)
        if tied:
            self.head_weight = self.embed_weight
        return self

    @torch.no_grad()
    def logits(
        self, final_hidden: Tensor, ids: Tensor | None = None, narrow: bool = False
    ) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., H]: float32, or float64 of float64.

        With `narrow`, they keep the dtype of the product.

        `ids`, int64 [Vd], selects target ids: logits are then [..., Vd]. The selected rows are kept
        for the next call with the same tensor.
        """
        weight, bias = (self.head_weight, self.head_bias) if ids is None else self._rows(ids)
        logits = apply_head(final_hidden.to(weight.dtype), weight, bias, self.spec)
        return logits if narrow else wide(logits)

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows `ids` of the head, [Vd, H], and of its bias, [Vd] or None."""
        chosen = self._selection
        # Compares identity and version, because comparing values would wait for the device.
        if chosen is None or chosen[0] is not ids or chosen[1] != ids._version:
            weight = self.head_weight[ids]
            bias = None if self.head_bias is None else self.head_bias[ids]
            self._selection = chosen = (ids, ids._version, weight, bias)
        return chosen[2], chosen[3]
