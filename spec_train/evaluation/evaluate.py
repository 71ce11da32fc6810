"""`spec-train eval`: measure a draft on a dataset, against its target, or both.

The acceptance length comes from real decoding if a target is given, otherwise from simulated
decoding on the dataset; it is None if there was nothing to measure. The evaluation fails if greedy
output differs from plain decoding by more than rounding, or if no prompt was answered.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spec_data.corpus.prompt_overlap import Grams, add_prompt
from spec_data.corpus.template import Template
from spec_data.corpus.template_probes import unstopped_end
from spec_data.models.devices import compute_dtype, use_device
from spec_data.models.identify import identify
from spec_data.models.reading import load_config
from spec_data.models.resolve import resolve_model
from spec_data.models.tokenizer import load_tokenizer
from spec_data.pages.page import Page
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.identity import CONTEXTS, compare
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.serving import read_sampling
from spec_train.drafts import Draft, load_draft
from spec_train.evaluation.decoding_metrics import fastest, sweep_line
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, sample_of
from spec_train.evaluation.on_target import (
    Decoding,
    check_draft,
    evaluate_target,
    load_target,
    stop_ids,
)
from spec_train.evaluation.out_of_memory import explained_memory
from spec_train.evaluation.plain_responses import PlainResponses
from spec_train.evaluation.prompts import read_prompts
from spec_train.evaluation.run_record import RunRecord, read_run
from spec_train.evaluation.trained_prompts import (
    find_trained,
    kwargs_for,
    prompt_warnings,
    rendered_otherwise,
    sampling_warnings,
)
from spec_train.formats.draft_files import read_config
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.read import is_own_form
from spec_train.formats.target_facts import TargetFacts, dataset_target, read_target
from spec_train.reports.results import evaluations
from spec_train.reports.run_page import PAGE, leave_page, page_of, report_page, short_names
from spec_train.simulation.ranges import unseen_contexts
from spec_train.simulation.simulated_decoding import train_serve_gap, uncut_length
from spec_train.training.machine import machine_facts
from spec_train.training.run_directory import DECODED, chosen_draft_dir, resolve_draft_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What is measured on a dataset: which documents, with which mask policy (None: its own)."""

    data: str
    split: str = "auto"
    mask: str | None = None


class Warnings(list[str]):
    """The warnings of an evaluation, each logged as it comes; `begin` stands before each."""

    begin = ""

    def add(self, more: list[str], code: str = "eval") -> None:
        """Log and keep some."""
        for warning in more:
            log.warning("warning[%s]: %s%s", code, self.begin, warning)
        self.extend(f"{self.begin}{warning}" for warning in more)


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
    about: str = "",
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
        about: what warnings begin with.

    Raises:
        SpecDataError: draft, dataset, target or prompts do not exist or do not match.
    """
    folder = chosen_draft_dir(given)
    run = read_run(Path(given), folder)
    where = use_device(device)
    # a published draft may leave its embedding or layers to the target
    facts = None if is_own_form(read_config(folder)) else _facts_of(documents, decoding)
    draft = load_draft(folder, facts, accept_edited=accept_edited).eval()
    warnings = Warnings()
    warnings.begin = about
    sample = None
    if documents is not None:  # report a mismatch before the target is loaded
        warnings.add(check_fit(draft, HiddenStatesDataset(documents.data)))
        sample = sample_of(
            draft,
            Path(documents.data),
            split=documents.split,
            run=run,
            limit=limit,
            mask=documents.mask,
        )
    if confidence_threshold:
        try:
            draft.stop_below(confidence_threshold)
        except ConfigError as error:
            raise ConfigError(
                f"--confidence-threshold {confidence_threshold}: {folder} {error}; leave it out"
            ) from None
    depths = [depth or draft.depth for depth in draft_tokens]
    depth = depths[-1]
    if draft.max_depth is not None and depth > draft.max_depth:
        raise ConfigError(
            f"--draft-tokens {depth}: {folder} drafts at most {draft.max_depth} tokens"
        )
    report: dict[str, Any] = {"acceptance_length": None, "draft": str(folder), "warnings": warnings}
    if decoding is not None:
        data = None if documents is None else Path(documents.data)
        lower = {
            "--max-new-tokens": decoding.max_new_tokens,
            "--tree-tokens": decoding.tree_tokens,
        }
        with explained_memory("real decoding", lower, dtype, where):
            report |= _decode(decoding, draft, where, dtype, depths, limit, run, data, warnings)
    else:
        draft.to(where, compute_dtype(dtype, where))
    if sample is not None:
        with explained_memory("the measurement on --data", {}, dtype, where):
            report["data"] = evaluate_data(draft, sample, depth)
        simulated, real = (
            part["acceptance_length"] for part in (report["data"]["simulated"], report)
        )
        if decoding is None:
            report["acceptance_length"] = simulated
        elif not (decoding.temperature or decoding.tree_tokens):  # the simulation has neither
            report["gap"] = None if None in (simulated, real) else simulated - real
    warnings.add(_doubts(report))
    warnings.add(_unseen(draft.config.origin.get(CONTEXTS), report), "unseen")
    options = {"limit": limit, "confidence_threshold": confidence_threshold}
    for record in (documents, decoding):
        options |= asdict(record) if record is not None else {}
    return report | {
        "draft_tokens": depth,
        "dtype": str(draft.embed_tokens.weight.dtype).removeprefix("torch."),
        **machine_facts(where),
        "options": options,
    }


def trained_identity(given: str | Path) -> dict[str, Any]:
    """Return the identity of target and prompts that a draft was fitted to, as its files record it.

    DraftError, MissingError: there is no such draft.
    """
    folder = resolve_draft_dir(given)
    section = read_config(folder).get(SECTION) or {}
    return _fitted_to(read_run(Path(given), folder), section.get("origin") or {})


def _fitted_to(run: RunRecord | None, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity: what a draft records as its origin, then what its run's data records."""
    return {**((run and run.identity) or {}), **origin}


def _decode(
    decoding: Decoding,
    draft: Draft,
    device: torch.device,
    dtype: str,
    depths: list[int],
    limit: int,
    run: RunRecord | None,
    data: Path | None,
    warnings: Warnings,
) -> dict[str, Any]:
    """Read the prompts, load the target, check that everything matches, and decode.

    The metrics are those of the last of `depths`; `sweep` has some of all. Moves the draft to the
    target's device and dtype.
    """
    directory, _ = resolve_model(decoding.target)
    tokenizer = load_tokenizer(directory, decoding.trust_remote_code)
    trained = _fitted_to(run, draft.config.origin)
    kwargs, about = kwargs_for(decoding.chat_template_kwargs, trained, tokenizer)
    warnings.add(about)
    template = Template(tokenizer, kwargs)
    prompts = read_prompts(decoding.prompts, template, limit, columns=decoding.columns)
    grams = Grams()
    for prompt in prompts:
        add_prompt(grams, prompt.record, template)
    overlap = find_trained(grams, run, data)
    warnings.add(prompt_warnings(prompts, overlap))
    model = load_target(decoding, directory, device, dtype, trained.get("rope_factors"))
    warnings.add(check_draft(draft, model))
    draft.to(device, model.dtype)
    config = load_config(directory, decoding.trust_remote_code)
    served = identify(directory, config, tokenizer, decoding.trust_remote_code)
    served["dtype"] = str(model.dtype).removeprefix("torch.")
    warnings.add(rendered_otherwise(trained, prompts))
    if end := unstopped_end(template, sorted(stop_ids(model, tokenizer))):
        warnings.add([str(end)])
    defaults = read_sampling(directory)
    warnings.add(sampling_warnings(defaults, decoding.temperature))
    compared = compare(
        trained, served, of_recorded="the draft was fitted with", of_current="this target has"
    )
    warnings.add([f"{line}; expect lower acceptance" for line in compared.texts])
    if compared.not_compared:
        log.info("not compared with the draft's training: %s", compared.not_compared)
    facts = served | {"rope_factors": trained.get("rope_factors")}
    plain = PlainResponses.of(model, facts, stop_ids(model, tokenizer))
    sweep: list[dict[str, Any]] = []
    different: list[str] = []
    for depth in depths:
        metrics = evaluate_target(draft, model, tokenizer, decoding, prompts, plain, depth)
        sweep.append(sweep_line(metrics))
        different += metrics["different"] or []
    return metrics | {
        "target": decoding.target,
        "chat_template_kwargs": kwargs,
        "prompts_rendered_with": prompts.facts(),
        "sampling_defaults": defaults,
        "not_compared": list(compared.unknown),
        "prompts": len(prompts),
        "bad_prompts": prompts.left_out,
        "bad_prompt_examples": prompts.examples,
        "trained_prompts": None if overlap.numbers is None else len(overlap.numbers),
        "trained_prompts_compared_with": overlap.data,
        "trained_prompts_not_compared": overlap.problem,
        "sweep": sweep,
        "best_draft_tokens": fastest(sweep),
        "different": None if metrics["different"] is None else different,
    }


def _facts_of(documents: Documents | None, decoding: Decoding | None) -> TargetFacts | None:
    """Return what a draft's files may lack, from the dataset or the target."""
    if documents is not None:
        return dataset_target(HiddenStatesDataset(documents.data))
    if decoding is None:
        return None
    return read_target(resolve_model(decoding.target)[0], decoding.target)


def _doubts(report: dict[str, Any]) -> list[str]:
    """Return warnings about what was not measured, and if training and serving differ clearly."""
    warnings = []
    if "target" in report and report["responses"] and not report["rounds"]:
        warnings.append(
            "no draft was verified: every response ended with its first token, which the prefill "
            "returns. Raise --max-new-tokens, or use prompts with longer answers"
        )
    if "data" in report:
        data, simulated = report["data"], report["data"]["simulated"]
        if not simulated["rounds"]:
            warnings.append(
                "nothing was verified: no measured document has two supervised tokens in a row "
                "after its first token. Measure more documents, or documents with longer answers"
            )
        rates, forced = simulated["every_slot_rate"], data["teacher_forced"]
        depth = sum(name.startswith("accept_rate/") for name in forced)  # --draft-tokens may differ
        own = uncut_length(rates[:depth]) if len(rates) >= depth else None
        if gap := train_serve_gap(forced["product_limit_length"], own, simulated["rounds"]):
            warnings.append(gap)
    return warnings


def _unseen(trained: Mapping[str, int] | None, report: dict[str, Any]) -> list[str]:
    """Return the texts of warning[unseen]: contexts that the training had none of."""
    parts = [part for part in (report, report.get("data", {})) if "by_context" in part]
    found = [unseen_contexts(trained, part["by_context"]) for part in parts]
    return [text for text in dict.fromkeys(found) if text]


def require_sound(report: dict[str, Any]) -> None:
    """Refuse metrics that mean nothing.

    Raises:
        RunError: greedy decoding with the draft differs from the target alone, or no prompt could
            be answered.
    """
    several = report.get("others", [])
    for one in (report, *several):
        where = f"{one['target']}: " if several else ""
        if "target" in one and not one["responses"]:
            raise RunError(
                f"{where}nothing was measured: none of {one['prompts']} prompts leaves room for an "
                "answer in the target's context; use shorter prompts"
            )
        if different := one.get("different"):
            raise RunError(
                f"{where}greedy decoding with the draft differs from the target alone in "
                f"{len(different)} responses, ties excluded:\n  " + "\n  ".join(different[:5])
            )


def write_eval_page(run: Path, report: dict[str, Any]) -> Path | None:
    """Write eval.html in a run, and its own page with the length of real decoding."""
    (name,) = short_names([run])

    others = report.get("others", [])

    def page() -> Page:
        first = f"{name}, {report['target']}" if others else name
        measured = evaluations(report, "this evaluation", first)
        for one in others:
            measured += evaluations(one, "this evaluation", f"{name}, {one['target']}")
        return report_page([], measured)

    written = leave_page(run / "eval.html", page)
    if "target" in report and not others:

        def page_of_run() -> Page:
            stored = dump_json(report | {"draft": Path(report["draft"]).resolve().name})
            write_atomically(run / DECODED, stored)
            return page_of([run])

        leave_page(run / PAGE, page_of_run)
    return written
