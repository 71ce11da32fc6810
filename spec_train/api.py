"""The functions of spec_train for Python. They are imported as `spec_train.NAME`.

Each takes the options of its command as keyword arguments, with the command's defaults, and does
what the command does, without printing. Paths are `str` or `Path`. Errors are SpecDataErrors.
"""

from pathlib import Path

import torch

from spec_data.models.devices import DTYPES, usable_device
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import Draft
from spec_train.drafts import load_draft as read_draft
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, sample_of
from spec_train.results import AcceptanceResult
from spec_train.training.run_directory import chosen_draft_dir

AnyPath = str | Path


def simulate_acceptance(
    draft: Draft,
    dataset: AnyPath | HiddenStatesDataset,
    *,
    limit: int = 0,
    draft_tokens: int = 0,
    mask: str | None = None,
) -> AcceptanceResult:
    """Simulate on stored states how many tokens of a draft in memory the target would accept.

    All documents are measured, those it was trained on too. `evaluate` measures a stored draft, on
    what its run held out.

    Args:
        draft: measured on its device, in its dtype and in evaluation mode.
        dataset: a dataset directory, or one that is open.
        limit: measure the first so many documents only; 0: all.
        draft_tokens: tokens drafted per verification; 0: as many as the draft was trained for.
        mask: supervised tokens, as `mask` of `fit`; None: the stored ones.

    Returns:
        Acceptance length and rates by depth.

    Raises:
        DraftError, DatasetError: the two do not fit together, or there is nothing to measure.
        ConfigError: a negative number, or more tokens than the draft can draft.

    >>> draft = spec_train.load_draft("run")
    >>> simulated = spec_train.simulate_acceptance(draft, "data", limit=4)
    >>> simulated.documents, len(simulated.accept_rate) == draft.depth
    (4, True)
    """
    if not isinstance(draft, Draft):
        raise ConfigError(f"draft = {draft!r}: pass a draft in memory, load_draft({str(draft)!r})")
    if min(limit, draft_tokens) < 0:
        raise ConfigError(f"limit = {limit}, draft_tokens = {draft_tokens}: expected at least 0")
    path = Path(dataset.location if isinstance(dataset, HiddenStatesDataset) else dataset)
    depth = draft_tokens or draft.depth
    if draft.max_depth is not None and depth > draft.max_depth:
        raise ConfigError(
            f"draft_tokens = {depth}: this draft can draft {draft.max_depth} tokens at once"
        )
    check_fit(draft, HiddenStatesDataset(path))
    training = draft.training
    try:
        draft.eval()
        sample = sample_of(draft, path, split="all", run=None, limit=limit, mask=mask)
        return AcceptanceResult.of(evaluate_data(draft, sample, depth))
    finally:
        draft.train(training)


def load_draft(
    path: AnyPath, *, device: str = "cpu", dtype: str = "auto", accept_edited: bool = False
) -> Draft:
    """Read a draft of any kind, from any program, in evaluation mode.

    Args:
        path: a run (its best draft), a checkpoint, or a draft directory in any form that `export`
            writes.
        device: where to put it: "cpu", "cuda", "cuda:1", "auto".
        dtype: "float32", "bfloat16", "float16"; "auto": as it is stored.
        accept_edited: read a draft that is not as it was sealed, with a warning.

    Returns:
        The draft: an `nn.Module` with `config`, `options`, `depth`, `loss`, `drafter`, `chains` and
        `save_pretrained`.

    Raises:
        MissingError: neither a draft nor a run. DraftError: a draft that cannot be read,
            or that was edited or damaged.
        ConfigError: an unknown dtype, or a device that this machine does not have.

    >>> draft = spec_train.load_draft("run", dtype="float32")
    >>> draft.name, draft.config.layers
    ('eagle3', (0, 2, 4))
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: choose from auto, {', '.join(DTYPES)}")
    draft = read_draft(chosen_draft_dir(path), accept_edited=accept_edited).eval()
    kind: torch.dtype | None = None if dtype == "auto" else DTYPES[dtype]
    draft.to(usable_device(device), kind)
    return draft
