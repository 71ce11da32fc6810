"""`spec-train doctor`: run every check that can be decided from what was given.

In: the options. Out: a `Diagnosis`. The order is files, target, dataset, conventions.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch

from spec_data.devices import compute_dtype, usable_device
from spec_data.models.resolve import cached_model, local_directory
from spec_data.models.shapes import block_count, text_table
from spec_data.shards.errors import DraftError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_train.data.token_counts import count_dataset
from spec_train.diagnosis.conventions import Setting
from spec_train.diagnosis.data_checks import data_checks, open_dataset
from spec_train.diagnosis.diagnosis_text import diagnosis_text
from spec_train.diagnosis.file_checks import (
    ReadDraft,
    engine_check,
    general_checks,
    joined,
    read_checked,
    subject_of,
)
from spec_train.diagnosis.mask_tokens import mask_tokens_to_try, reads_mask_token
from spec_train.diagnosis.outcome import Check, Diagnosis, finding, undecided
from spec_train.diagnosis.sample import Reading, TooFewDocuments, read_sample
from spec_train.diagnosis.target_checks import target_checks
from spec_train.diagnosis.trial_checks import too_few, trial_checks
from spec_train.diagnosis.trials import LONGEST, Trials, run_trials
from spec_train.drafts import Draft
from spec_train.drafts.targets import special_ids
from spec_train.evaluation.on_dataset import check_sizes
from spec_train.evaluation.run_record import read_run
from spec_train.exporting import find_target
from spec_train.formats.target_facts import TargetFacts
from spec_train.head import TargetHead, choose_draft_vocabulary
from spec_train.options.doctor_options import DoctorConfig
from spec_train.training.stored import resolve_draft_dir

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
        name=dataset.manifest.target.get("name"),
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
