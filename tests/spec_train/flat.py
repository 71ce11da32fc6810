"""Fit with options as one table, those of the trainer and of the draft: tests mix them."""

import dataclasses
from typing import Any

import spec_train
from spec_train.options.kinds import draft_options
from spec_train.options.training import Training
from spec_train.training.result import FitResult


def split(draft: str, **options: Any) -> tuple[Training, Any]:
    """The options of a run as (those of every draft, those of this one)."""
    kind = draft_options(draft)
    own = {field.name for field in dataclasses.fields(kind)}
    training = Training(**{k: v for k, v in options.items() if k not in own})
    return training, kind(**{k: v for k, v in options.items() if k in own})


def fit(draft: str, data: Any, out: Any, **options: Any) -> FitResult:
    """`spec_train.fit`."""
    data = [str(one) for one in data] if isinstance(data, (list, tuple)) else str(data)
    return spec_train.fit(*split(draft, data=data, out=str(out), **options))
