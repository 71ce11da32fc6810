"""Acceptance figures as sums: add them over micro-batches, ranks or a whole set, divide once.

A draft's sums are float64 tensors, most of them [S], one entry per depth (unroll step):

    loss         sum of the slot losses over supervised slots
    supervised   number of those slots: in the slot mask, teacher's choice in the draft vocabulary
    weighted     `supervised` times the step's normalised weight
    drafted      number of slots in the slot mask; those outside the draft vocabulary are misses
    hits         slots whose greedy draft token is the target's choice, the prefix being true
    acceptance   sum over slots of sum_v min(p, q); a miss adds nothing
    chains       [] chains whose S depths are all in the slot mask
    survive      chains hit at every depth up to this one
    at_risk      chains, whole or not, in the slot mask up to this depth and hit at all before it
    kept         those of them hit at this depth too
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Sums = dict[str, Tensor]


def chain_sums(hits: Tensor, drafted: Tensor) -> Sums:
    """Sums over chains of boolean hits and slot masks, both [S, ...] (slots anywhere).

    Entry s of a slot is the draft made at depth s + 1 of the chain that starts there.
    """
    hits, drafted = hits.flatten(1), drafted.flatten(1)
    whole = drafted.all(0)
    reached = torch.cumprod(drafted.to(torch.int8), dim=0).bool()
    alive = torch.cumprod((hits & reached).to(torch.int8), dim=0).bool()
    before = torch.cat([torch.ones_like(alive[:1]), alive[:-1]])
    return {
        "chains": whole.sum().double(),
        "survive": (alive & whole).sum(1).double(),
        "at_risk": (reached & before).sum(1).double(),
        "kept": alive.sum(1).double(),
    }


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Add sums of several batches, name by name."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def summarise(sums: Sums) -> dict[str, float | None]:
    """Turn sums into figures; one that nothing was measured for is None.

    "loss"; "acceptance_length" = 1 + sum over depths of P(survive); for every depth d
    "accept_rate/d" = P(hit at d | hit at every depth before), over the same chains (0 when none
    got there), so that the length is 1 plus the sum of their running products; "hit_rate/d" and
    "expected_acceptance/d" over all slots of depth d, the prefix being true; and "chains".

    "product_limit_length" is the same length from chains of any length: a chain that the end of
    its turn cuts off tells of the depths it has (Kaplan and Meier 1958), and depths that no chain
    reached add nothing. So it compares drafts on short answers too, where no chain is whole.
    """
    values = {name: value.double().cpu() for name, value in sums.items()}
    chains, survive = values["chains"], values["survive"]
    weight = _ratio(values["weighted"], values["supervised"])
    alive = torch.cat([chains.reshape(1), survive[:-1]])
    estimate = torch.cumprod(_ratio(values["kept"], values["at_risk"]), 0).sum()
    out: dict[str, float | None] = {
        "loss": float((weight * _ratio(values["loss"], values["supervised"])).sum()),
        "acceptance_length": 1.0 + float(_ratio(survive, chains).sum()) if chains else None,
        "product_limit_length": 1.0 + float(estimate) if values["at_risk"].any() else None,
        "chains": float(chains),
    }
    drafted = values["drafted"]
    for name, rates, measured in (
        ("accept_rate", _ratio(survive, alive), chains.expand_as(survive)),
        ("hit_rate", _ratio(values["hits"], drafted), drafted),
        ("expected_acceptance", _ratio(values["acceptance"], drafted), drafted),
    ):
        for depth, (rate, count) in enumerate(zip(rates, measured, strict=True), start=1):
            out[f"{name}/{depth}"] = float(rate) if count else None
    return out


PART_FIGURES = ("loss", "acceptance_length", "product_limit_length")
"""Figures that are also given for each dataset of several."""


def summarise_parts(
    parts: Mapping[str, Sums], summarise: Callable[[Sums], dict[str, float | None]]
) -> dict[str, float | None]:
    """Figures of all parts together, and the main ones of each named part as "loss/name" etc."""
    figures = summarise(add_sums(parts.values()))
    for name, sums in parts.items():
        if name:
            own = summarise(sums)
            figures |= {f"{figure}/{name}": own.get(figure) for figure in PART_FIGURES}
    return figures


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Elementwise quotient, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp_min(1), 0.0)


def shown(figure: float | None, digits: int = 3) -> str:
    """A figure for people; - where nothing was measured."""
    return "-" if figure is None else f"{figure:.{digits}f}"
