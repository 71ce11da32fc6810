"""The options of every spec-data command, as frozen dataclasses (see config.py)."""

import json
import re
from dataclasses import dataclass
from typing import Any

from spec_data.config import option
from spec_data.shards.errors import ConfigError

HIDDEN_CODECS = ("bf16", "int8c", "lm6c", "lm4c", "fp8")
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB, 2GB or 1000000.

    Raises:
        ConfigError: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError(f"size {text!r}: expected something like 500MB or 2GB")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def _at_least(least: int, **values: int) -> None:
    """Refuse options below `least`, by name."""
    for name, value in values.items():
        if value < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: expected {least} or more")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `generate` and `estimate`."""

    target: str = option(help="the target: a model directory or a Hub id", metavar="MODEL")
    corpus: tuple[str, ...] = option(
        help="where conversations come from: JSONL, Parquet or text files, a folder of them, a "
        "`datasets` directory, or a Hub dataset name; may be given several times",
        metavar="SRC",
    )
    out: str = option(help="the dataset directory to make", metavar="DIR")
    layers: str = option(
        "auto",
        help="layer ids to capture, e.g. 1,3,5: id k is the output of decoder block k, from 0; "
        "-1 (as in -1,3,5) is the embedding output; auto is the EAGLE-3 recipe 1, L/2-1, L-4; "
        "spread:N takes N, evenly spread from block 1 to L-2, as block drafts like them",
        metavar="IDS",
    )
    max_length: int = option(
        2048,
        help="cut documents to this many tokens, or to the target's context where that is shorter "
        "(counted, never silent)",
        metavar="N",
    )
    pack_length: int = option(
        0,
        help="tokens per packed row; 0 takes the longest document, at least 512",
        metavar="N",
    )
    batch_tokens: int = option(8192, help="tokens per target forward", metavar="N")
    limit: int = option(0, help="read at most this many corpus rows; 0 reads all", metavar="N")
    supervision: str = option(
        "final-hidden",
        help="what the teacher is rebuilt from: final-hidden (exact and small), topk:K (K exact "
        "logits beside the logsumexp), or logits (full and large)",
        metavar="KIND",
    )
    codec: str = option(
        "lm4c",
        help="how states are stored: bf16 (exact), int8c (0.5x the bytes), lm6c (0.38x), lm4c "
        "(0.25x), fp8 (0.5x); or by kind, e.g. aux=lm4c,final=int8c. The error is measured before "
        "the first shard, and one beyond the codec's bound stops the run",
        metavar="NAME",
    )
    final: str = option(
        "all",
        help="keep hidden.final at all tokens, or only where the next token is supervised: enough "
        "for EAGLE-3 as it is served, not for drafts that learn the states themselves",
        choices=("all", "supervised"),
    )
    keep_tails: bool = option(
        False, help="keep what follows a document's last supervised token; no draft learns from it"
    )
    mask: str = option(
        "assistant",
        help="which tokens are supervised: every assistant turn, the last one, or all tokens",
        choices=("assistant", "last-turn", "all"),
    )
    packing: str = option(
        "auto",
        help="how documents share a row: auto proves the family's mask and falls back to one "
        "document per row; rows forces that",
        choices=(
            "auto",
            "rows",
            "mask-per-layer-type",
            "block-causal-window",
            "block-causal",
            "position-ids",
        ),
    )
    dtype: str = option(
        "auto",
        help="dtype to run the target in; auto is the checkpoint's",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = option("auto", help="where to run the target: auto, cpu, cuda, cuda:1, ...")
    attn: str = option(
        "auto",
        help="attention implementation: auto, sdpa, eager, flash_attention_2",
        metavar="NAME",
    )
    revision: str | None = option(None, help="revision of a Hub target", metavar="REV")
    workers: str = option(
        "0/1",
        help="be worker i of n (from 0): run every command i/n, on one machine or many that share "
        "the directory, then `spec-data seal`",
        metavar="I/N",
    )
    on_bad_row: str = option(
        "skip",
        help="skip counts bad corpus rows and fails past 1 %; fail stops at the first",
        choices=("skip", "fail"),
    )
    max_shard_size: str = option("500MB", help="payload of one shard (a unit of resume)")
    chat_template_kwargs: str = option(
        "{}",
        help='JSON passed to the chat template, e.g. {"enable_thinking": false}',
        metavar="JSON",
    )
    on_policy: bool = option(
        False, help="the responses were sampled from this very target; recorded in the manifest"
    )
    trust_remote_code: bool = option(False, help="run the model repository's own Python code")
    dry_run: bool = option(False, help="plan and print sizes, run nothing (same as estimate)")

    def __post_init__(self) -> None:
        _at_least(1, batch_tokens=self.batch_tokens)
        _at_least(0, limit=self.limit, pack_length=self.pack_length)
        if self.max_length < 2:
            raise ConfigError(f"--max-length {self.max_length}: documents need two tokens or more")
        if self.pack_length and self.pack_length < self.max_length:
            raise ConfigError(
                f"--pack-length {self.pack_length} is below --max-length {self.max_length}; whole "
                "documents must fit a row: raise one or lower the other"
            )
        if not re.fullmatch(r"final-hidden|logits|topk:[1-9]\d*", self.supervision):
            raise ConfigError(
                f"--supervision {self.supervision!r}: final-hidden, topk:K (e.g. topk:64) or logits"
            )
        if parse_size(self.max_shard_size) < 1:
            raise ConfigError(f"--max-shard-size {self.max_shard_size}: a shard needs some bytes")
        _ = self.worker, self.template_kwargs, self.codecs
        if self.final != "all" and self.supervision != "final-hidden":
            raise ConfigError(
                f"--final {self.final} is about hidden.final, which --supervision "
                f"{self.supervision} does not store"
            )

    @property
    def worker(self) -> tuple[int, int]:
        """(i, n) of --workers i/n."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.workers)
        if not found or not int(found[1]) < int(found[2]):
            raise ConfigError(f"--workers {self.workers!r}: expected i/n with i from 0 to n-1")
        return int(found[1]), int(found[2])

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of the aux states and of hidden.final (bf16 where there is none)."""
        named = dict(part.partition("=")[::2] for part in self.codec.split(","))
        if len(named) == 1 and list(named.values()) == [""]:
            named = dict.fromkeys(("aux", "final"), self.codec)
            if self.supervision != "final-hidden":
                named["final"] = "bf16"
        elif "final" in named and self.supervision != "final-hidden":
            raise ConfigError(
                f"--codec {self.codec}: --supervision {self.supervision} stores no hidden.final"
            )
        unknown = set(named) - {"aux", "final"} or set(named.values()) - set(HIDDEN_CODECS)
        if unknown:
            raise ConfigError(
                f"--codec {self.codec!r}: expected one of {', '.join(HIDDEN_CODECS)}, or "
                "aux=NAME,final=NAME"
            )
        return {"aux": "bf16", "final": "bf16"} | named

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's keyword arguments."""
        try:
            value = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--chat-template-kwargs: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError("--chat-template-kwargs: expected a JSON object")
        return value


@dataclass(frozen=True, kw_only=True)
class SealConfig:
    """Options of `seal`."""

    out: str = option(help="the dataset directory whose workers are done", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Options of `inspect`."""

    data: str = option(help="the dataset directory", metavar="DIR")
    doc: int | None = option(None, help="print this document's tokens (row number)", metavar="N")
    color: str = option("auto", help="colour the tokens", choices=("auto", "always", "never"))

    def __post_init__(self) -> None:
        if self.doc is not None:
            _at_least(0, doc=self.doc)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Options of `verify`."""

    data: str = option(help="the dataset directory", metavar="DIR")
    target: str | None = option(
        None, help="also run this target afresh on sampled documents", metavar="MODEL"
    )
    samples: int = option(
        16, help="documents to sample for the re-derivations, at least one", metavar="N"
    )
    seed: int = option(0, help="which documents are sampled", metavar="N")
    device: str = option("auto", help="where to compute: auto, cpu, cuda")
    trust_remote_code: bool = option(False, help="run the model repository's own Python code")

    def __post_init__(self) -> None:
        _at_least(1, samples=self.samples)  # nothing re-derived is nothing verified
        _at_least(0, seed=self.seed)
