"""The public names: `__init__.py` imports each on first use, editors and mypy see them here."""

import spec_data
import spec_data.shards.errors

from .api import (
    load_draft as load_draft,
    loader as loader,
    simulate_acceptance as simulate_acceptance,
)
from .commands.doctor import doctor as doctor
from .commands.eval import compare as compare, evaluate as evaluate
from .commands.export import export as export
from .commands.fit import dry_run as dry_run, fit as fit
from .commands.report import write_report as write_report
from .commands.search import SearchResult as SearchResult, search as search
from .commands.vectors import vectors as vectors
from .data.collate import collate as collate
from .data.loader import Loader as Loader
from .drafts.kinds import register_draft as register_draft
from .diagnosis.checks import Diagnosis as Diagnosis
from .drafts.output import DraftOutput as DraftOutput
from .evaluation.exporting import ExportResult as ExportResult
from .losses.head import TargetHead as TargetHead
from .drafts.eagle.options import EagleOptions as EagleOptions
from .drafts.eagle3.options import Eagle3Options as Eagle3Options
from .drafts.peagle.options import PeagleOptions as PeagleOptions
from .drafts.dspark.options import DSparkOptions as DSparkOptions
from .drafts.dflash.options import DFlashOptions as DFlashOptions
from .drafts.dflash2.options import DFlash2Options as DFlash2Options
from .drafts.domino.options import DominoOptions as DominoOptions
from .drafts.lilicorr.options import LiLiCorrOptions as LiLiCorrOptions
from .drafts.xpress.options import XPressOptions as XPressOptions
from .drafts.mtp.options import MtpOptions as MtpOptions
from .training.search_space import SearchTraining as SearchTraining
from .options.training import Training as Training
from .results import (
    AcceptanceResult as AcceptanceResult,
    DecodingResult as DecodingResult,
    EvalResult as EvalResult,
)
from .simulation.intervals import Comparison as Comparison
from .training.result import FitResult as FitResult
from .training.run_cost import DryRun as DryRun
from .conformance.check import CheckedLog as CheckedLog
from .conformance.write import WrittenVectors as WrittenVectors

SpecDataError = spec_data.shards.errors.SpecDataError
__version__ = spec_data.__version__
