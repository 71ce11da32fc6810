"""The functions of spec_train for Python. They are imported as `spec_train.NAME`.

Each takes the options of its command as keyword arguments, with the command's defaults, and does
what the command does, without printing. Paths are `str` or `Path`. Errors are SpecDataErrors.
"""

from pathlib import Path
from typing import Any

import torch

from spec_data.models.devices import DTYPES, usable_device
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.command import checked_arguments
from spec_train.commands.eval import draft_depths, evaluate
from spec_train.drafts import Draft
from spec_train.drafts import load_draft as read_draft
from spec_train.evaluation.evaluate import Documents, measure
from spec_train.evaluation.on_dataset import check_fit, evaluate_data
from spec_train.results import AcceptanceResult
from spec_train.training.stored import resolve_draft_dir

AnyPath = str | Path


def simulate_acceptance(
    draft: AnyPath | Draft,
    dataset: AnyPath | HiddenStatesDataset,
    *,
    split: str = "auto",
    limit: int = 0,
    draft_tokens: int = 0,
    mask: str | None = None,
    accept_edited: bool = False,
) -> AcceptanceResult:
    """Simulate on stored states how many drafted tokens the target would accept.

    Args:
        draft: a path as for `evaluate`, or a draft in memory, which is measured on its device, in
            its dtype and in evaluation mode.
        dataset: a dataset directory, or one that is open.
        split: "validation" (what the run of the draft held out), "train", "all"; "auto":
            "validation" on the dataset that a run was trained on, else "all". A draft in memory
            belongs to no run: all documents are measured, those it was trained on too.
        limit: measure the first so many documents only; 0: all.
        draft_tokens: tokens drafted per round; 0: as many as the draft was trained for.
        mask: supervised tokens, as `mask` of `fit`; None: those of the run of the draft on its own
            data, else the stored ones.
        accept_edited: measure a draft that is not as it was sealed, with a warning.

    Returns:
        Acceptance length and rates by depth.

    Raises:
        DraftError, DatasetError: the two do not fit together, or there is nothing to measure.
        ConfigError: a split that is not known, or more tokens than the draft can draft.

    >>> draft = spec_train.load_draft("run")
    >>> found = spec_train.simulate_acceptance(draft, "data", limit=4)
    >>> found.documents, len(found.accept_rate) == draft.depth
    (4, True)
    """
    path = dataset.path if isinstance(dataset, HiddenStatesDataset) else Path(dataset)
    options = {"split": split, "limit": limit, "draft_tokens": draft_tokens, "mask": mask}
    checked_arguments(evaluate, options)
    draft_depths(str(draft_tokens))
    if isinstance(draft, (str, Path)):
        documents = Documents(data=str(path), split=split, mask=mask)
        report = measure(
            draft,
            documents,
            None,
            draft_tokens=[draft_tokens],
            limit=limit,
            accept_edited=accept_edited,
        )
        return AcceptanceResult.of(report["data"])
    depth = draft_tokens or draft.depth
    if draft.max_depth is not None and depth > draft.max_depth:
        raise ConfigError(
            f"draft_tokens = {depth}: this draft can draft {draft.max_depth} tokens per round"
        )
    check_fit(draft, HiddenStatesDataset(path))
    module: Any = draft  # also an nn.Module
    training = module.training
    try:
        module.eval()
        found = evaluate_data(
            draft, path, split=split, run=None, depth=depth, limit=limit, mask=mask
        )
    finally:
        module.train(training)
    return AcceptanceResult.of(found)


def load_draft(
    path: AnyPath, *, device: str = "cpu", dtype: str = "auto", accept_edited: bool = False
) -> Draft:
    """Read a draft of any kind, from any program, in evaluation mode.

    Args:
        path: a run (its best draft), a checkpoint, or a draft directory in any form that `export`
            writes.
        device: where to put it: "cpu", "cuda", "cuda:1", "auto".
        dtype: "fp32", "bf16", "fp16"; "auto": as it is stored.
        accept_edited: read a draft that is not as it was sealed, with a warning.

    Returns:
        The draft: an `nn.Module` with `config`, `options`, `depth`, `loss`, `drafter`, `chains` and
        `save_pretrained`.

    Raises:
        MissingError: neither a draft nor a run. DraftError: a draft that cannot be read,
            or that was edited or damaged.
        ConfigError: an unknown dtype, or a device that this machine does not have.

    >>> draft = spec_train.load_draft("run", dtype="fp32")
    >>> draft.name, draft.config.layers
    ('eagle3', (0, 2, 4))
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: choose from auto, {', '.join(DTYPES)}")
    draft = read_draft(resolve_draft_dir(path), accept_edited=accept_edited).eval()
    kind: torch.dtype | None = None if dtype == "auto" else DTYPES[dtype]
    draft.to(usable_device(device), kind)
    return draft
