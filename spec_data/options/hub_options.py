"""The options of `spec-data push` and `spec-data pull`."""

from dataclasses import dataclass

from spec_data.options.option_values import REQUIRED, RUNNING
from spec_data.options.view_options import DropColumnsConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option

_COLUMNS = "Columns"


@dataclass(frozen=True, kw_only=True)
class KeptColumns:
    """Options of `push` and `pull` that move a dataset with fewer columns; not given: all."""

    layers: str | None = option(
        None, help="only these layers, such as 1,3", group=_COLUMNS, metavar="IDS"
    )
    for_draft: str | None = option(
        None,
        flag="for",
        help="only the layers that `generate --for` recorded for this draft",
        group=_COLUMNS,
        metavar="DRAFT",
    )
    final: str | None = option(
        None,
        help="hidden.final only where the next token is supervised",
        group=_COLUMNS,
        choices=("supervised",),
    )

    def __post_init__(self) -> None:
        if self.layers is not None and self.for_draft is not None:
            raise ConfigError("--layers and --for: pass one of them, not both")

    @property
    def kept(self) -> list[str | None]:
        """The values of the three options; empty if none was given."""
        given = [self.layers, self.for_draft, self.final]
        return given if any(value is not None for value in given) else []

    def smaller(self, data: str, out: str) -> DropColumnsConfig:
        """Return the options of the `drop-columns` that writes this dataset."""
        return DropColumnsConfig(
            data=data, out=out, layers=self.layers, for_draft=self.for_draft, final=self.final
        )


@dataclass(frozen=True, kw_only=True)
class PushConfig(KeptColumns):
    """Options of `push`."""

    data: str = option(
        help="the dataset directory; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    repo: str = option(
        help="the dataset on the Hub, such as me/qwen3-8b-states; may be given without --repo",
        group=REQUIRED,
        metavar="REPO",
    )
    private: bool = option(
        False, help="make the repository private, if it does not exist yet", group=RUNNING
    )
    dry_run: bool = option(
        False, help="print what would be uploaded, and the card, then stop", group=RUNNING
    )


@dataclass(frozen=True, kw_only=True)
class PullConfig(KeptColumns):
    """Options of `pull`."""

    repo: str = option(
        help="a dataset that `push` uploaded, such as me/qwen3-8b-states; may be given without "
        "--repo",
        group=REQUIRED,
        metavar="REPO",
    )
    out: str = option(
        help="the dataset directory to write; the same command resumes an interrupted run in it. "
        "May be given without --out",
        group=REQUIRED,
        metavar="DIR",
    )
    revision: str | None = option(
        None,
        help="branch, tag or commit; not given: the main branch as it is now",
        group=RUNNING,
        metavar="REV",
    )
    dry_run: bool = option(
        False, help="print the size of what would be downloaded, then stop", group=RUNNING
    )
