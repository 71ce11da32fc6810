"""Room: the drafts, one folder per kind, and what they share.

A draft is a class that implements the Draft protocol (`protocol.py`); `DRAFTS` lists them by name.
To add a kind, add a folder, its options in `draft_options.py`, its files in `formats/`, and one
line here.

May import: spec_data.config, spec_data.shards, spec_train.attention, spec_train.data,
spec_train.formats, spec_train.head, spec_train.losses, spec_train.origin, spec_train.sampling.
"""

from pathlib import Path

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

DRAFTS: dict[str, type[Draft]] = {
    "eagle": EagleDraft,
    "eagle3": Eagle3Draft,
    "peagle": PeagleDraft,
    "dspark": DSparkDraft,
    "dflash": DFlashDraft,
}


def load_draft(directory: str | Path, target: TargetFacts | None = None) -> Draft:
    """Read a draft directory of any kind, written by this project or by another trainer.

    Args:
        directory: config.json and model.safetensors, in any form that `spec-train export` writes.
        target: facts that a foreign draft may omit (layers, embedding, head).

    Raises:
        MissingError: a file is absent.
        DraftError: not a draft, an unknown architecture, or one with arithmetic that this project
            does not have.
    """
    files = own_form(read_files(directory), target or TargetFacts())
    kind = files.config[SECTION].get("draft")
    if kind not in DRAFTS:
        raise DraftError(
            f"{files.config_path}: {SECTION}.draft is {kind!r}; known kinds: {', '.join(DRAFTS)}"
        )
    return DRAFTS[kind].from_files(files)


__all__ = ["DRAFTS", "Draft", "DraftLoss", "load_draft"]
