"""What a run reads: a dataset, with the masks of a policy, or several of one target as one.

From hidden states of different targets a draft would learn nothing. So datasets are mixed only if
all facts that identify their target agree; embedding and head are compared tensor by tensor. A
draft can read only what all datasets have. Documents are numbered over all datasets.
"""

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.codecs import Tables
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.identity import compare, joined
from spec_data.shards.loss_masks import masks_under
from spec_data.shards.packing import runs
from spec_data.shards.passing import Growing
from spec_data.shards.pictures import has_images
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.records import plain
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import ALL, SUPERVISED, Column, Manifest
from spec_data.shards.shard import CodedRows
from spec_data.shards.source_names import renamed_sources
from spec_data.shards.turn_masks import Turn
from spec_data.terminal.progress import progress
from spec_train.data.order import PHASE, STRETCH, BatchPlan, hash_keys, shuffled_windows
from spec_train.formats.origin import differing_rows
from spec_train.options.data_option import DataSource

log = logging.getLogger(__name__)

# -- mixed order -----------------------------------------------------------------------------------
# With weight w, every training document of a dataset appears w times per epoch: floor(w) or ceil(w)
# times, chosen so that epochs even out. Documents get evenly spaced phases u in (0, 1), in an order
# drawn from the seed, and document d has appeared floor(u_d + k * w) times after k epochs.
#
# A window has all datasets in proportion to their tokens: each dataset is cut into windows of its
# own share, and windows of equal number of all datasets are shuffled together. A dataset of few
# documents has none in most of its windows.


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One dataset of several: its documents [first, last) among all, and their weight."""

    name: str
    first: int
    last: int
    weight: Fraction
    fingerprint: str


def copies(count: int, weight: Fraction, epoch: int, *stream: int) -> np.ndarray:
    """Return how often each of `count` documents appears in `epoch`, int64 [count].

    The integers of `stream` (the seed is one of them) decide in which epochs a document appears.
    """
    whole, rest = divmod(weight, 1)
    if not rest:
        return np.full(count, int(whole), np.int64)
    order = np.argsort(hash_keys(np.arange(count), *stream), kind="stable")
    rank = np.argsort(order)  # int64 [count], of each document in the drawn order

    def shown(epochs: int) -> np.ndarray:  # floor(u + epochs * rest), u = (2 rank + 1) / (2 count)
        turns, part = divmod(epochs * rest.numerator, rest.denominator)
        steps = (2 * rank + 1) * rest.denominator + 2 * count * part
        return turns + steps // (2 * count * rest.denominator)

    return int(whole) + shown(epoch + 1) - shown(epoch)


class MixedPlan(BatchPlan):
    """The global batches of every epoch over several datasets, numbered one after another."""

    def __init__(
        self, lengths: np.ndarray, rows: np.ndarray, shares: Sequence[Share], **options: Any
    ) -> None:
        """Plan over the documents `rows`, int64 [n], of all datasets: `lengths` int64 [N].

        `options` are those of BatchPlan.
        """
        super().__init__(lengths, rows, **options)
        self.shares = tuple(shares)
        self._drawn: tuple[int, list[np.ndarray]] | None = None

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            "fingerprint": [share.fingerprint for share in self.shares],
            "weights": [str(share.weight) for share in self.shares],
            "windows": "by number",  # before, a small dataset was trained at the start of an epoch
        }

    def draw(self, epoch: int) -> list[np.ndarray]:
        """Return each dataset's documents of an epoch, int64: all that appear, then the repeats."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, [self._draw(i, epoch) for i in range(len(self.shares))]
        return self._drawn[1]

    def _draw(self, index: int, epoch: int) -> np.ndarray:
        share = self.shares[index]
        rows = self.rows[(self.rows >= share.first) & (self.rows < share.last)]
        times = copies(len(rows), share.weight, epoch, self.seed, PHASE, index)
        passes = [rows[times > done] for done in range(int(times.max(initial=0)))]
        return np.concatenate([_NONE, *passes])

    def documents(self, epoch: int) -> int:
        """Return the number of documents of an epoch, counting each as often as it appears."""
        return sum(map(len, self.draw(epoch)))

    def repeats(self) -> np.ndarray:
        """Return how often each of `rows` appears per epoch on average, scaled: int64 [n]."""
        common = math.lcm(*(share.weight.denominator for share in self.shares))
        times = np.zeros(len(self.rows), np.int64)
        for share in self.shares:
            inside = (self.rows >= share.first) & (self.rows < share.last)
            times[inside] = int(share.weight * common)
        return times

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of each window in training order: a part of every dataset."""
        drawn = self.draw(epoch)
        lengths = [self.lengths[part] for part in drawn]
        total = sum(int(tokens.sum()) for tokens in lengths)
        strings: list[Iterator[tuple[int, np.ndarray]]] = []  # of each dataset, indices of `rows`
        first = 0
        for i, (part, tokens) in enumerate(zip(drawn, lengths, strict=True)):
            window = max(1, self.window_tokens * int(tokens.sum()) // max(1, total))
            if len(part):
                windows = shuffled_windows(tokens, window, self.seed, epoch, STRETCH, i)
                strings.append(_moved(windows, first))
            first += len(part)
        rows, number = np.concatenate(drawn), itemgetter(0)
        for _, parts in itertools.groupby(heapq.merge(*strings, key=number), key=number):
            places = np.concatenate([places for _, places in parts])
            yield rows[self._shuffled(places, epoch)]


def _moved(
    windows: Iterator[tuple[int, np.ndarray]], first: int
) -> Iterator[tuple[int, np.ndarray]]:
    for number, places in windows:
        yield number, places + first


# -- masks -----------------------------------------------------------------------------------------


def open_with_mask(
    path: str | Path, policy: str | None, columns: Sequence[str] | None = None
) -> HiddenStatesDataset:
    """Open a dataset with the masks of a policy; None, or its own policy: as it is stored.

    Raises:
        MissingError, DatasetError: it cannot be read, or the masks cannot be derived from it.
        ConfigError: an unknown policy.
    """
    stored = HiddenStatesDataset(path, columns)
    if policy is None or policy == stored.manifest.mask:
        return stored
    if policy == "all" and has_images(stored):
        raise ConfigError(
            f"--mask all: {path} has documents with images, and no target generates the tokens "
            "that stand for an image; leave --mask out"
        )
    return PolicyDataset(path, policy, columns)


class PolicyDataset(HiddenStatesDataset):
    """A sealed dataset whose masks are those of `policy`; see `spec_data.shards.turn_masks`."""

    def __init__(self, path: str | Path, policy: str, columns: Sequence[str] | None = None) -> None:
        """Open `path` as `open_with_mask` does."""
        super().__init__(path, columns)
        bar = partial(progress, desc="masks", unit="documents", leave=False)
        masks = masks_under(HiddenStatesDataset(path, ()), policy, bar)
        self._masks, self.policy = masks, policy
        self.supervised, self.first_supervised = masks.supervised, masks.first_supervised


# -- mixture ---------------------------------------------------------------------------------------


class Mixture:
    """Several datasets of one target as one. `path` and target files are those of the first.

    The members are those of HiddenStatesDataset.
    """

    tables: Mapping[str, Tables] = {}
    """Empty: all columns are read decoded, because datasets may differ in codecs and tables."""

    def __init__(
        self, datasets: Sequence[HiddenStatesDataset], shares: Sequence[Share], manifest: Manifest
    ) -> None:
        """Number the documents of `datasets` one after another, as `shares` says."""
        self.datasets, self.shares, self.manifest = tuple(datasets), tuple(shares), manifest
        self._renamed = renamed_sources(self.datasets)
        first = self.datasets[0]
        self.path, self.location, self.target_dir = first.path, first.location, first.target_dir
        self.target_config = first.target_config
        self.lengths = np.concatenate([d.lengths for d in datasets])
        self.supervised = np.concatenate([d.supervised for d in datasets])
        self.first_supervised = np.concatenate([d.first_supervised for d in datasets])
        self.id_array = pa.concat_arrays([d.id_array for d in datasets])

    @cached_property
    def prompts(self) -> np.ndarray:
        """Which prompt a document answers, uint64 [N]."""
        return np.concatenate([dataset.prompts for dataset in self.datasets])

    def __len__(self) -> int:
        return self.shares[-1].last

    def _locate(self, index: int) -> tuple[HiddenStatesDataset, int]:
        for dataset, share in zip(self.datasets, self.shares, strict=True):
            if share.first <= index < share.last:
                return dataset, index - share.first
        raise IndexError(f"document {index} of {len(self)}")

    def shard_of(self, index: int) -> str:
        """Return the path of the shard file that holds a document."""
        dataset, row = self._locate(index)
        return f"{dataset.location}/{dataset.shard_of(row)}"

    def source_of(self, index: int) -> str:
        """Return the source of a document; those of one name in two datasets are told apart."""
        dataset, row = self._locate(index)
        name = dataset.source_of(row)
        return self._renamed[self.datasets.index(dataset)].get(name, name)

    def turns_of(self, index: int) -> list[Turn]:
        """Return the turns of a document: role, start and end."""
        dataset, row = self._locate(index)
        return dataset.turns_of(row)

    @property
    def growing(self) -> Growing | None:
        """None: all datasets are sealed."""
        return None

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Return True at once: all datasets are sealed, so every document can be read."""
        return True

    def fetch_ahead(self, rows: Iterable[int]) -> int:
        """Begin to download the shards of documents, as HiddenStatesDataset.fetch_ahead does."""
        wanted = list(rows)
        return sum(
            dataset.fetch_ahead([r - share.first for r in wanted if share.first <= r < share.last])
            for dataset, share in zip(self.datasets, self.shares, strict=True)
        )

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
        *,
        marked: bool = True,
    ) -> int:
        """Copy a document's tokens into `out`, as HiddenStatesDataset.read_into does."""
        dataset, row = self._locate(index)
        return dataset.read_into(row, out, start, length, marked=marked)


Documents = HiddenStatesDataset | Mixture
"""What a run reads: one dataset, several as one, or one that is still being generated."""


def parts_of(dataset: Documents) -> tuple[HiddenStatesDataset, ...]:
    """Return the datasets of a mixture, or the dataset alone."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


def open_documents(
    sources: Sequence[DataSource], mask: str | None = None
) -> HiddenStatesDataset | Mixture:
    """Open what a run trains on; one dataset of weight 1 is returned as it is.

    `mask` is a mask policy, None: the stored masks.

    Raises:
        MissingError, DatasetError: a dataset cannot be read, or its target or supervision is not
            that of the first. ConfigError: a dataset is given twice.
    """
    datasets = tuple(open_with_mask(source.path, mask) for source in sources)
    if len(sources) == 1 and sources[0].weight == 1:
        return datasets[0]
    known: dict[str, DataSource] = {}
    for source, dataset in zip(sources, datasets, strict=True):
        first = known.setdefault(dataset.manifest.fingerprint, source)
        if first is not source:
            raise ConfigError(
                f"--data {source}: the very dataset of {first}, and each would count twice; name "
                f"it once, with a weight: {first.path}:2"
            )
    for other in datasets[1:]:
        _require_same_target(datasets[0], other)
    bounds = np.cumsum([0, *map(len, datasets)]).tolist()
    names = unique_names([Path(source.place) for source in sources])
    shares = tuple(
        Share(
            name=names[i],
            first=bounds[i],
            last=bounds[i + 1],
            weight=source.weight,
            fingerprint=datasets[i].manifest.fingerprint,
        )
        for i, source in enumerate(sources)
    )
    return Mixture(datasets, shares, common_manifest([d.manifest for d in datasets]))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name per dataset: its directory's name, with #2, #3, ... if it repeats."""
    names: list[str] = []
    for path in paths:
        name = path.absolute().name
        choices = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
        names.append(next(choice for choice in choices if choice not in names))
    return names


def common_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """Return the manifest of several datasets as one: the first's, with only what all have.

    Raises:
        DatasetError: the datasets differ in supervision.
    """
    first = manifests[0]
    for other in manifests[1:]:
        if other.supervision != first.supervision:
            raise DatasetError(
                f"{other.where} has --supervision {other.supervision}, and {first.where} has "
                f"{first.supervision}; a run can use only one kind. Generate one of them again"
            )
    layers = [k for k in first.layers if all(k in other.layers for other in manifests)]
    shared = set.intersection(*({c.name for c in m.columns} for m in manifests))
    return first.changed(
        layers=tuple(layers),
        columns=tuple(_decoded(c) for c in first.columns if c.name in shared),
        final=SUPERVISED if any(m.final == SUPERVISED for m in manifests) else ALL,
        teacher=SUPERVISED if any(m.teacher == SUPERVISED for m in manifests) else ALL,
        draft_layers={
            draft: layers
            for draft, layers in first.draft_layers.items()
            if all(other.draft_layers.get(draft) == layers for other in manifests)
        },
        identity=joined([manifest.identity for manifest in manifests]),
        mixed=[manifest.fingerprint for manifest in manifests],
    ).with_fingerprint()


def _decoded(column: Column) -> Column:
    """Return a column as it is read: decoded, because codecs may differ."""
    codec = "bf16" if column.lossy else column.codec
    return Column(name=column.name, codec=codec, width=column.width)


def _require_same_target(first: HiddenStatesDataset, other: HiddenStatesDataset) -> None:
    """Refuse a dataset of another target; warn if only tokenizer, template or kwargs differ."""
    ours, theirs = first.manifest, other.manifest
    compared = compare(
        ours.identity,
        theirs.identity,
        of_recorded=f"{first.path} has",
        of_current=f"{other.path} has",
        states=True,
    )
    differing = compared.refused + differing_settings(plain(ours.head), plain(theirs.head))
    if not differing:
        differing = _differing_tensors(first, other)
    if differing:
        raise DatasetError(
            f"{other.path} has states of another target than {first.path}, and one draft cannot "
            "learn from both:\n  " + "\n  ".join(differing) + "\nFit a draft to each dataset, or "
            "generate one of them again"
        )
    for line in compared.warned:
        log.warning(
            "warning[mixture]: prompts of an engine can match only one of two datasets: %s", line
        )


def _differing_tensors(first: HiddenStatesDataset, other: HiddenStatesDataset) -> list[str]:
    """List what differs between embeddings and heads: of other dtypes, beyond rounding to them."""
    files = [d.manifest.files.get("target/head.safetensors") for d in (first, other)]
    if files[0] is not None and files[0] == files[1]:
        return []
    ours, theirs = (load_head_tensors(d) for d in (first, other))
    differing = []
    for name in {"embed_tokens", "lm_head", "lm_head_bias"} & ours.keys():
        one, two = ours[name], theirs[name]
        if one.dtype == two.dtype and torch.equal(one, two):
            continue
        share = differing_rows(one, two)
        if share or one.dtype == two.dtype:
            differing.append(f"{name}: {max(1e-4, share):.2%} of its rows differ")
    return sorted(differing)


# -- token counts ----------------------------------------------------------------------------------


def count_tokens(
    dataset: Documents,
    documents: Iterable[tuple[int, int, int]],
    longest: int,
    spans: np.ndarray | None = None,
) -> np.ndarray:
    """Count how often each token id is a supervised token, int64 [V], V tokens of the target.

    Only ids and masks are read, one document at a time.

    `documents` are (row, tokens that are counted, times that each counts); none has more than
    `longest` tokens. `spans`, int64 [longest + 1], receives how many runs of supervised tokens have
    each length; a document's first token is in none, as no draft knows what is before it.
    """
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(longest, dtype=torch.int64)
    mask = torch.zeros(longest, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    for row, length, times in documents:
        tokens = dataset.read_into(row, out, 0, length)
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), times)
        if spans is not None:
            np.add.at(spans, np.diff(runs(mask[1:tokens].numpy()))[:, 0], 1)
    return counts


def count_dataset(dataset: HiddenStatesDataset) -> np.ndarray:
    """Count the supervised tokens of all documents of a dataset, int64 [V]."""
    lengths = dataset.lengths.tolist()
    documents = ((row, length, 1) for row, length in enumerate(lengths))
    return count_tokens(dataset, documents, max(lengths, default=0))
