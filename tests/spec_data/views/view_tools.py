"""What tests of views share: a plain-Python construction of documents, and comparisons."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from tests.spec_data.runs import ON_CPU


def killed_after(real: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`real` works `count` times; then the process is stopped instead."""
    left = [count]

    def call(*given: Any, **named: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*given, **named)

    return call


def documents_of(path: Path) -> list[dict[str, Any]]:
    """Read every document of a dataset through the public reader."""
    return list(HiddenStatesDataset(path))


def assert_same_documents(path: Path, expected: Sequence[dict[str, Any]]) -> None:
    """Compare a dataset with plain documents: every key, every value, in order."""
    found = documents_of(path)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[name].dtype, name
                same = (value == other[name]) | ((value != value) & (other[name] != other[name]))
                assert bool(same.all()), name  # NaN: no row
            else:
                assert value == other[name], name


def assert_verified(path: Path) -> None:
    """Run every check of `verify`."""
    found = examine(data=str(path), samples=4, running=ON_CPU)
    assert not found.failures, str(found)
    odd = [text for text in found.warnings if "behaves like a random model" not in text]
    assert not odd, str(found)
