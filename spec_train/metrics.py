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
"""

from collections.abc import Iterable

import torch
from torch import Tensor

Sums = dict[str, Tensor]


def chain_sums(hits: Tensor, drafted: Tensor) -> Sums:
    """Sums "chains" and "survive" of boolean hits and slot masks, both [S, ...] (slots anywhere).

    Entry s of a slot is the draft made at depth s + 1 of the chain that starts there.
    """
    hits, drafted = hits.flatten(1), drafted.flatten(1)
    whole = drafted.all(0)
    alive = torch.cumprod((hits & whole).to(torch.int8), dim=0)
    return {"chains": whole.sum().double(), "survive": alive.sum(1).double()}


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Add sums of several batches, name by name."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def summarise(sums: Sums) -> dict[str, float]:
    """Turn sums into figures.

    "loss"; "acceptance_length" = 1 + sum over depths of P(survive); for every depth d
    "accept_rate/d" = P(hit at d | hit at every depth before), over the same chains, so that the
    length is 1 plus the sum of their running products; "hit_rate/d" and "expected_acceptance/d"
    over all slots of depth d, the prefix being true; and "chains". Without chains the length is 1.
    """
    values = {name: value.double().cpu() for name, value in sums.items()}
    chains, survive = values["chains"], values["survive"]
    weight = _ratio(values["weighted"], values["supervised"])
    alive = torch.cat([chains.reshape(1), survive[:-1]])
    out = {
        "loss": float((weight * _ratio(values["loss"], values["supervised"])).sum()),
        "acceptance_length": 1.0 + float(_ratio(survive, chains).sum()),
        "chains": float(chains),
    }
    for name, rate in (
        ("accept_rate", _ratio(survive, alive)),
        ("hit_rate", _ratio(values["hits"], values["drafted"])),
        ("expected_acceptance", _ratio(values["acceptance"], values["drafted"])),
    ):
        out.update({f"{name}/{d}": value for d, value in enumerate(rate.tolist(), start=1)})
    return out


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Elementwise quotient, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp_min(1), 0.0)
