"""Which prompts are in training documents: a draft knows their answers.

On such prompts more drafted tokens are accepted than on new ones, and nothing else shows it. The
comparison is that of `select --decontaminate` (`spec_data/corpus/prompt_overlap.py`). Documents
that the run held out do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_data.corpus.prompt_overlap import NGRAM, Grams
from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.progress import progress
from spec_train.data.policy_masks import open_with_mask
from spec_train.evaluation.on_dataset import choose_documents, recorded_fingerprint
from spec_train.evaluation.prompts import Prompts

_IDS = "input_ids"
_COLUMNS = (_IDS, "loss_mask")  # where the index does not tell, masks decide what is trained


@dataclass(frozen=True, kw_only=True)
class TrainedPrompts:
    """What the comparison found.

    `numbers` are the prompts that were trained on, ascending; None if no training data could be
    read. `data` are the datasets that were compared; `problem` says why another one was not.
    """

    numbers: list[int] | None
    data: list[str]
    problem: str | None = None


def find_trained(grams: Grams, run: dict[str, Any] | None, data: Path | None) -> TrainedPrompts:
    """Compare prompts with the training documents of a draft.

    Args:
        grams: the n-grams of the prompts.
        run: the facts of the draft's run (see run_record.py), None without a run.
        data: the dataset of `--data`; of a draft without a run, it counts as the training data.
    """
    paths = [*(run["sources"] if run is not None else ()), *([] if data is None else [data])]
    if not paths:
        return TrainedPrompts(numbers=None, data=[], problem="the training data is not known")
    found: set[int] = set()
    compared, problem = [], None
    for path in dict.fromkeys(map(Path, paths)):
        try:
            dataset = HiddenStatesDataset(path, _COLUMNS)
            if run is not None and recorded_fingerprint(dataset, run) not in run["datasets"]:
                if path != data:
                    problem = f"{path} is not the dataset that the draft was trained on"
                continue
            if run is not None:
                dataset = open_with_mask(path, run.get("mask"), _COLUMNS)
            found |= _compare(grams, dataset, _training_documents(dataset, run))
        except SpecDataError as error:
            problem = str(error)
            continue
        compared.append(str(path))
    numbers = sorted(found) if compared else None
    return TrainedPrompts(numbers=numbers, data=compared, problem=problem)


def _training_documents(dataset: HiddenStatesDataset, run: dict[str, Any] | None) -> list[int]:
    everything = list(range(len(dataset)))
    if run is None:
        return everything
    try:
        return choose_documents(dataset, "train", run)[0]
    except ConfigError:  # its held-out documents are not known
        return everything


def prompt_facts(prompts: Prompts, trained: TrainedPrompts) -> dict[str, Any]:
    """Return the metrics of --json about the prompts themselves."""
    return {
        "prompts": len(prompts),
        "bad_prompts": prompts.left_out,
        "bad_prompt_examples": prompts.examples,
        "trained_prompts": None if trained.numbers is None else len(trained.numbers),
        "trained_prompts_compared_with": trained.data,
        "trained_prompts_not_compared": trained.problem,
    }


def prompt_warnings(prompts: Prompts, trained: TrainedPrompts) -> list[str]:
    """Return warnings about prompts that are missing, and that were trained on."""
    found = []
    if prompts.left_out:
        found.append(
            f"{prompts.left_out} rows of --prompts are left out, so {len(prompts)} prompts remain; "
            f"the first: {prompts.examples[0]}"
        )
    if trained.numbers:
        first = prompts.found[trained.numbers[0]].where
        found.append(
            f"{len(trained.numbers)} of {len(prompts)} prompts are in training documents (the "
            f"first: {first}): {NGRAM} token ids in a row, or a whole shorter prompt. The draft "
            "knows their answers, and its acceptance on new prompts is lower"
        )
    return found


def prompt_lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the lines of the table about the prompts: name, value, meaning."""
    count, problem = report["trained_prompts"], report["trained_prompts_not_compared"]
    lines = []
    if report["bad_prompts"]:
        lines.append(("  bad prompts", f"{report['bad_prompts']:,}", "rows that were left out"))
    if count is None:
        lines.append(("  trained on", "-", f"not checked: {problem}"))
    else:
        missing = f"; not all were compared: {problem}" if problem else ""
        meaning = f"of {report['prompts']:,} prompts are in training documents{missing}"
        lines.append(("  trained on", f"{count:,}", meaning))
    return lines


def _compare(grams: Grams, dataset: HiddenStatesDataset, documents: Sequence[int]) -> set[int]:
    """Return the prompts that some documents of a dataset overlap."""
    found: set[int] = set()
    buffer = torch.zeros(int(dataset.lengths.max()), dtype=torch.int64)
    names = progress(documents, unit="documents", desc="prompts in training data", leave=False)
    for document in names:
        count = dataset.read_into(document, {_IDS: buffer}, 0, len(buffer))
        found |= grams.matches(buffer[:count].numpy().astype(np.int32))
    return found
