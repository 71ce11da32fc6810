"""The prompts of a benchmark as n-grams of token ids; see `overlap`."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.corpus.prompt_rows import parse_prompt
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import Record
from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import CorpusError, MissingError
from spec_data.views.overlap import LEAST_TOKENS, Grams

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


def read_benchmark(name: str, tokenizer_dir: Path, size: int) -> Benchmark:
    """Read the prompts of a file, directory or dataset, tokenised as in a dataset.

    Rows are read as `spec-train eval --prompts` reads them. `size` is n.

    Raises:
        MissingError: no such file.
        CorpusError: it cannot be read, or nothing in it can be compared.
        TargetError: no usable tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    grams = Grams(size)
    try:
        reader = CorpusReader([name], split="test", parse=parse_prompt)
        for record in reader:
            given = [record.input_ids] if record.input_ids is not None else []
            texts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in _asked(record)]
            grams.add([*given, *texts])
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


def _asked(record: Record) -> list[str]:
    """Return the texts of a prompt that are its own: user messages, or the text to continue."""
    if record.text is not None:
        return [record.text]
    own = [m["content"] for m in record.messages or () if m["role"] == "user"]
    return [text for text in (*own, *record.follow_ups) if isinstance(text, str)]
