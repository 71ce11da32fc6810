"""The options of `spec-train eval` about sampled responses. No torch: `--help` is instant."""

from spec_data.config import option

SAMPLES = 8
"""Responses that an evaluation keeps with their drafted tokens."""


def samples_option(group: str) -> int:
    """Return the field of --samples."""
    return option(
        SAMPLES,
        help="responses (documents, with --data) that --json keeps with every drafted "
        "token, evenly spread over what is measured; 0 = none. They contain text of the prompts",
        group=group,
        metavar="N",
    )
