"""The target's frozen head and embeddings, read from a dataset; and the draft vocabulary.

Logits are recomputed from final hidden states by the same `apply_head` that generation proved
against the model. A draft vocabulary is a selection of head rows: selecting once per run costs one
copy of those rows and saves the full-vocabulary product at every step.

V / Vd target / draft vocabulary, H hidden size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DraftError
from spec_data.shards.head_spec import HeadSpec, apply_head
from spec_data.shards.reader import load_head_tensors
from spec_data.shards.schema import Manifest


class TargetHead(nn.Module):
    """Frozen `embed_tokens` and `lm_head` of the target.

    Both are buffers that no checkpoint of a draft ever holds; with tied embeddings they are one
    tensor.
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
        """Take `embed_weight` [V, H], `head_weight` [V, H] and `head_bias` [V] or None."""
        super().__init__()
        self.spec = spec
        self.register_buffer("embed_weight", embed_weight, persistent=False)
        self.register_buffer("head_weight", head_weight, persistent=False)
        self.register_buffer("head_bias", head_bias, persistent=False)
        self._selection: tuple[Tensor, int, Tensor, Tensor | None] | None = None

    @classmethod
    def from_dataset(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        manifest: Manifest | None = None,
    ) -> "TargetHead":
        """Read the head of the dataset directory `path`, described by its manifest or another.

        Raises:
            MissingError, DatasetError: the head is absent or not what the manifest describes.
        """
        manifest = manifest or Manifest.read(Path(path) / "manifest.json")
        spec = manifest.head
        tensors = load_head_tensors(path, manifest)
        embed = tensors["embed_tokens"].to(device, dtype)
        head = embed if spec.tied else tensors["lm_head"].to(device, dtype)
        bias = tensors["lm_head_bias"].to(device, dtype) if spec.has_bias else None
        return cls(spec, embed, head, bias)

    @classmethod
    def from_model(cls, model: Any, spec: Mapping[str, Any] | None = None) -> "TargetHead":
        """Share the head of a loaded HF model.

        `spec` is the HeadSpec that its dataset proved, as a draft's origin keeps it; without one
        the head is taken for a plain product, which changes no greedy choice.
        """
        embed = model.get_input_embeddings().weight.data
        linear = model.get_output_embeddings()
        weight, bias = linear.weight.data, getattr(linear, "bias", None)
        known = HeadSpec(
            vocab_size=weight.shape[0],
            hidden_size=weight.shape[1],
            tied=weight is embed,
            has_bias=bias is not None,
        )
        if spec is not None:
            known = dataclasses.replace(known, scale=spec["scale"], softcap=spec.get("softcap"))
        return cls(known, embed, weight, None if bias is None else bias.data)

    def _apply(self, fn, recurse: bool = True):
        """Keep tied weights one tensor, and drop the selection, when the module moves."""
        tied = self.head_weight is self.embed_weight
        self._selection = None
        super()._apply(fn, recurse)
        if tied:
            self.head_weight = self.embed_weight
        return self

    @torch.no_grad()
    def logits(self, final_hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Give float32 logits [..., V] of final hidden states [..., H]; [..., len(ids)] with `ids`.

        `ids` int64 selects target ids; the selected rows are kept for the next call with it.
        """
        weight, bias = (self.head_weight, self.head_bias) if ids is None else self._rows(ids)
        logits = apply_head(final_hidden.to(weight.dtype), weight, bias, self.spec)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        kept = self._selection
        # Identity and version, not values: comparing values would synchronise with the device.
        if kept is None or kept[0] is not ids or kept[1] != ids._version:
            weight = self.head_weight[ids]
            bias = None if self.head_bias is None else self.head_bias[ids]
            self._selection = kept = (ids, ids._version, weight, bias)
        return kept[2], kept[3]


def choose_draft_vocabulary(
    counts: Tensor, size: int, special_ids: Sequence[int] = ()
) -> torch.LongTensor:
    """Choose the target ids of a draft vocabulary: sorted ascending, int64 [size].

    The special tokens, then the most frequent of the others; ties go to the lower id.

    Args:
        counts: how often each target token is a supervised token, int64 [V].
        size: Vd, 1..V.
        special_ids: ids that must be in; ids outside 0..V-1 are ignored.

    Raises:
        DraftError: `size` is not in 1..V, or too small for the special tokens.
    """
    vocab = counts.numel()
    special = sorted({i for i in special_ids if 0 <= i < vocab})
    if not 0 < size <= vocab:
        raise DraftError(f"draft vocabulary of {size}: the target's vocabulary has {vocab} tokens")
    if size < len(special):
        raise DraftError(
            f"draft vocabulary of {size} cannot hold the {len(special)} special tokens; raise it"
        )
    rank = counts.detach().to("cpu", torch.int64).clone()
    rank[special] = torch.iinfo(torch.int64).max
    chosen = torch.argsort(rank, descending=True, stable=True)[:size]
    return cast(torch.LongTensor, chosen.sort().values)
