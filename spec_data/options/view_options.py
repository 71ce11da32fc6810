"""The options of the commands that make views of datasets and edit them (see config.py)."""

import math
from dataclasses import dataclass

from spec_data.options.option_values import REQUIRED, at_least
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option

DOCUMENTS = "which documents"
TOKENS = "which tokens and columns"
RUNNING = "what is run"

_DATA_HELP = "the dataset directory; may be given without --data"


def out_option():
    """The directory that a view is written to."""
    return option(
        help="the directory to write; the same command resumes an interrupted run in it",
        group=REQUIRED,
        metavar="DIR",
    )


def dry_run_option(more: str = ""):
    """Print what would be written, and stop."""
    return option(
        False,
        help="print documents, tokens and the exact bytes of the shards, then stop" + more,
        group=RUNNING,
    )


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Options of `select`."""

    data: str = option(help=_DATA_HELP, group=REQUIRED, metavar="DIR", holds=Kind.DATASET)
    out: str = out_option()
    source: tuple[str, ...] = option(
        (), help="keep documents of these sources", group=DOCUMENTS, metavar="NAME"
    )
    min_length: int = option(
        0, help="keep documents of at least this many tokens", group=DOCUMENTS, metavar="N"
    )
    max_length: int | None = option(
        None, help="keep documents of at most this many tokens", group=DOCUMENTS, metavar="N"
    )
    min_supervised: int = option(
        0,
        help="keep documents with at least this many supervised tokens",
        group=DOCUMENTS,
        metavar="N",
    )
    max_supervised: int | None = option(
        None,
        help="keep documents with at most this many supervised tokens",
        group=DOCUMENTS,
        metavar="N",
    )
    min_first_choice: float | None = option(
        None,
        help="keep documents of whose supervised tokens at least this share (0 to 1) are the "
        "target's first choice: 0.75 keeps what the target might have written itself",
        group=DOCUMENTS,
        metavar="SHARE",
    )
    max_nll: float | None = option(
        None,
        help="keep documents whose supervised tokens have at most this negative log-likelihood "
        "under the target, in nats, as a mean. It is computed from the stored states",
        group=DOCUMENTS,
        metavar="NATS",
    )
    ids: str | None = option(
        None,
        help="keep the documents whose ids this text file lists, one per line",
        group=DOCUMENTS,
        metavar="FILE",
    )
    not_in: tuple[str, ...] = option(
        (),
        help="drop documents that these datasets have too, by their ids",
        group=DOCUMENTS,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    decontaminate: tuple[str, ...] = option(
        (),
        help="drop documents that contain --ngram token ids in a row of a prompt of this "
        "benchmark: files as `spec-train eval --prompts` reads them",
        group=DOCUMENTS,
        metavar="FILE",
        holds=Kind.CORPUS,
    )
    ngram: int = option(
        13,
        help="token ids in a row that make an overlap; shorter prompts of 8 tokens or more count "
        "as a whole",
        group=DOCUMENTS,
        metavar="N",
    )
    sample: str | None = option(
        None,
        help="keep a random sample of what is left: a number of documents such as 500, or a share "
        "such as 10% or 0.1",
        group=DOCUMENTS,
        metavar="N|SHARE",
        numbers=True,
    )
    seed: int = option(0, help="decides the sample", group=DOCUMENTS, metavar="N")
    mask: str | None = option(
        None,
        help="supervise other tokens, by the stored turns: assistant, last-turn, all, first-N or "
        "roles=A,B. Refused where a teacher would be needed that is not stored",
        group=TOKENS,
        metavar="POLICY",
    )
    dry_run: bool = dry_run_option()

    def __post_init__(self) -> None:
        at_least(0, min_length=self.min_length, min_supervised=self.min_supervised, seed=self.seed)
        at_least(1, ngram=self.ngram)
        for name in ("length", "supervised"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if most is not None and most < least:
                raise ConfigError(f"--max-{name} {most} is below --min-{name} {least}")
        share = self.min_first_choice
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"--min-first-choice {share}: expected a share from 0 to 1")
        if self.max_nll is not None and not 0 < self.max_nll < math.inf:
            raise ConfigError(f"--max-nll {self.max_nll}: expected a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Options of `merge`."""

    data: tuple[str, ...] = option(
        help="the datasets, in the order of the result; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    out: str = out_option()
    dry_run: bool = dry_run_option()


@dataclass(frozen=True, kw_only=True)
class AppendConfig:
    """Options of `append`."""

    data: tuple[str, ...] = option(
        help="the dataset that grows, then those that are added to it; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    dry_run: bool = dry_run_option()


@dataclass(frozen=True, kw_only=True)
class RecodeConfig:
    """Options of `recode`."""

    data: str = option(help=_DATA_HELP, group=REQUIRED, metavar="DIR", holds=Kind.DATASET)
    out: str = out_option()
    codec: str = option(
        help="how bf16 states are stored: int8c, fp8, lm6c, lm4c, or per kind, such as "
        "aux=lm4c,final=int8c; what is not named stays as it is",
        group=REQUIRED,
        metavar="NAME",
    )
    dry_run: bool = dry_run_option(
        ". Every token that escapes the codec adds 2 H + 4 bytes per column"
    )


@dataclass(frozen=True, kw_only=True)
class GcConfig:
    """Options of `gc`."""

    data: str = option(help=_DATA_HELP, group=REQUIRED, metavar="DIR", holds=Kind.UNFINISHED)
    yes: bool = option(False, help="delete what is found, instead of listing it", group=RUNNING)


@dataclass(frozen=True, kw_only=True)
class DropColumnsConfig:
    """Options of `drop-columns`."""

    data: str = option(
        help="the dataset, a directory or a URL, whose shards are downloaded; may be given without "
        "--data",
        group=REQUIRED,
        metavar="DIR",
        dataset="read",
        holds=Kind.DATASET,
    )
    out: str = out_option()
    layers: str | None = option(
        None,
        help="layer ids to keep, such as 1,3; not given: all",
        group=TOKENS,
        metavar="IDS",
    )
    for_draft: str | None = option(
        None,
        flag="for",
        help="keep the layers of this draft, as `generate --for` recorded them, instead of "
        "--layers",
        group=TOKENS,
        metavar="DRAFT",
    )
    final: str | None = option(
        None,
        help="keep hidden.final only where the next token is supervised",
        group=TOKENS,
        choices=("supervised",),
    )
    teacher: str | None = option(
        None,
        help="keep the columns made from logits only where the next token is supervised",
        group=TOKENS,
        choices=("supervised",),
    )
    dry_run: bool = dry_run_option()

    def __post_init__(self) -> None:
        if self.layers is not None and self.for_draft is not None:
            raise ConfigError("--layers and --for: pass one of them, not both")
