"""Which documents of a dataset contain parts of a benchmark's prompts (`--decontaminate`).

The rule is that of `corpus/prompt_overlap.py`.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.corpus.prompt_overlap import LEAST_TOKENS, Grams, add_prompt
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import parse_prompt
from spec_data.corpus.template import Template
from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import CorpusError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The prompts of one `--decontaminate` source.

    Attributes:
        sources: name and hash of its files.
        grams: the n-grams of its prompts.
    """

    sources: tuple[dict[str, Any], ...]
    grams: Grams


def read_benchmark(
    name: str, tokenizer_dir: Path, kwargs: Mapping[str, Any] | None = None
) -> Benchmark:
    """Read the prompts of a file, directory or dataset, tokenised as in a dataset.

    Rows are read as `spec-train eval --prompts` reads them. `kwargs` are the template kwargs of the
    dataset.

    Raises:
        MissingError: no such file.
        CorpusError: it cannot be read, or nothing in it can be compared.
        TargetError: no usable tokenizer.
    """
    template = Template(load_tokenizer(tokenizer_dir), kwargs, apart=True)
    grams = Grams()
    try:
        reader = CorpusReader([name], split="test", parse=parse_prompt)
        for record in reader:
            add_prompt(grams, record, template)
    except (MissingError, CorpusError) as error:
        raise type(error)(f"--decontaminate {str(error).removeprefix('corpus ')}") from error
    if grams.short == grams.prompts:
        raise CorpusError(
            f"--decontaminate {name}: none of its {grams.prompts} prompts has {LEAST_TOKENS} "
            "tokens, so nothing can be compared; drop this source"
        )
    if grams.short:
        logger.warning(
            "%s: %d of %d prompts have fewer than %d tokens and are not compared",
            *(name, grams.short, grams.prompts, LEAST_TOKENS),
        )
    sources = tuple({"source": r.source, "sha256": r.sha256} for r in reader.reports)
    return Benchmark(sources=sources, grams=grams)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What of a dataset is in a benchmark, and what of the benchmark is in the dataset.

    Attributes:
        documents: which of the documents overlap, bool [n].
        prompts: how many documents contain a part of each prompt, by its number.
    """

    documents: np.ndarray
    prompts: Counter[int]


def find_overlap(dataset: HiddenStatesDataset, documents: np.ndarray, grams: Grams) -> Overlap:
    """Compare `documents`, int64 [n], with a benchmark.

    Raises:
        DatasetError: damage.
    """
    reader = HiddenStatesDataset(dataset.place, ["input_ids"])
    overlaps = np.zeros(len(documents), bool)
    prompts: Counter[int] = Counter()
    bar = progress(documents.tolist(), desc="overlap", unit="docs", leave=False)
    for number, document in enumerate(bar):
        matches = grams.matches(reader[document]["input_ids"].numpy().astype(np.int32))
        overlaps[number] = bool(matches)
        prompts.update(matches)
    return Overlap(documents=overlaps, prompts=prompts)
