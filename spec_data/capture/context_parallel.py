"""--context-parallel: the tokens of every row lie on several processes, each with all weights.

Each process runs the blocks on its share of the slots. Attention gathers keys and values of one
layer at a time (`attention_in_parts.Share`), so what grows with a document is divided: hidden
states, queries, MLPs and scores. The first process receives the captured states.

A row of a matrix product may be summed in another order where the product has fewer rows, so states
equal those of one process up to rounding. That is proven before the first shard, on the longest
document of the proofs: a window that is lost, or a layer that mixes tokens outside of attention,
shows there.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from spec_data.capture.attention_in_parts import Share, attention_in_parts
from spec_data.capture.backend import BackendOptions
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import PER_DOCUMENT, ROWS
from spec_data.capture.processes import SharedTarget
from spec_data.capture.proofs import why_no_chunks
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.packing import PADDING
from spec_data.shards.schema import PackingRecord

_SPLIT = {"full_attention", "sliding_attention", "moe"}  # types of layers


def check_family(config: Any) -> None:
    """Refuse a target whose tokens cannot lie on several processes; `config` is transformers'.

    Raises:
        TargetError: the family, and what it has.
    """
    text = text_config(config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    types = set(getattr(text, "layer_types", None) or ())
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(of_type for of_type in rope.values() if isinstance(of_type, dict))]
    reasons = {
        f"it has layers of {', '.join(sorted(types - _SPLIT))}": bool(types - _SPLIT),
        "its layers carry a state": not types and getattr(kind, "_is_stateful", False),
        "it chooses the keys of each query": hasattr(text, "index_topk"),
        "its rotary frequencies follow the longest row": any(
            of_type.get("rope_type") == "dynamic" for of_type in ropes
        ),
        "its attention is not a function of transformers' interface": (
            kind is not None and not getattr(kind, "_supports_attention_backend", False)
        ),
        "it takes no position ids": (
            kind is not None and "position_ids" not in inspect.signature(kind.forward).parameters
        ),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise TargetError(
            f"--context-parallel cannot split the tokens of {config.model_type}: {found[0]}. Use "
            "--device-map auto or --tp-plan auto, or lower --max-length"
        )


def forward_bytes(config: Any, tokens: int, processes: int, columns: int, itemsize: int) -> int:
    """Return about how many bytes a forward of one document takes in the first process, which has
    the most, beside weights, logits and masks; of a dense target with sdpa.

    Args:
        config: the transformers configuration.
        tokens: of the document.
        columns: captured states per token.
        itemsize: bytes of a number of the target's dtype.
    """
    text, share = text_config(config), -(-tokens // processes)
    hidden, largest = text.hidden_size, 0
    of_layers = getattr(text, "per_layer_config", None)  # None: they are alike
    for i in range(len(of_layers or [text])):
        layer = of_layers[i] if of_layers else text
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or hidden // heads
        keys = getattr(layer, "num_key_value_heads", None) or heads
        # Keys and values of all tokens, gathered and repeated for all heads; queries and outputs.
        repeated = heads if heads > keys else 0
        attention = 2 * tokens * size * (keys + repeated) + 3 * share * heads * size
        mlp = getattr(layer, "intermediate_size", None) or 4 * hidden
        mlp = 3 * share * (max(mlp) if isinstance(mlp, list) else mlp)
        largest = max(largest, attention, mlp)
    captured = columns * share * hidden
    blocks = captured + 3 * share * hidden + largest
    gathered = captured + (columns + 1) * tokens * hidden
    return itemsize * max(blocks, gathered)


class SplitTarget(SharedTarget):
    """A target of which every process holds a share of the tokens."""

    flag = "--context-parallel"

    @classmethod
    def open(cls, options: BackendOptions) -> "SplitTarget":
        """Load the whole target on the GPU of each process.

        Raises:
            TargetError: its tokens cannot be split.
        """
        check_family(load_config(resolve_model(str(options.path))[0], options.trust_remote_code))
        target = super().open(options)
        assert isinstance(target, cls)
        if target.attn not in ("sdpa", "eager"):
            raise ConfigError(f"--context-parallel goes with --attn sdpa or eager: {target.attn}")
        return target

    def forward_together(
        self, ids: Tensor, documents: Tensor, positions: Tensor, form: str | None, full: bool
    ) -> States:
        """Run the share of this process; the first one returns the states of all slots."""
        count, length = dist.get_world_size(), ids.shape[1]
        more = -length % (2 * count)
        share = Share(rank=dist.get_rank(), processes=count, length=length + more)
        documents = pad(documents, (0, more), value=PADDING)
        ours, at = (share.of(pad(x, (0, more))).to(self.input_device) for x in (ids, positions))
        attention = attention_in_parts(self.model, self.attn, documents, share=share)
        given = {"attention_mask": None, "position_ids": at}
        states = self._forward(ours, given, full, attention)

        def gathered(part: Tensor) -> Tensor:
            """Return [B, T, ...] of the shares [B, S, ...], in the first process."""
            part, shares = part.contiguous(), None
            if dist.get_rank() == 0:
                shares = list(part.new_empty((count, *part.shape)).unbind())
            dist.gather(part, shares)
            return part if shares is None else share.joined(shares, 1)[:, :length]

        return states.each(gathered)

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        """Prove that the shares of all processes are the states of one, then that of packing."""
        if packing not in ("auto", PER_DOCUMENT, ROWS):
            raise ConfigError(
                f"--packing {packing}: --context-parallel has no mask of a pack; take auto, "
                f"{PER_DOCUMENT} or {ROWS}"
            )

        def run(ids: Tensor, split: bool) -> States:
            if split:
                at = torch.arange(ids.shape[1])[None]
                return self.forward(ids, torch.zeros_like(ids), at, None)
            ids = ids.to(self.input_device)
            return self._forward(ids, {"attention_mask": None}, False, nullcontext())

        ids = max(documents, key=len)[None]
        if reason := why_no_chunks(run, ids, self.config, self.dtype):
            raise TargetError(
                f"--context-parallel: the tokens of {self.architecture} cannot be split over "
                f"processes ({reason})"
            )
        return super().prove(documents, pack_length, ROWS if packing == ROWS else PER_DOCUMENT)
