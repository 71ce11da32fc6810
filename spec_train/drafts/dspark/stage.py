"""DSpark's second stage: a bias on the logits from the previous token, a forecast of acceptance.

Both heads read y, the state that enters the LM head (after the final norm), as DeepSpec's code and
the engines do. A draft's logits are W y + W2 g (W: rows of the target's LM head, W2 g: the Markov
bias); the confidence c = sigmoid(w [y; e]) is trained with BCE(c, c*), c* the draft's acceptance.

The confidence is calibrated on held-out documents (temperature scaling, arXiv 1706.04599): of
T in TEMPERATURES, the one under which sigmoid(w [y; e] / T) is the most likely. Engines read the
head's weights alone, so the draft that is served has w / T; T of each depth is a figure.

r Markov rank, H hidden size, V / Vd target / draft vocabulary, D drafts of a block, R drafts that
count.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.shards.files import dump_json
from spec_train.drafts.block.config import DSparkConfig
from spec_train.drafts.block.draft import BlockDraft, StageRows, StageTerm, Walk
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.teacher import SharedTeacher
from spec_train.losses.menu import LowRank, RowStats
from spec_train.losses.metrics import Sums

_STD = 0.02  # initialisation of the published drafts: the bias starts near zero
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-16, 17))  # a quarter to 4, in steps of 9 %
LEAST_FORECASTS = 500  # held out: with fewer, the confidence stays as it was trained


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


class MarkovWalk(Walk):
    """Adds the bias of the previous token to the logits of every draft, and forecasts it."""

    draft: "DSparkDraft"

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        draft, e = self.draft, self.draft.previous(previous)
        y, logits = self.slot()  # [..., H], [..., Vd]
        if draft.markov_head is not None and e is not None:
            g, self._state = draft.markov_head.step(e, y, self._state)
            logits = logits + draft.markov_head.markov_w2(g)
        confidence = None
        if draft.confidence_head is not None:
            confidence = draft.confidence_head(y, e).float().sigmoid()
        return logits, None, confidence


class MarkovRows(StageRows):
    """The bias of the drafts that count, and the loss of their confidence."""

    draft: "DSparkDraft"
    _rows: Tensor | None = None  # W1 of the previous tokens [R, r]

    def bias(self, y: Tensor, shared: SharedTeacher) -> LowRank | None:
        markov, chosen = self.draft.markov_head, self.chosen
        if markov is None:
            return None
        w2 = markov.markov_w2.weight
        if markov.kind == "vanilla":  # drafts of one slot follow the same token, and that is all
            latent = markov.markov_w1(chosen.token_before(shared.slots))  # [M, r], M slots
            self._rows = latent[shared.index]
            return LowRank(latent, w2, (shared.index, shared.bounds))
        e = markov.markov_w1(chosen.previous)  # [B, N, D, r]
        low_rank = LowRank(markov.block(e, y).flatten(0, 2)[chosen.rows], w2)
        self._rows = e.flatten(0, 2)[chosen.rows]
        return low_rank

    def term(self, hidden: Tensor, head_rows: Tensor, figures: RowStats) -> StageTerm | None:
        head, acceptance, options = (
            self.draft.confidence_head,
            figures.acceptance,
            self.draft.options,
        )
        w = self.chosen.weight
        if options.smoothing is not None:  # as the speculators library does
            steps = self.chosen.rows % self.draft.depth
            w = self.chosen.counted * torch.exp(-steps.double() / options.loss_decay_gamma)
        if head is None:
            return None
        rows = self._rows if len(hidden) else hidden.new_zeros(0, head.rank)
        logits = head(hidden, rows).to(acceptance.dtype)  # [R]
        bce = F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")  # [R]
        sums = {
            "confidence_number": w.sum(),
            "confidence_sum": (w * logits.detach().sigmoid().double()).sum(),
            "confidence_accepted": (w * acceptance.double()).sum(),
        }
        if not self.draft.training:
            sums |= self._by_temperature(logits.double(), acceptance.double())
        return StageTerm(bce, options.confidence_weight, figures, sums, rows=w)

    @torch.no_grad()
    def _by_temperature(self, logits: Tensor, acceptance: Tensor) -> Sums:
        """Sum -log likelihood of the forecasts [R] by depth and temperature, [D, 33 + 1].

        The last column counts them.
        """
        some = (self.chosen.weight > 0)[:, None]
        eighths = torch.arange(-16, 17, dtype=logits.dtype, device=logits.device)
        grid = (eighths / 8).exp2()  # TEMPERATURES, made there
        scaled, labels = logits[:, None] / grid, acceptance[:, None].expand(-1, len(grid))
        nll = F.binary_cross_entropy_with_logits(scaled, labels, reduction="none")
        nll = torch.cat([nll, torch.ones_like(nll[:, :1])], 1).where(some, 0.0)  # and how many
        d, depth = self.chosen.rows % self.draft.depth, self.draft.depth
        return {"confidence_nll": nll.new_zeros(depth, nll.shape[1]).index_add_(0, d, nll)}


class DSparkDraft(BlockDraft):
    """The draft that `spec-train fit dspark` trains."""

    config_class: ClassVar[type[DraftConfig]] = DSparkConfig
    walk_class: ClassVar[type[Walk]] = MarkovWalk
    rows_class: ClassVar[type[StageRows]] = MarkovRows

    def make_stage(self) -> None:
        config, size, rank = self.config, self.config.hidden_size, self.config.markov_rank
        self.markov_head: MarkovHead | None = None
        if rank:
            sizes = config.vocab_size, config.draft_vocab_size, rank, size
            self.markov_head = MarkovHead(*sizes, config.markov_head_type)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            width = rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(size, width)

    def previous(self, token_ids: Tensor) -> Tensor | None:
        """Return W1 [..., r] of previous tokens, int64 [...]; None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w1(token_ids)

    @classmethod
    def summarise(cls, sums: Sums) -> dict[str, float | None]:
        """Return the figures of a block draft, and the temperatures of its confidence.

        "confidence_temperature" is that of all forecasts, "confidence_temperature/d" of depth d.
        """
        figures = super().summarise(sums)
        if "confidence_nll" in sums:
            nll, number = sums["confidence_nll"].cpu().split((len(TEMPERATURES), 1), 1)
            figures["confidence_temperature"] = _best_temperature(nll.sum(0), float(number.sum()))
            for d, of_depth in enumerate(zip(nll, number[:, 0].tolist(), strict=True), start=1):
                figures[f"confidence_temperature/{d}"] = _best_temperature(*of_depth)
        return figures

    def calibrate(self, tensors: dict[str, Tensor], figures: Mapping[str, Any]) -> None:
        """Divide the confidence head by its temperature."""
        temperature = figures.get("confidence_temperature")
        if temperature is None or self.confidence_head is None:
            return
        for name, value in self.confidence_head.named_parameters(prefix="confidence_head"):
            tensors[name] = (value.detach() / temperature).to("cpu", tensors[name].dtype)

    def files_beside(
        self, form: str, figures: Mapping[str, Any], *, calibrated: bool
    ) -> dict[str, str]:
        """Of SGLang: the temperatures of the confidence by depth, of what the head is divided by.

        It reads them as `DSparkStsCalibration` (speculative/dspark_components/dspark_sts.py).
        """
        by_depth = [figures.get(f"confidence_temperature/{d + 1}") for d in range(self.depth)]
        if form != "sglang" or self.confidence_head is None or None in by_depth:
            return {}
        whole = figures["confidence_temperature"] if calibrated else 1.0
        temperatures = [float(t) / whole for t in by_depth if t is not None]
        if set(temperatures) == {1.0}:  # it is calibrated as it is
            return {}
        return {"confidence_temperatures.json": dump_json({"temperatures": temperatures})}

    def stop_below(self, confidence: float) -> None:
        if self.confidence_head is None:
            super().stop_below(confidence)
        self.confidence_threshold = confidence


def _best_temperature(nll: Tensor, forecasts: float) -> float | None:
    """Return the most likely temperature; None: there are too few forecasts."""
    return TEMPERATURES[int(nll.argmin())] if forecasts >= LEAST_FORECASTS else None
