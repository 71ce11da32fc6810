"""The functions of spec_data for Python. They are imported as `spec_data.NAME`.

Each takes the options of its command as keyword arguments, with the command's defaults, and does
what the command does, without printing. Paths are `str` or `Path`. Errors are SpecDataErrors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.conversion.export import ExportedStates
from spec_data.conversion.export import export_dataset as run_export
from spec_data.conversion.run import convert as run_conversion
from spec_data.estimation import estimate_size, estimate_text
from spec_data.generation.run import generate as run_generation
from spec_data.generation.status import Status, read_status
from spec_data.options.conversion_options import ConvertConfig, ExportDataConfig
from spec_data.options.generate_options import EstimateConfig, GenerateConfig
from spec_data.report import dataset_text
from spec_data.results import EstimateResult, GenerateResult
from spec_data.shards.errors import ConfigError
from spec_data.shards.likelihood_text import suspicions
from spec_data.shards.schema import Manifest
from spec_data.terminal.keywords import from_keywords, takes_options

AnyPath = str | Path


@takes_options(GenerateConfig, without=("dry_run",))
def generate(
    target: AnyPath, corpus: AnyPath | Sequence[AnyPath], out: AnyPath, **options: Any
) -> GenerateResult:
    """Run a target over a corpus and write a dataset; called again, resume it.

    Args:
        target: a model directory or a Hub id.
        corpus: JSONL, CSV, Parquet or text files, folders, `datasets` directories or Hub names.
        out: the dataset directory, or a URL such as s3://bucket/data (docs/remote.md).
        options: those of `spec-data generate`, listed below. `layers` may also be a list of ids,
            `for_drafts` (--for) a list of names, and `chat_template_kwargs` a dict.

    Returns:
        What was written, with the documents that were dropped by reason. `sealed` is False where
        other workers are not done.

    Raises:
        OptionError (a ConfigError and a TypeError): an unknown option.
        ConfigError: a bad value, or a directory that holds data made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: a failed proof, states that are not finite, or not enough disk.

    A label `on_policy` that all of the data contradict is no error here: `policy` is "off-policy".

    >>> made = spec_data.generate(
    ...     "target", "chats.jsonl", "data-2", layers=[0, 2, 4], codec="bf16", limit=5
    ... )
    >>> made.sealed, made.documents, made.layers
    (True, 5, (0, 2, 4))
    >>> made.dropped
    {}
    """
    given = {"target": target, "corpus": corpus, "out": out, **_without_dry_run(options)}
    config = from_keywords(GenerateConfig, given, "generate")
    manifest = run_generation(config)
    if manifest is None:
        return GenerateResult(path=Path(config.out), sealed=False)
    return _generated(Path(config.out), manifest)


def _without_dry_run(options: dict[str, Any]) -> dict[str, Any]:
    if "dry_run" in options:
        raise ConfigError("dry_run is an option of the command; call spec_data.estimate instead")
    return options


def _generated(path: Path, manifest: Manifest) -> GenerateResult:
    totals = manifest.totals
    return GenerateResult(
        path=path,
        sealed=True,
        layers=manifest.layers,
        documents=totals.documents,
        tokens=totals.tokens,
        supervised_tokens=totals.supervised,
        shards=len(manifest.shards),
        bytes=totals.bytes,
        dropped=manifest.documents.dropped,
        skipped_rows=_skipped(structs.asdict(manifest.documents)),
        fingerprint=manifest.fingerprint,
        policy=manifest.policy,
        agreement=manifest.agreement.sources if manifest.agreement else {},
        warnings=tuple(suspicions(manifest)),
        text=dataset_text(manifest),
    )


def _skipped(counts: dict[str, Any]) -> dict[str, int]:
    bad = counts.get("bad_rows", 0)
    return ({"bad": bad} if bad else {}) | counts.get("unrendered", {})


@takes_options(EstimateConfig, without=("dry_run",))
def estimate(
    target: AnyPath, corpus: AnyPath | Sequence[AnyPath], out: AnyPath, **options: Any
) -> EstimateResult:
    """Compute what `generate` would write with the same arguments: tokens, shards, bytes.

    The corpus is read and rendered, and nothing is written. Only the target's config and tokenizer
    are needed; with `probe` it is loaded and run on a few batches.

    Args:
        target, corpus, out, options: as for `generate`; `out` says which disk is meant.

    Returns:
        The sizes, and whether the disk has room (`fits`).

    Raises:
        As `generate`.

    >>> sizes = spec_data.estimate("target", "chats.jsonl", "data-3", layers=[0, 2, 4])
    >>> sizes.documents, sizes.layers, sizes.fits
    (12, (0, 2, 4), True)
    >>> sizes.bytes <= sizes.bytes_needed <= sizes.bytes_free
    True
    """
    given = {"target": target, "corpus": corpus, "out": out, **_without_dry_run(options)}
    found = estimate_size(from_keywords(EstimateConfig, given, "estimate"))
    facts = found.facts()
    counts = vars(found.plan.counts)
    return EstimateResult(
        layers=tuple(facts["layers"]),
        dropped=counts["dropped"],
        skipped_rows=_skipped(counts),
        probe=found.probe,
        text=estimate_text(found),
        **{name: facts[name] for name in _SIZES},
    )


_SIZES = (
    *(
        "target",
        "fitting",
        "drafts",
        "documents",
        "tokens",
        "supervised_tokens",
        "longest_document",
        "pack_length",
    ),
    *("packing_utilisation", "shards", "bytes", "bytes_per_token", "bytes_needed", "bytes_free"),
    *("other_bytes", "fits"),
)


def status(path: AnyPath) -> Status:
    """Read how far `generate` is in a directory; nothing is changed.

    Args:
        path: the directory that is being generated, or a dataset.

    Returns:
        Units, tokens, speed, time left, workers and failures; `print` shows them as the command
        does.

    Raises:
        MissingError: there is no dataset, and none is being generated.
        DatasetError: the plan or the manifest is damaged.

    >>> found = spec_data.status("data")
    >>> found.sealed, found.units_done == found.units, found.failures
    (True, True, ())
    """
    return read_status(Path(path))


@takes_options(ConvertConfig, without=("data", "dry_run"))
def convert(
    source: AnyPath, from_tool: str, target: AnyPath, out: AnyPath, **options: Any
) -> GenerateResult:
    """Read the hidden states that another trainer stored, and write a dataset; resume a run.

    Args:
        source: the directory that the other tool wrote.
        from_tool: "speculators", "specforge", "deepspec", "automodel", "modelopt" or "torchspec".
        target: the target whose states these are.
        out: the dataset directory.
        options: those of `spec-data convert`, listed below.

    Returns:
        What was written, as `generate` returns it.

    Raises:
        ConfigError, MissingError, DatasetError, CorpusError, TargetError: bad input.
        RunError: the states are not those of `target`, or not at their tokens.

    >>> _ = spec_data.export_dataset("data", "specforge", "stored")  # as SpecForge stores them
    >>> made = spec_data.convert("stored", "specforge", "target", "data-5", codec="bf16")
    >>> made.documents, made.layers
    (12, (0, 2, 4))
    """
    given = {"data": source, "from_tool": from_tool, "target": target, "out": out, **options}
    manifest = run_conversion(from_keywords(ConvertConfig, given, "convert"))
    return _generated(Path(out), manifest)


@takes_options(ExportDataConfig, without=("data",))
def export_dataset(path: AnyPath, to: str, out: AnyPath, **options: Any) -> ExportedStates:
    """Write a dataset in the layout of another trainer; resume a run.

    Args:
        path: the dataset directory.
        to: "speculators" or "specforge".
        out: the directory to write.
        options: those of `spec-data export`, listed below. `layers` may be a list of ids.

    Returns:
        What was written, and what the other trainer must be told.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that it does not have, or another export is in `out`.

    >>> done = spec_data.export_dataset("data", "speculators", "for-speculators", layers=[0, 2])
    >>> done.documents, done.lines[0][:31]
    (12, 'train with --target-layer-ids 1')
    """
    given = {"data": path, "to": to, "out": out, **options}
    config = from_keywords(ExportDataConfig, given, "export_dataset")
    return run_export(path, to, Path(out), config.layer_ids)
