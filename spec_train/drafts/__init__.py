"""The drafts, one module or folder per kind, and what they share.

A draft is a subclass of `draft.Draft`; `DRAFTS` lists them by name. To add a kind, add a module,
its files in `formats/`, and one line here.
"""

import logging
from pathlib import Path

from spec_data.shards.errors import DraftError, SpecDataError
from spec_train.drafts.block.domino import DominoDraft
from spec_train.drafts.block.draft import DFlashDraft
from spec_train.drafts.block.lattice import LiLiCorrDraft
from spec_train.drafts.block.markov import DSparkDraft
from spec_train.drafts.block.refiner import XPressDraft
from spec_train.drafts.block.selector import DFlash2Draft
from spec_train.drafts.draft import Draft, DraftLoss
from spec_train.drafts.eagle import EagleDraft
from spec_train.drafts.eagle3 import Eagle3Draft
from spec_train.drafts.mtp import MtpDraft
from spec_train.drafts.peagle import PeagleDraft
from spec_train.formats.contradictions import refuse_contradictions
from spec_train.formats.draft_files import DraftFiles, read_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import unread_keys, unread_text
from spec_train.formats.read import own_form
from spec_train.formats.target_facts import TargetFacts

log = logging.getLogger(__name__)

_CLASSES: tuple[type[Draft], ...] = (
    *(EagleDraft, Eagle3Draft, PeagleDraft, DSparkDraft, DFlashDraft, DFlash2Draft, DominoDraft),
    *(LiLiCorrDraft, XPressDraft, MtpDraft),
)
DRAFTS = {draft.name: draft for draft in _CLASSES}


def draft_class(kind: str) -> type[Draft]:
    """Return the class of a kind of draft.

    Raises:
        DraftError: `kind` is unknown.
    """
    if kind not in DRAFTS:
        raise DraftError(f"there is no draft {kind!r}; known kinds: {', '.join(DRAFTS)}")
    return DRAFTS[kind]


def load_draft(
    directory: str | Path, target: TargetFacts | None = None, *, accept_edited: bool = False
) -> Draft:
    """Read a draft directory of any kind, written by this project or by another trainer.

    Args:
        directory: config.json and model.safetensors, in any form that `spec-train export` writes.
        target: facts that a foreign draft may omit (layers, embedding, head).
        accept_edited: read a draft that is not as it was sealed, with a warning.

    Raises:
        MissingError: a file is absent.
        DraftError: not a draft, one that was damaged or edited, one whose keys contradict each
            other, an unknown architecture, or arithmetic that this project does not have.
    """
    return read_draft(directory, target, accept_edited)[0]


def read_draft(
    directory: str | Path, target: TargetFacts | None = None, accept_edited: bool = False
) -> tuple[Draft, DraftFiles]:
    """Read a draft as `load_draft` does; return also its files as they are on disk."""
    files = read_files(directory, accept_edited)
    if files.sealed:  # as this project wrote it: nothing can contradict
        return _draft_of(files, target), files
    refuse_contradictions(files)
    draft = _draft_of(files, target)
    if unread := unread_keys(files):
        log.warning("warning[unread-keys]: %s: %s", files.config_path, unread_text(unread))
    return draft, files


def own_files(draft: Draft, where: str) -> DraftFiles:
    """Return the files of `draft` in our own form, in the dtype of its weights."""
    return draft.files(next(draft.parameters()).dtype, where)


def _draft_of(files: DraftFiles, target: TargetFacts | None) -> Draft:
    """Make a draft from files of any form."""
    try:
        ours = own_form(files, target or TargetFacts())
        kind = ours.config[SECTION].get("draft")
        if kind not in DRAFTS:
            raise DraftError(
                f"{ours.config_path}: {SECTION}.draft is {kind!r}; known kinds: {', '.join(DRAFTS)}"
            )
        return DRAFTS[kind].from_files(ours)
    except SpecDataError as error:
        if str(files.where) in str(error):
            raise
        raise DraftError(f"{files.config_path}: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise DraftError(
            f"{files.config_path}: a field has a wrong type or value ({type(e).__name__}: {e}); it "
            "was edited or damaged"
        ) from e


__all__ = ["DRAFTS", "Draft", "DraftLoss", "draft_class", "load_draft", "own_files", "read_draft"]
