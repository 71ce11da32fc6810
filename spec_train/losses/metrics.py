"""Acceptance figures as sums: add them over micro-batches, ranks or a whole set, then divide once.

A draft's sums are float64 tensors. Most are [S], with one entry per depth (unroll step):

    loss         sum of the slot losses over supervised slots
    supervised   number of these slots: in the slot mask, and the target's choice is in the draft
                 vocabulary
    weighted     `supervised` times the step's normalised weight
    drafted      number of slots in the slot mask; a target's choice outside the draft vocabulary
                 counts as a miss
    hits         slots whose greedy draft token is the target's choice, given the true prefix
    acceptance   sum over the `measured` slots of sum_v min(p, q), with p the target's full
                 distribution: the probability that a draft sampled from q is kept at temperature 1.
                 It counts where the target's choice is outside the draft vocabulary, too
    measured     number of these slots, a part of the `drafted` ones; not given: all of them
    chains       [] whole chains: all S depths are in the slot mask
    survive      whole chains that are hit at every depth up to this one
    at_risk      chains, whole or not, in the slot mask up to this depth and hit at every depth
                 before it
    kept         those of `at_risk` that are hit at this depth too
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Sums = dict[str, Tensor]


def chain_sums(hits: Tensor, drafted: Tensor) -> Sums:
    """Count chains, given hits and slot masks: both bool [S, ...], with any dimensions of slots.

    Entry s of a slot is the token drafted at depth s + 1 of the chain that starts at this slot.
    Returns "drafted", "hits", "survive", "at_risk", "kept" [S] and "chains" [], float64.
    """
    hits, drafted = hits.flatten(1), drafted.flatten(1)  # [S, n], n chains
    whole = drafted.all(0)  # [n]
    reached = torch.cumprod(drafted.to(torch.int8), dim=0).bool()  # [S, n], in the mask so far
    alive = torch.cumprod((hits & reached).to(torch.int8), dim=0).bool()  # [S, n], hit so far
    before = torch.cat([torch.ones_like(alive[:1]), alive[:-1]])  # [S, n], hit before this depth
    return {
        "drafted": drafted.sum(1).double(),
        "hits": hits.sum(1).double(),
        "chains": whole.sum().double(),
        "survive": (alive & whole).sum(1).double(),
        "at_risk": (reached & before).sum(1).double(),
        "kept": alive.sum(1).double(),
    }


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Add the sums of several batches, name by name."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def summarise(sums: Sums) -> dict[str, float | None]:
    """Turn sums into figures; a figure without any measurement is None.

    - "loss", and "chains", the number of whole chains.
    - "acceptance_length" = 1 + sum over depths of P(survive), over whole chains.
    - "accept_rate/d" for every depth d = P(hit at d | hit at every depth before), over the same
      chains (0 if no chain got there). The length is 1 plus the sum of their running products.
    - "hit_rate/d" and "expected_acceptance/d", over all slots, or all measured ones, of depth d,
      given the true prefix.
    - "product_limit_length" estimates the same length from chains of any length (Kaplan and Meier
      1958): a chain cut off by the end of its turn counts for the depths that it has, and depths
      that no chain reached add nothing. So it also compares drafts on short answers, where no
      chain is whole.
    """
    values = on_host(sums)
    chains, survive = values["chains"], values["survive"]
    weight = _ratio(values["weighted"], values["supervised"])
    alive = torch.cat([chains.reshape(1), survive[:-1]])
    estimate = torch.cumprod(_ratio(values["kept"], values["at_risk"]), 0).sum()
    loss = float((weight * _ratio(values["loss"], values["supervised"])).sum())
    out: dict[str, float | None] = {
        "loss": loss if values["supervised"].any() else None,
        "acceptance_length": 1.0 + float(_ratio(survive, chains).sum()) if chains else None,
        "product_limit_length": 1.0 + float(estimate) if values["at_risk"].any() else None,
        "chains": float(chains),
    }
    drafted = values["drafted"]
    measured = values.get("measured", drafted)
    for name, rates, counts in (
        ("accept_rate", _ratio(survive, alive), chains.expand_as(survive)),
        ("hit_rate", _ratio(values["hits"], drafted), drafted),
        ("expected_acceptance", _ratio(values["acceptance"], measured), measured),
    ):
        for depth, (rate, count) in enumerate(zip(rates, counts, strict=True), start=1):
            out[f"{name}/{depth}"] = float(rate) if count else None
    return out


PART_FIGURES = ("loss", "acceptance_length", "product_limit_length")
"""Figures that are also reported for each dataset of several."""


def on_host(sums: Sums) -> Sums:
    """Return sums as float64 on the CPU; they are waited for once."""
    flat = torch.cat([value.double().flatten() for value in sums.values()]).cpu()
    parts = flat.split([value.numel() for value in sums.values()])
    return {name: part.view_as(sums[name]) for name, part in zip(sums, parts, strict=True)}


def summarise_parts(
    parts: Mapping[str, Sums], summarise: Callable[[Sums], dict[str, float | None]]
) -> dict[str, Any]:
    """Return the figures of all parts together, and PART_FIGURES of named ones as "loss/name"."""
    total = add_sums(parts.values())
    figures: dict[str, Any] = summarise(total)
    for name, sums in parts.items():
        if name:
            of_part = summarise(sums)
            figures |= {f"{figure}/{name}": of_part.get(figure) for figure in PART_FIGURES}
    return figures


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the elementwise quotient (any shape), 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp_min(1), 0.0)


def shown(figure: float | None, digits: int = 3) -> str:
    """Format a figure for people: "-" if nothing was measured."""
    return "-" if figure is None else f"{figure:.{digits}f}"
