"""The first weights of a new draft's `fc`, which joins the captured layers (--start-fc ridge).

Random weights mix the layers into states that mean nothing, and a draft first has to unlearn that.
Here `fc` begins as the best linear guess of the target's next final state: a draft at slot t knows
the states of t and the token t + 1, and what its first token needs is the final state of t + 1. So
ridge regression finds B with

    [x_t ; e_{t+1}] B  ~  f_{t+1}

x_t are the captured states as `fc` reads them and f final states, each row over its root mean
square, as the norm after `fc` has it: else the few tokens with huge states (attention sinks) would
decide alone. e is the target's embedding. Its rows of B are dropped, because the draft has the
token anyway; without them in the regression, the states would have to guess that token too. The
rest, scaled until the output of `fc` is as large as that of its random weights, replaces these.

The sample is the documents that the run trains on first: the same for any number of processes,
workers and packs, and of remote data no shard is read that the run does not need at once. Every
eighth document tells how strong the ridge has to be, and whether the guess is better than none.

N rows, n captured layers, A inputs of `fc`, H hidden size, D = A + H.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spec_data.shards.errors import DraftError
from spec_data.shards.schema import FINAL
from spec_data.terminal.given import decided
from spec_train.data.mixture import Documents
from spec_train.data.order import BatchPlan
from spec_train.drafts import Draft
from spec_train.drafts.draft import LayersDraft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import RANDOM, RIDGE, DraftOptions
from spec_train.training.ranks import Ranks

log = logging.getLogger(__name__)

MOST_INPUTS = 25_000
"""Largest D: a matrix D x D of float64 is then 5 GB, and three are in memory at a time."""
ROWS_PER_INPUT, MOST_ROWS = 8, 65_536
"""Rows of the sample: so many times D, at most MOST_ROWS."""
DOCUMENTS = 64
"""No document gives more than this part of the sample."""
HELD_OUT = 8
"""One of so many documents of the sample is held out."""
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths to try, as shares of each input's own sum of squares: so scales do not matter."""


def with_start_of_fc(
    options: DraftOptions, start: Draft | None, started: dict[str, Any] | None
) -> DraftOptions:
    """Return the options with the `start_fc` of a run that resumes, or that begins from `start`.

    Raises:
        DraftError: it was asked for, beside a draft that has its weights.
    """
    if not hasattr(options, "start_fc"):
        return options
    if started is not None:
        return decided(options, start_fc=started.get("start_fc", RANDOM))
    if start is None:
        return options
    if "start_fc" in options.given and options.start_fc != RANDOM:
        raise DraftError(
            f"--start-fc {options.start_fc} is about the first weights of a new draft, and "
            "--init-from brings trained ones; leave one of them out, or give --start-fc random"
        )
    return decided(options, start_fc=RANDOM)


def start_fc(
    draft: Draft, dataset: Documents, plan: BatchPlan, head: TargetHead, ranks: Ranks
) -> None:
    """Replace the random weights of a new draft's `fc`, if its options say so; log what was done.

    Rank 0 computes and the others receive. `plan` is that of training, `head` the target's.
    """
    if getattr(draft.options, "start_fc", RANDOM) != RIDGE:
        return
    weight = draft.main_weight
    if why := _why_not(draft, dataset):
        log.info("fc         starts with random weights, as %s", why)
        return
    found = torch.zeros_like(weight)
    if ranks.is_main:
        rows = sample_rows(plan, weight.shape[1] + weight.shape[0])
        dataset.wait_for(rows.tolist(), threading.Event())
        fitted = fit_fc(draft, dataset, plan, rows, head)
        if fitted is None or fitted.explained <= 0:
            log.info(
                "fc         starts with random weights: a sample of the data explained nothing"
            )
            found.copy_(weight.detach())
        else:
            log.info("fc         starts as %s", fitted)
            found.copy_(fitted.weight)
    with torch.no_grad():
        weight.copy_(ranks.sum(found))


def _why_not(draft: Draft, dataset: Documents) -> str:
    """Return why `fc` cannot be fitted; "" if it can."""
    fc = getattr(draft, "fc", None)
    if not isinstance(draft, LayersDraft) or not isinstance(fc, nn.Linear):
        return "it does not join captured layers"
    inputs, growing = fc.in_features + draft.config.hidden_size, dataset.growing
    if FINAL not in {column.name for column in dataset.manifest.columns}:
        return "the dataset has no final states to fit them to"
    if growing is not None and growing.passed_on:
        return "the data are passed on, and each document is read once"
    if inputs > MOST_INPUTS:
        return (
            f"fitting {inputs:,} inputs would take too much memory (the limit is {MOST_INPUTS:,})"
        )
    return ""


@dataclass(frozen=True)
class Fitted:
    """Weights of `fc`, and how they were found."""

    weight: Tensor  # [H, A]
    explained: float  # share of the variance of held-out rows, with the part of the embedding
    ridge: float
    rows: int
    documents: int

    def __str__(self) -> str:
        """In one line."""
        return (
            f"the ridge regression to the next final state, of {self.rows:,} tokens of "
            f"{self.documents:,} documents: it explains {100 * self.explained:.1f} % of the "
            f"variance of held-out ones (strength {self.ridge:g})"
        )


def sample_rows(plan: BatchPlan, inputs: int) -> np.ndarray:
    """Return the documents of the sample: the first ones of the run, each once, int64 [n]."""
    wanted = min(MOST_ROWS, ROWS_PER_INPUT * inputs)
    chosen: dict[int, None] = {}
    for window in plan.windows(0):
        for row in window.tolist():
            if wanted <= 0 and len(chosen) >= HELD_OUT:
                return np.array(list(chosen), np.int64)
            if row not in chosen:
                chosen[row] = None
                wanted -= min(int(plan.lengths[row]), _most_per_document(inputs))
    return np.array(list(chosen), np.int64)


def _most_per_document(inputs: int) -> int:
    return max(1, min(MOST_ROWS, ROWS_PER_INPUT * inputs) // DOCUMENTS)


@torch.no_grad()
def fit_fc(
    draft: Any, dataset: Documents, plan: BatchPlan, rows: np.ndarray, head: TargetHead
) -> Fitted | None:
    """Return weights of the `fc` of `draft` from the documents `rows`; None: too few of them."""
    fc, held = draft.fc, list[tuple[Tensor, Tensor]]()
    size, most = fc.in_features, _most_per_document(fc.in_features + fc.out_features)
    sums, counted = Sums(size + head.embed_weight.shape[1], fc.out_features, fc.weight.device), 0
    for number, row in enumerate(rows.tolist()):
        inputs, outputs = _read(draft, dataset, row, int(plan.lengths[row]), most, head)
        counted += len(inputs)
        if number % HELD_OUT == 1:
            held.append((inputs, outputs))
        else:
            sums.add(inputs, outputs)
    if not sums.rows or not any(len(inputs) for inputs, _ in held):
        return None
    inputs, outputs = (torch.cat(parts) for parts in zip(*held, strict=True))
    whole = (outputs.double() - sums.mean).square().sum()
    best: tuple[float, float, Tensor] | None = None
    for ridge in RIDGES:
        weights = sums.solve(ridge)
        wrong = (outputs - inputs @ weights.to(inputs.dtype)).double().square().sum()
        explained = float(1 - wrong / whole)
        if best is None or explained > best[0]:
            best = explained, ridge, weights
        elif explained < best[0]:
            break
    assert best is not None
    explained, ridge, weights = best
    states, own = inputs[:, :size], weights[:size].T.to(inputs.dtype)
    usual = (states @ fc.weight.to(inputs.dtype).T).square().mean().sqrt()
    scaled = own * (usual / (states @ own.T).square().mean().sqrt())
    if not bool(torch.isfinite(scaled).all()):
        return None
    return Fitted(scaled, explained, ridge, counted, len(rows))


def _read(
    draft: Any, dataset: Documents, row: int, length: int, most: int, head: TargetHead
) -> tuple[Tensor, Tensor]:
    """Return inputs [N, D] and outputs [N, H] of a document cut to `length`, N <= `most`.

    Rows without a stored final state are left out, and those that are not finite.
    """
    device, width = draft.fc.weight.device, dataset.manifest.hidden_size
    states = [torch.empty(length, width) for _ in draft.state_columns]
    final, ids = torch.empty(length, width), torch.empty(length, dtype=torch.int64)
    out = {"input_ids": ids, FINAL: final} | dict(zip(draft.state_columns, states, strict=True))
    dataset.read_into(row, out, 0, length)
    count = min(most, length - 1)
    at = torch.arange(count) * (length - 1) // max(1, count)  # evenly over the document
    aux = torch.cat([state[at] for state in states], -1).to(device)
    read, following = draft.fc_inputs(aux).float(), final[at + 1].to(device)
    embedding = head.embed_weight[ids[at + 1].to(device)].float()
    inputs, outputs = torch.cat([_normed(read), embedding], -1), _normed(following)
    usable = torch.isfinite(inputs).all(-1) & torch.isfinite(outputs).all(-1)
    return inputs[usable], outputs[usable]


def _normed(x: Tensor) -> Tensor:
    """Return rows [N, W] over their root mean square; rows of zeros stay."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp_min(1e-12))


class Sums:
    """What a regression needs of its rows: products of inputs and outputs, added in float64."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        """Start without rows."""
        self.rows = 0
        self._squares = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self._products = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self._outputs = torch.zeros(outputs, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add rows, [N, D] and [N, H]."""
        wide = inputs.double()
        self.rows += len(wide)
        self._squares.addmm_(wide.T, wide)
        self._products.addmm_(wide.T, outputs.double())
        self._outputs += outputs.double().sum(0)

    @property
    def mean(self) -> Tensor:
        """The mean of the outputs [H]."""
        return self._outputs / max(1, self.rows)

    def solve(self, ridge: float) -> Tensor:
        """Return B [D, H] of least squares plus `ridge` times each input's squares times B's."""
        own = self._squares.diagonal()
        own = own.clamp_min(1e-6 * float(own.mean()) + 1e-12)  # an input that is always zero
        squares = self._squares.clone()
        squares.diagonal().add_(ridge * own)
        return torch.cholesky_solve(self._products, torch.linalg.cholesky(squares))
