"""The public names: `__init__.py` imports each on first use, editors and mypy see them here."""

from .capture.model import Target as Target
from .capture.remote_target import RemoteTarget as RemoteTarget, TargetServer as TargetServer
from .commands.convert import convert as convert, export_dataset as export_dataset
from .commands.estimate import estimate as estimate
from .commands.generate import generate as generate
from .commands.hub import pull as pull, push as push
from .commands.inspect import (
    inspect as inspect,
    status as status,
    verify as verify,
    write_report as write_report,
)
from .commands.regenerate import regenerate as regenerate
from .commands.views import (
    copy as copy,
    join as join,
    merge as merge,
    recode as recode,
    select as select,
)
from .conversion.export import ExportedStates as ExportedStates
from .generation.options import CaptureOptions as CaptureOptions
from .generation.status import Status as Status
from .hub.transfer import Pulled as Pulled, Pushed as Pushed
from .models.target_options import EngineOptions as EngineOptions, LoadOptions as LoadOptions
from .regeneration.run import RegenerateResult as RegenerateResult
from .results import EstimateResult as EstimateResult, WrittenDataset as WrittenDataset
from .shards.batch import DraftBatch as DraftBatch
from .shards.errors import SpecDataError as SpecDataError
from .shards.reader import HiddenStatesDataset as HiddenStatesDataset, open_dataset as open_dataset
from .verification.findings import VerifyReport as VerifyReport

__version__: str
