"""Calls of the Hub's client, and its errors as ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spec_data.shards.errors import ConfigError, MissingError, RunError, SpecDataError

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_OF_HTTP = ("httpx", "httpcore", "requests")  # and their next major releases


def hub() -> HfApi:
    """Return the client of the Hub (of HF_ENDPOINT, where it is set)."""
    return HfApi(library_name="spec-data")


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of the client into ours.

    Raises:
        ConfigError: a bad name, or no right to do this. MissingError: no such repository.
        RunError: the Hub cannot be reached, or refuses.
    """
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{repo}: not the name of a repository: {error}") from None
    except LocalTokenNotFoundError:
        raise ConfigError(f"{repo}: this needs an account; {_LOG_IN}") from None
    except RevisionNotFoundError:
        raise MissingError(f"{repo}: no such revision") from None
    except RepositoryNotFoundError:
        raise MissingError(
            f"{repo}: no such dataset on the Hub, or it is private: {_LOG_IN}"
        ) from None
    except SpecDataError:
        raise
    except Exception as error:  # of several libraries: no network, a full disk, a broken upload
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise ConfigError(f"{repo}: the Hub does not allow it; {_LOG_IN}") from None
        library = type(error).__module__.partition(".")[0]
        if not (isinstance(error, OSError | RuntimeError) or library.startswith(_OF_HTTP)):
            raise
        (first, *_) = [*str(error).strip().splitlines(), type(error).__name__]
        raise RunError(f"{repo}: {first}; run the same command again to resume") from None
