"""The metrics of a run in TensorBoard, wandb and the other trackers of accelerate.

`metrics.jsonl` always has every metric; trackers receive the numbers of the same lines.
"""

import logging
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError

log = logging.getLogger(__name__)

PROJECT = "spec-train"


class Tracking:
    """The trackers of one run, on rank 0."""

    def __init__(self, names: str, folder: Path, cpu: bool) -> None:
        """Start the trackers of a comma-separated list, for the run in `folder`.

        Raises:
            ConfigError: a tracker is unknown, or its package is not installed.
        """
        from accelerate import Accelerator
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        wanted = [name.strip() for name in names.split(",") if name.strip()]
        available = {str(name) for name in get_available_trackers()}
        for name in wanted:
            if name not in LOGGER_TYPE_TO_CLASS:
                known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
                raise ConfigError(f"--track {name}: unknown; known: {known}")
            if name not in available:
                raise ConfigError(f"--track {name}: not installed; run: pip install {name}")
        self._accelerator = Accelerator(
            cpu=cpu, mixed_precision="no", log_with=wanted, project_dir=str(folder)
        )
        run = {"wandb": {"name": folder.name, "dir": str(folder)}}
        self._accelerator.init_trackers(PROJECT, init_kwargs=run)
        log.info("metrics also go to %s", ", ".join(wanted))

    def line(self, line: dict[str, Any]) -> None:
        """Send the numbers of a line of metrics, named <split>/<name>."""
        numbers = {
            f"{line['split']}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._accelerator.log(numbers, step=line["step"])

    def close(self) -> None:
        """Finish all trackers."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
