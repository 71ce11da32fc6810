"""spec-train: fit speculative-decoding drafts on a spec-data dataset, without the target.

Importing this package is free: the public names below are resolved on first use.
docs/python-api.md shows each of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spec_data import __version__

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers and editors
    from spec_data.shards.errors import SpecDataError
    from spec_train.api import (
        load_draft,
        simulate_acceptance,
    )
    from spec_train.commands.compare import compare
    from spec_train.commands.doctor import doctor
    from spec_train.commands.eval import evaluate
    from spec_train.commands.export import export
    from spec_train.commands.fit import dry_run, fit
    from spec_train.commands.report import write_report
    from spec_train.diagnosis.checks import Diagnosis
    from spec_train.evaluation.exporting import ExportResult
    from spec_train.options.draft_options import (
        DFlashOptions,
        DSparkOptions,
        Eagle3Options,
        EagleOptions,
        PeagleOptions,
    )
    from spec_train.options.training import Training
    from spec_train.results import AcceptanceResult, DecodingResult, EvalResult
    from spec_train.simulation.intervals import Comparison
    from spec_train.training.result import FitResult
    from spec_train.training.run_cost import DryRun

_PUBLIC = {
    "fit": "spec_train.commands.fit",
    "dry_run": "spec_train.commands.fit",
    "evaluate": "spec_train.commands.eval",
    "compare": "spec_train.commands.compare",
    "write_report": "spec_train.commands.report",
    "export": "spec_train.commands.export",
    "load_draft": "spec_train.api",
    "doctor": "spec_train.commands.doctor",
    "simulate_acceptance": "spec_train.api",
    "Training": "spec_train.options.training",
    "EagleOptions": "spec_train.options.draft_options",
    "Eagle3Options": "spec_train.options.draft_options",
    "PeagleOptions": "spec_train.options.draft_options",
    "DSparkOptions": "spec_train.options.draft_options",
    "DFlashOptions": "spec_train.options.draft_options",
    "FitResult": "spec_train.training.result",
    "Comparison": "spec_train.simulation.intervals",
    "Diagnosis": "spec_train.diagnosis.checks",
    "DryRun": "spec_train.training.run_cost",
    "EvalResult": "spec_train.results",
    "AcceptanceResult": "spec_train.results",
    "DecodingResult": "spec_train.results",
    "ExportResult": "spec_train.evaluation.exporting",
    "SpecDataError": "spec_data.shards.errors",
}

__all__ = [
    "Training",
    "EagleOptions",
    "Eagle3Options",
    "PeagleOptions",
    "DSparkOptions",
    "DFlashOptions",
    "fit",
    "dry_run",
    "evaluate",
    "compare",
    "write_report",
    "export",
    "load_draft",
    "doctor",
    "simulate_acceptance",
    "FitResult",
    "Diagnosis",
    "DryRun",
    "Comparison",
    "EvalResult",
    "AcceptanceResult",
    "DecodingResult",
    "ExportResult",
    "SpecDataError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
