"""Let the target on this machine answer: load it, and choose how its requests are batched."""

import logging
from typing import Any

from spec_data.models.devices import usable_device
from spec_data.models.loading import load_model
from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.continuous_batches import ContinuousBatches, ContinuousBatchingError
from spec_data.regeneration.conversations import Reading
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.regeneration.local_target import LocalTarget
from spec_data.regeneration.padded_batches import PaddedBatches

logger = logging.getLogger(__name__)


class LocalAnswers:
    """The answers of a local target. Weights are loaded by `run`.

    Raises:
        MissingError, TargetError, ConfigError: there is no such model, or no such device.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        usable_device(config.device)  # before anything that takes long
        self._config = config
        self._target = LocalTarget(config)

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        facts, config = self._target.facts, self._config
        return {
            "backend": "local",
            "target": {k: v for k, v in facts["target"].items() if k != "name"},
            "target_name": facts["target"]["name"],
            "tokenizer": facts["tokenizer"],
            "dtype": config.dtype,
            "attn": config.attn,
        }

    def run(self, reading: Reading, journal: Journal, ledger: Ledger) -> None:
        """Answer every turn that the journal does not hold.

        Raises:
            RunError: the device is out of memory, or the disk is full.
            ContinuousBatchingError: --batching continuous does not work for this target.
        """
        config = self._config
        model = load_model(
            str(self._target.directory),
            dtype=config.dtype,
            device=config.device,
            attn=config.attn,
            trust=config.trust_remote_code,
        )
        continuous = config.batching == "continuous" or (
            config.batching == "auto" and model.device.type == "cuda"
        )
        if continuous:
            try:
                ContinuousBatches(model, self._target, config).run(reading, journal, ledger)
                return
            except ContinuousBatchingError as error:
                if config.batching == "continuous" or ledger.answers:
                    raise
                logger.warning("warning: %s. Going on with padded batches", error)
                ledger.restart()
        PaddedBatches(model, self._target, config).run(reading, journal, ledger)
