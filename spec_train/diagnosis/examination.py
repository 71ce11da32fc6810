"""`spec-train doctor`: run every check that can be decided from what was given.

In: the options. Out: a `Diagnosis`. The order is files, target, dataset, conventions.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from spec_data.models.devices import compute_dtype, usable_device
from spec_data.models.families import block_count, text_table
from spec_data.models.resolve import cached_model, local_directory
from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards.errors import DraftError, SpecDataError
from spec_data.shards.files import write_atomically
from spec_data.shards.identity import compare
from spec_data.shards.likelihood_text import figures_text, suspicions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.terminal.paths import check_file_to_write
from spec_data.verification.run import examine
from spec_train.data.token_counts import count_dataset
from spec_train.diagnosis.conventions import Setting
from spec_train.diagnosis.file_checks import (
    ReadDraft,
    engine_check,
    general_checks,
    joined,
    read_checked,
    subject_of,
)
from spec_train.diagnosis.outcome import (
    FINDING,
    OK,
    UNDECIDED,
    Check,
    Diagnosis,
    finding,
    ok,
    undecided,
)
from spec_train.diagnosis.sample import Reading, TooFewDocuments, read_sample
from spec_train.diagnosis.trials import (
    LONGEST,
    Trials,
    mask_tokens_to_try,
    reads_mask_token,
    run_trials,
    too_few,
    trial_checks,
)
from spec_train.drafts import Draft
from spec_train.drafts.config import special_ids
from spec_train.drafts.vocabulary import choose_draft_vocabulary
from spec_train.evaluation.exporting import find_target
from spec_train.evaluation.on_dataset import check_sizes
from spec_train.evaluation.run_record import read_run
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from spec_train.options.doctor_options import DoctorConfig
from spec_train.training.stored import resolve_draft_dir

# -- data checks -----------------------------------------------------------------------------------
# Is the dataset sound, and are its answers the target's own? The rules of verify and generate.


_WHOLE = 4 * 10**9
"""Bytes of a dataset up to which it is checked whole without being asked."""


def data_checks(
    dataset: HiddenStatesDataset, place: str, *, whole: bool, device: str
) -> Iterator[Check]:
    """Verify the dataset at `place`, and judge how its answers agree with the target."""
    yield _verified(dataset, place, whole, device)
    yield _agreement(dataset)


def _verified(dataset: HiddenStatesDataset, place: str, whole: bool, device: str) -> Check:
    size = dataset.manifest.totals.bytes
    if size > _WHOLE and not whole:
        return undecided(
            "data", f"give --whole-data, or run `spec-data verify {place}`: {size / 1e9:.0f} GB"
        )
    try:
        found = examine(VerifyConfig(data=place, device=device))
    except SpecDataError as error:
        return finding("data", str(error), fix="copy or generate the dataset again")
    if found.failures:
        return finding(
            "data",
            found.failures[0],
            *found.failures[1:20],
            fix=f"copy or generate it again; `spec-data verify {place}` lists every failure",
        )
    return ok("data", f"{len(dataset):,} documents verified", *_only_files(found.warnings))


def _only_files(warnings: list[str]) -> Iterator[str]:
    """Yield the warnings about files; those about answers have a check of their own."""
    yield from (line for line in warnings if "first choice" not in line)


def _agreement(dataset: HiddenStatesDataset) -> Check:
    measured = dataset.manifest.agreement
    if measured is None:
        return undecided(
            "on-policy", "give a dataset that `spec-data generate` has written: this one, a view "
            "of a part of a source, records no agreement with its target",
        )  # fmt: skip
    total = measured.total
    if not total.enough:
        return undecided("on-policy", f"give more documents: {total.tokens} supervised tokens")
    if lines := suspicions(dataset.manifest):
        return finding(
            "on-policy",
            *lines,
            fix="let the target answer the prompts itself (`spec-data regenerate`), and generate "
            "and train from that",
        )
    return ok("on-policy", figures_text(total))


def open_dataset(place: str) -> HiddenStatesDataset | Check:
    """Open a dataset; a finding if it cannot be opened.

    Raises:
        MissingError: there is none.
    """
    from spec_data.shards.errors import DatasetError

    try:
        return HiddenStatesDataset(place)
    except DatasetError as error:
        return finding("data", str(error), fix="copy or generate the dataset again")


# -- diagnosis text --------------------------------------------------------------------------------
# A diagnosis as lines for people: findings first, then what is sound, then what is undecided.


_MARKS = {FINDING: "FINDING", OK: "ok", UNDECIDED: "not decidable"}
_SHOWN = 6  # conventions of a round
_WIDTH = max(map(len, _MARKS.values()))


def diagnosis_text(found: Diagnosis) -> str:
    """Return the lines of a diagnosis."""
    lines = [f"{found.draft}: {found.kind or 'not readable as a draft'}"]
    if found.documents:
        where = f"{found.documents} documents"
        if found.which_documents:
            where += f" ({found.which_documents})"
        length = found.acceptance_length
        lines[0] += (
            f", tried on {where}"
            if length is None
            else f", acceptance length {length:.2f} over all slots of {where}"
        )
    for state in (FINDING, OK, UNDECIDED):
        lines += _lines(check for check in found.checks if check.state == state)
    lines += _table(found)
    count = len(found.findings)
    lines.append(f"{found.draft}: {count or 'no'} finding{'' if count == 1 else 's'}")
    return "\n".join(lines)


def _lines(checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        mark = _MARKS[check.state].ljust(_WIDTH)
        yield f"{mark}  {check.name}: {check.text}"
        indent = " " * (_WIDTH + 2)
        if check.state == FINDING:
            yield from (f"{indent}evidence: {line}" for line in check.evidence)
            yield f"{indent}fix: {check.fix}"
        else:
            yield from (f"{indent}{line}" for line in check.evidence)


def _table(found: Diagnosis) -> Iterator[str]:
    """Yield the tried conventions, the best of each round first."""
    if not found.tried:
        return
    yield "conventions tried: acceptance length, p-value; loss, p-value"
    for number in sorted({tried.round for tried in found.tried}):
        some = [tried for tried in found.tried if tried.round == number]
        losses = [f"{t.loss_before:6.3f}" for t in some if t.loss_before is not None]
        words = "as declared" if number == 1 else "with the better convention above"
        yield f"  {some[0].before:6.3f}          {(losses or [' ' * 6])[0]}           {words}"
        ordered = sorted(some, key=lambda t: t.rank, reverse=True)
        for tried in ordered[:_SHOWN]:
            mark = "better " if tried.better else ""
            loss = " " * 15
            if tried.loss is not None and tried.loss_p_value is not None:
                loss = f"{tried.loss:6.3f} {tried.loss_p_value:7.2g} "
            yield (
                f"  {tried.length:6.3f} {tried.p_value:7.2g}  {loss}  {mark}{tried.check}: "
                f"{tried.text}"
            )
        if len(ordered) > _SHOWN:
            shorter = ordered[_SHOWN].length
            yield f"  and {len(ordered) - _SHOWN} more, of at most {shorter:.3f} (--json has all)"


# -- target checks ---------------------------------------------------------------------------------
# Is it the same target, served in the same way? Facts of the draft, the dataset and the target.
#
# The comparison is that of `spec_data.shards.identity`; here each difference gets the name of the
# failure that it is.


_FIX = {
    "quantised": "serve the target as it was captured, or capture with the quantised target and "
    "train again",
    "chat-template": "serve with the template and kwargs of the training data, or generate the "
    "dataset with those that are served",
    "tokenizer": "serve with the tokenizer of the training data, or generate again",
    "target": "use the target that the draft was fitted to, or capture this one and train again",
}
_WHAT = {
    "quantised": "the target runs in the precision of the capture",
    "chat-template": "prompts are rendered as in the training data",
    "tokenizer": "the tokenizer is that of the training data",
    "target": "weights, config and rope are those of the training",
}

_ROUNDED = "no other quantisation; states are rounded when served, as those of every target are"
"""Said of a capture in float32 of a target that is served in bf16: no failure by itself."""


def _named(fact: str) -> str:
    """Return the check that a fact belongs to."""
    if fact.startswith("chat_template"):
        return "chat-template"
    if fact.startswith("tokenizer"):
        return "tokenizer"
    return "quantised" if fact in ("quantization", "dtype") else "target"


def target_checks(
    origin: Mapping[str, Any], dataset: HiddenStatesDataset | None, target: TargetFacts | None
) -> Iterator[Check]:
    """Compare the target and the prompts of the draft, of the dataset and of serving.

    Args:
        origin: what the draft records of its training; empty for drafts of other trainers.
        dataset: the dataset, if there is one.
        target: the target that serves, with its identity; None: not given.
    """
    stored = dataset.manifest.identity if dataset is not None else {}
    served = target.identity if target is not None else {}
    pairs = [
        (origin, stored, "the draft was fitted with", "the dataset has"),
        (origin, served, "the draft was fitted with", "the target has"),
        (stored, served, "the dataset was captured with", "the target has"),
    ]
    possible = [pair for pair in pairs if pair[0] and pair[1]]
    lines: dict[str, list[str]] = {name: [] for name in _WHAT}
    notes: dict[str, list[str]] = {name: [] for name in _WHAT}
    unknown: list[str] = []
    for recorded, found, ours, theirs in possible:
        compared = compare(recorded, found, of_recorded=ours, of_found=theirs)
        for difference in compared.differences:
            into = notes if difference.name == "dtype" else lines
            into[_named(difference.name)].append(difference.text)
        if compared.not_compared:
            unknown.append(f"not compared, because only one side tells it: {compared.not_compared}")
    if target is not None:
        unknown += [f"not compared: {problem}" for problem in target.problems]
    for name, texts in lines.items():
        if texts:
            yield finding(name, *dict.fromkeys(texts), fix=_FIX[name])
        elif not possible:
            yield undecided(name, _needed(origin, dataset, target))
        else:
            text = _ROUNDED if notes[name] else _WHAT[name]
            more = unknown if name == "target" else notes[name]
            yield ok(name, text, *dict.fromkeys(more))


def _needed(
    origin: Mapping[str, Any], dataset: HiddenStatesDataset | None, target: TargetFacts | None
) -> str:
    if target is None:
        text = "give --target" if origin or dataset is not None else "give --target and --data"
        return f"{text}: the draft does not record its target" if not origin else text
    return "give --data: the draft does not record its target"


# -- examination -----------------------------------------------------------------------------------


log = logging.getLogger(__name__)


def examine_draft(config: DoctorConfig) -> Diagnosis:
    """Run every check of a draft.

    Raises:
        MissingError: draft, dataset or target do not exist.
        ConfigError: the device is not usable here, or a split that no run records.
    """
    device = usable_device(config.device)
    folder = resolve_draft_dir(config.draft)
    checks: list[Check] = []
    dataset = None if config.data is None else open_dataset(config.data)
    if isinstance(dataset, Check):
        checks.append(dataset)
        dataset = None
    target = None if config.target is None else find_target(config.target)
    facts = _facts(dataset, target)
    read = read_checked(folder, facts)
    checks += read.checks
    origin = read.draft.config.origin if read.draft is not None else {}
    if read.draft is not None:
        subject = subject_of(read, dataclasses.replace(facts, identity={}, problems=()), folder)
        checks += general_checks(subject)
        checks.append(engine_check(subject, config.engine))
    checks += target_checks(origin, dataset, target)
    trials = None
    if dataset is not None and config.data is not None:
        data = list(
            data_checks(dataset, config.data, whole=config.whole_data, device=config.device)
        )
        checks += data
        if read.draft is not None:
            more, trials = _tried(config, read, folder, dataset, device, data)
            checks += more
        else:
            checks.append(undecided("conventions", "correct the draft's files first"))
    else:
        checks.append(undecided("conventions", "give --data, a dataset of the draft's target"))
    found = Diagnosis(
        draft=str(folder),
        kind=None if read.draft is None else read.draft.name,
        checks=tuple(joined(checks)),
        tried=() if trials is None else tuple(trials.tried),
        documents=0 if trials is None else trials.setting.sample.documents,
        which_documents="" if trials is None else trials.setting.sample.which,
        acceptance_length=None if trials is None else trials.declared,
    )
    return dataclasses.replace(found, text=diagnosis_text(found))


def _facts(dataset: HiddenStatesDataset | None, target: TargetFacts | None) -> TargetFacts:
    """Return what is known of the target: from its files, else from the dataset."""
    if target is not None and target.embedding is not None:
        return target
    if dataset is None:
        return target or TargetFacts()
    raw = dataset.target_config()
    try:
        tensors = load_head_tensors(dataset.path)
    except SpecDataError:  # verify names the damage
        tensors = {}
    return TargetFacts(
        name=dataset.manifest.target.name,
        architectures=tuple(raw.get("architectures") or ()),
        num_layers=block_count(raw),
        max_positions=text_table(raw).get("max_position_embeddings"),
        embedding=tensors.get("embed_tokens"),
        head=tensors.get("lm_head"),
    )


def _tried(
    config: DoctorConfig,
    read: ReadDraft,
    folder: Path,
    dataset: HiddenStatesDataset,
    device: torch.device,
    data: list[Check],
) -> tuple[list[Check], Trials | None]:
    """Try the neighbouring conventions on some documents."""
    draft = read.draft
    assert draft is not None
    try:
        check_sizes(draft, dataset)
    except DraftError as error:
        fix = "give a dataset of the draft's own target"
        return [finding("target", str(error), fix=fix)], None
    draft.to(device, compute_dtype(config.dtype, device)).eval()
    _shorten(draft)
    place = None if config.target is None else _directory(config.target)
    try:
        sample = read_sample(
            draft,
            dataset,
            run=read_run(Path(config.draft), folder),
            split=config.split,
            documents=config.documents,
            target=place,
            trust=config.trust_remote_code,
        )
        setting = Setting(
            draft=draft,
            reading=Reading(tuple(draft.state_columns)),
            sample=sample,
            target_config=dataset.target_config(),
            **_counted(dataset, draft, sample.head),
        )
        trials = run_trials(setting, config.seed)
    except TooFewDocuments as error:
        return [too_few(error.count)], None
    except SpecDataError as error:
        if any(check.fix for check in data):  # the damage is named already
            return [undecided("conventions", f"the dataset cannot be read: {error}")], None
        raise
    return list(trial_checks(trials)), trials


def _shorten(draft: Draft) -> None:
    """Let the loss of a draft that is unrolled have no more steps than the chains."""
    if getattr(draft.options, "ttt_steps", 0) > LONGEST:
        fewer = {"ttt_steps": LONGEST, "position_weights": "auto"}
        draft.use_options(dataclasses.replace(draft.options, **fewer))


def _directory(target: str) -> Path | None:
    return local_directory(target) or cached_model(target)


def _counted(dataset: HiddenStatesDataset, draft: Draft, head: TargetHead) -> dict[str, Any]:
    """Return what the setting of a draft has from the token counts of a dataset: see `Setting`.

    Nothing is counted for a draft with the full vocabulary and without a mask token.
    """
    if draft.full_vocabulary and not reads_mask_token(draft):
        return {}
    counts = torch.from_numpy(count_dataset(dataset))
    found: dict[str, Any] = {"mask_tokens": mask_tokens_to_try(draft, dataset, head, counts)}
    if not draft.full_vocabulary:
        special = special_ids(dataset.target_config())
        size = draft.config.draft_vocab_size
        found["chosen"] = choose_draft_vocabulary(counts, size, special)
    return found


# -- command ---------------------------------------------------------------------------------------
# The command: print the diagnosis, write its figures, and name what to run next.


def run_doctor(config: DoctorConfig) -> tuple[Diagnosis, list[str]]:
    """Examine a draft, print the result and write --json; return it with the next command.

    Raises:
        As `examine_draft`, and ConfigError if --json cannot be written.
    """
    if config.json is not None:
        check_file_to_write("--json", config.json)
    found = examine_draft(config)
    print(found)
    if config.json is not None:
        text = json.dumps(found.to_json(), indent=2, ensure_ascii=False, default=str)
        write_atomically(Path(config.json), text + "\n")
    return found, next_command(found, config)


def next_command(found: Diagnosis, config: DoctorConfig) -> list[str]:
    """Return the command that decides more, or follows from a sound or a wrong draft."""
    target = ["--target", config.target] if config.target else []
    names = {check.name for check in found.findings}
    if names & {"data"} and config.data:
        return ["spec-data", "verify", config.data]
    if names:
        return ["spec-train", "export", "--draft", config.draft, "--check", *target]
    missing = any(check.state == UNDECIDED for check in found.checks)
    if missing and (config.data is None or config.target is None):
        data = ["--data", config.data or "DATA"]
        more = ["--target", config.target or "MODEL"]
        return ["spec-train", "doctor", "--draft", config.draft, *data, *more]
    if config.data:
        return ["spec-train", "eval", "--draft", config.draft, "--data", config.data]
    return ["spec-train", "export", "--draft", config.draft, "--check", *target]
