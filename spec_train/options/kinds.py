"""The kinds of drafts of this project by name, and the options of each. No torch here.

A kind is the folder `spec_train/drafts/NAME`, whose `kind.toml` is all that others know of it.
Rooms below the drafts find its options and its files by this name, and import them on first use.
"""

import importlib
from collections.abc import Iterator, Mapping

from spec_data.shards.draft_kinds import default_kind, draft_kinds
from spec_data.shards.errors import DraftError
from spec_data.terminal.console import did_you_mean
from spec_train.options.draft_options import DraftOptions

BUILT_IN = {name: kind.class_ for name, kind in draft_kinds().items()}
"""Where the class of a kind is in its folder. Messages name the kinds in this order."""

DEFAULT = default_kind()
"""The kind that is trained where none is named."""


def folder_of(kind: str) -> str:
    """Return the package of a kind of this project."""
    return f"spec_train.drafts.{kind}"


class _Options(Mapping[str, type[DraftOptions]]):
    """The classes of options by kind; a kind's `options.py` is imported when one asks for it."""

    def __getitem__(self, kind: str) -> type[DraftOptions]:
        if kind not in BUILT_IN:
            raise KeyError(kind)
        found: type[DraftOptions] = importlib.import_module(f"{folder_of(kind)}.options").OPTIONS
        return found

    def __contains__(self, kind: object) -> bool:
        return kind in BUILT_IN

    def __iter__(self) -> Iterator[str]:
        return iter(BUILT_IN)

    def __len__(self) -> int:
        return len(BUILT_IN)


DRAFT_OPTIONS: Mapping[str, type[DraftOptions]] = _Options()
"""The options of the kinds of this project: a class per name."""


def draft_options(name: str) -> type[DraftOptions]:
    """Return the class of a draft's options.

    Raises:
        DraftError: there is no draft of that name.
    """
    if name not in DRAFT_OPTIONS:
        nearest = did_you_mean(str(name), list(DRAFT_OPTIONS))
        drafts = ", ".join(sorted(DRAFT_OPTIONS))
        raise DraftError(f"unknown draft {name!r}; drafts are {drafts}{nearest}")
    return DRAFT_OPTIONS[name]
