"""The public names: `__init__.py` imports each on first use, editors and mypy see them here."""

from .config import DraftConfig as DraftConfig
from .depths import (
    HeadsDraft as HeadsDraft,
    HeadsDrafter as HeadsDrafter,
    depth_chains as depth_chains,
    depth_counts as depth_counts,
    depth_loss as depth_loss,
)
from .draft import (
    Draft as Draft,
    DraftLoss as DraftLoss,
    FinalDraft as FinalDraft,
    LayersDraft as LayersDraft,
)
from .drafting import Drafter as Drafter
from .kinds import kind_named as kind_named, register_draft as register_draft
from .loading import (
    DRAFTS as DRAFTS,
    draft_class as draft_class,
    load_draft as load_draft,
    own_files as own_files,
    read_draft as read_draft,
)
