"""DFlash (arXiv 2602.06036): the backbone of block drafts alone."""

from typing import ClassVar

from spec_train.drafts.block.config import DFlashConfig
from spec_train.drafts.block.draft import BlockDraft
from spec_train.drafts.config import DraftConfig


class DFlashDraft(BlockDraft):
    """The draft that `spec-train fit dflash` trains."""

    config_class: ClassVar[type[DraftConfig]] = DFlashConfig
