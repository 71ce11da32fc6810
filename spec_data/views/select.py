"""`spec-data select`: some documents or layers of a dataset, with other loss masks if asked.

Conditions are applied in a fixed order, and a document is counted under the first that it does not
meet. Those that read stored columns see only what is left.

Shapes: N documents.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.identity import usual_kwargs
from spec_data.shards.layer_ids import chosen_layers
from spec_data.shards.loss_masks import LossMasks, masks_under
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest, layer_column
from spec_data.terminal.progress import progress
from spec_data.views.derive import derived, with_sources
from spec_data.views.rows import Rows
from spec_data.views.scores import document_scores
from spec_data.views.where import matching, names_column

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents, columns and masks a `select` keeps; see `spec_data.commands.views.select`.

    Attributes:
        where: an SQL condition; "": every document.
        ids: file with document ids, one per line.
        not_in: datasets whose documents are left out.
        decontaminate: benchmarks whose prompts no document may contain.
        sample: a number of documents or a share of what is left; "": all.
        seed: of the sample.
        mask: a mask policy; "": the masks stay.
        layers: ids, or the name of a draft; "": all.
    """

    where: str = ""
    ids: str = ""
    not_in: Sequence[str] = ()
    decontaminate: Sequence[str] = ()
    sample: str = ""
    seed: int = 0
    mask: str = ""
    layers: str = ""


def select_rows(dataset: HiddenStatesDataset, given: Selection) -> tuple[Rows, Manifest]:
    """Return the rows of a `select` and the draft of its manifest.

    Raises:
        ConfigError: an option contradicts the dataset, no document is left, or nothing changes.
        DatasetError: damage, or the mask needs tokens that are not stored.
    """
    if given.mask == dataset.manifest.mask:
        given = replace(given, mask="")
    if not any(value for name, value in vars(given).items() if name != "seed"):
        raise ConfigError(f"{dataset.place}: nothing would change; name what is to be kept")
    bar = partial(progress, desc="masks", unit="docs", leave=False)
    masks = masks_under(dataset, given.mask, bar) if given.mask else None
    every = Rows.of(dataset)
    rows = every.with_masks(masks) if masks else every
    chosen = _Conditions(dataset, rows, given)
    keep, dropped = chosen.apply()
    if not len(keep):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise ConfigError(f"{dataset.place}: no document is left ({reasons}); relax the options")
    rows = rows.take(keep)
    if masks:
        rows = rows.with_ids(_new_ids(dataset, keep, masks))
    columns = dataset.manifest.columns
    if given.layers:
        layers = _kept_layers(given.layers, dataset.manifest)
        drop = {layer_column(k) for k in dataset.manifest.layers if k not in layers}
        columns = tuple(column for column in columns if column.name not in drop)
        rows = rows.with_columns([column.name for column in columns])
    draft = derived("select", chosen.recorded(), [dataset.manifest], columns, dropped)
    draft = with_sources(draft, every.texts("source"), rows.texts("source"))
    return rows, draft.changed(mask=given.mask, agreement=None) if masks else draft


class _Conditions:
    """The conditions of a selection, and what the manifest records of them."""

    def __init__(self, dataset: HiddenStatesDataset, rows: Rows, given: Selection) -> None:
        self._dataset, self._rows, self._given = dataset, rows, given
        self._ids: list[str] = []
        self._others: list[str] = []
        self._benchmarks: list[dict[str, Any]] = []
        self._left = np.arange(len(rows))

    def apply(self) -> tuple[np.ndarray, dict[str, int]]:
        """Return the documents that meet all conditions, int64 [n], and the others by reason."""
        dropped: Counter[str] = Counter()
        for reason, meets in self._results():
            dropped[reason] += int((~meets).sum())
            self._left = self._left[meets]
        return self._left, {reason: count for reason, count in dropped.items() if count}

    def _results(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield of each condition its reason, and which of the documents left meet it, bool [n]."""
        given = self._given
        if given.ids:
            self._ids = _read_ids(Path(given.ids), self._dataset)
            yield "select:ids", np.isin(self._own_ids(), self._ids)
        if given.mask:  # as `generate` names documents from which nothing is learned
            supervised = self._numbers("supervised") - (self._numbers("first_supervised") == 0)
            yield "nothing-supervised", supervised > 0
        if given.where:
            yield "select:where", matching(self._table(given.where), given.where)
        for path in given.not_in:
            other = HiddenStatesDataset(path, ())
            self._others.append(other.manifest.fingerprint)
            yield "select:not-in", ~np.isin(self._own_ids(), other.doc_ids)
        for name in given.decontaminate:
            yield "select:overlap", self._apart(name)
        if given.sample:
            yield "select:sample", _sampled(self._own_ids(), given.sample, given.seed)

    def _own_ids(self) -> list[str]:
        return self._dataset.id_array.take(pa.array(self._left)).to_pylist()

    def _numbers(self, name: str) -> np.ndarray:
        return self._rows.table.column(name).to_numpy()[self._left]

    def _table(self, condition: str) -> pa.Table:
        """Return what a condition is about: a row for each document that is left.

        Likelihoods are computed only if they are named.
        """
        left = self._rows.table.take(pa.array(self._left))
        columns = {
            "number": pa.array(self._left),
            **{name: left.column(name) for name in ("doc_id", "source")},
            "length": left.column("tokens"),
            "supervised": left.column("supervised"),
        }
        nll = names_column(condition, "nll")
        if nll or names_column(condition, "first_choice"):
            scores = document_scores(self._dataset, self._left, nll)
            columns |= {
                "first_choice": pa.array(scores.first_choice, from_pandas=True),
                "nll": pa.array(scores.nll, from_pandas=True),
            }
        else:
            columns |= dict.fromkeys(("first_choice", "nll"), pa.nulls(len(left), pa.float64()))
        return pa.table(columns)

    def _apart(self, name: str) -> np.ndarray:
        """Return which documents share no part with a benchmark, bool [n]."""
        from spec_data.views.overlap import find_overlap, read_benchmark  # two seconds of imports

        kwargs = usual_kwargs(self._dataset.manifest.identity)
        benchmark = read_benchmark(name, self._dataset.target_dir, kwargs)
        self._benchmarks += benchmark.sources
        overlap = find_overlap(self._dataset, self._left, benchmark.grams)
        logger.info(
            "%s: %d of %d documents share %d token ids in a row with %d of its %d prompts",
            *(name, int(overlap.documents.sum()), len(self._left), benchmark.grams.size),
            *(len(overlap.prompts), benchmark.grams.prompts),
        )
        return ~overlap.documents

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the view; files by their contents, not by their paths."""
        options = dict(vars(self._given))
        if self._ids:
            text = "\n".join(sorted(set(self._ids))).encode()
            options["ids"] = hashlib.sha256(text).hexdigest()
        options["not_in"] = self._others
        options["decontaminate"] = self._benchmarks
        if not self._given.sample:
            del options["seed"]
        return options


def _read_ids(file: Path, dataset: HiddenStatesDataset) -> list[str]:
    """Read document ids of a dataset, one per line; empty lines are skipped.

    Raises:
        MissingError: no such file. ConfigError: it is no text, or has no id.
        DatasetError: the dataset lacks some of them.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MissingError(f"--ids {file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ids {file}: cannot be read as text ({error})") from None
    ids = [line.strip() for line in lines if line.strip()]
    if not ids:
        raise ConfigError(f"--ids {file}: no document id in it; write one per line")
    lacking = sorted(set(ids) - set(dataset.doc_ids))
    if lacking:
        raise DatasetError(
            f"--ids {file}: {len(lacking)} of {len(set(ids))} ids are not in {dataset.place} "
            f"(first: {lacking[0]}); is it the list of another dataset, or of another mask? An id "
            "changes with the loss mask"
        )
    return ids


def _sampled(ids: Sequence[str], amount: str, seed: int) -> np.ndarray:
    """Return which documents are in a random sample, bool [n].

    The documents with the lowest hashes of (seed, id) are taken. So the order of a dataset does not
    matter, and a larger sample contains a smaller one of the same seed.
    """
    keys = [hashlib.sha256(f"{seed} {name}".encode()).digest() for name in ids]
    order = sorted(range(len(keys)), key=lambda number: (keys[number], number))
    sampled = np.zeros(len(ids), bool)
    sampled[order[: sample_size(amount, len(ids))]] = True
    return sampled


def sample_size(amount: str, count: int) -> int:
    """Return the documents of a sample of `count`: a number, or a share rounded to the nearest.

    Raises:
        ConfigError: `amount` is no number above 0, or a share above 1.
    """
    text = amount.strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    share = value / 100 if text.endswith("%") else value
    if not text.endswith("%") and value >= 1 and value.is_integer() and "." not in text:
        return min(int(value), count)
    if not 0 < share <= 1:
        raise ConfigError(
            f"--sample {amount}: expected a number of documents such as 500, or a share such as "
            "10% or 0.1"
        )
    return round(share * count)


def _kept_layers(layers: str, manifest: Manifest) -> tuple[int, ...]:
    """Return the layers to keep: ids, or those that were captured for a draft.

    Raises:
        ConfigError: the dataset records no layers of this draft. DraftError: no such layer.
    """
    if not layers[:1].isalpha():
        return chosen_layers(layers, manifest.layers)
    recorded = manifest.draft_layers
    if layers not in recorded:
        raise ConfigError(
            f"--layers {layers}: the dataset records no layers of this draft (recorded: "
            f"{', '.join(recorded) or 'none'}); name their ids"
        )
    return recorded[layers]


def _new_ids(dataset: HiddenStatesDataset, keep: np.ndarray, masks: LossMasks) -> list[str]:
    """Return the ids that documents have under new masks."""
    reader = HiddenStatesDataset(dataset.place, ["input_ids"])
    ids = []
    for document in progress(keep.tolist(), desc="ids", unit="docs", leave=False):
        tokens = reader[document]["input_ids"].numpy()
        ids.append(document_id(tokens, masks.mask(document, len(tokens))))
    return ids


def document_id(input_ids: np.ndarray, mask: np.ndarray) -> str:
    """Return the id of a document, a hash of its tokens and its loss mask (FORMAT.md)."""
    parts = input_ids.astype(np.int32).tobytes(), mask.astype(np.uint8).tobytes()
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]
