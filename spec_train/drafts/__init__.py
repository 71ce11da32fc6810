"""Room: the drafts, one folder per kind, and what they share.

A draft is a class of the Draft protocol (`protocol.py`); `DRAFTS` lists them by name. Adding a kind
adds a folder, its options in `draft_options.py`, its files in `formats/`, and one line here.

May import: spec_data.config, spec_data.shards, spec_train.attention, spec_train.data,
spec_train.formats, spec_train.head, spec_train.losses, spec_train.origin, spec_train.sampling.
"""

from pathlib import Path
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.drafts.dspark.draft import DFlashDraft, DSparkDraft
from spec_train.drafts.eagle.draft import EagleDraft
from spec_train.drafts.eagle3.draft import Eagle3Draft
from spec_train.drafts.peagle.draft import PeagleDraft
from spec_train.drafts.protocol import Draft, DraftLoss
from spec_train.formats.draft_files import read_files
from spec_train.formats.flat import SECTION
from spec_train.formats.forms import own_form
from spec_train.formats.target_facts import TargetFacts

DRAFTS: dict[str, Any] = {
    "eagle": EagleDraft,
    "eagle3": Eagle3Draft,
    "peagle": PeagleDraft,
    "dspark": DSparkDraft,
    "dflash": DFlashDraft,
}


def load_draft(directory: str | Path, target: TargetFacts | None = None) -> Any:
    """Read a draft directory, whatever its kind, and whoever wrote it.

    Args:
        directory: config.json and model.safetensors, in any form that `spec-train export` writes.
        target: what a foreign draft may leave to its target (layers, embedding, head).

    Raises:
        MissingError, DraftError: not a draft, one of an unknown architecture, or one that computes
            something that ours does not.
    """
    files = own_form(read_files(directory), target or TargetFacts())
    kind = files.config[SECTION].get("draft")
    if kind not in DRAFTS:
        raise DraftError(f"{files.config_path}: draft {kind!r} is none of {', '.join(DRAFTS)}")
    return DRAFTS[kind].from_files(files)


__all__ = ["DRAFTS", "Draft", "DraftLoss", "load_draft"]
