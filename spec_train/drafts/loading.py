"""Reading a draft of any kind, from any program."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_data.shards.errors import DraftError, SpecDataError, an
from spec_train.drafts.draft import Draft
from spec_train.drafts.kinds import (
    class_of,
    family_class,
    kind_named,
    known_kind,
    note_used,
)
from spec_train.formats.contradictions import refuse_contradictions
from spec_train.formats.draft_files import DraftFiles, read_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import unread_keys, unread_text
from spec_train.formats.read import own_form
from spec_train.formats.target_facts import TargetFacts
from spec_train.options.kinds import BUILT_IN

log = logging.getLogger(__name__)

DRAFTS: dict[str, type[Draft]] = {name: kind_named(name).draft_class() for name in BUILT_IN}
"""The classes of the drafts of this project, by kind."""


def draft_class(name: str, architectures: Sequence[str] = ()) -> type[Draft]:
    """Return the class of a kind of draft that a user named, see `kinds.kind_named`.

    `architectures` are those of the target, whose family may have a class of its own.
    """
    kind: type[Draft] = class_of(kind_named(name), architectures)
    return kind


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
        return _class_of_file(ours, kind).from_files(ours)
    except SpecDataError as error:
        if str(files.where) in str(error):
            raise
        raise DraftError(f"{files.config_path}: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise DraftError(
            f"{files.config_path}: a field has a wrong type or value ({type(e).__name__}: {e}); it "
            "was edited or damaged"
        ) from e


def _class_of_file(files: DraftFiles, kind: Any) -> type[Draft]:
    """Return the class of the kind that a file names; code that it names is never loaded.

    Raises:
        DraftError: it is no draft of this project, and its code was not named by the user.
    """
    known = known_kind(kind) if isinstance(kind, str) else None
    code = files.config[SECTION].get("code")
    if known is not None:
        found: type[Draft] | None = known.draft_class()
        if kind in BUILT_IN and code is not None:
            found = family_class(str(kind), code)
        if found is None:
            raise DraftError(
                f"{files.config_path}: {an(kind)} draft of {code}, a class that the family of its "
                f"target has. If you trust that code, name it with --draft-code {code} (in Python: "
                "spec_train.register_draft)"
            )
        note_used(found)
        if kind not in BUILT_IN and code is not None and code != found.code:
            log.warning(
                "warning[draft-code]: %s: trained as %s, and read as %s: other code may compute "
                "something else of the same weights",
                *(files.config_path, code, found.code or kind),
            )
        return found
    if isinstance(kind, str) and isinstance(code, str):
        raise DraftError(
            f"{files.config_path}: a draft of the kind {kind!r}, whose code is not part of "
            f"spec-train: it was trained as {code}. If you trust that code, name it with "
            f"--draft-code {code} (in Python: spec_train.register_draft)"
        )
    raise DraftError(
        f"{files.config_path}: {SECTION}.draft is {kind!r}; known kinds: {', '.join(DRAFTS)}"
    )
