"""The options of `eval` about its page."""

from spec_data.terminal.config import option

AUTO, NONE = "auto", "none"
SAMPLES = 8
"""Responses that an evaluation keeps with their drafted tokens."""


def report_option(group: str) -> str:
    """Return the field of --report."""
    return option(
        AUTO,
        help="write the figures as an HTML page: a file name; none: no page. auto: eval.html in "
        "the run directory if --draft is one, else a page beside the file of --json, else none",
        group=group,
        metavar="FILE",
    )


def markdown_option(group: str) -> str | None:
    """Return the field of --markdown."""
    return option(
        None,
        help="write the printed table, with the settings, as Markdown, such as for a model card",
        group=group,
        metavar="FILE",
    )


def samples_option(group: str) -> int:
    """Return the field of --samples."""
    return option(
        SAMPLES,
        help="responses (documents, with --data) that --json and --report keep with every drafted "
        "token, evenly spread over what is measured; 0 = none. They contain text of the prompts",
        group=group,
        metavar="N",
    )
