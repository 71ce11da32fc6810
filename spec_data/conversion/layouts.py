"""The tools whose stored states can be read, by the name of `convert --from`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from spec_data.conversion.from_automodel import AutoModelCache
from spec_data.conversion.from_deepspec import DeepSpecCache
from spec_data.conversion.speculators import SpeculatorsFiles
from spec_data.conversion.stored_samples import Layout, TargetSizes
from spec_data.conversion.table_layout import open_modelopt, open_specforge, open_torchspec
from spec_data.generation.setup import context_length
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.options.conversion_options import ConvertConfig
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError, MissingError

_OPEN: dict[str, Callable[[Path, Sequence[int] | None, TargetSizes], Layout]] = {
    "speculators": SpeculatorsFiles,
    "specforge": open_specforge,
    "deepspec": DeepSpecCache,
    "automodel": AutoModelCache,
    "modelopt": open_modelopt,
    "torchspec": open_torchspec,
}


def open_layout(
    tool: str, path: str | Path, given: Sequence[int] | None, sizes: TargetSizes
) -> Layout:
    """Open the directory that a tool wrote.

    Args:
        tool: the name of `--from`.
        path: the directory.
        given: the ids of --stored-layers, in the counting of the tool; None: not given.
        sizes: of the target.

    Raises:
        MissingError, DatasetError: it is no such directory, has no sample, or is of a release that
            is not read.
        ConfigError, TargetError: the layers are not known, or not of this target.
    """
    if not Path(path).is_dir():
        raise MissingError(f"{path}: no such directory")
    found = _OPEN[tool](Path(path), given, sizes)
    if not len(found):
        raise MissingError(f"{path}: no sample")
    return found


# -- tool setup ------------------------------------------------------------------------------------
# From the options of `convert` to an opened layout, and to those of the dataset it becomes.


logger = logging.getLogger(__name__)

_LONGEST = 1 << 20  # tokens of a sample, where the context of the target is unknown


def opened(config: ConvertConfig) -> tuple[Layout, int]:
    """Open the source under the declared conventions; return it and the blocks of the target.

    Raises:
        MissingError, DatasetError: it is not what the tool writes.
        ConfigError, TargetError: the layers are not known, or not of this target.
    """
    if Path(config.out).resolve() == Path(config.data).resolve():
        raise ConfigError(f"--out {config.out} is the source; choose another directory")
    path, _ = resolve_model(config.target, config.revision)
    text = text_config(load_config(path, config.trust_remote_code))
    sizes = TargetSizes(blocks=text.num_hidden_layers, hidden_size=text.hidden_size)
    layout = open_layout(config.from_tool, config.data, config.layer_ids, sizes)
    if config.final_norm != "auto":
        layout.conventions = replace(layout.conventions, final_norm=config.final_norm)
    stored = layout.conventions
    logger.info(
        "%s: %d samples of %s; layers %s in its counting (%s of blocks) are %s here; the last "
        "state is %s the final norm",
        *(config.data, len(layout), layout.tool, _listed(stored.stored_layers), stored.counting),
        *(_listed(stored.layers), stored.final_norm),
    )
    return layout, sizes.blocks


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


def to_generate(config: ConvertConfig, layout: Layout) -> GenerateConfig:
    """Return the options of a `generate` that would have captured these states."""
    path, _ = resolve_model(config.target, config.revision)
    context = context_length(text_config(load_config(path, config.trust_remote_code)))
    names = (
        *("target", "out", "codec", "final", "teacher", "dtype"),
        *("device", "revision", "limit", "on_bad_row", "max_bad_rows", "max_shard_size"),
        *("on_policy", "allow_high_nll", "trust_remote_code"),
    )
    return GenerateConfig(
        corpus=(config.data,),
        layers=_listed(tuple(sorted(layout.conventions.layers))),
        max_length=context if context >= 2 else _LONGEST,
        mask="all" if config.mask == "all" else "assistant",
        **{name: getattr(config, name) for name in names},
    )
