"""Find the directory of a model: one on this machine, one of the Hub, or one of its local cache."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.shards.path_kinds import Kind, expect, like_a_path

_WEIGHTS = "*.safetensors"
_COPIES = ["consolidated*.safetensors", "original/*"]  # the same weights in another program's form
_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def resolve_model(
    name: str, revision: str | None = None, weights: bool = True
) -> tuple[Path, str | None]:
    """Return the local directory of a model directory or Hub id, and the Hub commit (or None).

    Without `weights`, only the small files of a Hub id are downloaded.

    Raises:
        MissingError: `name` is no model directory, and neither the Hub nor its local cache has it.
        ConfigError: a `revision` of a local directory.
    """
    path = local_directory(name)
    if path is not None:
        if revision is not None:
            raise ConfigError(
                f"--revision {revision}: --target {name} is a directory on this machine and has no "
                "revisions; leave --revision out, or pass the model's Hub id"
            )
        return path, None
    files = [f for f in _FILES if weights or f != _WEIGHTS]
    try:
        snapshot = snapshot_download(
            name, revision=revision, allow_patterns=files, ignore_patterns=_COPIES
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MissingError(
            f"--target {name}: not a directory here, and not available from the Hub: {reason}"
        ) from None
    return Path(snapshot), Path(snapshot).name


def local_directory(name: str) -> Path | None:
    """Return the model directory `name`, or None if the name can only be a Hub id.

    Raises:
        MissingError: `name` is empty, or a path at which no target is.
    """
    if not name.strip():
        raise MissingError("--target is empty; pass a model directory or a Hub id")
    path = Path(name).expanduser()
    if not path.exists() and not like_a_path(name):
        return None
    expect(path if name.startswith("~") else name, Kind.TARGET, "--target")
    return path


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """Return the directory of a Hub id in the local cache, without any download; None if absent.

    Files other than config.json may be missing there.
    """
    try:
        path = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
    return path if (path / "config.json").is_file() else None
