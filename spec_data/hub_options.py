"""The options of `spec-data push` and `spec-data pull`."""

from dataclasses import dataclass

from spec_data.config import option
from spec_data.option_values import REQUIRED, RUNNING


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Options of `push`."""

    data: str = option(
        help="the dataset directory; may be given without --data", group=REQUIRED, metavar="DIR"
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
class PullConfig:
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
