"""Datasets made of datasets, without the target: `select`, `merge`, `join`, `copy`, `recode`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from spec_data.terminal.command import command
from spec_data.terminal.rules import Needs, ruled
from spec_data.terminal.types import (
    JOINED,
    Columns,
    Corpus,
    Count,
    Dataset,
    Datasets,
    Directory,
    Layers,
    Text,
    comma_list,
    path_list,
)

if TYPE_CHECKING:
    from spec_data.results import WrittenDataset
    from spec_data.shards.schema import Manifest
    from spec_data.views.copy import Copy
    from spec_data.views.rows import Rows

_Sample = Annotated[Text, Parameter(metavar="N|SHARE")]


@command
@ruled(
    Needs(
        "columns",
        "decontaminate",
        "--columns names columns of --decontaminate; give that, or leave it out",
    ),
    Needs("seed", "sample", "--seed decides the sample of --sample; give that, or leave it out"),
)
def select(
    data: Dataset,
    out: Directory,
    *,
    where: Annotated[str, Parameter(metavar="SQL")] = "",
    sample: _Sample = "",
    seed: Count = 0,
    not_in: Datasets = (),
    decontaminate: Corpus = (),
    columns: Columns = "",
    mask: Annotated[str, Parameter(metavar="POLICY")] = "",
    layers: Layers = "",
) -> "WrittenDataset":
    """Write a view of some documents or layers of a dataset, with other loss masks if asked.

    A view has no shards: it refers to those of the dataset, which must stay where it is.

    Examples:
        spec-data select data/all data/short --where "length < 1024 and source = 'gsm8k'"
        spec-data select data/all data/some --sample 10% --seed 1 --layers eagle3
        spec-data select data/all data/clean --decontaminate gsm8k_test.jsonl

    Args:
        data: the dataset or view, a directory or a URL.
        out: the directory to write.
        where: keep documents that meet this SQL condition on number, doc_id, source, length,
            supervised, first_choice (share of supervised tokens that are the target's arg max) and
            nll (mean negative log-likelihood of supervised tokens in nats).
        sample: keep a random sample of what is left: 500, 10% or 0.1.
        seed: decides the sample.
        not_in: drop documents that these datasets have too, by their ids.
        decontaminate: drop documents that share 13 token ids in a row with a prompt of these
            benchmarks: files as `spec-train eval --prompts` reads them. How many overlap each file
            is printed and stored.
        columns: columns of the benchmarks under other names, such as prompt=problem; see
            `spec-data generate`.
        mask: supervise other tokens, by the stored turns: assistant, last-turn, all, first-N or
            roles=A,B.
        layers: keep these layer ids only, such as 1,3; or those captured for a draft: eagle3.

    Raises:
        ConfigError: a bad value, no document is left, or `out` holds something else.
        DatasetError: damage, or the mask needs a teacher that is not stored.
    """
    from spec_data.views.select import select_rows

    whole = isinstance(sample, float) and sample.is_integer() and sample != 1
    # 500.0 are documents, 0.1 and 1.0 a share
    options: dict[str, Any] = {
        "where": where,
        "not_in": path_list(not_in),
        "decontaminate": path_list(decontaminate),
        "columns": columns,
        "sample": str(int(sample) if whole else sample),
        "seed": seed,
        "mask": mask,
        "layers": comma_list(layers),
    }
    return _view(Path(out), [str(data)], lambda inputs: select_rows(*inputs, **options))


@command
def merge(data: Datasets, out: Directory) -> "WrittenDataset":
    """Write a view of the documents of several datasets of one target, each once.

    It has the columns that all have. Where some are exact and others lossy, a column is
    decoded to bf16 as it is read.

    Examples:
        spec-data merge data/a data/b --out data/both

    Args:
        data: the datasets, in the order of the result.
        out: the directory to write.

    Raises:
        ConfigError: fewer than two datasets, or `out` holds something else.
        DatasetError: damage, or they cannot be one dataset; the message says why.
    """
    from spec_data.views.merge import merge_rows

    return _view(Path(out), path_list(data), merge_rows)


@command
def join(data: Datasets, out: Directory) -> "WrittenDataset":
    """Write a view of the layers of several captures of the same documents.

    The first dataset has the documents and all columns but the layers that the others add. Ids
    prove that tokens and masks are the same; states of another target are refused.

    Examples:
        spec-data join data/eagle3-layers data/dspark-layers --out data/both

    Args:
        data: the datasets, captured from one target.
        out: the directory to write.

    Raises:
        ConfigError: fewer than two datasets, one adds no layer, or `out` holds something else.
        DatasetError: damage, other targets, or no document in common.
    """
    from spec_data.views.merge import join_rows

    return _view(Path(out), path_list(data), join_rows)


@command
def copy(data: Dataset, out: Directory, *, dry_run: bool = False) -> "WrittenDataset":
    """Write a view, or a remote dataset, with shards of its own.

    The same command resumes.

    Examples:
        spec-data copy data/clean data/clean-alone

    Args:
        data: the view or dataset, a directory or a URL.
        out: the directory to write.
        dry_run: print documents, tokens and bytes, then stop.

    Raises:
        ConfigError: `out` holds something else. DatasetError: damage.
        RunError: the disk is too small.
    """
    from spec_data.shards.reader import HiddenStatesDataset
    from spec_data.views.copy import plain_copy

    return _copied(Path(out), plain_copy(HiddenStatesDataset(str(data))), dry_run)


@command
def recode(
    data: Dataset, out: Directory, codec: Annotated[str, JOINED], *, dry_run: bool = False
) -> "WrittenDataset":
    """Write a dataset with its bf16 states in fewer bits.

    A column that cannot be stored so stays in bf16, with a warning. States that are lossy already
    are not encoded again. The same command resumes.

    Examples:
        spec-data recode data/bf16 data/small --codec default,final=fine

    Args:
        data: the dataset or view, a directory or a URL.
        out: the directory to write.
        codec: fine, default, small, or the largest error, such as 0.03; or per column, such as
            final=fine,L3=0.05: what is not named stays as it is.
        dry_run: print documents, tokens and bytes, then stop.

    Raises:
        ConfigError: an unknown codec, or nothing would change.
        DatasetError: damage, or the states are lossy already.
        RunError: the disk is too small.
    """
    from spec_data.shards.reader import HiddenStatesDataset
    from spec_data.views.recode import recoded_copy

    dataset = HiddenStatesDataset(str(data))
    return _copied(Path(out), recoded_copy(dataset, codec, dry_run), dry_run)


def _view(
    out: Path, data: Sequence[str], make: Callable[..., "tuple[Rows, Manifest]"]
) -> "WrittenDataset":
    """Write the view whose rows `make` returns for the opened `data`, a list."""
    from spec_data.results import WrittenDataset
    from spec_data.shards.reader import HiddenStatesDataset
    from spec_data.views.rows import check_out, write_view

    inputs = [HiddenStatesDataset(path) for path in data]
    check_out(out, inputs)
    return WrittenDataset.of(out, write_view(out, *make(inputs)))


def _copied(out: Path, copy: "Copy", dry_run: bool) -> "WrittenDataset":
    """Write a copy, or say how large it is."""
    from spec_data.results import WrittenDataset
    from spec_data.terminal.progress import size
    from spec_data.views.copy import copy_bytes, write_copy

    if not dry_run:
        return WrittenDataset.of(out, write_copy(out, copy))
    counts, count = copy.dataset.manifest.totals, copy_bytes(copy)
    about = "at most" if any(c.lossy and c.error is None for c in copy.columns) else "about"
    return WrittenDataset(
        path=out,
        sealed=False,
        documents=counts.documents,
        tokens=counts.tokens,
        supervised_tokens=counts.supervised,
        bytes=count,
        dropped=copy.draft.documents.dropped,
        again="next",
        text=f"{counts.documents:,} documents, {counts.tokens:,} tokens, {about} {size(count)}",
    )
