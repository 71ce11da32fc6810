"""`spec-train eval`: measure a draft on a dataset, against its target, or both, and report.

`run_eval` prints a table, writes all metrics to --json, and fails (exit code 1) if greedy output
differs from plain decoding by more than rounding, or if no prompt was answered. Its
`acceptance_length` comes from real decoding if a target is given, otherwise from the serving-like
walk over the dataset; it is null if there was nothing to measure.
"""

import json
import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_data import __version__
from spec_data.corpus.prompt_overlap import Grams, add_prompt
from spec_data.corpus.template import Template, names_read
from spec_data.models.devices import compute_dtype, usable_device
from spec_data.models.families import block_count
from spec_data.models.identify import identify
from spec_data.models.reading import load_config
from spec_data.models.resolve import cached_model, local_directory
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.identity import Comparison, compare, kwargs_text, usual_kwargs
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.terminal.config import to_dict
from spec_data.terminal.paths import check_file_to_write
from spec_train.drafts import Draft, load_draft
from spec_train.evaluation.both_ways import PlainResponses, stop_ids
from spec_train.evaluation.eval_table import markdown, table
from spec_train.evaluation.on_dataset import check_fit, evaluate_data
from spec_train.evaluation.on_target import (
    check_draft,
    evaluate_target,
    find_target,
    load_target,
)
from spec_train.evaluation.prompt_batches import batch_width
from spec_train.evaluation.prompts import parse_template_kwargs, read_prompts
from spec_train.evaluation.run_record import read_run
from spec_train.evaluation.speed_model import fastest, sweep_line
from spec_train.evaluation.trained_prompts import (
    find_trained,
    prompt_facts,
    prompt_warnings,
)
from spec_train.formats.draft_files import read_config
from spec_train.formats.forms import is_own_form
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.options.benchmark_options import draft_depths
from spec_train.options.command_options import EvalConfig
from spec_train.simulation.parting import parted, uncut_length
from spec_train.training.stored import resolve_draft_dir

# -- draft to measure ------------------------------------------------------------------------------
# The draft that `eval` measures: a published one may leave its embedding or layers to the target.
#
# In: the options of `eval`. Out: the draft. What its files lack comes from --data, or from
# --target.


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


# -- same target -----------------------------------------------------------------------------------
# Compare the target and the prompts of an evaluation with those that a draft was fitted to.
#
# A draft runs with any target of its shape. With another version of the target, other rope
# settings, another tokenizer or prompts rendered otherwise, it is only accepted less often, so each
# difference is a warning that names the fact.


log = logging.getLogger(__name__)

UNKNOWN_KWARGS = (
    "neither the draft nor its training data records the chat template kwargs of the rendering, so "
    "prompts are rendered without any; if there were some, pass --chat-template-kwargs"
)


def trained_identity(origin: Mapping[str, Any], run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the identity that a draft was fitted to: its origin, then what its data records.

    `run` holds the facts of the draft's run (see run_record.py); drafts of older releases record
    fewer facts than their data.
    """
    return {**((run or {}).get("identity") or {}), **origin}


def prompt_kwargs(trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the template kwargs of most documents of the training data; None: not recorded."""
    used = trained.get("template_kwargs_used") or {}
    if len(used) > 1:
        log.info("the training data has several chat template kwargs: %s", "; ".join(used))
    return usual_kwargs(trained)


def kwargs_for(
    given: dict[str, Any] | None, usual: dict[str, Any] | None, tokenizer: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the template kwargs for the prompts, and warnings about them.

    Args:
        given: --chat-template-kwargs, None if not given.
        usual: those of the training data, None if not known.
        tokenizer: that of the target.
    """
    if given is not None:
        return given, []
    if usual is None:
        return {}, [UNKNOWN_KWARGS] if tokenizer.chat_template else []
    names = names_read(tokenizer)
    unread = sorted(set(usual) - names) if names is not None else []
    kept = {name: value for name, value in usual.items() if name not in unread}
    return kept, [
        f"the training data was rendered with {name} = {usual[name]!r}, which this target's chat "
        "template does not read"
        for name in unread
    ]


def system_warnings(
    trained: Mapping[str, Any], prompts: Iterable[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Return a warning if most prompts have a system message and most training rows none, or the
    other way round.

    Args:
        trained: the identity that a draft was fitted to.
        prompts: the messages of every prompt that is a chat.
    """
    known = trained.get("system_messages") or {}
    rows = sum(known.values())
    asked = [any(m["role"] in ("system", "developer") for m in messages) for messages in prompts]
    if not rows or not asked:
        return []
    before, now = known.get("with", 0) / rows, sum(asked) / len(asked)
    if (before < 0.5) == (now < 0.5):
        return []
    return [
        f"{now:.0%} of the prompts and {before:.0%} of the conversations of the training data have "
        "a system message; expect lower acceptance than with prompts like the training data"
    ]


def identity_of(
    directory: Path, tokenizer: Any, dtype: torch.dtype, trust: bool = False
) -> dict[str, Any]:
    """Return the identity of the target in `directory` that runs in `dtype`.

    `trust` runs the code that comes with the target.
    """
    config = load_config(directory, trust)
    name = str(dtype).removeprefix("torch.")
    return identify(directory, config=config, tokenizer=tokenizer, dtype=name)


def compare_with_trained(
    trained: Mapping[str, Any],
    identity: Mapping[str, Any],
    tokenizer: Any,
    *,
    kwargs: Sequence[Mapping[str, Any]],
) -> Comparison:
    """Compare a target with the identity that a draft was fitted to.

    Args:
        trained: that identity, as far as it is known.
        identity: that of the target (see `identity_of`).
        tokenizer: that of the target.
        kwargs: the template kwargs of every prompt that was rendered with the chat template.
    """
    found = dict(identity)
    if kwargs and tokenizer.chat_template:
        found["template_kwargs_used"] = dict.fromkeys(map(kwargs_text, kwargs), 1)
    return compare(
        trained, found, of_recorded="the draft was fitted with", of_found="this target has"
    )


# -- report ----------------------------------------------------------------------------------------


def run_eval(
    config: EvalConfig, measured: Callable[[EvalConfig], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Evaluate with `config`, print a table, and return the metrics of --json.

    `measured` does more than `measure`, such as writing a page; None: `measure`.

    Raises:
        As `measure` and `require_sound`.
    """
    report = (measured or measure)(config)
    print(table(report))
    require_sound(report)
    return report


def require_sound(report: dict[str, Any]) -> None:
    """Refuse metrics that mean nothing.

    Raises:
        RunError: greedy decoding with the draft differs from the target alone, or no prompt could
            be answered.
    """
    _require_answers(report)
    _require_lossless(report)


def measure(config: EvalConfig) -> dict[str, Any]:
    """Evaluate with `config`; return the metrics of --json.

    Raises:
        SpecDataError: draft, dataset, target or prompts do not exist or do not match.
    """
    _check_outputs(config)
    folder = resolve_draft_dir(config.draft)
    run = read_run(Path(config.draft), folder)
    device = usable_device(config.device)
    draft = draft_to_measure(config, folder).eval()
    warnings: list[str] = []
    if config.data is not None:  # report a mismatch before the target is loaded
        _warn(warnings, check_fit(draft, HiddenStatesDataset(config.data)))
    _set_threshold(draft, config.confidence_threshold, folder)
    depths = [depth or draft.depth for depth in draft_depths(config.draft_tokens)]
    depth = depths[-1]
    if draft.max_depth is not None and depth > draft.max_depth:
        raise ConfigError(
            f"--draft-tokens {depth}: {folder} drafts at most {draft.max_depth} tokens per round"
        )
    report: dict[str, Any] = {
        "acceptance_length": None,
        "draft": str(folder),
        "warnings": warnings,
    }
    saved: list[dict[str, list[int]]] = []
    if config.target is not None:
        found, saved = _decode(config, draft, device, depths, run, warnings)
        report |= found
    else:
        draft.to(device, compute_dtype(config.dtype, device))
    if config.data is not None:
        report["data"] = evaluate_data(
            draft,
            Path(config.data),
            split=config.split,
            run=run,
            depth=depth,
            limit=config.limit,
            check=config.check,
            mask=config.mask,
            walk_only=config.walk_only,
            samples=config.samples,
        )
        simulated = report["data"]["walk"]["acceptance_length"]
        if config.target is None:
            report["acceptance_length"] = simulated
        else:
            known = None not in (simulated, report["acceptance_length"])
            report["gap"] = simulated - report["acceptance_length"] if known else None
    _warn(warnings, _unmeasured(report) + _parted(report))
    report |= _setting(draft, device, depth) | {"options": to_dict(config)}
    if config.save_responses:
        lines = "".join(json.dumps(response) + "\n" for response in saved)
        write_atomically(Path(config.save_responses), lines)
    if config.json:
        write_atomically(Path(config.json), dump_json(report))
    if config.markdown:
        write_atomically(Path(config.markdown), markdown(report))
    return report


def _set_threshold(draft: Draft, threshold: float, folder: Path) -> None:
    """Let a draft that forecasts its acceptance stop early."""
    if not threshold:
        return
    try:
        draft.stop_below(threshold)
    except ConfigError as error:
        raise ConfigError(
            f"--confidence-threshold {threshold}: {folder} {error}; leave it out"
        ) from None


def _decode(
    config: EvalConfig,
    draft: Draft,
    device: torch.device,
    depths: list[int],
    run: dict[str, Any] | None,
    warnings: list[str],
) -> tuple[dict[str, Any], list[dict[str, list[int]]]]:
    """Read the prompts, load the target, check that everything matches, and decode.

    The figures are those of the last of `depths`, the numbers of drafted tokens in ascending
    order; `sweep` has some of all. Moves the draft to the target's device and dtype. Appends to
    `warnings`.
    """
    directory, tokenizer = find_target(config)
    trained = trained_identity(draft.config.origin, run)
    given = config.chat_template_kwargs
    kwargs, about = kwargs_for(
        None if given is None else parse_template_kwargs(given), prompt_kwargs(trained), tokenizer
    )
    _warn(warnings, about)
    template = Template(tokenizer, kwargs, apart=True)
    prompts = read_prompts(str(config.prompts), template, config.limit, config.max_bad_rows)
    chats = [p.record.messages for p in prompts if p.record.messages is not None]
    _warn(warnings, system_warnings(trained, chats))
    grams = Grams()
    for prompt in prompts:
        add_prompt(grams, prompt.record, template)
    known = find_trained(grams, run, Path(config.data) if config.data else None)
    _warn(warnings, prompt_warnings(prompts, known))
    model = load_target(config, directory, device, trained.get("rope_factors"))
    _warn(warnings, check_draft(draft, model))
    draft.to(device, model.dtype)
    identity = identity_of(directory, tokenizer, model.dtype, config.trust_remote_code)
    compared = compare_with_trained(trained, identity, tokenizer, kwargs=prompts.kwargs)
    _warn(warnings, [f"{line}; expect lower acceptance" for line in compared.texts])
    if compared.not_compared:
        log.info("not compared with the draft's training: %s", compared.not_compared)
    stop = stop_ids(model, tokenizer)
    width = batch_width(config, model, prompts)
    plain = PlainResponses.of(model, identity, config.max_new_tokens, stop, width)
    sweep: list[dict[str, Any]] = []
    different: list[str] = []
    for depth in depths:
        found, saved = evaluate_target(
            draft, model, tokenizer, config, prompts, plain, depth=depth, width=width
        )
        sweep.append(sweep_line(found))
        different += found["different"] or []
    found |= {"sweep": sweep, "best_draft_tokens": fastest(sweep)}
    found["different"] = None if found["different"] is None else different
    facts = {"target": config.target, "chat_template_kwargs": kwargs}
    facts |= {"not_compared": list(compared.unknown)} | prompt_facts(prompts, known)
    return facts | found, saved


def _warn(warnings: list[str], found: list[str]) -> None:
    for warning in found:
        log.warning("warning: %s", warning)
    warnings += found


def _check_outputs(config: EvalConfig) -> None:
    """Raise for an output path that cannot be written before the work starts, not after it."""
    for name in ("json", "markdown", "save_responses"):
        if (file := getattr(config, name)) is not None:
            check_file_to_write("--" + name.replace("_", "-"), file)


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
    if data is None or data["teacher_forced"] is None:
        return []
    walk = data["walk"]
    text = parted(data["teacher_forced"], uncut_length(walk["accept_rate"]), walk["rounds"])
    return [text] if text else []


def _unmeasured(report: dict[str, Any]) -> list[str]:
    """Return warnings for metrics that are null because there was nothing to measure."""
    found = []
    if "target" in report and report["responses"] and not report["rounds"]:
        found.append(
            "no draft was verified: every response ended with its first token, which the prefill "
            "returns. Raise --max-new-tokens, or use prompts with longer answers"
        )
    if "data" in report and not report["data"]["walk"]["rounds"]:
        found.append(
            "the walk has no round: no measured document has two supervised tokens in a row after "
            "its first token. Measure more documents, or documents with longer answers"
        )
    return found


def _require_answers(report: dict[str, Any]) -> None:
    if "target" in report and not report["responses"]:
        raise RunError(
            f"nothing was measured: none of {report['prompts']} prompts leaves room for an answer "
            "in the target's context; use shorter prompts"
        )


def _require_lossless(report: dict[str, Any]) -> None:
    different = report.get("different")
    if different:
        raise RunError(
            f"greedy decoding with the draft differs from the target alone in {len(different)} of "
            f"{report['responses']} responses, ties excluded:\n  " + "\n  ".join(different[:5])
        )
