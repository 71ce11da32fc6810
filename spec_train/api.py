"""The functions of spec_train for Python. They are imported as `spec_train.NAME`.

Each takes the options of its command as keyword arguments, with the command's defaults, and does
what the command does, without printing. Paths are `str` or `Path`. Errors are SpecDataErrors.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from spec_data.models.devices import DTYPES, usable_device
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.config import DOCUMENT_LENGTH
from spec_train.data.loader import Loader
from spec_train.data.mixture import open_documents, parts_of
from spec_train.data.splits import make_splits
from spec_train.data.stream import BatchStream, BufferOptions
from spec_train.drafts import Draft
from spec_train.drafts import load_draft as read_draft
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, sample_of
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from spec_train.results import AcceptanceResult
from spec_train.training.run_directory import chosen_draft_dir

log = logging.getLogger(__name__)
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


def loader(
    data: AnyPath | Sequence[AnyPath] | HiddenStatesDataset,
    draft: Draft,
    *,
    seq_len: int = DOCUMENT_LENGTH,
    batch_size: int = 4,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    validation: float = 0.02,
    split: str = "train",
    split_seed: int = 0,
    mask: str | None = None,
    window_tokens: int = 1 << 22,
) -> Loader:
    """Read the packs of `fit`, batch by batch, for a training loop of one's own.

    Args:
        data: as `data` of `fit`: a dataset, or several as DIR:WEIGHT; or one that is open.
        draft: decides which columns are read, and the dtype of the states.
        seq_len: tokens per pack.
        batch_size: packs of a batch, on one rank.
        seed: decides the order, and the numbers that a draft draws with a batch.
        rank: of this process, of `world_size`: ranks share the batches of an epoch.
        world_size: processes that train together.
        validation: share of the documents that is held out, as in `fit`; 0: none.
        split: "train", or "validation": the documents that are held out.
        split_seed: decides which are held out.
        mask: supervised tokens, as `mask` of `fit`; None: the stored ones.
        window_tokens: documents are shuffled inside windows of so many tokens.

    Returns:
        Batches, an epoch per iteration. They are on the CPU; a draft takes them to its device.

    Raises:
        DatasetError, DraftError: the draft cannot learn from this dataset, or no document is left.
        ConfigError: a value that `fit` refuses, too, or a rank that there is not.

    >>> draft = spec_train.load_draft("run", dtype="float32")
    >>> batches = spec_train.loader("data", draft, seq_len=128, batch_size=2, validation=0.4)
    >>> sum(batch.tokens for batch in batches) > 0
    True
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank = {rank} of world_size = {world_size}: expected 0 to one less")
    if split not in ("train", "validation"):
        raise ConfigError(f"split = {split!r}: choose from train, validation")
    opened = data if isinstance(data, HiddenStatesDataset) else None
    config = Training(
        data=data.location if isinstance(data, HiddenStatesDataset) else _texts(data),
        out="",
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        validation=validation,
        validation_documents=0 if validation else Training.validation_documents,
        split_seed=split_seed,
        mask=None if opened is not None else mask,
        window_tokens=window_tokens,
    )
    if opened is not None and mask is not None:
        raise ConfigError(f"mask = {mask!r} with a dataset that is open: pass its path")
    dataset = open_documents(parse_sources(config.data), mask) if opened is None else opened
    for part in parts_of(dataset):
        for line in check_fit(draft, part):
            log.warning("warning[eval]: %s", line)
    splits = make_splits(dataset, config, world_size)
    plan = splits.train
    if split == "validation":
        if not len(splits.measured):
            raise DatasetError(f"{dataset.path}: validation={validation} holds no document out")
        plans = list(splits.validation.values())
        if len(plans) > 1:
            raise ConfigError("split='validation' of several datasets: read each by itself")
        plan = plans[0]
    return Loader(
        BatchStream(
            dataset,
            plan,
            draft.columns(dataset.manifest.supervision),
            batch_size=batch_size,
            buffers=BufferOptions(dtype=draft.embed_tokens.weight.dtype, reuse=False),
            rank=rank,
            world_size=world_size,
        )
    )


def _texts(data: AnyPath | Sequence[AnyPath]) -> str | list[str]:
    return str(data) if isinstance(data, str | Path) else [str(path) for path in data]


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
        The draft: an `nn.Module` with `config`, `options`, `depth`, `loss`, `drafter`, `chains`,
        `save_pretrained` and `push_to_hub`. To train it: read it with `dtype="float32"`, because
        steps are smaller than bfloat16 can tell, and call `train()`. `trainable_parameters()` are
        what `fit` trains; the target's embedding and head have no gradient.

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
