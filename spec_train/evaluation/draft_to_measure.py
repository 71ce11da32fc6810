"""The draft that `eval` measures: a published one may leave its embedding or layers to the target.

In: the options of `eval`. Out: the draft. What its files lack comes from --data, or from --target.
"""

from pathlib import Path

from spec_data.models.resolve import cached_model, local_directory
from spec_data.models.shapes import block_count
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_train.drafts import Draft, load_draft
from spec_train.formats.draft_files import read_config
from spec_train.formats.forms import is_own_form
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.options.command_options import EvalConfig


def draft_to_measure(config: EvalConfig, folder: Path) -> Draft:
    """Read the draft in `folder`, of any program.

    Raises:
        As `load_draft`, and for a dataset or target that cannot be read.
    """
    own = is_own_form(read_config(folder))
    facts = None if own else _facts_of(config)
    return load_draft(folder, facts, accept_edited=config.accept_edited)


def _facts_of(config: EvalConfig) -> TargetFacts | None:
    if config.data is not None:
        dataset = HiddenStatesDataset(config.data)
        tensors = load_head_tensors(dataset.path)
        return TargetFacts(
            num_layers=block_count(dataset.target_config()),
            embedding=tensors["embed_tokens"],
            head=tensors["lm_head"],
        )
    if config.target is not None:
        found = local_directory(config.target) or cached_model(config.target)
        return None if found is None else read_target(found, config.target)
    return None
