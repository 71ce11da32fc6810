"""The functions of spec_data for datasets on the Hugging Face Hub: `push` and `pull`."""

from pathlib import Path
from typing import Any

from spec_data.hub.pull import Pulled
from spec_data.hub.pull import pull as run_pull
from spec_data.hub.push import Pushed
from spec_data.hub.push import push as run_push
from spec_data.options.hub_options import PullConfig, PushConfig
from spec_data.terminal.keywords import from_keywords, takes_options

AnyPath = str | Path


@takes_options(PushConfig, without=("data",))
def push(path: AnyPath, repo: str, **options: Any) -> Pushed:
    """Upload a sealed dataset to the Hub; called again, resume it.

    Args:
        path: the dataset directory.
        repo: the dataset on the Hub, such as "me/qwen3-8b-states".
        options: those of `spec-data push`, listed below.

    Returns:
        What was uploaded, and the card.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        ConfigError: no right to write there, or the repository holds another dataset.
        RunError: the Hub cannot be reached.
    """
    return run_push(from_keywords(PushConfig, {"data": path, "repo": repo, **options}, "push"))


@takes_options(PullConfig)
def pull(repo: str, out: AnyPath, **options: Any) -> Pulled:
    """Download a dataset that `push` uploaded, and check every shard; called again, resume it.

    Args:
        repo: the dataset on the Hub.
        out: the dataset directory to write.
        options: those of `spec-data pull`, listed below.

    Returns:
        What was downloaded.

    Raises:
        MissingError: no such repository or revision.
        DatasetError: the repository holds no dataset of spec-data, or a shard is damaged.
        ConfigError: `out` holds something else. RunError: the Hub cannot be reached.
    """
    return run_pull(from_keywords(PullConfig, {"repo": repo, "out": out, **options}, "pull"))
