"""Says that kernels are compiled: the first steps on a GPU would be a silent minute."""

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from spec_data.terminal import NOTICE
from spec_data.terminal.progress import Bar
from spec_train.attention import flex, fused

log = logging.getLogger(__name__)


@contextlib.contextmanager
def compiling_shown(bar: Bar, device: torch.device) -> Iterator[None]:
    """Show on the bar that torch compiles; say once that it began, and at the end how long it took.

    The time is no part of a step: the bar would say many times too much is left. Nothing happens on
    devices on which nothing is compiled.
    """
    if device.type not in (*flex.COMPILED, *fused.FUSED_ON):
        yield
        return
    from torch._dynamo import callback_handler as handler
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    seconds, began = 0.0, 0.0

    def graphs() -> int:
        return int(counters["stats"]["unique_graphs"] - before)

    def start(*_: object) -> None:
        nonlocal began
        if not began:
            log.log(
                NOTICE,
                "torch compiles kernels for this device: the first steps take longer "
                "(docs/gpu.md says how to keep the kernels)",
            )
        began = time.perf_counter()
        bar.set_postfix_str(f"compiling kernels, graph {graphs() + 1}")

    def end(*_: object) -> None:
        nonlocal seconds
        seconds += time.perf_counter() - began
        bar.unpause()

    handler.register_start_callback(start)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        handler.remove_start_callback(start)
        handler.remove_end_callback(end)
        if began:
            log.log(NOTICE, "%d graphs were compiled in %.0f seconds", graphs(), seconds)
