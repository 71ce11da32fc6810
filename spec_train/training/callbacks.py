"""What a program is called for while `fit` trains, by the names of transformers' `TrainerCallback`.

A callback is any object with some of these methods. Each is called as
`on_log(args, state, control, logs=..., model=...)`: `args` are the options of the run, `state` says
how far it is, and fields of `control` may be set.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from spec_data.shards.errors import ConfigError

EVENTS = (
    *("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save"),
    "on_train_end",
)
"""What is called: after all set-up; before and after each step; with a line of metrics of training
(`logs`); with one of held-out documents, also before the first step (`metrics`); after a checkpoint
was handed to its writer; at the end, also of a run that is stopped."""


@dataclass
class TrainerState:
    """How far a run is, under the names of transformers."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    best: dict[str, Any] | None = None
    """The best draft so far: its step and its figures."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics that this process has written."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclass
class TrainerControl:
    """What a callback asks for; all but the stop is done once, in this step."""

    should_training_stop: bool = False
    """Stop after this step: it is validated and saved, and the same call goes on from there."""
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class Callbacks:
    """The callbacks of a run, in their order."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        """Take them.

        Raises:
            ConfigError: one has no method that is called, or another that never would be.
        """
        self.callbacks = [callbacks] if _methods(callbacks) else list(callbacks)
        for callback in self.callbacks:
            name = type(callback).__name__
            if isinstance(callback, type):
                raise ConfigError(
                    f"callbacks: {callback.__name__} is a class; pass {callback.__name__}()"
                )
            own = _methods(callback)
            if unknown := sorted(own - set(EVENTS)):
                raise ConfigError(
                    f"callbacks: {name} has {', '.join(unknown)}, which fit never calls; it calls "
                    + ", ".join(EVENTS)
                )
            if not own:
                raise ConfigError(f"callbacks: {name} has none of {', '.join(EVENTS)}")
        self.state, self.control = TrainerState(), TrainerControl()

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def call(self, event: str, args: Any, **more: Any) -> None:
        """Call all that have the method; what one returns is the control from then on."""
        for callback in self.callbacks:
            if event in _methods(callback):
                found = getattr(callback, event)(args, self.state, self.control, **more)
                self.control = self.control if found is None else found

    def take(self, name: str) -> bool:
        """Return whether something is asked for, and forget it."""
        asked = bool(getattr(self.control, name))
        setattr(self.control, name, False)
        return asked


def _methods(callback: Any) -> set[str]:
    """Return the names of the methods on_... that do something: those of a base class do not."""
    base = next(
        (kind for kind in type(callback).__mro__ if kind.__name__ == "TrainerCallback"), None
    )
    names = {name for name in dir(callback) if name.startswith("on_")}
    if base is None:
        return names
    return {
        name
        for name in names
        if getattr(type(callback), name, None) is not getattr(base, name, None)
    }
