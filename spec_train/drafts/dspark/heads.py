"""The two small heads of DSpark: a bias from the previous token, and a forecast of acceptance.

In: states of drafts and embeddings of previous tokens. Out: the latent vector of the bias; logits
of the acceptance. Both heads read y, the state that enters the LM head (after the final norm), as
DeepSpec's code and the engines do.

r Markov rank, H hidden size, V / Vd target / draft vocabulary, D drafts of a block.
"""

import torch
from torch import Tensor, nn

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
