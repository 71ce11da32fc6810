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
from spec_train.drafts.kind_vectors import Drafted, KindVectors, Reads, SlowDraft, every_vectors
from spec_train.drafts.slow_layer import Document
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS

_LAST = re.compile(r"(midlayer|block|layers\.\d+)\.mlp\.down_proj\.weight")
_RIDGE = 1e-4
"""Weight of the norm of the fitted matrix, as a share of the mean square of its inputs."""


@dataclass(frozen=True)
class TinyDraft:
    """A draft for the slow references."""

    kind: str
    depth: int
    target: TinyTarget
    config: Any  # a DraftConfig
    state: Mapping[str, Any]  # the tensors of its checkpoint, float64

    @property
    def says(self) -> KindVectors:
        """What its kind says of its vectors."""
        return every_vectors()[self.kind]

    def states(self, answer: Answer, reads: Reads) -> Tensor:
        """Return the target's states that an engine hands over [T - 1, n*H]."""
        if not self.config.reads_layers:
            found = answer.states[:, tiny.BLOCKS + (0 if reads.normed else 1)]
        else:
            parts = [answer.states[:, k + 1] for k in self.config.layers]
            if reads.normed:
                norm, eps = self.target.state["norm.weight"], self.target.sizes.rms_norm_eps
                parts = [torch.stack([slow.rms(x, norm, eps) for x in part]) for part in parts]
            found = torch.cat(parts, -1)
        return torch.cat([found[:1]] * reads.shift + [found])[: len(found)]

    @functools.cached_property
    def slow(self) -> SlowDraft:
        """What the slow reference of its kind reads."""
        given = self.config
        own = {"windows": given.windows, "act": given.hidden_act}
        return SlowDraft(
            depth=self.depth,
            config=given,
            state=self.state,
            sizes=vars(sizes_of(vars(given))) | own,
            target=sizes_of(self.target.config),
            head=self.target.head,
        )

    @functools.cached_property
    def reference(self) -> Any:
        """The configuration of the slow reference."""
        return self.says.reference(self.slow)

    def draft(self, tokens: Sequence[int], states: Tensor, reads: Reads, known: bool) -> Drafted:
        """Draft after the last of `tokens`, which the target's `states` [T, n*H] do not include.

        `known`: `tokens` has `depth - 1` more tokens, after which it drafts, in place of its own.
        """
        anchor = len(tokens) - 1 - (self.depth - 1 if known else 0)
        config = dataclasses.replace(self.reference, **dict(reads.fields))
        document = Document(x=list(tokens), aux=states)
        ids = list(reads.ids) or slow.draft_ids(self.state, self.config.draft_vocab_size)
        return self.says.drafted(self.slow, config, document, anchor, known, ids)


def make_draft(
    kind: str, target: TinyTarget, options: dict[str, Any], ids: Sequence[int], seed: int
) -> Any:
    """Return a random draft of a kind, float64; `ids` are its vocabulary, () all tokens."""
    chosen, says = DRAFT_OPTIONS[kind](**options), every_vectors()[kind]
    config_class, fields = DRAFTS[kind].config_class, dict[str, Any]()
    if config_class.reads_layers:
        fields = {"layers": tiny.LAYERS, "draft_vocab_size": len(ids) or tiny.VOCAB}
    if any(field.name == "mask_token_id" for field in dataclasses.fields(config_class)):
        fields["mask_token_id"] = tiny.MASK
    config = config_class.from_target(
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
        if hasattr(draft, "norm") and not says.own_norm:
            draft.norm.weight.copy_(target.state["norm.weight"])
        if says.own_head:
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
    says, depth = tiny_draft.says, tiny_draft.depth
    name = [n for n in tiny_draft.state if _LAST.fullmatch(n)][-1]
    signs = torch.arange(tiny.HIDDEN).remainder(2) * -2.0 + 1 if says.own_head else 1.0
    weight = torch.zeros_like(tiny_draft.state[name])
    for _ in range(says.passes):
        inputs, wanted = [], []
        for answer in answers:
            last, normed = answer.states[:, tiny.BLOCKS], answer.states[:, tiny.BLOCKS + 1]
            final = says.wanted(tiny_draft.slow, last, normed)
            states = tiny_draft.states(answer, Reads())
            for anchor in range(answer.prompt, answer.prompt + count):
                if anchor % 3 == 2:
                    continue  # left out, so that the draft is wrong somewhere
                probe = _Probe(weight)
                state = {**tiny_draft.state, name: probe}
                norm = None
                if "norm.weight" in state:
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
