"""The kinds of drafts of this project, and what a capture must know of each. No torch here.

A kind is a folder `spec_train/drafts/NAME` with a file `kind.toml`, which is all that others know
of it before its code is imported. The trainer lies beside this package, and is not imported for it.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import msgspec

FOLDERS = Path(__file__).parents[2] / "spec_train" / "drafts"
FILE = "kind.toml"


class Published(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """By what a published config.json shows that it is a draft of such a kind."""

    keys: list[str] = []
    classes: list[str] = []
    """Parts of the names of its classes, in lower case."""


class DraftKind(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The file `kind.toml` of a kind."""

    place: int = 1000
    """Where it stands in lists: ascending, then by name."""
    class_: str = msgspec.field(name="class")
    """MODULE:NAME of its class, in its folder."""
    layers: int
    """How many layers it reads by its recipe; 0: the final hidden states alone."""
    default: bool = False
    """It is the kind where none is named."""
    target_block: bool = False
    """It starts from a block of the target's own, which a capture copies if it is asked to."""
    only_on: dict[str, str] = {}
    """By supervision, what it needs there besides: --OPTION VALUE: why."""
    published: Published = Published()


@functools.cache
def draft_kinds() -> Mapping[str, DraftKind]:
    """Return the kinds by name, in the order of lists."""
    files = FOLDERS.glob(f"*/{FILE}")
    kinds = {f.parent.name: msgspec.toml.decode(f.read_bytes(), type=DraftKind) for f in files}
    return dict(sorted(kinds.items(), key=lambda kind: (kind[1].place, kind[0])))


def default_kind() -> str:
    """Return the kind that is meant where none is named."""
    return next(name for name, kind in draft_kinds().items() if kind.default)
