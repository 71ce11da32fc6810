"""The prompts of a benchmark as n-grams of token ids; see `prompt_overlap`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.corpus.prompt_overlap import LEAST_TOKENS, Grams, add_prompt
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import parse_prompt
from spec_data.corpus.template import Template
from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import CorpusError, MissingError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The prompts of one `--decontaminate` source.

    Attributes:
        name: as the user wrote it; sources: name and hash of its files.
        grams: the n-grams of its prompts.
    """

    name: str
    sources: tuple[dict[str, Any], ...] = field(default=())
    grams: Grams


def read_benchmark(
    name: str, tokenizer_dir: Path, size: int, kwargs: Mapping[str, Any] | None = None
) -> Benchmark:
    """Read the prompts of a file, directory or dataset, tokenised as in a dataset.

    Rows are read as `spec-train eval --prompts` reads them. `size` is n, `kwargs` are the template
    kwargs of the dataset.

    Raises:
        MissingError: no such file.
        CorpusError: it cannot be read, or nothing in it can be compared.
        TargetError: no usable tokenizer.
    """
    template = Template(load_tokenizer(tokenizer_dir), kwargs, apart=True)
    grams = Grams(size)
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
    return Benchmark(name=name, sources=sources, grams=grams)
