"""A draft in memory, to the Hugging Face Hub."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_data.shards.errors import ConfigError


def push_folder(
    repo_id: str, write: Callable[[Path], None], token: str | bool | None, **commit: Any
) -> str:
    """Upload what `write` writes into a folder, in one commit; return the URL of the commit.

    `commit` has `private` of the repository, and arguments of `HfApi.upload_folder`.

    Raises:
        ConfigError: not the name of a repository, or no account.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    api, private = HfApi(token=token, library_name="spec-train"), commit.pop("private")
    try:
        with TemporaryDirectory() as folder:
            write(Path(folder))
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **commit).commit_url)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id}: not the name of a repository: {error}") from None
    except LocalTokenNotFoundError:
        raise ConfigError(
            f"{repo_id}: this needs an account; log in with `hf auth login`, or set HF_TOKEN"
        ) from None
