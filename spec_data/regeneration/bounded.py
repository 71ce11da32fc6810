"""Clients for the requests of `openai` that hold no answer beyond its bound, and no redirect.

A server that is not ours may send without end, or little that unpacks to much. So the pieces of a
body are counted as they are unpacked; behind the bound the body ends, the connection is closed, and
the answer says that it is cut (`is_cut`). Nothing is raised: `openai` would ask again.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

LEAST = 4 << 20
"""Bytes of any answer that are read: lists of models, metrics, words of an error."""
PER_TOKEN = 4 << 10
"""Further bytes for each token that an answer may have: its text, thoughts, probabilities."""
_CUT = "spec_data.cut"
_PACKED = ("", "identity", "gzip", "deflate")
_OPTIONS: dict[str, Any] = {
    "follow_redirects": False,
    "headers": {"Accept-Encoding": "gzip, deflate"},
}


def client() -> Any:
    """Return what sends the requests of a client of openai."""
    import openai

    return openai.DefaultHttpxClient(**_OPTIONS, event_hooks={"response": [_bound]})


def async_client() -> Any:
    """Return what sends the requests of an asynchronous client of openai."""
    import openai

    return openai.DefaultAsyncHttpxClient(**_OPTIONS, event_hooks={"response": [_bound_async]})


def is_cut(response: Any) -> bool:
    """Return whether the body of a response ended at its bound."""
    return _CUT in response.extensions


def most_bytes(tokens: int) -> int:
    """Return the bytes of the largest answer of so many tokens that is read."""
    return LEAST + PER_TOKEN * tokens


def _most(response: Any) -> int:
    """Return the bytes of the largest body of a response that is read, by what was asked."""
    if response.headers.get("content-encoding", "").lower() not in _PACKED:
        return 0  # it was not asked for, and a piece of it may unpack to gigabytes
    try:
        tokens = json.loads(response.request.content).get("max_tokens")
    except (ValueError, AttributeError):  # it has no body
        tokens = None
    return most_bytes(tokens if isinstance(tokens, int) else 0)


def _bound(response: Any) -> None:
    whole, most = response.iter_bytes, _most(response)

    def cut(*args: Any) -> Iterator[bytes]:
        size = 0
        with contextlib.closing(whole(*args)) as pieces:
            for piece in pieces:
                size += len(piece)
                if size > most:
                    response.extensions[_CUT] = most
                    response.close()
                    return
                yield piece

    response.iter_bytes = cut


async def _bound_async(response: Any) -> None:
    whole, most = response.aiter_bytes, _most(response)

    async def cut(*args: Any) -> AsyncIterator[bytes]:
        size = 0
        async with contextlib.aclosing(whole(*args)) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    response.extensions[_CUT] = most
                    await response.aclose()
                    return
                yield piece

    response.aiter_bytes = cut
