"""The vectors: which drafts, in which published forms, and the mistakes whose numbers are known."""

from dataclasses import dataclass, field
from typing import Any

from spec_train.conformance import target as tiny
from spec_train.conformance.drafts import Reads


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One vector."""

    name: str
    kind: str
    what: str
    target: str = "llama"
    options: dict[str, Any]
    vocabulary: int = 0  # tokens that the draft can propose; 0: all
    forms: tuple[str, ...]  # of `spec-train export`


_TINY = {"intermediate_size": 256}
_BLOCK = _TINY | {"num_layers": 1}
_LATTICE = {
    **{"lilicorr_candidate_topk": 2, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2},
    **{"lilicorr_num_layers": 1, "lilicorr_factor_dim": 8, "lilicorr_logit_scale": 8.0},
}
_EAGLE3 = ("vllm", "speculators")
_BLOCKS = ("vllm", "speculators", "deepspec")
RECIPES = (
    Recipe(
        name="eagle",
        kind="eagle",
        what="EAGLE-1/2",
        options=_TINY | {"depth": 3},
        forms=("vllm", "sglang"),
    ),
    Recipe(
        name="eagle3",
        kind="eagle3",
        what="EAGLE-3, reduced vocabulary",
        options=_TINY | {"ttt_steps": 4},
        vocabulary=96,
        forms=_EAGLE3,
    ),
    Recipe(
        name="eagle3-full",
        kind="eagle3",
        what="EAGLE-3, all tokens, norm before the residual",
        target="qwen3",
        options=_TINY | {"ttt_steps": 4, "norm_before_residual": True},
        forms=_EAGLE3,
    ),
    Recipe(
        name="eagle31",
        kind="eagle3",
        what="EAGLE-3.1 (norm of every layer and of what is fed back), reduced vocabulary",
        options=_TINY | {"ttt_steps": 4, "fc_norm": True, "norm_output": True},
        vocabulary=96,
        forms=_EAGLE3,
    ),
    Recipe(
        name="peagle",
        kind="peagle",
        what="P-EAGLE of two layers, reduced vocabulary",
        options=_TINY | {"depths": 4, "num_layers": 2},
        vocabulary=96,
        forms=_EAGLE3,
    ),
    Recipe(
        name="dspark",
        kind="dspark",
        what="DSpark of two layers, anchor layout, vanilla Markov head, confidence head",
        target="qwen3",
        options=_BLOCK | {"num_layers": 2, "block_size": 4, "markov_rank": 8},
        forms=_BLOCKS,
    ),
    Recipe(
        name="dspark-mask",
        kind="dspark",
        what="DSpark, mask layout, reduced vocabulary",
        target="qwen3",
        options=_BLOCK | {"block_size": 5, "markov_rank": 8, "layout": "mask"},
        vocabulary=96,
        forms=_BLOCKS[:2],
    ),
    *(
        Recipe(
            name=f"dspark-{kind}",
            kind="dspark",
            what=f"DSpark, {kind} Markov head",
            target="qwen3",
            options=_BLOCK | {"block_size": 4, "markov_rank": 8, "markov_head_type": kind},
            forms=("sglang", *_BLOCKS[1:]),
        )
        for kind in ("gated", "rnn")
    ),
    Recipe(
        name="dflash",
        kind="dflash",
        what="DFlash of one layer",
        target="qwen3",
        options=_BLOCK | {"block_size": 5},
        forms=("vllm", "speculators", "transformers"),
    ),
    Recipe(
        name="dflash-deep",
        kind="dflash",
        what="DFlash of two layers",
        target="qwen3",
        options=_BLOCK | {"num_layers": 2, "block_size": 5},
        forms=("vllm", "speculators", "transformers"),
    ),
    Recipe(
        name="dflash-window",
        kind="dflash",
        what="DFlash of two layers, the first with a window of 6 positions, not causal in a block",
        target="qwen3",
        options=_BLOCK
        | {
            **{"num_layers": 2, "block_size": 5, "sliding_window": 6},
            **{"layer_types": "sliding_attention,full_attention"},
            **{"sliding_window_non_causal": True},
        },
        forms=("vllm", "speculators"),
    ),
    Recipe(
        name="dflash2",
        kind="dflash2",
        what="DFlash 2 of two layers",
        target="qwen3",
        options=_BLOCK
        | {"num_layers": 2, "block_size": 5, "selector_rank": 8, "selector_top_k": 4},
        forms=("vllm", "speculators"),
    ),
    Recipe(
        name="domino",
        kind="domino",
        what="Domino of two layers",
        target="qwen3",
        options=_BLOCK | {"num_layers": 2, "block_size": 5, "emb_dim": 8, "gru_hidden_dim": 8},
        forms=("sglang",),
    ),
    Recipe(
        name="lilicorr",
        kind="lilicorr",
        what="LiLiCorr of two layers",
        target="qwen3",
        options=_BLOCK | _LATTICE | {"num_layers": 2, "block_size": 5},
        forms=("sglang",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A mistake; its name begins with the code of the same failure in `spec-train doctor`."""

    name: str
    meaning: str
    reads: Reads = field(default_factory=Reads)
    config: dict[str, Any] = field(default_factory=dict)  # changes that a file can make as well
    vocabulary: tuple[int, ...] = ()  # of such a file

    @property
    def in_file(self) -> bool:
        """Whether a draft directory has the mistake baked in."""
        return bool(self.config or self.vocabulary)


def twins_of(recipe: Recipe, config: Any, ids: tuple[int, ...]) -> list[Twin]:
    """Return the mistakes with which a draft of this configuration and vocabulary can be served."""
    kind, found = recipe.kind, []
    if kind != "eagle":
        for step in (-1, 1):
            found.append(
                Twin(
                    name=f"layer-ids{step:+d}",
                    meaning="every captured layer one block too "
                    + ("early" if step < 0 else "late: an id that means outputs read as inputs"),
                    config={"layers": tuple(k + step for k in config.layers)},
                )
            )
    found += [
        Twin(
            name="state-shift",
            meaning="the target's states one token late: each row has those of the token before",
            reads=Reads(shift=1),
        ),
        Twin(
            name="final-norm",
            meaning="states on the other side of the target's final norm",
            reads=Reads(normed=True),
        ),
    ]
    if kind in ("eagle3", "peagle"):
        name = "norm_before_residual"
        found.append(
            Twin(
                name="carried-norm-residual",
                meaning=f"{name} read as its opposite",
                config={name: not config.norm_before_residual},
            )
        )
    if kind == "eagle3":
        found.append(
            Twin(
                name="carried-norm-output",
                meaning="norm_output read as its opposite: what is fed back is normed, or is not",
                config={"norm_output": not config.norm_output},
            )
        )
    if ids:
        others = [i for i in range(tiny.FIRST, tiny.VOCAB) if i not in ids]
        stale = sorted([*ids[: len(ids) - len(others)], *others])
        found += [
            Twin(
                name="vocabulary-map-ignored",
                meaning="rows of the draft's head taken for token ids, without d2t",
                reads=Reads(ids=tuple(range(len(ids)))),
            ),
            Twin(
                name="vocabulary-map-stale",
                meaning="d2t of another vocabulary of the same size",
                vocabulary=tuple(stale),
            ),
        ]
    if kind not in ("eagle", "eagle3"):
        found.append(
            Twin(
                name="mask-token",
                meaning="another token in the slots that are unknown",
                config={"mask_token_id": tiny.MASK + 1},
            )
        )
    if kind not in ("eagle", "eagle3", "peagle"):
        if kind != "lilicorr":  # its tables have a row per draft, none for a slot more
            found.append(_slots(config))
        if not config.layer_types:
            endless = (("windows", (tiny.VOCAB,) * config.num_hidden_layers),)
            found.append(
                Twin(
                    name="window-causal",
                    meaning="slots of a block see only earlier slots",
                    reads=Reads(fields=endless),
                )
            )
    if config.layer_types:
        found += [
            Twin(
                name="window+1",
                meaning="the window counted from the position before: its own is not counted",
                config={"sliding_window": config.sliding_window + 1},
            ),
            Twin(
                name="window-causal",
                meaning="slots of a layer with a window see only earlier slots of the block",
                config={"sliding_window_non_causal": not config.sliding_window_non_causal},
            ),
        ]
    return found


def _slots(config: Any) -> Twin:
    anchor, size = config.sample_from_anchor, config.block_size
    other = (("sample_from_anchor", not anchor), ("block_size", size + anchor))
    return Twin(
        name="slot-layout",
        meaning="drafts taken from the slot "
        + ("after: the anchor's drafts nothing" if anchor else "before: the anchor's drafts"),
        reads=Reads(fields=other),
    )
