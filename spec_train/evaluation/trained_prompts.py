"""Are the prompts of an evaluation rendered as in training, and no part of it?

On prompts that are in training documents more drafted tokens are accepted than on new ones, and
nothing else shows it: the comparison is that of `select --decontaminate`
(`spec_data/corpus/prompt_overlap.py`).
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_data.corpus.prompt_overlap import NGRAM, Grams
from spec_data.corpus.template import names_read
from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.serving import differing_prompts, sampling_text, usual_kwargs
from spec_data.shards.storage import scheme_of
from spec_data.terminal.progress import progress
from spec_train.data.mixture import open_with_mask
from spec_train.evaluation.on_dataset import choose_documents, recorded_fingerprint
from spec_train.evaluation.prompts import Prompts
from spec_train.evaluation.run_record import RunRecord
from spec_train.formats.serving_conditions import changed, turned_off

_COLUMNS = ("input_ids", "loss_mask")  # where the index does not tell, masks decide what is trained


def kwargs_for(
    given: dict[str, Any] | None, trained: Mapping[str, Any], tokenizer: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the template kwargs for the prompts, and warnings about them.

    Without `given` ones they are those of most documents of the identity that the draft was fitted
    to.
    """
    if given is not None:
        return given, []
    usual = usual_kwargs(trained)
    if usual is None:
        return {}, [
            "neither the draft nor its training data records the chat template kwargs of the "
            "rendering, so prompts are rendered without any; if there were some, pass "
            "--chat-template-kwargs"
        ] if tokenizer.chat_template else []
    names = names_read(tokenizer)
    unread = sorted(set(usual) - names) if names is not None else []
    return {name: value for name, value in usual.items() if name not in unread}, [
        f"the training data was rendered with {name} = {usual[name]!r}, which this target's chat "
        "template does not read"
        for name in unread
    ]


def rendered_otherwise(
    trained: Mapping[str, Any], prompts: Prompts, kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a line for each way in which clearly many prompts differ from the training's.

    `kwargs` are those that a server renders all of them with.
    """
    words = "the draft was fitted with", "these prompts have"
    differing = differing_prompts(trained, prompts.facts(kwargs), *words)
    return [f"{text}; expect lower acceptance" for _, text in differing]


def sampling_warnings(defaults: Mapping[str, float], temperature: float) -> list[str]:
    """Return a warning about sampling that an engine applies and this evaluation does not.

    `defaults` are those of generation_config.json, as `sampling_defaults` returns them.
    """
    if not defaults:
        return []
    here = f"at temperature {temperature:g}" if temperature else "greedily"
    return [
        f"generation_config.json sets {sampling_text(defaults)}, which engines apply to requests "
        f"that set nothing; here the answers are decoded {here} without them. {changed(defaults)}"
        f"{turned_off()}"
    ]


def server_sampling_warnings(defaults: Mapping[str, float], sent: Collection[str]) -> list[str]:
    """Return a warning about sampling that a server adds to requests, which have `sent` alone."""
    added = {name: value for name, value in defaults.items() if name not in sent}
    if not added:
        return []
    return [
        f"generation_config.json sets {sampling_text(added)}, which an engine applies to these "
        f"requests, unless it was started without: what it counts holds for that. {changed(added)}"
        f"{turned_off()}"
    ]


# -- prompts that were trained on ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainedPrompts:
    """Which prompts are in training documents.

    `numbers` are those prompts, ascending; None if no training data could be read. `data` are the
    datasets that were compared; `problem` says why another one was not.
    """

    numbers: list[int] | None
    data: list[str]
    problem: str | None = None


def find_trained(grams: Grams, run: RunRecord | None, data: Path | None) -> TrainedPrompts:
    """Compare prompts with the training documents of a draft, without those that it held out.

    Args:
        grams: the n-grams of the prompts.
        run: the draft's run, None without one.
        data: the dataset of `--data`; of a draft without a run, it counts as the training data.
    """
    runs = [] if run is None else [run, *run.earlier]
    paths = [*(path for one in runs for path in one.sources), *([] if data is None else [data])]
    once = {path if scheme_of(path) else Path(path).resolve(): path for path in paths}
    numbers: set[int] = set()
    compared, problem = [], None if paths else "the training data is not known"
    if run is not None and run.unknown:
        problem = f"the data of {run.unknown}, which the draft began as (--init-from), is unknown"
    for path in once.values():
        try:
            dataset = HiddenStatesDataset(path, _COLUMNS)
            own = [one for one in runs if recorded_fingerprint(dataset, one) in one.datasets]
            if runs and not own:
                if path != data:
                    problem = f"{path} is not the dataset that the draft was trained on"
                continue
            documents: Sequence[int] = range(len(dataset))
            learned: set[int] = set()
            with contextlib.suppress(ConfigError):  # its held-out documents are not known
                for one in own:
                    masked = open_with_mask(path, one.mask, _COLUMNS)
                    learned |= set(choose_documents(masked, "train", one)[0])
                documents = sorted(learned) if own else documents
            buffer = torch.zeros(int(dataset.lengths.max()), dtype=torch.int64)
            for document in progress(
                documents, unit="documents", desc="prompts in training data", leave=False
            ):
                count = dataset.read_into(document, {"input_ids": buffer}, 0, len(buffer))
                numbers |= grams.matches(buffer[:count].numpy().astype(np.int32))
            compared.append(str(path))
        except SpecDataError as error:
            problem = str(error)
    return TrainedPrompts(
        numbers=sorted(numbers) if compared else None, data=compared, problem=problem
    )


def prompt_warnings(prompts: Prompts, trained: TrainedPrompts) -> list[str]:
    """Return warnings about prompts that are missing, and that were trained on."""
    warnings = []
    if prompts.left_out:
        warnings.append(
            f"{prompts.left_out} rows of --prompts are left out, so {len(prompts)} prompts remain; "
            f"the first: {prompts.examples[0]}"
        )
    if trained.numbers:
        first = prompts.prompts[trained.numbers[0]].where
        warnings.append(
            f"{len(trained.numbers)} of {len(prompts)} prompts are in training documents (the "
            f"first: {first}): {NGRAM} token ids in a row, or a whole shorter prompt. The draft "
            "knows their answers, and its acceptance on new prompts is lower"
        )
    return warnings
