"""The functions of spec_data for Python that make views of datasets; imported as `spec_data.NAME`.

Each takes the options of its command as keyword arguments. No target is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.options.view_options import (
    AppendConfig,
    DropColumnsConfig,
    MergeConfig,
    RecodeConfig,
    SelectConfig,
)
from spec_data.report import dataset_text
from spec_data.shards.schema import Manifest
from spec_data.terminal.keywords import from_keywords, takes_options
from spec_data.views.appending import append as run_append
from spec_data.views.appending import plan_append
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.joining import plan_merge
from spec_data.views.leftovers import Leftover, delete_leftovers, find_leftovers
from spec_data.views.recoding import plan_recode
from spec_data.views.select_view import plan_select
from spec_data.views.write_view import View, write_view

AnyPath = str | Path
_WITHOUT = ("data", "out", "dry_run")


@dataclass(frozen=True, kw_only=True)
class ViewResult:
    """A view that was written."""

    path: Path
    documents: int
    tokens: int
    supervised_tokens: int
    shards: int
    reused_shards: int
    """Shards that are files of the inputs: hard links, or copies."""
    bytes: int
    """Bytes of all shards."""
    dropped: dict[str, int]
    """Documents that were left out since the corpus was read, by reason."""
    fingerprint: str
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


@takes_options(SelectConfig, without=_WITHOUT)
def select(path: AnyPath, out: AnyPath, **options: Any) -> ViewResult:
    """Write a dataset of some of the documents of another; called again, resume it.

    Args:
        path: the dataset.
        out: the directory to write.
        options: those of `spec-data select`, listed below.

    Returns:
        What was written.

    Raises:
        ConfigError: a bad value, no document is left, or `out` holds other data.
        DatasetError: damage, or `mask` needs a teacher that is not stored.
    """
    given = {"data": path, "out": out, **options}
    return _written(plan_select(from_keywords(SelectConfig, given, "select")), Path(out))


@takes_options(DropColumnsConfig, without=_WITHOUT)
def drop_columns(path: AnyPath, out: AnyPath, **options: Any) -> ViewResult:
    """Write a dataset with fewer columns or rows of another; called again, resume it.

    Args:
        path: the dataset.
        out: the directory to write.
        options: those of `spec-data drop-columns`, listed below.

    Returns:
        What was written.

    Raises:
        ConfigError, DraftError: a layer that the dataset does not have, or nothing would change.
        DatasetError: damage.
    """
    given = {"data": path, "out": out, **options}
    config = from_keywords(DropColumnsConfig, given, "drop_columns")
    return _written(plan_drop_columns(config), Path(out))


def merge(paths: Sequence[AnyPath], out: AnyPath) -> ViewResult:
    """Write the documents of several datasets of one target as one; called again, resume it.

    Args:
        paths: the datasets, in the order of the result.
        out: the directory to write.

    Returns:
        What was written.

    Raises:
        ConfigError: fewer than two datasets, or `out` holds other data.
        DatasetError: damage, or the datasets cannot be one; the message says why.
    """
    config = from_keywords(MergeConfig, {"data": list(paths), "out": out}, "merge")
    return _written(plan_merge(config), Path(out))


@takes_options(RecodeConfig, without=(*_WITHOUT, "codec"))
def recode(path: AnyPath, out: AnyPath, codec: str, **options: Any) -> ViewResult:
    """Write a dataset with its bf16 states in a smaller codec; called again, resume it.

    Args:
        path: the dataset.
        out: the directory to write.
        codec: int8c, fp8, lm6c, lm4c, or per kind, such as "aux=lm4c,final=int8c".
        options: those of `spec-data recode`, listed below.

    Returns:
        What was written.

    Raises:
        ConfigError: an unknown codec, or nothing would change.
        DatasetError: damage, or the states are lossy already.
        RunError: the error is above the bound of the codec.
    """
    given = {"data": path, "out": out, "codec": codec, **options}
    return _written(plan_recode(from_keywords(RecodeConfig, given, "recode")), Path(out))


def append(path: AnyPath, *others: AnyPath) -> ViewResult:
    """Add the documents of other datasets to a dataset, as new shards; called again, resume it.

    Args:
        path: the dataset that grows.
        others: the datasets that are added.

    Returns:
        The dataset as it is now.

    Raises:
        ConfigError: no other dataset, or the shards of `path` would have to change.
        DatasetError: damage, or the datasets cannot be one; the message says why.
    """
    planned = plan_append(from_keywords(AppendConfig, {"data": [path, *others]}, "append"))
    manifest = run_append(planned)
    added = len(planned.view.units) if planned.view else 0
    return view_result(Path(path), manifest, len(manifest.shards) - added)


def gc(path: AnyPath, *, yes: bool = False) -> list[Leftover]:
    """List what killed processes left in a dataset's directory, and delete it with `yes`.

    Args:
        path: a dataset, or a directory that is being generated.
        yes: delete what is found.

    Returns:
        The files and folders, with their bytes and why nothing needs them.

    Raises:
        MissingError: there is no dataset. RunError: a process works there.
    """
    return delete_leftovers(Path(path)) if yes else find_leftovers(Path(path))


def _written(view: View, out: Path) -> ViewResult:
    """Write a view and describe it."""
    manifest = write_view(out, view)
    return view_result(out, manifest, sum(unit.shard is not None for unit in view.units))


def view_result(path: Path, manifest: Manifest, reused: int) -> ViewResult:
    """Describe a dataset that was written; `reused` of its shards are files of the inputs."""
    totals = manifest.totals
    return ViewResult(
        path=path,
        documents=totals.documents,
        tokens=totals.tokens,
        supervised_tokens=totals.supervised,
        shards=len(manifest.shards),
        reused_shards=reused,
        bytes=totals.bytes,
        dropped=manifest.documents.dropped,
        fingerprint=manifest.fingerprint,
        text=dataset_text(manifest),
    )
