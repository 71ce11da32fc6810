"""The options of P-EAGLE. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from spec_data.terminal.rules import Rule
from spec_data.terminal.types import Positive
from spec_train.options.draft_options import (
    AUTO,
    DRAFT,
    Kind,
    NormOptions,
    Ratio,
    TokenId,
    of_one_token,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PeagleOptions(NormOptions):
    """Options of the P-EAGLE draft (arXiv 2602.01469): all drafted tokens in one forward."""

    example: ClassVar[Mapping[str, Any]] = {"draft_vocab_size": 40, "depths": 3, "num_layers": 2}
    loss: Annotated[Kind, DRAFT] = "kl"
    depths: Positive = 8
    """Tokens drafted by one forward; time and memory grow with it."""
    rounds: ClassVar[str] = "depths"
    needless: ClassVar[tuple[Rule, ...]] = of_one_token(
        "depths", cod_ratio=0.7, position_weights=AUTO
    )
    published_layers: ClassVar[int] = 4
    cod_ratio: Annotated[Ratio, DRAFT] = 0.7
    """Conditional drop sampling: depth d keeps a share cod_ratio ** d of the slots."""
    cod_floor: ClassVar[float] = 0.2
    """Smallest share of the slots that any depth keeps."""
    mask_token_id: Annotated[TokenId, DRAFT] = -1
    """Token that stands for the unknown ones at depth 1 and deeper; -1 chooses one that text does
    not use."""
    segments: Annotated[Positive, DRAFT] = 1
    """Train a row in so many parts, one after another: the same gradient with less memory, slower,
    because a part's documents are computed again up to its start."""
    norm_output: ClassVar[bool] = False
    """Nothing is fed back here, so nothing is normed for it."""


OPTIONS = PeagleOptions
