"""How often each token is a supervised token: of documents, of a dataset, or from a file.

V target vocabulary.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_train.data.mixture import Documents


def count_tokens(
    dataset: Documents, documents: Iterable[tuple[int, int, int]], longest: int
) -> np.ndarray:
    """Count how often each token id is a supervised token, int64 [V].

    Only ids and masks are read, one document at a time.

    Args:
        dataset: what is read.
        documents: (row, tokens that are counted, times that each counts).
        longest: largest number of tokens.
    """
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(longest, dtype=torch.int64)
    mask = torch.zeros(longest, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    for row, length, times in documents:
        tokens = dataset.read_into(row, out, 0, length)
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), times)
    return counts


def count_dataset(dataset: HiddenStatesDataset) -> np.ndarray:
    """Count the supervised tokens of all documents of a dataset, int64 [V]."""
    lengths = dataset.lengths.tolist()
    documents = ((row, length, 1) for row, length in enumerate(lengths))
    return count_tokens(dataset, documents, max(lengths, default=0))


def counts_from(path: str | Path, vocab: int, tokenizer_hash: str | None) -> np.ndarray:
    """Return the token counts of --draft-vocab-from, int64 [V].

    Args:
        path: a dataset directory, or a JSON object {token id: count}.
        vocab: V of the draft's target.
        tokenizer_hash: of the draft's target (see shards.identity); None: not known.

    Raises:
        MissingError: no such file. ConfigError: another kind of file.
        DatasetError: ids of another tokenizer, or a damaged dataset.
    """
    path = Path(path)
    if path.is_dir():
        dataset = HiddenStatesDataset(path)
        _require_same_tokens(dataset.manifest, vocab, tokenizer_hash)
        return count_dataset(dataset)
    if not path.exists():
        raise MissingError(f"--draft-vocab-from {path}: no such dataset or file")
    if path.suffix != ".json":
        raise ConfigError(
            f"--draft-vocab-from {path}: expected a dataset directory, or a .json file with an "
            "object {token id: count}. To count a corpus, capture it with `spec-data generate` "
            "first, or count its tokens into such a file"
        )
    return _read_counts(path, vocab)


def _require_same_tokens(other: Manifest, vocab: int, tokenizer_hash: str | None) -> None:
    """Refuse a dataset whose token ids mean other tokens.

    Raises:
        DatasetError: vocabulary sizes or hashes of the tokenizers differ.
    """
    theirs = other.identity.get("tokenizer_hash")
    if other.vocab_size == vocab and (None in (theirs, tokenizer_hash) or theirs == tokenizer_hash):
        return
    raise DatasetError(
        f"--draft-vocab-from {Path(other.where).parent}: its tokens are those of another tokenizer "
        f"(vocabulary {other.vocab_size}, here {vocab}; tokenizer hash {theirs}, here "
        f"{tokenizer_hash}), so its counts do not fit. Take a dataset of the same tokenizer, or a "
        "JSON object {token id: count}"
    )


def _read_counts(path: Path, vocab: int) -> np.ndarray:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"--draft-vocab-from {path}: not valid JSON ({error})") from None
    counts = np.zeros(vocab, dtype=np.int64)
    if not isinstance(found, dict):
        raise ConfigError(f"--draft-vocab-from {path}: expected an object {{token id: count}}")
    for name, count in found.items():
        valid = type(count) is int and 0 <= count < 2**53
        if not name.isdecimal() or int(name) >= vocab or not valid:
            raise ConfigError(
                f"--draft-vocab-from {path}: {name!r}: {count!r} is no count of a token; expected "
                f"ids from 0 to {vocab - 1} and whole numbers"
            )
        counts[int(name)] = count
    if not counts.any():  # the vocabulary would be the lowest ids
        raise ConfigError(f"--draft-vocab-from {path}: counts no token")
    return counts
