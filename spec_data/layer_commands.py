"""The command `spec-data add-layers`. Heavy imports wait until it runs."""

import argparse
import dataclasses

from spec_data.options.layer_options import AddLayersConfig
from spec_data.terminal.config import as_flags, resolve
from spec_data.terminal.console import say_next

_ADD = """\
Capture further layers of a dataset's target, and keep what is stored: the new layers become one
more file beside each shard. The target must be the one that the dataset was captured with, by its
files and by the states that it computes: stored states of sampled documents are compared with new
ones. The tokens are those that are stored; no corpus is read. Stop it whenever you like: the same
command resumes. No `fit` may be running on the dataset meanwhile."""
_EXAMPLES = """\
examples:
  spec-data add-layers data/qwen3-8b --target Qwen/Qwen3-8B --layers 7,9 --dry-run
  spec-data add-layers data/qwen3-8b --target Qwen/Qwen3-8B --for dspark --out data/both"""


def _add_layers(args: argparse.Namespace) -> int:
    config = resolve(AddLayersConfig, args)
    from spec_data.added_layers.run import add_layers, layer_sizes
    from spec_data.report import dataset_text

    if config.dry_run:
        print(layer_sizes(config))
        say_next("spec-data", "add-layers", *as_flags(dataclasses.replace(config, dry_run=False)))
        return 0
    print(dataset_text(add_layers(config)))
    say_next("spec-data", "verify", config.out or config.data, "--target", config.target)
    return 0


LAYER_COMMANDS = (
    (
        *("add-layers", AddLayersConfig, "DIR --target MODEL --layers IDS", "capture more layers"),
        *(_ADD, _EXAMPLES),
    ),
)
"""Name, options, usage, one line, description and examples."""

LAYER_FUNCTIONS = {"add-layers": _add_layers}
"""What it calls."""
