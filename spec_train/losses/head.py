"""The target's frozen head and embeddings, read from a dataset, and the draft vocabulary.

Logits are recomputed from final hidden states with the same `apply_head` that generation proved
against the model. A draft vocabulary is a selection of rows of the head. Selecting once per run
costs one copy of these rows and saves the full-vocabulary product at every step.

V / Vd target / draft vocabulary, H hidden size.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import load_head_tensors
from spec_data.shards.schema import HeadSpec, Manifest, apply_head


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
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        manifest: Manifest | None = None,
    ) -> "TargetHead":
        """Read the head of a dataset directory, described by its manifest or by `manifest`.

        Raises:
            MissingError, DatasetError: the head is missing or not what the manifest describes.
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
        """Share the weights of a loaded HF model.

        `spec` is the HeadSpec of a dataset, as a draft's origin stores it. Without it, the head is
        treated as a plain product; no greedy choice depends on the difference.
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
        """Move the module: tied weights stay one tensor, and the selected rows are dropped."""
        tied = self.head_weight is self.embed_weight
        self._selection = None
        super()._apply(fn, recurse)
        if tied:
            self.head_weight = self.embed_weight
        return self

    @torch.no_grad()
    def logits(self, final_hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., H]: float32, or float64 of float64.

        `ids`, int64 [Vd], selects target ids: logits are then [..., Vd]. The selected rows are kept
        for the next call with the same tensor.
        """
        weight, bias = (self.head_weight, self.head_bias) if ids is None else self._rows(ids)
        logits = apply_head(final_hidden.to(weight.dtype), weight, bias, self.spec)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows `ids` of the head, [Vd, H], and of its bias, [Vd] or None."""
        kept = self._selection
        # Compares identity and version, because comparing values would wait for the device.
        if kept is None or kept[0] is not ids or kept[1] != ids._version:
            weight = self.head_weight[ids]
            bias = None if self.head_bias is None else self.head_bias[ids]
            self._selection = kept = (ids, ids._version, weight, bias)
        return kept[2], kept[3]


def choose_draft_vocabulary(
    counts: Tensor, size: int, special_ids: Sequence[int] = ()
) -> torch.LongTensor:
    """Choose the target ids of a draft vocabulary: int64 [size], ascending.

    Special tokens come first, then the most frequent other tokens; ties go to the lower id.

    Args:
        counts: how often each target token is a supervised token, int64 [V].
        size: Vd, 1..V.
        special_ids: ids that are always chosen; ids outside 0..V-1 are ignored.

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


def smallest_vocabulary(
    counts: Tensor, share: float, special_ids: Sequence[int] = ()
) -> torch.LongTensor:
    """Choose the smallest draft vocabulary that holds a share of the supervised tokens.

    Tokens are chosen as by `choose_draft_vocabulary`: int64 [Vd], ascending.

    Args:
        counts: how often each target token is a supervised token, int64 [V].
        share: above 0 and at most 1.
        special_ids: ids that are always chosen; ids outside 0..V-1 are ignored.

    Raises:
        DraftError: there is no supervised token.
    """
    total = int(counts.sum())
    if not total:
        raise DraftError("there is no supervised token, so no draft vocabulary can cover any")
    special = sorted({i for i in special_ids if 0 <= i < counts.numel()})
    others = counts.detach().to("cpu", torch.int64).clone()
    held = int(others[special].sum())
    others[special] = 0
    covered = held + others.sort(descending=True).values.cumsum(0)  # [V], with 1, 2, ... others
    # the least count that is at least the share; a product in floats may be above a whole number
    needed = min(math.ceil(share * total - 1e-9 * total), total)
    more = 0 if held >= needed else int((covered < needed).sum()) + 1
    return choose_draft_vocabulary(counts, max(1, len(special) + more), special_ids)


def vocabulary_coverage(
    counts: Tensor, chosen: Tensor, special_ids: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the share of supervised tokens inside a draft vocabulary, and the best such share.

    The second is that of the vocabulary of the same size which `choose_draft_vocabulary` chooses
    for these counts. Both are 1 if there is no supervised token.

    Args:
        counts: how often each target token is a supervised token, int64 [V].
        chosen: the target ids of the draft vocabulary, int64 [Vd].
        special_ids: ids that are always chosen, if the vocabulary is large enough.
    """
    total = int(counts.sum())
    if not total:
        return 1.0, 1.0
    # a vocabulary of a file may be too small for the special tokens
    fitting = special_ids if len(chosen) >= len(set(special_ids)) else ()
    best = choose_draft_vocabulary(counts, len(chosen), fitting)
    return int(counts[chosen.cpu()].sum()) / total, int(counts[best].sum()) / total
