"""spec-data: run a target once, keep what its drafts need to learn in a small Arrow dataset.

Importing this package is free: the public names below are resolved on first use, so that
`spec-data --help` never pays for torch. docs/python-api.md shows each of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers and editors
    from spec_data.capture.model import Target
    from spec_data.capture.target_batch import TargetBatch
    from spec_data.commands.convert import convert
    from spec_data.commands.estimate import estimate
    from spec_data.commands.export import export_dataset
    from spec_data.commands.generate import generate
    from spec_data.commands.hub import pull, push
    from spec_data.commands.inspect import inspect
    from spec_data.commands.regenerate import regenerate
    from spec_data.commands.report import write_report
    from spec_data.commands.status import status
    from spec_data.commands.verify import verify
    from spec_data.commands.views import DerivedDataset, copy, join, merge, recode, select
    from spec_data.conversion.export import ExportedStates
    from spec_data.generation.status import Status
    from spec_data.hub.pull import Pulled
    from spec_data.hub.push import Pushed
    from spec_data.regeneration.result import RegenerateResult
    from spec_data.results import (
        EstimateResult,
        GenerateResult,
    )
    from spec_data.shards.errors import SpecDataError
    from spec_data.shards.reader import HiddenStatesDataset, open_dataset
    from spec_data.verification.findings import VerifyReport

__version__ = "0.1.0"

_PUBLIC = {
    "open_dataset": "spec_data.shards.reader",
    "generate": "spec_data.commands.generate",
    "estimate": "spec_data.commands.estimate",
    "status": "spec_data.commands.status",
    "regenerate": "spec_data.commands.regenerate",
    "convert": "spec_data.commands.convert",
    "export_dataset": "spec_data.commands.export",
    "verify": "spec_data.commands.verify",
    "inspect": "spec_data.commands.inspect",
    "write_report": "spec_data.commands.report",
    "ExportedStates": "spec_data.conversion.export",
    "push": "spec_data.commands.hub",
    "pull": "spec_data.commands.hub",
    "Pushed": "spec_data.hub.push",
    "Pulled": "spec_data.hub.pull",
    "Status": "spec_data.generation.status",
    "HiddenStatesDataset": "spec_data.shards.reader",
    "Target": "spec_data.capture.model",
    "TargetBatch": "spec_data.capture.target_batch",
    "EstimateResult": "spec_data.results",
    "GenerateResult": "spec_data.results",
    "RegenerateResult": "spec_data.regeneration.result",
    "VerifyReport": "spec_data.verification.findings",
    "SpecDataError": "spec_data.shards.errors",
    "select": "spec_data.commands.views",
    "merge": "spec_data.commands.views",
    "join": "spec_data.commands.views",
    "copy": "spec_data.commands.views",
    "recode": "spec_data.commands.views",
    "DerivedDataset": "spec_data.commands.views",
}

__all__ = [
    "open_dataset",
    "generate",
    "estimate",
    "status",
    "regenerate",
    "convert",
    "export_dataset",
    "push",
    "pull",
    "verify",
    "inspect",
    "write_report",
    "Pushed",
    "Pulled",
    "HiddenStatesDataset",
    "Target",
    "TargetBatch",
    "EstimateResult",
    "ExportedStates",
    "GenerateResult",
    "RegenerateResult",
    "VerifyReport",
    "Status",
    "SpecDataError",
    "select",
    "merge",
    "join",
    "copy",
    "recode",
    "DerivedDataset",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
