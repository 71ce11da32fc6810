"""A proven target that captures units, out of memory in forwards of half as many tokens.

A capture runs for hours, often beside other programs. Where one of them takes memory, the units at
hand are captured again with fewer tokens per forward, and so are all after them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from spec_data.capture.backend import TargetBackend
from spec_data.generation.batch_size import fewer_tokens, in_memory
from spec_data.generation.capture import CapturedUnit, capture_units
from spec_data.generation.plan import Plan
from spec_data.generation.proof import check_running, prepare_capture
from spec_data.generation.setup import Setup
from spec_data.models.devices import is_memory_error, memory_error_text


class UnitCapture:
    """Captures units of a plan with a target that is proven here, or was; see `prepare_capture`.

    Attributes:
        settings: how units are captured from now on.
    """

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        target: TargetBackend,
        out: Path,
        share: Callable[[], bool] = lambda: True,
    ) -> None:
        self._proven = setup, plan, target, out
        self._plan, self._target = plan, target
        self.settings = prepare_capture(*self._proven, share)

    def capture(
        self, units: Iterable[int], on_tokens: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[tuple[int, CapturedUnit]]:
        """Yield units as `capture_units` does; tokens that are captured again count once.

        Raises:
            RunError: broken states; or not even one row of a batch fits in memory; or the states
                of smaller batches differ by more than rounding.
        """
        source, begun, again = iter(units), list[int](), list[int]()
        told, done, finished = 0, 0, 0  # tokens: told to `on_tokens`, captured, in finished units

        def next_units() -> Iterator[int]:
            for unit in chain(again, source):
                begun.append(unit)
                yield unit

        def count(tokens: int) -> None:
            nonlocal told, done
            done += tokens
            if done > told:
                on_tokens(done - told)
                told = done

        while True:
            given = self._target, self._plan, next_units(), self.settings, count
            try:
                for unit, captured in capture_units(*given):
                    begun.remove(unit)
                    finished += self._plan.unit_set_tokens([unit])
                    yield unit, captured
                return
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                problem = memory_error_text(error)
            # outside the handler, which keeps the tensors of the forward
            self._halve(problem)
            again, begun, done = begun, [], finished

    def _halve(self, problem: str) -> None:
        """Go on with fewer tokens per forward, whose states are proven to be the same."""
        settings = self.settings
        given = self._target, self._plan, settings.form, settings.columns
        size = fewer_tokens(*given, settings.batch_tokens, problem)
        _, size = in_memory(lambda size: check_running(*self._proven, size), *given, size)
        self.settings = replace(settings, batch_tokens=size)
