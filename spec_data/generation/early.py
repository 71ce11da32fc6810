"""The forwards of a small plan, made once: for the checks, for the codec tables, and as data.

Before the first shard, a run looks at a sample of the corpus. Of a small plan the sample is the
whole plan, in the very forwards of its units. Their columns are kept in memory, and capture takes
them instead of a second forward. A forward is a pure function of its batch, so the bytes of a unit
do not depend on whether its columns were kept. A run that resumes keeps nothing.

Shapes: N tokens of the plan, m tokens with a supervised next token, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.capture.backend import TargetBackend
from spec_data.generation.capture import (
    Forwarded,
    ForwardKey,
    add_figures,
    forward_columns,
    forward_key,
    unit_forwards,
)
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.shards.likelihood import DocumentFigures
from spec_data.shards.schema import Column
from spec_data.terminal.progress import progress

_TOKENS = 32768  # of the largest plan that is captured early
_BYTES = 512 << 20  # of its columns, which are in memory together


@dataclass
class EarlyForwards:
    """The columns of the forwards of every unit, until capture takes them.

    Attributes:
        kept: what `forward_columns` returned, on the CPU, by `forward_key`.
        figures: those of all documents of the plan.
    """

    figures: DocumentFigures
    kept: dict[ForwardKey, Forwarded]

    def states(self, plan: Plan, column: Column, form: str, batch_tokens: int) -> Tensor:
        """Return the states of a column at every token of the plan, [N, H] in the target's dtype.

        Tokens without a row in a sparse column are NaN.
        """
        values, _ = next(iter(self.kept.values()))
        like = values[column.name]
        out = torch.full((plan.tokens, like.shape[1]), torch.nan, dtype=like.dtype)
        for unit, (first, last) in enumerate(plan.units):
            bounds = plan.documents.offsets[first : last + 1]
            for batch, following in unit_forwards(plan, unit, form, batch_tokens):
                rows = batch.token_index(bounds)
                rows = rows[following >= 0] if column.sparse else rows
                out[torch.from_numpy(rows)] = self.kept[forward_key(unit, batch)][0][column.name]
        return out


def capture_early(
    setup: Setup, plan: Plan, target: TargetBackend, form: str, batch_tokens: int
) -> EarlyForwards | None:
    """Run every forward of a small plan, of `batch_tokens` tokens; None if the plan is not small.

    Raises:
        RunError, TargetError: the target does not produce the states.
    """
    config, columns = setup.config, setup.columns
    size = torch.empty(0, dtype=target.dtype).element_size()
    width = sum(c.width or 1 for c in columns)
    if plan.tokens > _TOKENS or plan.tokens * width * size > _BYTES:
        return None
    kept: dict[ForwardKey, Forwarded] = {}
    parts = []
    with progress(total=plan.tokens, desc="first look", unit="tok", leave=False) as bar:
        for unit, (first, last) in enumerate(plan.units):
            own = DocumentFigures.zeros(last - first)
            for batch, following in unit_forwards(plan, unit, form, batch_tokens):
                values, figures = forward_columns(
                    target, batch, form, columns, following, config.own_temperature
                )
                add_figures(figures.cpu().numpy(), following, batch, own)
                key = forward_key(unit, batch)
                kept[key] = {name: value.cpu() for name, value in values.items()}, figures.cpu()
                bar.update(batch.tokens)
            parts.append(own)
    return EarlyForwards(DocumentFigures.join(parts), kept)
