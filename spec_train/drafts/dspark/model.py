"""The configuration and the small heads of block drafts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.models.families import TargetShape
from spec_data.shards.errors import DraftError
from spec_train.attention.masks import BlockWindow
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.mask_token import require_in_vocabulary
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import DFLASH, DSPARK
from spec_train.options.draft_options import FULL, SLIDING, BlockOptions


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DraftConfig):
    """Shapes and arithmetic of the draft.

    The file has the flat form that DeepSpec writes and engines read (`Qwen3DSparkModel`). A DFlash
    draft in the layout of its paper is a `DFlashDraftModel`. `sample_from_anchor` is always
    written, because the engines have different defaults. `target_layer_ids` are block outputs in
    every engine.
    """

    draft: ClassVar[str] = "dspark"
    architectures: ClassVar[tuple[str, ...]] = (DSPARK, DFLASH)
    switches: ClassVar[tuple[str, ...]] = (*DraftConfig.switches, "sliding_window_non_causal")

    qk_norm: bool = True  # as in Qwen3's layers
    sliding_window_non_causal: bool = False  # sliding layers see later slots of their block

    num_target_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool  # its input is [y; W1 of the previous token], not y alone

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in_vocabulary(self.mask_token_id, self.vocab_size)
        if not self.layer_types:
            object.__setattr__(self, "sliding_window_non_causal", False)
        elif (self.sliding_window or 0) < self.block_size:
            raise DraftError(
                f"sliding_window = {self.sliding_window} is less than block_size = "
                f"{self.block_size}: engines differ in what the slots of a block then see of it"
            )

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        same = ("block_size", "markov_rank", "markov_head_type", "sliding_window_non_causal")
        return {
            **{name: getattr(options, name) for name in same},
            "num_target_layers": shape.num_hidden_layers,
            "sample_from_anchor": options.layout == "anchor",
            "enable_confidence_head": options.confidence_weight > 0,
            "confidence_head_with_markov": options.with_markov,
        }

    @property
    def block_windows(self) -> tuple[BlockWindow | None, ...]:
        """The window of every layer; None: its slots see the whole context and block."""
        causal = not self.sliding_window_non_causal
        return tuple(None if size is None else BlockWindow(size, causal) for size in self.windows)

    @property
    def first(self) -> int:
        """Slot of a block that makes its first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        return self.block_size - self.first

    def to_json(self, options: BlockOptions) -> dict[str, Any]:
        published = self.draft == "dflash" and not self.sample_from_anchor
        out: dict[str, Any] = {
            "architectures": [DFLASH if published else DSPARK],
            "model_type": "qwen3",
            **self.shared_json(),
            "target_layer_ids": list(self.layers),
            "num_anchors": options.num_anchors,
            "layer_types": [FULL] * self.num_hidden_layers,
            "attention_dropout": 0.0,
            "use_sliding_window": bool(self.layer_types),
            **self.shape_json(),
            **self._causal_json(),
            SECTION: self.own_json(options),
        }
        if self.draft_vocab_size == self.vocab_size and not self.train_embeddings:
            # The file has no head: engines take the target's. Without this key, llama.cpp ties a
            # missing head to the embedding of the file.
            out["has_embed_tokens"] = False
        if published:
            out["dflash_config"] = {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.layers),
                "block_size": self.block_size,
            }
        return out

    def _causal_json(self) -> dict[str, Any]:
        """Return the key that engines read before their defaults, where it says what we compute.

        Without it, vLLM and SGLang make sliding layers causal and full ones not; llama.cpp makes
        none causal. It is for all layers, so causal sliding layers beside full ones have no key.
        """
        if not self.layer_types:
            return {}
        if self.sliding_window_non_causal:
            return {"is_causal": False}
        return {"is_causal": True} if set(self.layer_types) == {SLIDING} else {}


class DFlashConfig(DSparkConfig):
    """A block draft without the two small heads."""

    draft: ClassVar[str] = "dflash"


# -- heads -----------------------------------------------------------------------------------------
# A bias from the previous token, and a forecast of acceptance. Both heads read y, the state that
# enters the LM head (after the final norm), as DeepSpec's code and the engines do.
#
# r Markov rank, H hidden size, V / Vd target / draft vocabulary, D drafts of a block.

_STD = 0.02  # initialisation of the published drafts: the bias starts near zero


class MarkovHead(nn.Module):
    """A low-rank bias on the logits, bias = W2 g(W1[previous token]); g by `kind`:

    vanilla: g = e. gated: g = sigmoid(G [y; e]) * e. rnn: a state s runs through the block,
    [gate; candidate; out] = J [s; e; y], s' = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate)
    and g = tanh(out), s = 0 at its start. e = W1[previous token].
    """

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int, kind: str) -> None:
        """Make W1 [V, r], W2 [Vd, r] and the projection that `kind` needs."""
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        for table in (self.markov_w1, self.markov_w2):
            nn.init.normal_(table.weight, std=_STD)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        elif kind != "vanilla":
            raise ValueError(f"markov_head_type = {kind!r}: choose from vanilla, gated, rnn")

    @property
    def of_token_alone(self) -> bool:
        """Whether g depends on the previous token only, and not on the draft's states."""
        return self.kind == "vanilla"

    def step(self, e: Tensor, y: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return g [..., r], which W2 multiplies, and the next state [..., r] or None.

        Args:
            e: W1 of the previous tokens [..., r].
            y: states [..., H].
            state: [..., r], or None at the start of a block; always None unless `kind` is "rnn".
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([y, e], dim=-1))) * e, None
        if self.kind == "vanilla":
            return e, None
        state = torch.zeros_like(e) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, e, y], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(candidate)

    def block(self, e: Tensor, y: Tensor) -> Tensor:
        """Return all g [..., D, r] of blocks whose previous tokens are known.

        Args:
            e: W1 of the previous tokens [..., D, r].
            y: states [..., D, H].
        """
        if self.kind != "rnn":
            return self.step(e, y, None)[0]
        state: Tensor | None = None
        parts = []
        for d in range(e.shape[-2]):
            g, state = self.step(e[..., d, :], y[..., d, :], state)
            parts.append(g)
        return torch.stack(parts, dim=-2)


class ConfidenceHead(nn.Module):
    """Forecasts whether a draft is accepted, given that all earlier ones of the block are."""

    def __init__(self, hidden: int, rank: int) -> None:
        """Make the projection of [y; e], width H + r; rank 0: of y alone, width H."""
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden + rank, 1)
        nn.init.zeros_(self.proj.bias)

    def forward(self, y: Tensor, e: Tensor | None) -> Tensor:
        """Return logits [...] of the acceptance of drafts with states y [..., H].

        `e` [..., r] is W1 of their previous tokens, or None; a head of rank 0 does not read it.
        """
        features = y if e is None or not self.rank else torch.cat([y, e.to(y.dtype)], dim=-1)
        return self.proj(features).squeeze(-1)
