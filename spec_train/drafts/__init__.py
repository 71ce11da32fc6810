"""The drafts by name. A draft is a class of the Draft protocol; adding one adds a line here."""

from pathlib import Path
from typing import Any

from spec_train.drafts.eagle3 import Eagle3Draft
from spec_train.drafts.eagle3_config import ARCHITECTURE as EAGLE3
from spec_train.drafts.protocol import Draft, DraftLoss
from spec_train.exports.files import DraftFiles, read_files
from spec_train.exports.flat import SECTION
from spec_train.exports.formats import own_form
from spec_train.exports.target import TargetFacts

DRAFTS: dict[str, Any] = {"eagle3": Eagle3Draft}
_ARCHITECTURES = {EAGLE3: "eagle3"}


def load_draft(directory: str | Path, target: TargetFacts | None = None) -> Any:
    """Read a draft directory, whatever its kind, and whoever wrote it.

    Args:
        directory: config.json and model.safetensors, in any form that `spec-train export` writes.
        target: what a foreign draft may leave to its target (layers, embedding, head).

    Raises:
        MissingError, DraftError: not a draft, one of an unknown architecture, or one that computes
            something that ours does not.
    """
    files = read_files(directory)
    if not _is_own(files):
        files = own_form(files, target or TargetFacts())
    return DRAFTS[files.config[SECTION]["draft"]].from_files(files)


def _is_own(files: DraftFiles) -> bool:
    """Whether a draft class of this project wrote the files."""
    section = files.config.get(SECTION)
    names = files.config.get("architectures") or []
    return isinstance(section, dict) and any(
        _ARCHITECTURES.get(name) == section.get("draft") for name in names
    )


__all__ = ["DRAFTS", "Draft", "DraftLoss", "load_draft"]
