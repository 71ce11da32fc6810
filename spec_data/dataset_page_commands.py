"""The commands `spec-data report` and `spec-data preview`. Heavy imports wait until one runs."""

import argparse

from spec_data.options.dataset_page_options import PreviewConfig, ReportConfig, named_place
from spec_data.shards.urls import scheme_of
from spec_data.terminal.config import as_flags, resolve
from spec_data.terminal.console import say_next
from spec_data.terminal.paths import check_file_to_write

_REPORT = """\
Write one HTML page of a dataset: bytes by column and their measured error, lengths, what was left
out, packing, agreement with the target, norms of the states, and its documents token by token:
supervised tokens, turns, special tokens, the target's first choice and its entropy. The file needs
no network and no other file; it contains texts of the dataset."""
_PREVIEW = """\
Write one HTML page of a corpus before any GPU time: the documents that `generate` would capture,
token by token, with the supervised ones marked; and what would be left out, by reason. It needs the
tokenizer of the target, and no weights."""
_PREVIEW_EXAMPLES = """\
examples:
  spec-data preview --corpus chats.jsonl --target Qwen/Qwen3-8B
  spec-data preview --corpus chats.jsonl --target Qwen/Qwen3-8B --mask last-turn --limit 1000"""

PAGE_COMMANDS = (
    ("report", ReportConfig, "DIR", "write a page of a dataset", _REPORT, ""),
    (
        *("preview", PreviewConfig, "--corpus SRC [SRC ...] --target MODEL"),
        *("write a page of a corpus, before capture", _PREVIEW, _PREVIEW_EXAMPLES),
    ),
)
"""Name, options, usage, short help, description and epilog of each command."""


def _report(args: argparse.Namespace) -> int:
    """Run `report` and return its exit code."""
    config = resolve(ReportConfig, args)
    out = report_file(config)
    check_file_to_write("--out", out)
    from spec_data.pages.html_page import write_page
    from spec_data.report import draft_to_fit
    from spec_data.reports.dataset_page import dataset_page

    print(f"written: {write_page(out, dataset_page(config))}")
    draft, run = draft_to_fit(config.data)
    say_next("spec-train", "fit", draft, "--data", config.data, "--out", run)
    return 0


def report_file(config: ReportConfig) -> str:
    """Return the file that `report` writes."""
    if config.out is not None:
        return config.out
    place = named_place(config.data)
    return f"{place.name if scheme_of(config.data) else place}.html"


def _preview(args: argparse.Namespace) -> int:
    """Run `preview` and return its exit code."""
    config = resolve(PreviewConfig, args)
    check_file_to_write("--out", config.out)
    from spec_data.pages.html_page import write_page
    from spec_data.report import counts_text
    from spec_data.reports.preview_page import preview_page, read_preview

    found = read_preview(config)
    print(counts_text(vars(found.plan.counts), found.plan.tokens))
    print(f"written: {write_page(config.out, preview_page(config, found))}")
    say_next("spec-data", "estimate", *as_flags(config.as_generate()))
    return 0


PAGE_FUNCTIONS = {"report": _report, "preview": _preview}
"""What each command calls."""
