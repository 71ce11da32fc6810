"""Read several datasets of one target as one dataset, with one manifest and one head.

Hidden states of different targets must never be mixed in a run, even if the targets are alike: the
draft would learn from neither. So datasets are mixed only if all facts that identify their target
agree; embedding and head are compared tensor by tensor. A draft can read only what all datasets
have. The documents are numbered over all datasets, one after another.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.config import differing_fields
from spec_data.shards.checking import FIRST
from spec_data.shards.coded import CodedRows
from spec_data.shards.errors import DatasetError
from spec_data.shards.identity import compare, identity_of, joined, own_facts
from spec_data.shards.layer_ids import recorded_layers
from spec_data.shards.lossy import Tables
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import ALL, SUPERVISED, Column, Manifest, fingerprint
from spec_train.data.mixed_order import Share
from spec_train.data.policy_masks import open_with_mask
from spec_train.options.data_option import Source
from spec_train.origin import differing_rows

log = logging.getLogger(__name__)


class Documents(Protocol):
    """What a run reads: one dataset or several as one. See HiddenStatesDataset for the members."""

    @property
    def path(self) -> Path: ...
    @property
    def place(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def tables(self) -> dict[str, Tables]: ...
    @property
    def target_dir(self) -> Path: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def supervised(self) -> np.ndarray: ...
    @property
    def first_supervised(self) -> np.ndarray: ...
    @property
    def id_array(self) -> pa.StringArray: ...
    @property
    def doc_ids(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def target_config(self) -> dict[str, Any]: ...
    def shard_of(self, index: int) -> str: ...
    def source_of(self, index: int) -> str: ...
    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool: ...
    def fetch_ahead(self, index: int, columns: Iterable[str]) -> None: ...
    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
    ) -> int: ...


@dataclass(frozen=True)
class Mixture:
    """Several datasets of one target as one. `path` and target files are those of the first."""

    datasets: tuple[HiddenStatesDataset, ...]
    shares: tuple[Share, ...]
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Directory of the first dataset."""
        return self.datasets[0].path

    @property
    def place(self) -> str:
        """URL or directory of the first dataset."""
        return self.datasets[0].place

    @property
    def target_dir(self) -> Path:
        """Folder of the target's files, in the first dataset."""
        return self.datasets[0].target_dir

    @property
    def tables(self) -> dict[str, Tables]:
        """Empty: all columns are read decoded, because datasets may differ in codecs and tables."""
        return {}

    def target_config(self) -> dict[str, Any]:
        """Return the target's configuration."""
        return self.datasets[0].target_config()

    def __len__(self) -> int:
        return self.shares[-1].last

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [N]."""
        return np.concatenate([d.lengths for d in self.datasets])

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return np.concatenate([d.supervised for d in self.datasets])

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return np.concatenate([d.first_supervised for d in self.datasets])

    @cached_property
    def id_array(self) -> pa.StringArray:
        """Content hashes of the documents; copies of a document in several datasets share one."""
        return pa.concat_arrays([d.id_array for d in self.datasets])

    @cached_property
    def doc_ids(self) -> list[str]:
        """Content hashes of the documents."""
        return self.id_array.to_pylist()

    def _locate(self, index: int) -> tuple[HiddenStatesDataset, int]:
        for dataset, share in zip(self.datasets, self.shares, strict=True):
            if share.first <= index < share.last:
                return dataset, index - share.first
        raise IndexError(f"document {index} of {len(self)}")

    def shard_of(self, index: int) -> str:
        """Return the path of the shard file that holds a document."""
        dataset, row = self._locate(index)
        return f"{dataset.place}/{dataset.shard_of(row)}"

    def source_of(self, index: int) -> str:
        """Return the source of a document, in the words of its dataset."""
        dataset, row = self._locate(index)
        return dataset.source_of(row)

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Return True at once: all datasets are sealed, so every document can be read."""
        return True

    def fetch_ahead(self, index: int, columns: Iterable[str]) -> None:
        """Begin to fetch columns of a document, as HiddenStatesDataset.fetch_ahead does."""
        dataset, row = self._locate(index)
        dataset.fetch_ahead(row, columns)

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
    ) -> int:
        """Copy a document's tokens into `out`, as HiddenStatesDataset.read_into does."""
        dataset, row = self._locate(index)
        return dataset.read_into(row, out, start, length)


def open_documents(
    sources: Sequence[Source], check: str = FIRST, mask: str | None = None
) -> HiddenStatesDataset | Mixture:
    """Open what a run trains on; one dataset of weight 1 is returned as it is.

    `check` is as for HiddenStatesDataset; `mask` is a mask policy, None: the stored masks.

    Raises:
        MissingError, DatasetError: a dataset cannot be read, or its target or supervision is not
            that of the first.
    """
    datasets = tuple(open_with_mask(source.path, mask, check=check) for source in sources)
    if len(sources) == 1 and sources[0].weight == 1:
        return datasets[0]
    for other in datasets[1:]:
        _require_same_target(datasets[0], other)
    bounds = np.cumsum([0, *map(len, datasets)]).tolist()
    names = unique_names([source.path for source in sources])
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
    mixture = Mixture(datasets, shares, common_manifest([d.manifest for d in datasets]))
    copies = len(mixture) - len(mixture.id_array.unique())
    if copies:
        log.info(
            "%s documents are in several datasets: in training their weights add up, and each is "
            "held out of all datasets or of none",
            f"{copies:,}",
        )
    return mixture


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name per dataset: its directory's name, with #2, #3, ... if it repeats."""
    names: list[str] = []
    for path in paths:
        name = path.absolute().name
        seen = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{seen + 1}" if seen else name)
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
    if any(other.layers != first.layers for other in manifests):
        log.info(
            "layers     %s in all datasets, of %s",
            layers or "none",
            "; ".join(f"{list(m.layers)} in {Path(m.where).parent.name}" for m in manifests),
        )
    recorded = [recorded_layers(manifest.raw) for manifest in manifests]
    shared = set.intersection(*({c.name for c in m.columns} for m in manifests))
    parts = [manifest.fingerprint for manifest in manifests]
    raw = {k: v for k, v in first.raw.items() if k != "fingerprint"} | {
        "layers": layers,
        "columns": [_decoded(c) for c in first.columns if c.name in shared],
        "final": SUPERVISED if any(m.final == SUPERVISED for m in manifests) else ALL,
        "draft_layers": {
            draft: list(own)
            for draft, own in recorded[0].items()
            if all(other.get(draft) == own for other in recorded)
        },
        "mixed": parts,
    }
    if not raw["draft_layers"]:
        del raw["draft_layers"]  # as in datasets without it
    if any(m.teacher == SUPERVISED for m in manifests):
        raw["teacher"] = SUPERVISED
    if "identity" in first.raw:
        raw["identity"] = own_facts(joined([identity_of(manifest) for manifest in manifests]))
    raw["fingerprint"] = fingerprint(raw)
    return Manifest(raw, first.where)


def _decoded(column: Column) -> dict[str, Any]:
    """Return a column's manifest entry as it is read: decoded, because codecs may differ."""
    codec = "bf16" if column.lossy else column.codec
    return {"name": column.name, "codec": codec, "width": column.width}


def _require_same_target(first: HiddenStatesDataset, other: HiddenStatesDataset) -> None:
    """Refuse a dataset of another target; warn if only tokenizer, template or kwargs differ.

    Raises:
        DatasetError: the targets differ; the message lists how.
    """
    ours, theirs = first.manifest, other.manifest
    compared = compare(
        identity_of(ours),
        identity_of(theirs),
        of_recorded=f"{first.path} has",
        of_found=f"{other.path} has",
        states=True,
    )
    differing = compared.refused + differing_fields(vars(ours.head), vars(theirs.head))
    if not differing:
        differing = _differing_tensors(first, other)
    if differing:
        raise DatasetError(
            f"{other.path} has states of another target than {first.path}, and one draft cannot "
            "learn from both:\n  " + "\n  ".join(differing) + "\nFit a draft to each dataset, or "
            "generate one of them again"
        )
    for line in compared.warned:
        log.warning("warning: prompts of an engine can match only one of two datasets: %s", line)


def _differing_tensors(first: HiddenStatesDataset, other: HiddenStatesDataset) -> list[str]:
    """List what differs between embeddings and heads, beyond rounding to their dtypes."""
    name = "target/head.safetensors"
    hashes = [d.manifest.raw["files"].get(name, {}).get("sha256") for d in (first, other)]
    if hashes[0] is not None and hashes[0] == hashes[1]:
        return []
    ours, theirs = (load_head_tensors(d.path) for d in (first, other))
    return [
        f"{tensor}: {share:.2%} of its rows differ"
        for tensor in ("embed_tokens", "lm_head", "lm_head_bias")
        if tensor in ours and (share := _differing_share(ours[tensor], theirs[tensor]))
    ]


def _differing_share(own: Tensor, other: Tensor) -> float:
    """Return the share of rows of two tensors [V, H] or [V] that differ; equal dtypes: exactly."""
    if own.dtype == other.dtype:
        return 0.0 if torch.equal(own, other) else max(1e-4, differing_rows(own, other))
    return differing_rows(own, other)
