"""What mypy and an editor see of the public functions: checked by `mypy`, never run."""

from typing import Any, assert_type

import spec_data
import spec_train
from spec_data.shards.reader import Document


def use() -> None:
    """Types, and a name that does not exist (an unused `ignore` is an error of mypy)."""
    dataset = spec_data.open_dataset("d")
    assert_type(dataset[0], Document)
    assert_type(dataset[0:2], dict[str, list[Any]])
    training = spec_train.Training(data="d", out="r")
    spec_train.Training(data="d", out="r", stepz=3)  # type: ignore[call-arg]
    assert_type(spec_train.fit(training).history, list[dict[str, Any]])
    assert_type(spec_train.evaluate("r").acceptance_length, float | None)
