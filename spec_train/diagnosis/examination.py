"""`spec-train doctor`: run every check that can be decided from what was given.

The order is files, target, dataset, conventions. A rule that another room has is called there; here
its result gets the name of the failure that it is.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from spec_data.corpus.facts import parse_columns
from spec_data.models.devices import compute_dtype, use_device
from spec_data.models.resolve import cached_model, local_directory
from spec_data.models.target_options import EngineOptions
from spec_data.shards.errors import (
    ConfigError,
    DatasetError,
    DraftError,
    MissingError,
    SpecDataError,
)
from spec_data.shards.identity import compare
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine as verify_dataset
from spec_train.diagnosis.capture import captured
from spec_train.diagnosis.checks import (
    FINDING,
    Check,
    Diagnosis,
    judged,
    one_per_name,
    undecided,
)
from spec_train.diagnosis.conventions import Setting
from spec_train.diagnosis.sample import LEAST_DOCUMENTS, Reading, TooFewDocuments, read_sample
from spec_train.diagnosis.trials import LONGEST, Trials, run_trials, trial_checks
from spec_train.drafts import Draft, own_files, read_draft
from spec_train.evaluation.exporting import export_command, find_target
from spec_train.evaluation.on_dataset import check_sizes
from spec_train.evaluation.run_record import read_run
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.names import unread_keys
from spec_train.formats.preflight import (
    EMBEDDING,
    MAX_POSITIONS,
    REFUSE,
    WARN,
    WEIGHTS,
    Subject,
    general,
)
from spec_train.formats.target_facts import TargetFacts, dataset_target
from spec_train.formats.write import with_facts_in
from spec_train.training.run_directory import chosen_draft_dir

_VERIFIED_BYTES = 4 * 10**9  # of a dataset that is verified here; a larger one takes minutes


def examine(
    draft: str,
    data: str | None = None,
    target: str | None = None,
    *,
    corpus: Sequence[str] = (),
    columns: str | dict[str, str] = "",
    documents: int = 64,
    device: str = "auto",
    trust: bool = False,
) -> Diagnosis:
    """Run every check of a draft.

    The arguments are those of `spec_train.doctor`.

    Raises:
        MissingError: draft, dataset or target do not exist.
        ConfigError: the device is not usable here, or too few documents decide nothing.
    """
    if 0 < documents < LEAST_DOCUMENTS:
        raise ConfigError(f"--documents {documents}: expected {LEAST_DOCUMENTS} or more, or 0")
    parse_columns(columns)  # a bad one is refused before anything is read
    used = use_device(device)
    folder = chosen_draft_dir(draft)
    checks: list[Check] = []
    dataset = None
    if data is not None:
        try:
            dataset = HiddenStatesDataset(data)
        except DatasetError as error:
            checks.append(judged("data", [str(error)]))
    served = None if target is None else find_target(target)
    if target is not None and local_directory(target) is None and cached_model(target) is None:
        raise MissingError(
            f"--target {target}: no directory here, and not in the local Hub cache; download it "
            f"first: hf download {target}"
        )
    facts = served or TargetFacts()
    if dataset is not None and facts.embedding is None:
        with contextlib.suppress(SpecDataError):  # `verify` names the damage
            facts = dataset_target(dataset)
    loaded, files, more = _read_checked(folder, facts)
    checks += more
    if loaded is not None and files is not None:
        checks += _file_checks(loaded, files, folder, facts)
    unread = ""
    if loaded is None:
        unread = "correct the draft's files first"
        if not any(check.name == "files" and check.state == FINDING for check in checks):
            unread = "give its --target, or --data: without the embedding the draft cannot be read"
    checks += _target_checks(loaded.config.origin if loaded else {}, dataset, served, unread)
    trials = None
    of_data = [] if dataset is None or data is None else _data_checks(dataset, data, device)
    checks += of_data
    if loaded is None:
        checks.append(undecided("conventions", unread))
    elif not documents:
        checks.append(undecided("conventions", "give --documents: 0 tries none"))
    else:
        loaded.to(used, compute_dtype("auto", used)).eval()
        path = None if target is None else local_directory(target) or cached_model(target)
        if dataset is not None:
            more, trials = _try_conventions(
                *(loaded, dataset, of_data),
                run=read_run(Path(draft), folder),
                documents=documents,
                target=path,
                trust=trust,
            )
        elif data is None and served is not None and path is not None:
            more, trials = _capture_and_try(
                *(loaded, served, path),
                corpus=corpus,
                columns=columns,
                documents=documents,
                device=device,
                trust=trust,
            )
        else:
            more = [undecided("conventions", "give --target, or --data, a dataset of it")]
        checks += more
    merged = one_per_name(checks)
    findings = {check.name for check in merged if check.state == FINDING}
    next_command: list[str] = []
    if loaded is None or "seal" in findings:
        pass  # export would refuse it
    elif data is not None and "data" in findings:
        next_command = ["spec-data", "verify", data]
    elif findings:
        pass  # what to do is with the finding; the draft is not to be served as it is
    elif data is not None:
        next_command = ["spec-train", "eval", "--draft", draft, "--data", data]
    else:
        next_command = export_command(draft, target)
    return Diagnosis(
        draft=str(folder),
        kind=None if loaded is None else loaded.name,
        checks=tuple(merged),
        tried=() if trials is None else tuple(trials.tried),
        documents=0 if trials is None else trials.current.setting.sample.documents,
        acceptance_length=None if trials is None else trials.declared,
        per_document=() if trials is None else trials.per_document,
        next_command=next_command,
    )


# -- the draft's files -----------------------------------------------------------------------------


def _read_checked(
    folder: Path, facts: TargetFacts
) -> tuple[Draft | None, DraftFiles | None, list[Check]]:
    """Read a draft of any program, with its files, also if it differs from its seal."""
    broken_seal: list[str] = []
    while True:
        try:
            with _warnings() as said:
                draft, files = read_draft(folder, facts, accept_edited=bool(broken_seal))
            break
        except DraftError as error:
            if broken_seal:
                checks = [] if broken_seal == [str(error)] else [judged("seal", broken_seal)]
                return None, None, [*checks, _unreadable(error, facts)]
            broken_seal.append(str(error))
    sealed = "as it was sealed" if files.sealed else "no seal: the draft is of another trainer"
    checks = [
        judged("seal", broken_seal, sound=sealed),
        judged("files", [], sound=f"a draft of kind {draft.name}, its keys agree"),
    ]
    doubts = []
    for record in said:
        text = re.sub(r"^warning\[[\w-]+\]: ", "", record.getMessage())
        if failure := getattr(record, "failure", None):  # one with a page of its own
            checks.append(judged(failure, [text]))
        elif "accepted as edited" not in text:  # `seal` says it
            doubts.append(text)
    clear = "the files say everything that decides what is computed"
    assumed = "read with assumptions" if doubts else clear
    return draft, files, [*checks, judged("ambiguous-keys", [], *doubts, sound=assumed)]


def _unreadable(error: DraftError, facts: TargetFacts) -> Check:
    """Return the check of files that make no draft, perhaps only without the target's weights."""
    if "it shares the target's" not in str(error):
        return judged("files", [str(error)])
    if facts.embedding is not None:  # it is of another size
        return judged("target", [str(error)])
    text = "give --data, or --target with its weights: the file shares the target's embedding"
    return undecided("files", text, str(error))


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings of reading a draft instead of printing them."""
    logger, handler = logging.getLogger("spec_train"), BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _file_checks(
    draft: Draft, files: DraftFiles, folder: Path, facts: TargetFacts
) -> Iterator[Check]:
    """Name what the rules for every engine find."""
    exported = own_files(draft, str(folder))
    alone = dataclasses.replace(facts, identity={}, problems=())  # the target has its own checks
    unread = tuple(unread_keys(files))
    subject = Subject(exported, with_facts_in(files, alone), "vllm", unread)
    texts: dict[str, list[str]] = {}
    for finding in general(subject):
        if finding.level in (REFUSE, WARN):
            texts.setdefault(finding.rule, []).append(finding.text)
    yield judged(WEIGHTS, texts.get(WEIGHTS, []), sound="every weight is finite")
    for rule, value, sound in (
        (MAX_POSITIONS, subject.target.max_positions, "at least the target's length"),
        (EMBEDDING, subject.target.embedding, "the target's, bit for bit, or trained"),
    ):
        if value is None:
            text = "give --data, or --target with its weights, with which it is compared"
            yield undecided(rule, text)
        else:
            yield judged(rule, texts.get(rule, []), sound=sound)
    if layers := [text for text in texts.get("", []) if text.startswith("layer")]:
        yield judged("layer-ids", layers)


# -- the target ------------------------------------------------------------------------------------
# Is it the same target, served in the same way? The comparison is that of `shards.identity`; here
# each difference gets the name of the failure that it is.

_STREAMS = "streams"  # the check, and the fact of an identity
_TARGET_CHECKS = {
    "target": "weights, config and rope are those of the training",
    _STREAMS: "the residual streams become one state as in the training",
    "quantised": "the target runs in the precision of the capture",
    "chat-template": "prompts are rendered as in the training data",
    "tokenizer": "the tokenizer is that of the training data",
}
_ROUNDED = "no other quantisation; states are rounded when served, as those of every target are"
"""Said of a capture in float32 of a target that is served in bf16: no failure by itself."""


_CHECK_OF = {
    "chat_template": "chat-template",
    "tokenizer": "tokenizer",
    "quantization": "quantised",
    "dtype": "quantised",
    _STREAMS: _STREAMS,
}
"""The check that a fact of an identity belongs to, by its beginning; others are of "target"."""


def _target_checks(
    origin: Mapping[str, Any],
    dataset: HiddenStatesDataset | None,
    target: TargetFacts | None,
    unread: str,
) -> Iterator[Check]:
    """Compare the target and the prompts of the draft, of the dataset and of serving.

    `origin` is what the draft records of its training; empty for drafts of other trainers.
    `unread`: what to do first, if the draft was not read.
    """
    stored = dataset.manifest.identity if dataset is not None else {}
    served = target.identity if target is not None else {}
    pairs = [
        (origin, stored, "the draft was fitted with", "the dataset has"),
        (origin, served, "the draft was fitted with", "the target has"),
        (stored, served, "the dataset was captured with", "the target has"),
    ]
    pairs = [pair for pair in pairs if pair[0] and pair[1]]
    problems: dict[str, list[str]] = {name: [] for name in _TARGET_CHECKS}
    notes: dict[str, list[str]] = {name: [] for name in _TARGET_CHECKS}
    for recorded, given, of_recorded, of_given in pairs:
        compared = compare(recorded, given, of_recorded=of_recorded, of_current=of_given)
        for difference in compared.differences:
            lines = notes if difference.name == "dtype" else problems
            of = (c for begin, c in _CHECK_OF.items() if difference.name.startswith(begin))
            lines[next(of, "target")].append(difference.text)
        if compared.not_compared:
            notes["target"].append(
                f"not compared, because only one side tells it: {compared.not_compared}"
            )
    if target is not None:
        notes["target"] += [f"not compared: {problem}" for problem in target.problems]
    several = next((one[_STREAMS] for one in (served, stored) if one.get(_STREAMS)), None)
    for name, sound in _TARGET_CHECKS.items():
        if name == _STREAMS and several is None and _STREAMS not in origin:
            continue  # a target with one stream
        if name == _STREAMS and not problems[name] and _STREAMS not in origin:
            text = f"the draft does not record its contraction of the streams ({several} here)"
            yield undecided(name, f"{text}: train it on a dataset of `spec-data generate`")
        elif pairs:
            sound = _ROUNDED if notes[name] and name == "quantised" else sound
            yield judged(name, problems[name], *dict.fromkeys(notes[name]), sound=sound)
        else:
            lacks = "--target" if origin or target is None else "--data"
            if not origin:
                lacks += " and --data" if target is None and dataset is None else ""
                lacks += ": the draft does not record its target"
            yield undecided(name, unread or f"give {lacks}")


# -- the dataset -----------------------------------------------------------------------------------


def _data_checks(dataset: HiddenStatesDataset, data: str, device: str) -> list[Check]:
    """Verify the dataset named `data`, and judge how its answers agree with the target."""
    manifest = dataset.manifest
    total = None if manifest.agreement is None else manifest.agreement.total
    if total is None:
        agreement = undecided("on-policy", "the dataset records no agreement with its target")
    elif not total.enough:
        agreement = undecided("on-policy", f"give more documents: {total.tokens} supervised tokens")
    else:
        agreement = judged("on-policy", manifest.suspicions, sound=str(total))
    size = manifest.totals.bytes
    if size > _VERIFIED_BYTES:
        text = f"run `spec-data verify {data}`: {size / 1e9:.0f} GB"
        return [undecided("data", text), agreement]
    try:
        report = verify_dataset(data, running=EngineOptions(device=device))
    except SpecDataError as error:
        return [judged("data", [str(error)]), agreement]
    warnings = [] if report.failures else [w for w in report.warnings if "first choice" not in w]
    sound = f"{len(dataset):,} documents verified"
    return [judged("data", report.failures[:20], *warnings, sound=sound), agreement]


# -- the conventions -------------------------------------------------------------------------------


def _capture_and_try(
    draft: Draft, served: TargetFacts, target: Path, **given: Any
) -> tuple[list[Check], Trials | None]:
    """Try the conventions on answers of the target in `target`; `given`: see `captured`."""
    rows = served.vocab_size if served.embedding is None else len(served.embedding)
    try:
        check_sizes(draft, rows or 0, served.hidden_size or 0, served.name or "the target")
    except DraftError as error:
        return [judged("target", [str(error)])], None
    try:
        with captured(draft, target, served.num_layers or 0, **given) as dataset:
            chosen = {"run": None, "documents": given["documents"], "target": None}
            return _try_conventions(draft, dataset, [], **chosen)
    except SpecDataError as error:
        text = f"give --data: answers of the target cannot be captured: {error}"
        return [undecided("conventions", text)], None


def _try_conventions(
    draft: Draft, dataset: HiddenStatesDataset, data: list[Check], **given: Any
) -> tuple[list[Check], Trials | None]:
    """Try the neighbouring conventions on some documents; `given`: see `read_sample`."""
    try:
        manifest = dataset.manifest
        check_sizes(draft, manifest.vocab_size, manifest.hidden_size, str(dataset.path))
    except DraftError as error:
        return [judged("target", [str(error)])], None
    if getattr(draft.options, "ttt_steps", 0) > LONGEST:  # no more steps of the loss than of chains
        fewer = {"ttt_steps": LONGEST, "position_weights": "auto"}
        draft.use_options(dataclasses.replace(draft.options, **fewer))
    try:
        sample, reading = read_sample(draft, dataset, **given), Reading(tuple(draft.state_columns))
        trials = run_trials(Setting(draft=draft, reading=reading, sample=sample, dataset=dataset))
    except TooFewDocuments as error:
        text = f"at least {LEAST_DOCUMENTS} documents are needed (--documents, --data): {error}"
        return [undecided("conventions", text)], None
    except SpecDataError as error:
        if any(check.fix for check in data):  # the damage is named already
            return [undecided("conventions", f"the dataset cannot be read: {error}")], None
        raise
    return list(trial_checks(trials)), trials
