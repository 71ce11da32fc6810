"""One replica of the target as an actor of Ray. This module does not import Ray itself."""

import logging
import threading
from pathlib import Path
from typing import Any

import torch

from spec_data.generation.explained_failures import explained_failures
from spec_data.generation.plan import load_plan
from spec_data.generation.replica import Replica
from spec_data.generation.setup import data_settings, set_up, settings
from spec_data.generation.status import FactsWriter
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.follow import WORK
from spec_data.shards.resumable import differing_settings

DRIVER = "0/1"
"""The worker whose lock the driver holds for all replicas."""


class RayReplica:
    """A copy of the target that captures the units that the driver hands it.

    Its methods run in threads: the shard of one unit is written while the next one is captured.
    """

    def __init__(self, options: dict[str, Any], number: int, threads: int) -> None:
        """Take the options of the run; nothing is loaded yet, so that a constructor never fails."""
        self.config = GenerateConfig(**options)
        self.out = Path(self.config.out)
        self.name = f"ray-{number}"
        self.threads = threads
        self._guard = threading.Lock()
        self._replica: Replica | None = None
        self._facts: FactsWriter | None = None

    def prepare(self) -> list[str]:
        """Load the target and prove it; return what was logged on the way.

        Raises:
            SpecDataError: as `Replica`; or this machine has another target or other versions.
        """
        lines: list[str] = []
        with self._guard, _collected(lines), explained_failures(self.out):
            torch.set_num_threads(self.threads)
            setup, plan = set_up(self.config), load_plan(self.out / WORK)
            corpus = {"corpus": plan.settings["corpus"]}
            ignored = {name: plan.settings[name] for name in ("max_shard_size",)}
            own = settings(setup, []) | corpus | ignored
            changed = differing_settings(data_settings(plan.settings), data_settings(own))
            if changed:
                raise ConfigError(
                    f"the machine of replica {self.name} differs from that of the driver:\n  "
                    + "\n  ".join(changed)
                )
            self._facts = FactsWriter(self.out, plan, self.name, DRIVER)
            try:
                self._replica = Replica(setup, plan, self.out)
            except BaseException as error:
                self._facts.end(error)
                raise
        return lines

    def capture(self, unit: int) -> int:
        """Capture a unit and write its shard and its record; return the bytes written.

        Raises:
            RunError: broken states, a full disk or a full device.
        """
        replica, facts = self._replica, self._facts
        assert replica is not None and facts is not None, "prepare comes first"
        with explained_failures(self.out):
            with self._guard:
                facts.begin(unit)
                captured = replica.capture(unit, facts.add)
            written = replica.finish(unit, captured)
        facts.finish(unit, written)
        return written

    def close(self) -> None:
        """Say in the file of this process that it ends."""
        if self._facts is not None:
            self._facts.end()


class _collected(logging.Handler):
    """Collect the log lines of this project in a list while the block runs."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())

    def __enter__(self) -> "_collected":
        self._logger = logging.getLogger("spec_data")
        self._before = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
