"""The attention mask of a tree of tokens, in the form that a target accepts.

Each entry of a verification forward sees the cached tokens and its own path, within the layer's
window; its position follows from its depth. Models take such a mask as one 4-D tensor, or as one
tensor per layer type if only some layers have a sliding window. Models do not declare which form
they support, so each form is tested before use, on a small tree whose paths are also computed one
by one. A model that fails every form is refused. A form without the windows of the model's layers
is never tested: the small tree is shorter than a window and would pass wrongly.

Shapes: n nodes of a tree, T tokens cached before them, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from spec_data.shards.errors import TargetError
from spec_train.decoding.chains import decoder_config
from spec_train.decoding.tree_growth import ROOT, DraftTree

_WINDOWED, _PLAIN = "sliding_attention", "full_attention"
_PER_TYPE, _SINGLE = "one mask per layer type", "one mask"
_TEST_TREE = DraftTree([3, 4, 5, 6, 7], [ROOT, ROOT, 0, 1, 2])  # branches of different lengths
_TEST_PROMPT = [1, 2, 3, 4, 5, 6]


def tree_mask(tree: DraftTree, cached: int, window: int | None) -> Tensor:
    """Return what each entry of a verification sees, bool [1 + n, cached + 1 + n].

    The first dimension and the last 1 + n of the second are the root and the nodes of the tree; the
    first `cached` of the second are the tokens cached before, at positions 0, 1, ... A layer with a
    `window` sees that many positions, its own included.
    """
    seen = torch.cat([torch.ones(1 + len(tree.tokens), cached).bool(), tree.ancestry()], dim=1)
    if window is None:
        return seen
    depths = torch.tensor([0, *tree.depths])
    positions = torch.cat([torch.arange(cached), cached + depths])  # [cached + 1 + n]
    return seen & (cached + depths[:, None] - positions < window)


class TreeMasks:
    """Builds tree masks for one target, in a form that was tested with it."""

    def __init__(self, model: Any) -> None:
        """Find the form.

        Raises:
            TargetError: no form works with the model.
        """
        self._device, self._dtype = model.device, model.dtype
        config = decoder_config(model)
        self._attn = config._attn_implementation
        self._types = set(getattr(config, "layer_types", None) or ())
        self._window = getattr(config, "sliding_window", None)
        if self._attn not in ("sdpa", "eager"):
            raise TargetError(
                f"{type(model).__name__} with {self._attn} attention accepts no tree mask; pass "
                "--attn sdpa or --attn eager, or leave --tree-tokens out to draft chains"
            )
        for form in self._candidates():
            self._form = form
            if self._works(model):
                return
        raise TargetError(
            f"{type(model).__name__} ignores or misreads tree masks in every known form; leave "
            "--tree-tokens out to draft chains"
        )

    def _candidates(self) -> list[str]:
        if not self._types <= {_WINDOWED, _PLAIN}:
            return []
        mixed = len(self._types) == 2 and self._window is not None
        per_type = [_PER_TYPE] if self._types else []
        return per_type if mixed else [*per_type, _SINGLE]

    def layout(self, tree: DraftTree, cached: int) -> dict[str, Any]:
        """Return the model's arguments for a verification forward over the root and the nodes.

        `attention_mask` [1, 1, 1 + n, cached + 1 + n], bool for sdpa and the model's dtype for
        eager, or a dict of such masks by layer type; `position_ids` int64 [1, 1 + n].
        """
        depths = torch.tensor([[0, *tree.depths]], device=self._device)
        mask: Any
        if self._form == _PER_TYPE:
            mask = {
                kind: self._mask(tree, cached, self._window if kind == _WINDOWED else None)
                for kind in sorted(self._types)
            }
        else:
            slides = self._types != {_PLAIN}
            mask = self._mask(tree, cached, self._window if slides else None)
        return {"attention_mask": mask, "position_ids": cached + depths}

    def _mask(self, tree: DraftTree, cached: int, window: int | None) -> Tensor:
        seen = tree_mask(tree, cached, window).to(self._device)[None, None]
        if self._attn == "sdpa":
            return seen
        blocked = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return blocked.masked_fill_(~seen, torch.finfo(self._dtype).min)

    @torch.inference_mode()
    def _works(self, model: Any) -> bool:
        """Return whether the logits after each node equal those of its path computed alone."""
        vocab = model.get_output_embeddings().weight.shape[0]
        prompt, root = [i % vocab for i in _TEST_PROMPT], 8 % vocab
        tree = DraftTree([i % vocab for i in _TEST_TREE.tokens], _TEST_TREE.parents)

        def run(tokens: list[int], cache: Any, **layout: Any) -> Tensor:
            ids = torch.tensor([tokens], device=self._device)
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, **layout)
            return out.logits[0].float()

        cache = DynamicCache()
        run(prompt, cache)
        try:
            found = run([root, *tree.tokens], cache, **self.layout(tree, len(prompt)))
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
            return False  # the model does not accept a mask of this form
        seen = tree.ancestry()
        expected = torch.stack(
            [
                run(
                    [*prompt, *(t for t, on in zip([root, *tree.tokens], path, strict=True) if on)],
                    DynamicCache(),
                )[-1]
                for path in seen.tolist()
            ]
        )
        difference = (found - expected).norm() / expected.std(-1, keepdim=True).expand_as(
            expected
        ).norm()
        return bool(difference < max(1e-3, 16 * torch.finfo(self._dtype).eps))
