"""The plan of a conversion: its documents are the samples of a layout, in their order.

Samples are read as corpus rows with token ids and a mask, so that malformed ones are counted,
listed and limited like those of a corpus, and equal ones are stored once. Which sample each
document is from is written beside the plan.
"""

import json
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.conversion.stored_samples import Layout, SampleTokens
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.documents import Document
from spec_data.corpus.file_rows import Digest, Row
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.sources import Source
from spec_data.generation.plan import Plan, cut_into_units, render_corpus, truncate
from spec_data.generation.setup import Setup, row_settings, settings, unit_limit
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.files import sha256_json, write_atomically

# -- mask frame ------------------------------------------------------------------------------------
# Does a stored loss mask mark the supervised tokens themselves, or the tokens before them?
#
# A trainer may store the mask of labels: entry t then stands for token t + 1. The chat template of
# the target shows it: an answer begins right after the generation prompt, so the last token of the
# prompt comes just before a run of ones. Where the prompt ends *inside* the run, the mask is one
# too early; where it ends one token before that place, the mask is one too late.


TOKEN, NEXT = "token", "next"
"""Entry t of the mask is about token t, or about token t + 1."""

_TOKENS = 3  # of the end of the generation prompt that must be found
_RUNS = 4  # fewest runs that say something


def in_token_frame(mask: Tensor, frame: str) -> Tensor:
    """Return a mask [T] whose entry t is about token t."""
    if frame == TOKEN:
        return mask
    return torch.cat([mask.new_zeros(1), mask[:-1]])


def generation_prompt(tokenizer: Any) -> list[int]:
    """Return the last token ids before an answer, by the chat template; [] if unknown."""
    message = [{"role": "user", "content": "a"}]
    try:
        given = {"tokenize": True, "return_dict": False}
        without = tokenizer.apply_chat_template(message, add_generation_prompt=False, **given)
        with_prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, **given)
    except Exception:  # there is no template, or it fails: a program, it can raise anything
        return []
    own = list(with_prompt)[len(without) :]
    return own[-_TOKENS:] if list(with_prompt)[: len(without)] == list(without) else []


def runs_by_offset(
    documents: Sequence[tuple[Tensor, Tensor]], prompt: Sequence[int]
) -> dict[int, int]:
    """Count runs of ones by where the generation prompt ends, relative to the token before the run.

    Args:
        documents: token ids int64 [T] and mask [T], in the token frame.
        prompt: of `generation_prompt`.

    Returns:
        Number of runs by offset: 0 is right, 1 a mask that is one too early, -1 one too late.
    """
    counts = {0: 0, 1: 0, -1: 0}
    width = len(prompt)
    for ids, mask in documents:
        edges = torch.diff(mask.long(), prepend=mask.new_zeros(1).long())
        for start in (edges == 1).nonzero().flatten().tolist():
            for offset in counts:
                end = start + offset
                if width <= end <= len(ids) and ids[end - width : end].tolist() == list(prompt):
                    counts[offset] += 1
    return counts


def check_frame(counts: dict[int, int], frame: str) -> str:
    """Refuse a mask that is shifted against its tokens; return what was found, in words.

    Raises:
        ConfigError: most runs of ones begin one token too early or too late.
    """
    total, right = sum(counts.values()), counts[0]
    worst = max((1, -1), key=lambda offset: counts[offset])
    if total < _RUNS:
        return (
            "not checked: the generation prompt of the chat template was not found before answers"
        )
    if counts[worst] <= right:
        return f"{right} of {total} supervised runs begin right after the generation prompt"
    if worst == 1 and frame == TOKEN:
        raise ConfigError(
            f"the loss masks are one token too early: {counts[1]} of {total} supervised runs begin "
            "with the last token of the generation prompt, so entry t is about token t + 1. What "
            "fits is --mask-frame next. Nothing was written"
        )
    advice = " What fits is --mask-frame token." if frame == NEXT else ""
    raise ConfigError(
        f"the loss masks are shifted: {counts[worst]} of {total} supervised runs begin one token "
        f"too {'early' if worst == 1 else 'late'}.{advice} Nothing was written"
    )


# -- sample plan -----------------------------------------------------------------------------------


SAMPLES = "samples.json"
"""In OUT/.generate: the number of the sample of each planned document."""


def listing_hash(layout: Layout, root: Path) -> str:
    """Return a hash of the names and sizes of the files of a layout; no file is read."""
    return sha256_json(
        [[f.relative_to(root).as_posix(), f.stat().st_size] for f in layout.files() if f.is_file()]
    )


def tokens_of(layout: Layout, number: int, all_tokens: bool, frame: str) -> tuple[Tensor, Tensor]:
    """Return ids int64 [T] of a sample, and its mask [T] in the token frame.

    Args:
        layout, number: the sample.
        all_tokens: supervise every token, and do not read the stored mask.
        frame: what the entries of a stored mask are about, see `mask_frame`.

    Raises:
        BadRow: the sample is malformed, or has no mask.
    """
    found: SampleTokens = layout.tokens(number)
    if all_tokens:
        return found.ids, found.ids.new_ones(len(found.ids))
    if found.mask is None:
        raise BadRow("no loss mask is stored; supervise every token with --mask all")
    return found.ids, in_token_frame(found.mask, frame)


class _Samples:
    """The samples of a layout as the rows of one corpus source; remembers their digests."""

    def __init__(self, layout: Layout, setup: Setup, name: str, path: str, frame: str) -> None:
        self.numbers: dict[str, int] = {}  # by the id of the document that a sample becomes
        self._layout, self._name, self._path, self._frame = layout, name, path, frame
        self._all = setup.config.mask == "all"
        self._max_length = setup.config.max_length

    def sources(self, *_given: object) -> list[Source]:
        """Return the one source; see `corpus.sources.resolve`."""
        kind = f"states of {self._layout.tool}"
        count = len(self._layout)
        digest = lambda: listing_hash(self._layout, Path(self._path))  # noqa: E731
        return [
            Source(
                name=self._name,
                path=self._path,
                kind=kind,
                rows=self._rows,
                digest=digest,
                count=lambda: count,
            )
        ]

    def _rows(self, digest: Digest) -> Generator[Row]:
        digest.set_source(lambda: listing_hash(self._layout, Path(self._path)))
        for number in range(len(self._layout)):
            where = f"{self._path}/{self._layout.where(number)}"
            try:
                ids, mask = tokens_of(self._layout, number, self._all, self._frame)
            except BadRow as reason:
                yield where, reason
                continue
            row = {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
            self._remember(number, row)
            yield where, row

    def _remember(self, number: int, row: dict[str, list[int]]) -> None:
        ids, mask = row["input_ids"], row["loss_mask"]
        if set(mask) - {0, 1} or min(ids) < 0 or max(ids) > np.iinfo(np.int32).max:
            return  # rendering refuses it
        document = Document(input_ids=ids, loss_mask=mask, turns=(), source="", where="")
        digest = truncate(document, self._max_length).digest
        self.numbers.setdefault(digest.hex(), number)


def make_sample_plan(
    layout: Layout, setup: Setup, path: str, frame: str, scratch: Path | None = None
) -> tuple[Plan, list[int]]:
    """Read the tokens of every sample; return the plan, and the sample of each of its documents.

    Args:
        layout: the samples; path: their directory, as the user wrote it.
        setup: what is written.
        frame: what the entries of a stored mask are about.
        scratch: where temporary files go; None: where the system puts them.

    Raises:
        CorpusError: too many samples are malformed, or no document is left.
    """
    config = setup.config
    name = Path(path).resolve().name
    samples = _Samples(layout, setup, name, path, frame)
    reader = CorpusReader(
        [path],
        on_bad_row="fail" if config.on_bad_row == "fail" else "skip",
        limit=config.limit or None,
        max_bad_rows=config.bad_row_limit,
        find=samples.sources,
    )
    rendered = render_corpus(reader, row_settings(setup), processes=1, scratch=scratch)
    plan = cut_into_units(rendered, settings(setup, reader.reports), partial(unit_limit, setup))
    numbers = [samples.numbers[doc_id] for doc_id in plan.documents.doc_ids()]
    return plan, numbers


def save_samples(work: Path, numbers: list[int]) -> None:
    """Write the number of the sample of each planned document."""
    write_atomically(work / SAMPLES, json.dumps(numbers))


def read_samples(work: Path, documents: int) -> list[int]:
    """Return the number of the sample of each planned document.

    Raises:
        DatasetError: the file is damaged.
    """
    file = work / SAMPLES
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list) or len(found) != documents:
        raise DatasetError(f"{file}: damaged; delete {work.parent} and convert again")
    return [int(number) for number in found]
