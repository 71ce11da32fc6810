"""The vectors: which drafts, in which published forms, and the mistakes whose numbers are known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spec_train.conformance import target as tiny
from spec_train.conformance.drafts import Reads


@dataclass(frozen=True)
class Recipe:
    """One vector."""

    name: str
    kind: str
    what: str
    target: str
    forms: tuple[str, ...]  # of `spec-train export`
    options: dict[str, Any]
    vocabulary: int = 0  # tokens that the draft can propose; 0: all


_EAGLE3, _BLOCKS = "vllm speculators", "vllm speculators deepspec"
_DFLASH = "vllm speculators transformers"


def _recipe(
    name: str, kind: str, what: str, forms: str, options: dict[str, Any], vocabulary: int = 0
) -> Recipe:
    blocks = kind not in ("eagle", "eagle3", "peagle")
    target = "qwen3" if blocks or name == "eagle3-full" else "llama"
    options = {"intermediate_size": 256} | ({"num_layers": 1} if blocks else {}) | options
    return Recipe(name, kind, what, target, tuple(forms.split()), options, vocabulary)


def _markov(kind: str) -> Recipe:
    name, what = f"dspark-{kind}", f"DSpark, {kind} Markov head"
    options = {"block_size": 4, "markov_rank": 8, "markov_head_type": kind}
    return _recipe(name, "dspark", what, "sglang speculators deepspec", options)


def _mtp(target: str, what: str) -> Recipe:
    """The block of a target, trained for three steps; its form is the target itself."""
    options = {"depth": 3, "norm_output": True}
    return Recipe(f"mtp-{target}", "mtp", f"MTP block of {what}", target, ("target",), options)


_PLAIN = {"ttt_steps": 4, "norm_before_fc": False}
_DEEP = {"num_layers": 2, "block_size": 5}
_WINDOW = {"sliding_window": 6, "layer_types": "sliding_attention,full_attention"}
_WINDOW |= {"sliding_window_non_causal": True}
_LATTICE = {
    **{"lilicorr_candidate_topk": 2, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2},
    **{"lilicorr_num_layers": 1, "lilicorr_factor_dim": 8, "lilicorr_logit_scale": 8.0},
}
RECIPES = (
    _recipe("eagle", "eagle", "EAGLE-1/2", "vllm sglang", {"depth": 3}),
    _recipe("eagle3", "eagle3", "EAGLE-3, reduced vocabulary", _EAGLE3, _PLAIN, 96),
    _recipe(
        *("eagle3-full", "eagle3", "EAGLE-3, all tokens, norms before fc and residual", _EAGLE3),
        {"ttt_steps": 4, "norm_before_residual": True},
    ),
    _recipe(
        *("eagle31", "eagle3", "EAGLE-3.1 (norms of each layer, and of what is fed back)"),
        *(_EAGLE3, {"ttt_steps": 4, "fc_norm": True, "norm_output": True}, 96),
    ),
    _recipe(
        *("peagle", "peagle", "P-EAGLE of two layers, reduced vocabulary", _EAGLE3),
        *({"depths": 4, "num_layers": 2}, 96),
    ),
    _recipe(
        *("dspark", "dspark", "DSpark of two layers, anchor layout, vanilla Markov head", _BLOCKS),
        {"num_layers": 2, "block_size": 4, "markov_rank": 8},
    ),
    _recipe(
        *("dspark-mask", "dspark", "DSpark, mask layout, reduced vocabulary", _EAGLE3),
        *({"block_size": 5, "markov_rank": 8, "layout": "mask"}, 96),
    ),
    _markov("gated"),
    _markov("rnn"),
    _recipe("dflash", "dflash", "DFlash of one layer", _DFLASH, {"block_size": 5}),
    _recipe("dflash-deep", "dflash", "DFlash of two layers", _DFLASH, _DEEP),
    _recipe(
        *("dflash-window", "dflash", "DFlash, one of two layers has a window, not causal in it"),
        *(_EAGLE3, _DEEP | _WINDOW),
    ),
    _recipe(
        *("dflash2", "dflash2", "DFlash 2 of two layers", _EAGLE3),
        _DEEP | {"selector_rank": 8, "selector_top_k": 4},
    ),
    _recipe(
        *("domino", "domino", "Domino of two layers", "sglang"),
        _DEEP | {"emb_dim": 8, "gru_hidden_dim": 8},
    ),
    _recipe("lilicorr", "lilicorr", "LiLiCorr of two layers", "sglang", _DEEP | _LATTICE),
    _recipe(
        *("xpress", "xpress", "XPress of two layers, as many passes as drafts", "vllm"),
        _DEEP | {"xpress_rank": 16, "xpress_num_passes": 4},
    ),
    _mtp("mimo", "MiMo: fc reads [state ; embedding]"),
    _mtp("qwen3_5", "Qwen3.5 and Qwen3-Next: norms of 1 + weight, gated attention"),
    _mtp("glm4_moe", "GLM-4.5, a dense layer"),
    _mtp("deepseek_v3", "DeepSeek-V3, latent attention and a dense layer"),
)


@dataclass(frozen=True)
class Twin:
    """A mistake; its name begins with the code of the same failure in `spec-train doctor`."""

    name: str
    meaning: str
    reads: Reads = field(default_factory=Reads)
    config: dict[str, Any] = field(default_factory=dict)  # changes that a file can make as well
    vocabulary: tuple[int, ...] = ()  # of such a file
    edit: Callable[[Any], None] | None = None  # of the weights of such a file

    @property
    def in_file(self) -> bool:
        """Whether a draft directory has the mistake baked in."""
        return bool(self.config or self.vocabulary or self.edit)


def _swap_sides(draft: Any) -> None:
    draft.fc.weight.copy_(draft.fc.weight.roll(tiny.HIDDEN, 1))


def _swap_norms(draft: Any) -> None:
    draft.enorm, draft.hnorm = draft.hnorm, draft.enorm


def _stale_norm(draft: Any) -> None:
    draft.norm.weight.copy_(draft.hnorm.weight)


def twins_of(recipe: Recipe, config: Any, ids: tuple[int, ...]) -> list[Twin]:
    """Return the mistakes with which a draft of this configuration and vocabulary can be served."""
    kind, found = recipe.kind, []

    def add(name: str, meaning: str, **wrong: Any) -> None:
        in_reads = {key: wrong.pop(key) for key in tuple(wrong) if key in Reads.__annotations__}
        vocabulary, edit = wrong.pop("vocabulary", ()), wrong.pop("edit", None)
        found.append(Twin(name, meaning, Reads(**in_reads), wrong, vocabulary, edit))

    if kind not in ("eagle", "mtp"):
        for step, where in (-1, "early"), (1, "late"):
            layers = tuple(k + step for k in config.layers)
            meaning = f"every captured layer one block too {where}: inputs and outputs of blocks"
            add(f"layer-ids{step:+d}", f"{meaning} taken for each other", layers=layers)
    add("state-shift", "the target's states one token late: those of the token before", shift=1)
    add("final-norm", "states on the other side of the target's final norm", normed=True)
    if kind in ("eagle3", "peagle"):
        flip = not config.norm_before_residual
        meaning = "norm_before_residual read as its opposite"
        add("carried-norm-residual", meaning, norm_before_residual=flip)
    if kind == "eagle3":
        meaning = "norm_output read as its opposite: what is fed back is normed, or is not"
        add("carried-norm-output", meaning, norm_output=not config.norm_output)
    if kind == "mtp":
        meaning = "the state that is fed back: before the block's norm instead of after it"
        add("carried-norm-output", meaning, fields=(("norm_output", not config.norm_output),))
        add("mtp-sides", "fc's two inputs, state and embedding, swapped", edit=_swap_sides)
        add("mtp-norms", "the norms of state and embedding swapped", edit=_swap_norms)
        add("mtp-norm", "another norm before the head than the block's own", edit=_stale_norm)
        return found
    if ids:
        others = [i for i in range(tiny.FIRST, tiny.VOCAB) if i not in ids]
        stale = tuple(sorted([*ids[: len(ids) - len(others)], *others]))
        meaning = "rows of the draft's head taken for token ids, without d2t"
        add("vocabulary-map-ignored", meaning, ids=tuple(range(len(ids))))
        add("vocabulary-map-stale", "d2t of another vocabulary of this size", vocabulary=stale)
    if kind not in ("eagle", "eagle3"):
        meaning = "another token in the slots that are unknown"
        add("mask-token", meaning, mask_token_id=tiny.MASK + 1)
    if kind in ("eagle", "eagle3", "peagle"):
        return found
    if kind not in ("lilicorr", "xpress"):  # tables of as many slots as it has, none for one more
        anchor = config.sample_from_anchor
        other = (("sample_from_anchor", not anchor), ("block_size", config.block_size + anchor))
        where = "after: the anchor's drafts nothing" if anchor else "before: the anchor's drafts"
        add("slot-layout", f"drafts taken from the slot {where}", fields=other)
    causal = "slots see only earlier slots of their block"
    if config.layer_types:
        meaning = "the window counted from the position before: its own is not counted"
        add("window+1", meaning, sliding_window=config.sliding_window + 1)
        flip = not config.sliding_window_non_causal
        add("window-causal", f"{causal}, in layers with a window", sliding_window_non_causal=flip)
    else:
        endless = (("windows", (tiny.VOCAB,) * config.num_hidden_layers),)
        add("window-causal", causal, fields=endless)
    return found
