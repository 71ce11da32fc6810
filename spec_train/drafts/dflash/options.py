"""The options of DFlash. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from spec_train.options.draft_options import SHAPE, BlockVocabulary, PlainBlockOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DFlashOptions(PlainBlockOptions, BlockVocabulary):
    """Options of the DFlash draft (arXiv 2602.06036): a block draft without further heads."""

    layout: Annotated[Literal["mask", "anchor"], SHAPE] = "mask"
    """Mask: the mask slots draft their own tokens, the anchor's slot none (what engines serve as
    DFlash); anchor: every slot drafts the token after its own (served as DSpark)."""


OPTIONS = DFlashOptions
