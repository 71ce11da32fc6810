"""Datasets on the Hugging Face Hub: `spec-data push` and `pull`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spec_data.terminal.command import command
from spec_data.terminal.types import Dataset, Directory

if TYPE_CHECKING:
    from spec_data.hub.transfer import Pulled, Pushed

_Repo = Annotated[str, Parameter(metavar="REPO")]


@command
def push(data: Dataset, repo: _Repo, *, private: bool = False, dry_run: bool = False) -> "Pushed":
    """Upload a dataset to the Hub, with its texts for the Hub's viewer.

    The same command resumes.

    Examples:
        spec-data push data/qwen3-8b me/qwen3-8b-states --private

    Args:
        data: the dataset directory; make one of a view with `spec-data copy`.
        repo: the dataset on the Hub, such as me/qwen3-8b-states.
        private: make the repository private, if it does not exist yet.
        dry_run: print what would be uploaded, then stop.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        ConfigError: a view, a URL, no right to write, or the repository holds another dataset.
        RunError: the Hub cannot be reached.
    """
    from spec_data.hub.transfer import push as upload

    return upload(Path(data), repo, private=private, dry_run=dry_run)


@command
def pull(
    repo: _Repo,
    out: Directory,
    *,
    revision: Annotated[str, Parameter(metavar="REV")] = "",
    dry_run: bool = False,
) -> "Pulled":
    """Download a dataset that `push` uploaded, and check every shard.

    The same command resumes.

    Examples:
        spec-data pull me/qwen3-8b-states data/qwen3-8b

    Args:
        repo: the dataset on the Hub, such as me/qwen3-8b-states.
        out: the directory to write.
        revision: branch, tag or commit; not given: the main branch as it is now.
        dry_run: print the size of what would be downloaded, then stop.

    Raises:
        MissingError: no such repository or revision.
        DatasetError: the repository holds no dataset of spec-data, or a shard is damaged.
        ConfigError: `out` holds something else.
        RunError: the Hub cannot be reached, or the disk is too small.
    """
    from spec_data.hub.transfer import pull as download

    return download(repo, Path(out), revision=revision or None, dry_run=dry_run)
