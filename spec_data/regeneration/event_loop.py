"""Run a coroutine to its end, also where a notebook runs an event loop in the same thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; an interrupt cancels it and waits for its clean-up.

    Raises:
        BaseException: whatever the coroutine raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return _in_a_thread(work)


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    found: list[T] = []
    errors: list[BaseException] = []
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def run() -> None:
        try:
            found.append(asyncio.run(cancellable()))
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="servers", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        for stop in cancel:
            stop()
        thread.join()
        raise
    if errors:
        raise errors[0]
    return found[0]
