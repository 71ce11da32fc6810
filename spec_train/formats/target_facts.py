"""Facts that a draft's files may leave to its target: decoder blocks, embedding, LM head, name.

With them goes the target's identity, which an export compares with the draft's origin.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spec_data.models.families import block_count, text_table
from spec_data.shards.errors import MissingError, TargetError
from spec_data.shards.file_heads import check_files, instead
from spec_data.shards.files import read_object, weight_map
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.serving import read_sampling

_INDEX = "model.safetensors.index.json"
_EMBEDDING = (
    *("embed_tokens.weight", "wte.weight", "embed_in.weight", "backbone.embeddings.weight"),
    "word_embeddings.weight",
)
_HEAD = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class TargetFacts:
    """The known facts of a target; embedding and head are [V, H] in the target's dtype.

    `sampling` is that of generation_config.json; None: unknown. `identity` is a table of
    `spec_data.shards.identity`; `problems` says, in words, which parts of the target could not be
    read for it.
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()
    num_layers: int | None = None
    max_positions: int | None = None
    embedding: Tensor | None = None
    head: Tensor | None = None
    dtype: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    sampling: dict[str, float] | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_target(folder: Path, name: str | None = None) -> TargetFacts:
    """Read the facts of a model directory; `name` is what a form writes as the target's name.

    The identity is left out: to make it, the weights are hashed.

    Raises:
        MissingError: config.json is absent. TargetError: a file is damaged.
    """
    path = folder / "config.json"
    if folder.is_dir():
        check_files(folder, TargetError)
    try:
        config = read_object(path, TargetError)
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; --target takes a model directory") from None
    files, text = _tensors(folder), text_table(config)
    embedding = _find(files, _EMBEDDING)
    outer, inner = (table.get("tie_word_embeddings") for table in (config, text))
    head = embedding if (inner if outer is None else outer) else _find(files, _HEAD)
    quantised = any("lm_head." in name or "embed_out." in name for name in files)
    if head is None and not quantised and (outer is not False or inner):
        head = embedding  # families that tie may not say it
    return TargetFacts(
        name=name or str(folder),
        architectures=tuple(config.get("architectures") or ()),
        num_layers=block_count(config),
        max_positions=text.get("max_position_embeddings"),
        embedding=embedding,
        head=head,
        dtype=_first(("dtype", "torch_dtype"), text, config),
        hidden_size=_first(("hidden_size", "n_embd", "d_model"), text),
        vocab_size=_first(("vocab_size",), text, config),
        sampling=read_sampling(folder),
    )


def _first(names: tuple[str, ...], *tables: dict[str, Any]) -> Any:
    return next((table[name] for table in tables for name in names if table.get(name)), None)


def dataset_target(dataset: HiddenStatesDataset) -> TargetFacts:
    """Return what a dataset tells of its target, for drafts whose files leave it to the target."""
    raw, tensors = dataset.target_config(), load_head_tensors(dataset)
    return TargetFacts(
        name=dataset.manifest.target.name,
        architectures=tuple(raw.get("architectures") or ()),
        num_layers=block_count(raw),
        max_positions=text_table(raw).get("max_position_embeddings"),
        embedding=tensors["embed_tokens"],
        head=tensors["lm_head"],
    )


def _tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model, from one or several weight files."""
    index = folder / _INDEX
    if index.is_file():
        return weight_map(index, TargetError)
    file = folder / "model.safetensors"
    if not file.is_file():
        return {}
    with _opened(file) as weights:
        return dict.fromkeys(weights.keys(), file)


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> Tensor | None:
    """Return the tensor whose name has one of the endings, the first of them that there is."""
    for ending in endings:
        for name, file in files.items():
            if name.endswith(ending) and file.is_file():
                with _opened(file) as weights:
                    return weights.get_tensor(name)
    return None


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as weights:
            yield weights
    except SafetensorError as error:
        why = instead(file, f"damaged ({error}); copy it again")
        raise TargetError(f"{file}: {why}") from None
