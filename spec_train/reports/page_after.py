"""Pages at the end of `fit` and `eval`. A page that cannot be written is a warning, never an error.

At the end of `fit` the best draft is also walked over a few held-out documents, so that the page
shows where drafts are accepted, and the tokens. This costs less than a step of training.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from spec_data.devices import compute_dtype, usable_device
from spec_data.pages.html_page import write_page
from spec_data.paths import check_file_to_write
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import write_atomically
from spec_train.drafts import load_draft
from spec_train.evaluation.on_dataset import evaluate_data
from spec_train.evaluation.report import measure
from spec_train.evaluation.run_record import read_run
from spec_train.options import EvalConfig, FitConfig
from spec_train.report_options import AUTO, NONE, SAMPLES
from spec_train.reports.names import short_names
from spec_train.reports.run_page import PAGE, report_page, write_report
from spec_train.reports.stored_figures import SAMPLE, evaluation_of, is_run
from spec_train.training import setup
from spec_train.training.result import FitResult
from spec_train.training.stored import resolve_draft_dir

log = logging.getLogger(__name__)

EVAL_PAGE = "eval.html"
MOST_TOKENS = 4096
"""Tokens of the held-out sample at the end of `fit`, at most: about those of one step."""


def fit(draft_name: str, config: FitConfig, options: Any) -> FitResult:
    """Fit a draft (see `training.setup.fit`), then write report.html into the run directory.

    Raises:
        As `training.setup.fit`.
    """
    result = setup.fit(draft_name, config, options)
    if os.environ.get("RANK", "0") == "0":
        _after_fit(config, result)
    return result


def _after_fit(config: FitConfig, result: FitResult) -> None:
    """Write the page of a run, with a fresh sample if the run has ended."""
    run = result.directory
    # the run is saved, and worth more than its page: no error ends the command
    try:
        if result.finished and result.best is not None and not _is_fresh(run, result.best):
            _write_sample(config, run, result.best)
    except (MissingError, DatasetError) as error:  # such as data that --follow-keep has deleted
        log.info("no sample of drafted tokens for the page: %s", error)
    except Exception as error:
        _warn(f"{run / SAMPLE} was not written", error)
    try:
        log.info("page       %s", write_report([run]))
    except Exception as error:
        _warn(f"{run / PAGE} was not written", error)


def _warn(what: str, error: Exception) -> None:
    log.warning("warning: %s: %s: %s", what, type(error).__name__, error)
    log.debug("the page failed", exc_info=error)


def _is_fresh(run: Path, best: dict[str, Any]) -> bool:
    """Return whether the sample of a run is of its best draft, which has not changed since."""
    try:
        stamp = json.loads((run / SAMPLE).read_text(encoding="utf-8"))["best"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(stamp == _stamp(run, best))


def _stamp(run: Path, best: dict[str, Any]) -> dict[str, Any]:
    return {"step": best["step"], "written_ns": resolve_draft_dir(run).stat().st_mtime_ns}


def _write_sample(config: FitConfig, run: Path, best: dict[str, Any]) -> None:
    """Walk the best draft over a few held-out documents of every dataset; write acceptance.json.

    Without documents or data there is no sample, and an older one is deleted.
    """
    file = run / SAMPLE
    file.unlink(missing_ok=True)
    folder = resolve_draft_dir(run)
    facts = read_run(run, folder)
    device = usable_device(config.device)
    if facts is None:
        return
    sources = facts["sources"]
    draft = load_draft(folder, accept_edited=config.accept_edited).eval()
    draft.to(device, compute_dtype(config.dtype, device))
    found = [
        evaluate_data(
            draft,
            source,
            split="validation",
            run=facts,
            depth=draft.depth,
            walk_only=True,
            samples=max(1, SAMPLES // len(sources)),
            most_tokens=max(1, MOST_TOKENS // len(sources)),
        )
        for source in sources
    ]
    write_atomically(file, json.dumps({"best": _stamp(run, best), "data": found}) + "\n")


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Evaluate (see `evaluation.report.measure`) and write the page of --report.

    Raises:
        As `evaluation.report.measure`. ConfigError: the file of --report cannot be written.
    """
    file = page_of(config)
    if file is not None and config.report != AUTO:
        check_file_to_write("--report", file)
    figures = measure(config)
    if file is not None:
        try:
            (name,) = short_names([Path(config.draft)])
            page = report_page([], evaluation_of(figures, "this evaluation", name))
            log.info("page       %s", write_page(file, page))
        except Exception as error:  # the figures are worth more than their page
            _warn(f"{file} was not written", error)
    return figures


def page_of(config: EvalConfig) -> Path | None:
    """Return the file that --report stands for; None: no page."""
    if config.report == NONE:
        return None
    if config.report != AUTO:
        return Path(config.report)
    if is_run(Path(config.draft)):
        return Path(config.draft) / EVAL_PAGE
    return None if config.json is None else Path(config.json).with_suffix(".html")
