"""Calls of the Hub's client, and its errors as ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spec_data.shards.errors import ConfigError, MissingError, RunError, SpecDataError

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_AGAIN = "run the same command again to resume"


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
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ConfigError(f"{repo}: the Hub does not allow it; {_LOG_IN}") from None
        raise RunError(f"{repo}: the Hub refuses: {_first(error)}; {_AGAIN}") from None
    except Exception as error:  # of several libraries: no network, a full disk, a broken upload
        library = type(error).__module__.partition(".")[0]
        of_http = library.startswith(("httpx", "httpcore", "requests"))
        if isinstance(error, SpecDataError) or not (
            of_http or isinstance(error, (OSError, RuntimeError))
        ):
            raise
        raise RunError(f"{repo}: {_first(error)}; {_AGAIN}") from None


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
