"""The drafts by name. A draft is a class of the Draft protocol; adding one adds a line here."""

from pathlib import Path
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.drafts.dspark import DFlashDraft, DSparkDraft
from spec_train.drafts.dspark_config import DFLASH, DSPARK
from spec_train.drafts.eagle import EagleDraft
from spec_train.drafts.eagle3 import Eagle3Draft
from spec_train.drafts.eagle3_config import ARCHITECTURE as EAGLE3
from spec_train.drafts.eagle_config import ARCHITECTURE as EAGLE
from spec_train.drafts.files import read_config
from spec_train.drafts.peagle import PeagleDraft
from spec_train.drafts.peagle_config import ARCHITECTURE as PEAGLE
from spec_train.drafts.protocol import Draft, DraftLoss

DRAFTS: dict[str, Any] = {
    "eagle": EagleDraft,
    "eagle3": Eagle3Draft,
    "peagle": PeagleDraft,
    "dspark": DSparkDraft,
    "dflash": DFlashDraft,
}
_ARCHITECTURES = {
    EAGLE: "eagle",
    EAGLE3: "eagle3",
    PEAGLE: "peagle",
    DSPARK: "dspark",
    DFLASH: "dflash",
}


def load_draft(directory: str | Path) -> Any:
    """Read a draft directory, whatever its kind.

    Raises:
        MissingError, DraftError: not a draft, or one of an unknown architecture.
    """
    folder = Path(directory)
    raw = read_config(folder)
    names = raw.get("architectures") or []
    kind = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
    if kind is None:
        raise DraftError(
            f"{folder / 'config.json'}: architectures {names} are no draft of spec-train; known: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    own = raw.get("spec_train")  # drafts of one architecture may be of several kinds
    said = own.get("draft") if isinstance(own, dict) else None
    return DRAFTS[said if said in DRAFTS else kind].from_pretrained(folder)


__all__ = ["DRAFTS", "Draft", "DraftLoss", "load_draft"]
