"""The tiny drafts: random weights, and one matrix that is fitted so that drafts are accepted.

The last `down_proj` of a draft is the least-squares solution that maps its inputs, at most places
of the target's answers, to the target's own final states: in closed form, in float64, then rounded
to bfloat16. So a draft is right at some places and wrong at others, and what it reads matters.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import HeadSpec
from spec_train.conformance import target as tiny
from spec_train.conformance.target import Answer, TinyTarget, drawn_weight, sizes_of
from spec_train.drafts import DRAFTS
from spec_train.drafts import slow_layer as slow
from spec_train.drafts.block import reference as blocks
from spec_train.drafts.dflash2 import reference as selector
from spec_train.drafts.eagle import reference as eagle
from spec_train.drafts.eagle3 import reference as eagle3
from spec_train.drafts.lilicorr import reference as lattice
from spec_train.drafts.mtp import reference as mtp
from spec_train.drafts.peagle import reference as peagle
from spec_train.drafts.slow_layer import Document
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS

CHAINS: dict[str, Any] = {"eagle": eagle, "mtp": mtp}
STAGES = {"dflash2": selector.Block, "lilicorr": lattice.Block}
_LAST = re.compile(r"(midlayer|block|layers\.\d+)\.mlp\.down_proj\.weight")
_PASSES = {"eagle": 3, "mtp": 3, "eagle3": 3, "dflash2": 4}
"""Where the inputs of the fitted matrix, or what follows it, depend on the matrix itself."""
_RIDGE = 1e-4
"""Weight of the norm of the fitted matrix, as a share of the mean square of its inputs."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What an engine does with a draft's files; the defaults are right, other values mistakes."""

    shift: int = 0  # the states of so many tokens earlier
    normed: bool = False  # states after the target's final norm; of EAGLE-1/2 and MTP: before it
    ids: tuple[int, ...] = ()  # target ids of the draft vocabulary, if they are not the file's
    fields: tuple[tuple[str, Any], ...] = ()  # of the reference's config


@dataclass(frozen=True)
class Drafted:
    """What a draft proposes after the last known token."""

    tokens: list[int]
    logits: Tensor  # [K, V or Vd], of candidates alone where a second stage chooses
    states: Sequence[Tensor] = ()  # of EAGLE-1/2 and MTP: what the head reads, K of [H]


@dataclass(frozen=True)
class TinyDraft:
    """A draft for the slow references."""

    kind: str
    depth: int
    target: TinyTarget
    config: Any  # a DraftConfig
    state: Mapping[str, Any]  # the tensors of its checkpoint, float64

    def states(self, answer: Answer, reads: Reads) -> Tensor:
        """Return the target's states that an engine hands over [T - 1, n*H]."""
        if self.kind in CHAINS:
            found = answer.states[:, tiny.BLOCKS + (0 if reads.normed else 1)]
        else:
            parts = [answer.states[:, k + 1] for k in self.config.layers]
            if reads.normed:
                norm, eps = self.target.state["norm.weight"], self.target.sizes.rms_norm_eps
                parts = [torch.stack([slow.rms(x, norm, eps) for x in part]) for part in parts]
            found = torch.cat(parts, -1)
        return torch.cat([found[:1]] * reads.shift + [found])[: len(found)]

    @functools.cached_property
    def reference(self) -> Any:
        """The configuration of the slow reference."""
        given = self.config
        fields = vars(sizes_of(vars(given))) | {"windows": given.windows, "act": given.hidden_act}
        if self.kind == "eagle":
            return eagle.Config(**fields, head_weight=self.target.head)
        if self.kind == "mtp":
            fields |= vars(sizes_of(self.target.config)) | {"head_weight": self.target.head}
            fields |= {"norm_output": given.norm_output, "states_first": given.states_first}
            return mtp.Config(**fields)
        if self.kind in ("eagle3", "peagle"):
            fields["norm_before_residual"] = given.norm_before_residual
        if self.kind == "eagle3":
            return eagle3.Config(**fields, norm_output=given.norm_output, steps=self.depth)
        fields["mask_token_id"] = given.mask_token_id
        if self.kind == "peagle":
            return peagle.Config(**fields, depths=self.depth)
        ids = slow.draft_ids(self.state, given.draft_vocab_size)
        fields |= {
            "head_rows": self.state.get("lm_head.weight", self.target.head[ids]),
            "block_size": given.block_size,
            "sample_from_anchor": given.sample_from_anchor,
            "non_causal": given.sliding_window_non_causal,
            "kind": given.markov_head_type if given.markov_rank else "none",
            "confidence_reads_markov": given.confidence_head_with_markov,
            "prefix": getattr(given, "pure_draft_prefix_len", 0),
            "top_k": getattr(given, "selector_top_k", 0),
        }
        if self.kind == "lilicorr":
            fields |= {"top_k": given.lilicorr_candidate_topk}
            fields |= {"vector_eps": given.lilicorr_vector_eps}
            fields |= {"logit_scale": given.lilicorr_logit_scale}
        return blocks.Config(**fields)

    def draft(self, tokens: Sequence[int], states: Tensor, reads: Reads, known: bool) -> Drafted:
        """Draft after the last of `tokens`, which the target's `states` [T, n*H] do not include.

        `known`: `tokens` has `depth - 1` more tokens, after which it drafts, in place of its own.
        """
        anchor = len(tokens) - 1 - (self.depth - 1 if known else 0)
        config, state, count = self.reference, self.state, self.depth
        config = dataclasses.replace(config, **dict(reads.fields))
        document = Document(x=list(tokens), aux=states)
        ids = list(reads.ids) or slow.draft_ids(state, self.config.draft_vocab_size)
        if self.kind in CHAINS:
            after = tokens[anchor + 1 :] if known else None
            chain = CHAINS[self.kind].chain(state, config, document, anchor - 1, after, count)
            logits = [eagle.head(config, x) for x in chain]
            return Drafted([int(z.argmax()) for z in logits], torch.stack(logits), chain)
        elif self.kind == "eagle3":
            form = "known" if known else "own"
            found = eagle3.unrolled(state, config, tokens, states, form, ids)
            logits = [found[anchor - 1, s][0] for s in range(count)]
        elif self.kind == "peagle":
            known_only = Document(x=tokens[: anchor + 1], aux=states)
            made = peagle.reference_logits(state, config, known_only, [anchor], count)
            logits = [made[anchor, d] for d in range(count)]
        elif self.kind in STAGES:
            return self._by_stage(config, document, anchor, known)
        else:
            found_here, _ = blocks.block_logits(
                state, config, document, anchor, own=not known, ids=ids
            )
            logits = found_here[:count]
        return Drafted([ids[int(z.argmax())] for z in logits], torch.stack(logits))

    def _by_stage(self, config: Any, document: Document, anchor: int, known: bool) -> Drafted:
        """Draft with a second stage that chooses among the candidates of every slot."""
        states = blocks.block_states(self.state, config, document, anchor)
        unary, _ = blocks.block_logits(
            self.state, config, document, anchor, own=not known, states=states
        )
        if not known:
            document = dataclasses.replace(document, x=list(document.x)[: anchor + 1])
        block = STAGES[self.kind](self.state, config, document, anchor, states)
        tokens, logits = [], []
        for d, z in enumerate(unary[: self.depth]):
            candidates = block.candidates(z)
            scores = block.scores(d, z, candidates)
            tokens.append(candidates[int(scores.argmax())])
            logits.append(torch.full_like(z, -1e4).index_put((torch.tensor(candidates),), scores))
            if not known:
                document.x.append(tokens[-1])  # type: ignore[attr-defined]
        return Drafted(tokens, torch.stack(logits))


def make_draft(
    kind: str, target: TinyTarget, options: dict[str, Any], ids: Sequence[int], seed: int
) -> Any:
    """Return a random draft of a kind, float64; `ids` are its vocabulary, () all tokens."""
    chosen = DRAFT_OPTIONS[kind](**options)
    fields: dict[str, Any] = {}
    if kind not in CHAINS:
        fields = {"layers": tiny.LAYERS, "draft_vocab_size": len(ids) or tiny.VOCAB}
    if kind not in (*CHAINS, "eagle3"):
        fields["mask_token_id"] = tiny.MASK
    config = DRAFTS[kind].config_class.from_target(
        target.config,
        vocab_size=tiny.VOCAB,
        options=chosen,
        origin={"chat_template_kwargs": {}},
        **fields,
    )
    draft: Any = DRAFTS[kind](config, chosen).double()
    if target.layout is not None:
        draft.update_config(states_first=target.layout.states_first)
    if ids:
        draft.set_vocabulary(torch.tensor(ids))
    generator = torch.Generator().manual_seed(seed)
    signs = torch.arange(tiny.HIDDEN).remainder(2) * -2.0 + 1
    with torch.no_grad():
        for name, value in draft.named_parameters():
            stage = not name.startswith(("layers.", "midlayer.", "fc", "hidden_norm"))
            share = 0.25 if stage and value.ndim > 1 else 1.0  # a second stage corrects a little
            share = 1 / 16 if "_conv." in name else share  # nearly each slot as it is
            drawn = {name: drawn_weight(name, tuple(value.shape), generator) * share}
            value.copy_(target.from_file(drawn, -1)[name])
            if name.endswith("base_kernel"):
                value[:, 0] = (value[:, 0] + 1.0).bfloat16()
        spec = HeadSpec(vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, tied=False)
        draft.adopt(TargetHead(spec, target.state["embed_tokens.weight"], target.head, None))
        if hasattr(draft, "norm") and kind != "mtp":  # the norm of a block is its own
            draft.norm.weight.copy_(target.state["norm.weight"])
        if kind in ("eagle3", "peagle"):  # a head of its own: the target's would draft nonsense
            draft.lm_head.weight.mul_(signs)
    return draft


class _Probe:
    """A weight that remembers what it is multiplied with."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.inputs: list[Tensor] = []

    def __matmul__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.weight @ x

    def __mul__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.weight * x


def fit_draft(draft: Any, tiny_draft: TinyDraft, answers: Sequence[Answer], count: int) -> None:
    """Fit the last `down_proj` of a draft in place to the first `count` tokens of answers."""
    kind, depth = tiny_draft.kind, tiny_draft.depth
    name = [n for n in tiny_draft.state if _LAST.fullmatch(n)][-1]
    own = "lm_head.weight" in tiny_draft.state and kind in ("eagle3", "peagle")
    signs = torch.arange(tiny.HIDDEN).remainder(2) * -2.0 + 1 if own else 1.0
    weight = torch.zeros_like(tiny_draft.state[name])
    for _ in range(_PASSES.get(kind, 1)):
        inputs, wanted = [], []
        for answer in answers:
            final = answer.states[:, tiny.BLOCKS + (kind == "eagle")]
            if kind == "mtp":  # of this state, the block's norm is the target's normed one
                final = answer.states[:, tiny.BLOCKS + 1] / tiny_draft.state["norm.weight"]
            final = final / (1.0 if kind == "eagle" else final.square().mean(-1, True).sqrt() / 2)
            states = tiny_draft.states(answer, Reads())
            for anchor in range(answer.prompt, answer.prompt + count):
                if anchor % 3 == 2:
                    continue  # left out, so that the draft is wrong somewhere
                probe = _Probe(weight)
                state = {**tiny_draft.state, name: probe}
                norm = None
                if kind != "eagle":
                    norm = state["norm.weight"] = _Probe(state["norm.weight"])
                probed = dataclasses.replace(tiny_draft, state=state)
                made = probed.draft(answer.tokens[: anchor + depth], states, Reads(), known=True)
                outputs = made.states if norm is None else norm.inputs[-depth:]
                for d in range(depth):
                    g = probe.inputs[-depth:][d]
                    inputs.append(g)
                    wanted.append(final[anchor + d] * signs - (outputs[d] - weight @ g))
        g, w = torch.stack(inputs), torch.stack(wanted)
        square = g.T @ g
        square += _RIDGE * square.diagonal().mean() * torch.eye(len(square))
        weight = torch.linalg.solve(square, g.T @ w).T.bfloat16().double()
    draft.get_parameter(name).data.copy_(weight)
