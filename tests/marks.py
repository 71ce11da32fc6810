"""Cases that are long ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(short: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Return the parameters `names`; those outside `short` are marked as long."""
    kept = set(short)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.long) for name in names]
