"""The options of `spec-data convert` and `spec-data export`."""

from dataclasses import dataclass

from spec_data.options.option_values import (
    CAPTURE,
    DEFAULT_CODEC,
    DOCUMENTS,
    REQUIRED,
    RUNNING,
    SHARDS,
    at_least,
    parse_codecs,
)
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option

TOOLS = ("speculators", "specforge", "deepspec", "automodel", "modelopt", "torchspec")
"""Tools whose stored states `convert` reads."""

EXPORTS = ("speculators", "specforge")
"""Tools whose layout `export` writes."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Options of `convert`."""

    data: str = option(
        help="the directory that the other tool wrote; may be given without --data",
        group=REQUIRED,
        metavar="SRC",
    )
    from_tool: str = option(
        flag="from", help="the tool that wrote it", group=REQUIRED, choices=TOOLS
    )
    target: str = option(
        help="the target whose states these are: a local directory or a Hugging Face Hub id. Its "
        "weights are read once, one block at a time, to prove what the states are",
        group=REQUIRED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    out: str = option(
        help="the dataset directory to write; the same command resumes an interrupted run in it",
        group=REQUIRED,
        metavar="DIR",
    )
    mask: str = option(
        "stored",
        help="supervised tokens: those of the stored loss masks, or all. Without a stored mask a "
        "sample is malformed",
        group=DOCUMENTS,
        choices=("stored", "all"),
    )
    limit: int = option(
        0, help="convert at most this many samples; 0: all", group=DOCUMENTS, metavar="N"
    )
    max_bad_rows: str = option(
        "auto",
        help="stop if more samples are malformed: a count such as 5, or a share such as 1%. auto "
        "is 1 %; below 1,000 samples it is 10 samples, but not more than 10 %",
        group=DOCUMENTS,
        metavar="N|SHARE",
        numbers=True,
    )
    on_policy: bool = option(
        False,
        help="state that this very target wrote the responses; it is measured, as by generate",
        group=DOCUMENTS,
    )
    allow_high_nll: bool = option(
        False,
        help="convert samples that the target finds less likely than random tokens",
        group=DOCUMENTS,
    )
    codec: str = option(
        DEFAULT_CODEC,
        help="how states are stored, as by generate: bf16, int8c, fp8, lm6c or lm4c; or per kind, "
        "such as aux=lm4c,final=int8c",
        group=CAPTURE,
        metavar="NAME",
    )
    final: str = option(
        "all",
        help="tokens at which hidden.final is stored, as by generate",
        group=CAPTURE,
        choices=("all", "supervised"),
    )
    teacher: str = option(
        "supervised",
        help="tokens at which the head runs, as by generate",
        group=CAPTURE,
        choices=("supervised", "all"),
    )
    dtype: str = option(
        "auto",
        help="dtype in which the target runs; auto is the checkpoint's own",
        group=RUNNING,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = option(
        "auto", help="device of the head: auto, cpu, cuda, cuda:1, ...", group=RUNNING
    )
    revision: str | None = option(
        None,
        help="branch, tag or commit of a target on the Hub; not given: its main branch",
        group=RUNNING,
        metavar="REV",
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the model; only for authors you trust",
        group=RUNNING,
    )
    max_shard_size: str = option(
        "auto", help="size of one shard, as by generate", group=SHARDS, metavar="SIZE"
    )
    dry_run: bool = option(
        False, help="prove the states and print sizes, then stop; nothing is written", group=SHARDS
    )

    def __post_init__(self) -> None:
        at_least(0, limit=self.limit)
        parse_codecs(self.codec, "final-hidden")


@dataclass(frozen=True, kw_only=True)
class ExportDataConfig:
    """Options of `export`."""

    data: str = option(
        help="the dataset directory; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    to: str = option(help="the trainer that is to read it", group=REQUIRED, choices=EXPORTS)
    out: str = option(
        help="the directory to write; the same command resumes an interrupted run in it",
        group=REQUIRED,
        metavar="OTHER",
    )
    layers: str | None = option(
        None,
        help="layer ids of the dataset to write, such as 1,17,32; not given: all of them",
        group=CAPTURE,
        metavar="IDS",
        numbers=True,
    )

    @property
    def layer_ids(self) -> list[int] | None:
        """The ids of --layers; None: not given."""
        if self.layers is None:
            return None
        try:
            return [int(part) for part in self.layers.split(",")]
        except ValueError:
            raise ConfigError(f"--layers {self.layers!r}: expected ids such as 1,3,5") from None
