"""`spec-train compare`: is one draft accepted longer than another, on the same prompts?"""

from typing import TYPE_CHECKING

from spec_data.terminal.command import command
from spec_data.terminal.types import Count, File

if TYPE_CHECKING:
    from spec_train.evaluation.compare import ComparedDrafts


@command
def compare(first: File, second: File, *, seed: Count = 0) -> "ComparedDrafts":
    """Compare two evaluations by real decoding, prompt by prompt.

    Prints both acceptance lengths, the difference with its 95 % interval, and a p-value.

    Examples:
        spec-train eval --draft A --target MODEL --prompts prompts.jsonl --json a.json
        spec-train eval --draft B --target MODEL --prompts prompts.jsonl --json b.json
        spec-train compare a.json b.json

    Args:
        first: file of `eval --json`, of one draft.
        second: that of the other one, on equal prompts.
        seed: seed of the resamples.

    Raises:
        MissingError: a file does not exist.
        ConfigError: not evaluations with a target, or fewer than two prompts in common.
    """
    from spec_train.evaluation.compare import compare_files

    return compare_files(str(first), str(second), seed)
