"""The checks of `--draft-config FILE`: unknown keys, and keys that describe the target."""

import logging
from typing import Any

from spec_data.console import nearest
from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import ConfigError
from spec_train.formats.known_keys import HARMLESS, KNOWN
from spec_train.options.command_options import FitConfig
from spec_train.options.draft_config_file import OPTION_KEYS, read_draft_config

log = logging.getLogger(__name__)

_OF_TARGET = ("vocab_size", "hidden_size", "target_hidden_size", "rms_norm_eps")
_COMPARED = (*_OF_TARGET, "num_target_layers", "rope_theta", "rope_scaling", "rope_parameters")
_OWN = frozenset({"spec_train", "transformer_layer_config"})


def check_keys(config: FitConfig) -> None:
    """Refuse unknown keys of the file; log those that have no effect.

    Raises:
        MissingError, ConfigError: the file cannot be read, or a key is unknown.
    """
    if config.draft_config is None:
        return
    raw = read_draft_config(config.draft_config)
    known = OPTION_KEYS | KNOWN | _OWN
    for name in raw:
        if name not in known:
            near = nearest(name, sorted(OPTION_KEYS))
            advice = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"--draft-config {config.draft_config}: unknown key {name}{advice}")
    ignored = sorted(n for n in raw if n in HARMLESS or n not in {*OPTION_KEYS, *_COMPARED})
    if ignored:
        log.info(
            "--draft-config %s: keys without effect: %s", config.draft_config, ", ".join(ignored)
        )


def check_target(config: FitConfig, draft: Any) -> None:
    """Refuse a file that describes another target than that of the fresh `draft`.

    Raises:
        ConfigError: names the key and both values; or the rope settings cannot be read.
    """
    if config.draft_config is None:
        return
    raw, own = read_draft_config(config.draft_config), draft.config
    wanted = {name: getattr(own, name) for name in _OF_TARGET}
    if hasattr(own, "num_target_layers"):
        wanted["num_target_layers"] = own.num_target_layers
    if any(name in raw for name in ("rope_theta", "rope_scaling", "rope_parameters")):
        limits = {"max_position_embeddings": own.max_position_embeddings}
        try:
            raw["rope"] = rope_parameters(limits | raw)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--draft-config {config.draft_config}: its rope settings cannot be read ({error})"
            ) from None
        wanted["rope"] = own.rope_parameters
    for name, value in wanted.items():
        if name in raw and raw[name] != value:
            raise ConfigError(
                f"--draft-config {config.draft_config}: {name} = {raw[name]} contradicts the "
                f"target of the dataset, which has {value}; remove the key, or use the dataset of "
                "that target"
            )
