"""Edits of the answer of a target elsewhere, as bytes of a safetensors file: what a draft must not
be trained on. Each is whole and well-formed, so nothing but its content tells.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Edit = Callable[[dict[str, Tensor]], object]
INTEGERS = ("input_ids", "position_ids", "document_ids", "target_argmax")
STATES = ("hidden.L0", "hidden.final")


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """An edit of one column."""

    def edit(table: dict[str, Tensor]) -> None:
        table[name] = change(table[name]).contiguous()

    return edit


def with_value(value: float, *, at: int = 0) -> Callable[[Tensor], Tensor]:
    """A change of one slot of the first row."""

    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[0, at] = value
        return values

    return change


def edits(columns: Mapping[str, Tensor]) -> dict[str, Edit]:
    """All edits of an answer with these columns, by what they do."""
    found: dict[str, Edit] = {}
    for name in columns:
        found[f"without {name}"] = lambda table, name=name: table.pop(name)
        found[f"{name} for one row more"] = changed(name, lambda x: torch.cat([x, x[:1]]))
        found[f"{name} for one slot less"] = changed(name, lambda x: x[:, :-1])
        found[f"{name} in another dtype"] = changed(
            name, lambda x: x.half() if x.is_floating_point() else x.int()
        )
    for name in (n for n in columns if columns[n].ndim == 3):
        found[f"{name} of another width"] = changed(name, lambda x: x[..., 1:])
        found[f"{name} without an axis"] = changed(name, lambda x: x[..., 0])
    for name in (n for n in columns if columns[n].is_floating_point()):
        for value in (torch.nan, torch.inf):
            found[f"{name} with {value}"] = changed(name, with_value(value, at=3))
        found[f"{name} in padding"] = changed(name, with_value(1.0, at=-1))
    for name in (n for n in INTEGERS if n in columns):
        found[f"{name} with -7"] = changed(name, with_value(-7, at=2))
        found[f"{name} with a million"] = changed(name, with_value(1_000_000, at=2))
    found["other ids"] = changed("input_ids", lambda x: x.flip(0))
    found["another mask"] = changed("loss_mask", lambda x: ~x)
    found["other positions"] = changed("position_ids", lambda x: x + 1)
    found["one document"] = changed("document_ids", lambda x: x.clamp(max=0))
    if "target_probs" in columns:
        found["probabilities below 0"] = changed("target_probs", with_value(-0.5, at=1))
        found["probabilities that add up to 2"] = changed("target_probs", lambda x: x * 2)
        found["a mass of 2"] = changed("target_mass", with_value(2.0, at=1))
    found["a column that is not asked for"] = lambda table: table.update(
        {"hidden.L3": table["hidden.L0"].clone()}
    )
    found["two teachers"] = lambda table: table.update(
        {"logits" if "logits" not in table else "target_probs": table["hidden.L0"].clone()}
    )
    return found
