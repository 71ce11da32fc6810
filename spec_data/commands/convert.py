"""`spec-data convert` and `export`: hidden states in the layouts of other trainers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from spec_data.generation.options import DOCUMENTS, CaptureOptions
from spec_data.models.target_options import LoadOptions
from spec_data.terminal.command import command
from spec_data.terminal.types import (
    JOINED,
    Count,
    Dataset,
    Directory,
    Layers,
    Target,
    Text,
    comma_list,
    more,
)

if TYPE_CHECKING:
    from spec_data.conversion.export import ExportedStates
    from spec_data.results import WrittenDataset

_CAPTURE = more("how states are stored")

Tool = Literal["speculators", "specforge", "deepspec", "automodel", "modelopt", "torchspec"]


@command
def convert(
    source: Directory,
    target: Target,
    out: Directory,
    *,
    from_: Tool,
    codec: Annotated[str, JOINED] = "default",
    mask: Literal["stored", "all"] = "stored",
    limit: Count = 0,
    follow: bool = False,
    on_policy: bool = False,
    loading: LoadOptions = LoadOptions(),
    final: Annotated[Literal["all", "supervised"], _CAPTURE] = "all",
    teacher: Annotated[Literal["supervised", "all"], _CAPTURE] = "supervised",
    max_shard_size: Annotated[Text, _CAPTURE] = "auto",
    allow_high_nll: Annotated[bool, DOCUMENTS] = False,
    max_bad_rows: Annotated[Text, DOCUMENTS] = "auto",
) -> "WrittenDataset":
    """Read the hidden states that another trainer stored, and write a dataset.

    What the states are (layers and their order, norm, masks) is found by comparison with the target
    before anything is written; states of other tokens or of another target are refused. Called
    again, it resumes.

    Examples:
        spec-data convert --from specforge SRC --target MODEL --out DIR

    Args:
        source: the directory that the other tool wrote.
        target: the target whose states these are: a local directory or a Hugging Face Hub id. Its
            weights are read once, one block at a time.
        out: the dataset directory to write.
        from_: the tool that wrote the states.
        codec: how states are stored, as by generate: bf16, fine, default, small, or the
            largest error, such as 0.03; or per column, such as default,final=bf16.
        mask: supervised tokens: those of the stored loss masks, or all. Without a stored mask a
            sample is malformed.
        limit: convert at most this many samples; 0: all.
        follow: convert while speculators' generator writes, so that `fit --follow` trains
            meanwhile: wait for files, an hour each. When it has ended: touch hidden_states/done.
        on_policy: state that this very target wrote the responses; it is measured, as by generate.
        loading: how the target is loaded; the device is that of its head.
        final: tokens at which hidden.final is stored, as by generate.
        teacher: tokens at which the head runs, as by generate.
        max_shard_size: size of one shard, as by generate.
        allow_high_nll: convert samples that the target finds less likely than random tokens.
        max_bad_rows: stop if more samples are malformed: a count such as 5, or a share such as 1%.
            auto is 1 %; below 1,000 samples it is 10, but not more than 10 %.

    Returns:
        What was written, as `generate` returns it.

    Raises:
        ConfigError, MissingError, DatasetError, CorpusError, TargetError: bad input.
        RunError: the states are not those of `target`, or not at their tokens.

    >>> _ = spec_data.export_dataset("data", "specforge", "stored")  # as SpecForge stores them
    >>> made = spec_data.convert("stored", "target", "data-5", from_="specforge", codec="bf16")
    >>> made.documents, made.layers
    (12, (0, 2, 4))
    """
    from spec_data.conversion.run import keep_evidence, set_up_conversion
    from spec_data.generation.output import LocalOutput
    from spec_data.generation.run import write_dataset
    from spec_data.generation.workers import Worker
    from spec_data.results import WrittenDataset

    options = CaptureOptions(
        codec=codec,
        limit=limit,
        on_policy=on_policy,
        final=final,
        teacher=teacher,
        max_shard_size=max_shard_size,
        allow_high_nll=allow_high_nll,
        max_bad_rows=max_bad_rows,
        num_proc=1,
        **loading.values(),
    )
    corpus, setup, load, evidence = set_up_conversion(
        *(from_, str(target), Path(str(out)), str(source), options),
        every_token=mask == "all",
        follow=3600.0 if follow else None,
    )
    keep_evidence(Path(str(out)), evidence)
    output, worker = LocalOutput(Path(str(out))), Worker(device=loading.device)
    manifest = write_dataset(corpus, setup, output, worker, load=load)
    return WrittenDataset.of(str(out), manifest, str(target), said=setup.said)


@command
def export_dataset(
    data: Dataset,
    to: Literal["speculators", "specforge"],
    out: Directory,
    *,
    layers: Layers | None = None,
) -> "ExportedStates":
    """Write a dataset in the layout of another trainer.

    An interrupted run goes on when the same command is run again.

    Examples:
        spec-data export DIR --to speculators --out OTHER

    Args:
        data: the dataset: a directory or a URL.
        to: the trainer that is to read it.
        out: the directory to write.
        layers: layer ids of the dataset to write, such as 1,17,32; not given: all of them.

    Returns:
        What was written, and what the other trainer must be told.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that it does not have, or another export is in `out`.

    >>> done = spec_data.export_dataset("data", "speculators", "for-speculators", layers=[0, 2])
    >>> done.documents, done.lines[0][:26]
    (12, 'the target layer ids are 1')
    """
    from spec_data.conversion.export import write_dataset
    from spec_data.shards.errors import ConfigError

    chosen = None
    if layers is not None:
        text = comma_list(layers)
        try:
            chosen = [int(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--layers {text!r}: expected ids such as 1,3,5") from None
    return write_dataset(str(data), to, Path(str(out)), chosen)
