"""spec-data: run a target once, keep what its drafts need to learn in a small Arrow dataset.

Importing this package is free: the public names below are resolved on first use, so that
`spec-data --help` never pays for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "HiddenStatesDataset": "spec_data.shards.reader",
    "Target": "spec_data.target.model",
    "TargetBatch": "spec_data.target.target_batch",
    "SpecDataError": "spec_data.shards.errors",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
