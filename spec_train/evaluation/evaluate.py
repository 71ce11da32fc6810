"""`spec-train eval`: measure a draft on a dataset, against its target, or both.

The acceptance length comes from real decoding if a target is given, otherwise from simulated
decoding on the dataset; it is None if there was nothing to measure. The evaluation fails if greedy
output differs from plain decoding by more than rounding, or if no prompt was answered.
"""

import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_data import __version__
from spec_data.corpus.prompt_overlap import Grams, add_prompt
from spec_data.corpus.template import Template
from spec_data.models.devices import compute_dtype, usable_device
from spec_data.models.families import block_count
from spec_data.models.resolve import cached_model, local_directory
from spec_data.pages.page import write_page
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import write_atomically
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_train.drafts import Draft, load_draft
from spec_train.evaluation.on_dataset import check_fit, evaluate_data
from spec_train.evaluation.on_target import (
    check_draft,
    evaluate_target,
    find_target,
    load_target,
)
from spec_train.evaluation.paired_decoding import Decoding, PlainResponses, stop_ids
from spec_train.evaluation.prompt_batches import batch_width
from spec_train.evaluation.prompts import read_prompts
from spec_train.evaluation.run_record import read_run
from spec_train.evaluation.same_target import (
    compare_with_trained,
    identity_of,
    kwargs_for,
    prompt_kwargs,
    system_warnings,
    trained_identity,
)
from spec_train.evaluation.speed_model import fastest, sweep_line
from spec_train.evaluation.trained_prompts import find_trained, prompt_facts, prompt_warnings
from spec_train.formats.draft_files import read_config
from spec_train.formats.forms import is_own_form
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.reports.results import evaluations
from spec_train.reports.run_page import report_page, short_names, warn_of_page
from spec_train.simulation.train_serve_gap import train_serve_gap, uncut_length
from spec_train.training.stored import resolve_draft_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What is measured on a dataset: which documents, with which mask policy (None: its own)."""

    data: str
    split: str = "auto"
    mask: str | None = None


def measure(
    given: str | Path,
    documents: Documents | None,
    decoding: Decoding | None,
    *,
    draft_tokens: list[int],
    limit: int = 0,
    confidence_threshold: float = 0.0,
    dtype: str = "auto",
    device: str = "auto",
    accept_edited: bool = False,
) -> dict[str, Any]:
    """Evaluate a draft on a dataset, by real decoding, or both; return all metrics.

    Args:
        given: a run, a checkpoint or a draft directory.
        documents, decoding: what is measured; None: not that.
        draft_tokens: how many are drafted per verification, ascending; 0: as the draft was trained.
            The metrics are those of the last one, the others are compared with it.
        limit: prompts of each set, and documents, at most; 0: all.
        confidence_threshold: end the drafts before the first one with less confidence; 0: never.
        dtype, device: of target and draft. accept_edited: also a draft that differs from its seal.

    Raises:
        SpecDataError: draft, dataset, target or prompts do not exist or do not match.
    """
    folder = resolve_draft_dir(given)
    run = read_run(Path(given), folder)
    where = usable_device(device)
    target = None if decoding is None else decoding.target
    data = None if documents is None else documents.data
    draft = draft_to_measure(folder, data, target, accept_edited).eval()
    warnings: list[str] = []
    if data is not None:  # report a mismatch before the target is loaded
        _warn(warnings, check_fit(draft, HiddenStatesDataset(data)))
    if confidence_threshold:
        _set_threshold(draft, confidence_threshold, folder)
    depths = [depth or draft.depth for depth in draft_tokens]
    depth = depths[-1]
    if draft.max_depth is not None and depth > draft.max_depth:
        raise ConfigError(
            f"--draft-tokens {depth}: {folder} drafts at most {draft.max_depth} tokens"
        )
    report: dict[str, Any] = {"acceptance_length": None, "draft": str(folder), "warnings": warnings}
    if decoding is not None:
        report |= _decode(decoding, draft, where, dtype, depths, limit, run, data, warnings)
    else:
        draft.to(where, compute_dtype(dtype, where))
    if documents is not None:
        report["data"] = evaluate_data(
            draft,
            Path(documents.data),
            split=documents.split,
            run=run,
            depth=depth,
            limit=limit,
            mask=documents.mask,
        )
        simulated = report["data"]["walk"]["acceptance_length"]
        if decoding is None:
            report["acceptance_length"] = simulated
        else:
            known = None not in (simulated, report["acceptance_length"])
            report["gap"] = simulated - report["acceptance_length"] if known else None
    _warn(warnings, _unmeasured(report) + _parted(report))
    options = {"limit": limit, "confidence_threshold": confidence_threshold}
    for record in (documents, decoding):
        options |= asdict(record) if record is not None else {}
    return report | _setting(draft, where, depth) | {"options": options}


def _decode(
    decoding: Decoding,
    draft: Draft,
    device: torch.device,
    dtype: str,
    depths: list[int],
    limit: int,
    run: dict[str, Any] | None,
    data: str | None,
    warnings: list[str],
) -> dict[str, Any]:
    """Read the prompts, load the target, check that everything matches, and decode.

    The metrics are those of the last of `depths`; `sweep` has some of all. Moves the draft to the
    target's device and dtype. Appends to `warnings`.
    """
    directory, tokenizer = find_target(decoding)
    trained = trained_identity(draft.config.origin, run)
    usual = prompt_kwargs(trained)
    kwargs, about = kwargs_for(decoding.chat_template_kwargs, usual, tokenizer)
    _warn(warnings, about)
    template = Template(tokenizer, kwargs, apart=True)
    prompts = read_prompts(decoding.prompts, template, limit)
    chats = [p.record.messages for p in prompts if p.record.messages is not None]
    _warn(warnings, system_warnings(trained, chats))
    grams = Grams()
    for prompt in prompts:
        add_prompt(grams, prompt.record, template)
    overlap = find_trained(grams, run, Path(data) if data else None)
    _warn(warnings, prompt_warnings(prompts, overlap))
    model = load_target(decoding, directory, device, dtype, trained.get("rope_factors"))
    _warn(warnings, check_draft(draft, model))
    draft.to(device, model.dtype)
    identity = identity_of(directory, tokenizer, model.dtype, decoding.trust_remote_code)
    compared = compare_with_trained(trained, identity, tokenizer, kwargs=prompts.kwargs)
    _warn(warnings, [f"{line}; expect lower acceptance" for line in compared.texts])
    if compared.not_compared:
        log.info("not compared with the draft's training: %s", compared.not_compared)
    stop = stop_ids(model, tokenizer)
    width = batch_width(decoding, model, prompts)
    plain = PlainResponses.of(model, identity, decoding.max_new_tokens, stop, width)
    sweep: list[dict[str, Any]] = []
    different: list[str] = []
    for depth in depths:
        metrics, responses = evaluate_target(
            draft, model, tokenizer, decoding, prompts, plain, depth=depth, width=width
        )
        sweep.append(sweep_line(metrics))
        different += metrics["different"] or []
    metrics |= {"sweep": sweep, "best_draft_tokens": fastest(sweep)}
    metrics["different"] = None if metrics["different"] is None else different
    if decoding.save_responses is not None:
        lines = "".join(json.dumps(response) + "\n" for response in responses)
        write_atomically(Path(decoding.save_responses), lines)
    facts = {"target": decoding.target, "chat_template_kwargs": kwargs}
    facts |= {"not_compared": list(compared.unknown)} | prompt_facts(prompts, overlap)
    return facts | metrics


def draft_to_measure(
    folder: Path, data: str | None, target: str | None, accept_edited: bool = False
) -> Draft:
    """Read the draft in `folder`, of any program.

    A published draft may leave its embedding or layers to the target: what its files lack comes
    from the dataset `data`, or from `target`.

    Raises:
        As `load_draft`, and for a dataset or target that cannot be read.
    """
    facts = None if is_own_form(read_config(folder)) else _facts_of(data, target)
    return load_draft(folder, facts, accept_edited=accept_edited)


def _facts_of(data: str | None, target: str | None) -> TargetFacts | None:
    if data is not None:
        dataset = HiddenStatesDataset(data)
        tensors = load_head_tensors(dataset.path)
        return TargetFacts(
            num_layers=block_count(dataset.target_config()),
            embedding=tensors["embed_tokens"],
            head=tensors["lm_head"],
        )
    directory = None if target is None else local_directory(target) or cached_model(target)
    return None if directory is None else read_target(directory, target)


def _set_threshold(draft: Draft, threshold: float, folder: Path) -> None:
    """Let a draft that forecasts its acceptance stop early."""
    try:
        draft.stop_below(threshold)
    except ConfigError as error:
        raise ConfigError(
            f"--confidence-threshold {threshold}: {folder} {error}; leave it out"
        ) from None


def _warn(warnings: list[str], more: list[str]) -> None:
    for warning in more:
        log.warning("warning: %s", warning)
    warnings += more


def _setting(draft: Draft, device: torch.device, depth: int) -> dict[str, Any]:
    """Return the device, dtype, threads and versions of the measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "draft_tokens": depth,
        "dtype": str(draft.embed_tokens.weight.dtype).removeprefix("torch."),
        "device": f"{device} {name}".strip(),
        "threads": torch.get_num_threads(),
        "versions": {
            "spec-data": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _parted(report: dict[str, Any]) -> list[str]:
    """Return a warning if the length of training and that of serving differ clearly."""
    data = report.get("data")
    if data is None:
        return []
    walk = data["walk"]
    text = train_serve_gap(
        data["teacher_forced"], uncut_length(walk["accept_rate"]), walk["rounds"]
    )
    return [text] if text else []


def _unmeasured(report: dict[str, Any]) -> list[str]:
    """Return warnings for metrics that are null because there was nothing to measure."""
    warnings = []
    if "target" in report and report["responses"] and not report["rounds"]:
        warnings.append(
            "no draft was verified: every response ended with its first token, which the prefill "
            "returns. Raise --max-new-tokens, or use prompts with longer answers"
        )
    if "data" in report and not report["data"]["walk"]["rounds"]:
        warnings.append(
            "nothing was verified: no measured document has two supervised tokens in a row after "
            "its first token. Measure more documents, or documents with longer answers"
        )
    return warnings


def require_sound(report: dict[str, Any]) -> None:
    """Refuse metrics that mean nothing.

    Raises:
        RunError: greedy decoding with the draft differs from the target alone, or no prompt could
            be answered.
    """
    if "target" in report and not report["responses"]:
        raise RunError(
            f"nothing was measured: none of {report['prompts']} prompts leaves room for an answer "
            "in the target's context; use shorter prompts"
        )
    if different := report.get("different"):
        raise RunError(
            f"greedy decoding with the draft differs from the target alone in {len(different)} of "
            f"{report['responses']} responses, ties excluded:\n  " + "\n  ".join(different[:5])
        )


def write_eval_page(file: Path, draft: Path, report: dict[str, Any]) -> None:
    """Write the page of an evaluation; a failure is a warning: the metrics are worth more."""
    try:
        (name,) = short_names([draft])
        page = report_page([], evaluations(report, "this evaluation", name))
        log.info("page       %s", write_page(file, page).path)
    except Exception as error:
        warn_of_page(file, error)
