"""`spec-data select`: a dataset of some of the documents of another, with other masks if asked."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.options.view_options import SelectConfig
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.identity import usual_kwargs
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import SUPERVISED
from spec_data.shards.turn_masks import check_policy
from spec_data.terminal.progress import progress
from spec_data.views.benchmarks import Benchmark, read_benchmark
from spec_data.views.choosing import (
    Condition,
    check_ids,
    choose,
    of_sources,
    read_ids,
    sample,
    supervised_tokens,
    with_ids,
    within,
)
from spec_data.views.overlap import find_overlap
from spec_data.views.scores import document_scores
from spec_data.views.stored_documents import Change, StoredDocuments, stored_tokens
from spec_data.views.view_manifest import derived_draft, keep_sources, view_record
from spec_data.views.view_units import Part, view_units
from spec_data.views.write_view import View, check_out

logger = logging.getLogger(__name__)
NOTHING = "nothing-supervised"  # the reason under which `generate` counts such documents


def plan_select(config: SelectConfig) -> View:
    """Return the view that a `select` writes.

    Raises:
        ConfigError: an option contradicts the dataset, or no document is left.
        DatasetError: damage, or --mask needs tokens that are not stored.
    """
    stored = StoredDocuments(HiddenStatesDataset(config.data))
    check_out(Path(config.out), [stored])
    mask = config.mask if config.mask != stored.manifest.mask else None
    change = Change(columns=stored.manifest.columns, mask=mask)
    chosen = _Chosen(stored, config, change)
    keep, dropped = choose(len(stored), chosen.conditions())
    if not keep.any():
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise ConfigError(f"{config.data}: no document is left ({reasons}); relax the options")
    if mask is not None:
        check_stored(stored, np.flatnonzero(keep), change)
    record = view_record("select", chosen.recorded(), [stored.manifest])
    draft = derived_draft(stored.manifest, change.columns, record, dropped)
    own = stored.sources.to_pylist()
    keep_sources(draft, own, [own[d] for d in np.flatnonzero(keep).tolist()])
    if mask is not None:
        draft["mask"] = mask
        draft.pop("agreement", None)
    part = Part(stored=stored, keep=keep, change=change)
    return View(parts=(part,), units=view_units([part]), draft=draft)


@dataclass
class _Chosen:
    """The conditions of the options, and what the manifest records of them."""

    stored: StoredDocuments
    config: SelectConfig
    change: Change

    def __post_init__(self) -> None:
        self._benchmarks: list[Benchmark] = []
        self._others: list[str] = []
        self._ids: list[str] = []

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions, in the order in which they are applied."""
        config, dataset = self.config, self.stored.dataset
        if config.ids is not None:
            self._ids = read_ids(Path(config.ids))
            check_ids(self.stored, self._ids, Path(config.ids))
            yield Condition(reason="select:ids", wanted=with_ids(self.stored, self._ids))
        if config.source:
            yield Condition(reason="select:source", wanted=of_sources(self.stored, config.source))
        yield Condition(
            reason="select:length",
            wanted=within(dataset.lengths, config.min_length, config.max_length),
        )
        yield from self._supervised()
        yield from self._scores()
        for path in config.not_in:
            other = HiddenStatesDataset(path)
            self._others.append(other.manifest.fingerprint)
            wanted = with_ids(self.stored, other.doc_ids, inside=False)
            yield Condition(reason="select:in-other-dataset", wanted=wanted)
        for name in config.decontaminate:
            yield self._overlap(name)
        if config.sample is not None:
            yield Condition(
                reason="select:sample", wanted=sample(self.stored, config.sample, config.seed)
            )

    def _supervised(self) -> Iterator[Condition]:
        counts = self.stored.dataset.supervised
        if self.change.mask is not None:
            counts = supervised_tokens(self.stored, self.change.mask)
            yield Condition(reason=NOTHING, wanted=within(counts, 1, None))
        least, most = self.config.min_supervised, self.config.max_supervised
        yield Condition(reason="select:supervised", wanted=within(counts, least, most))

    def _scores(self) -> Iterator[Condition]:
        share, nll = self.config.min_first_choice, self.config.max_nll
        if share is None and nll is None:
            return

        def wanted(documents: np.ndarray) -> np.ndarray:
            found = document_scores(self.stored.dataset, documents, nll is not None)
            fine = np.ones(len(documents), bool)
            if share is not None:
                fine &= found.first_choice >= share  # nan is never above
            if nll is not None:
                fine &= found.nll <= nll
            return fine

        yield Condition(reason="select:likelihood", wanted=wanted)

    def _overlap(self, name: str) -> Condition:
        tokenizer = self.stored.dataset.target_dir
        kwargs = usual_kwargs(self.stored.manifest.identity)
        benchmark = read_benchmark(name, tokenizer, self.config.ngram, kwargs)
        self._benchmarks.append(benchmark)

        def wanted(documents: np.ndarray) -> np.ndarray:
            found = find_overlap(self.stored, documents, benchmark.grams)
            logger.info(
                "%s: %d of %d documents share %d token ids in a row with %d of its %d prompts",
                *(name, int(found.documents.sum()), len(documents), self.config.ngram),
                *(len(found.prompts), benchmark.grams.prompts),
            )
            return ~found.documents

        return Condition(reason="select:overlap", wanted=wanted)

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the view; files by their contents, not by their paths."""
        options = asdict(self.config)
        for name in ("data", "out", "dry_run", "not_in", "decontaminate", "ids"):
            del options[name]
        if self._ids:
            text = "\n".join(sorted(set(self._ids))).encode()
            options["ids"] = hashlib.sha256(text).hexdigest()
        options["not_in"] = self._others
        options["decontaminate"] = [s for b in self._benchmarks for s in b.sources]
        for name, needed in (("ngram", self._benchmarks), ("seed", self.config.sample)):
            if not needed:
                del options[name]
        return options


def check_stored(stored: StoredDocuments, documents: np.ndarray, change: Change) -> None:
    """Check that sparse columns have all tokens that a new mask supervises.

    Raises:
        ConfigError: unknown policy. DatasetError: they do not; the message says what is missing.
    """
    check_policy(change.mask or "")
    sparse = [column for column in change.columns if column.sparse]
    if not sparse:
        return
    missing, without = 0, []
    for document in progress(documents.tolist(), desc="masks", unit="docs", leave=False):
        place = stored.find(document)
        known = stored_tokens(sparse[0], place.mask(None))  # all have the same tokens
        wanted = stored_tokens(sparse[0], place.mask(change.mask))
        lacking = len(np.setdiff1d(wanted, known, assume_unique=True))
        missing += lacking
        without += [document] if lacking else []
    if not missing:
        return
    manifest = stored.manifest
    kinds = [
        f"--{name} all" for name in ("teacher", "final") if getattr(manifest, name) == SUPERVISED
    ]
    raise DatasetError(
        f"{stored.dataset.path}: --mask {change.mask} supervises {missing:,} tokens of "
        f"{len(without):,} documents (first: document {without[0]}) at which "
        f"{', '.join(column.name for column in sparse)} were not stored, because the mask at "
        f"generation ({manifest.mask}) does not supervise them. Take a narrower "
        f"mask, or generate the dataset again with {' and '.join(kinds)}"
    )
