"""The manifest and the columns: what a dataset says about itself, validated when it is read.

Token columns hold one value (width None) or one vector (width W) per token of a document, as
`large_list<storage>` or `large_list<fixed_size_list<storage>[W]>`.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from spec_data.shards.codecs import Codec, codec_named
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import sha256_json
from spec_data.shards.head import HeadSpec

FORMAT = "spec-data"
FORMAT_VERSION = "1.0"
LAYER_CONVENTION = "layer id k is the output of decoder block k, counted from 0"
FINAL = "hidden.final"

TURNS_TYPE = pa.list_(
    pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
)


def layer_column(layer: int) -> str:
    """Column name of a captured layer."""
    return f"hidden.L{layer}"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A token column: `width` values per token (None: one number, not a vector)."""

    name: str
    codec: str
    width: int | None = None

    @property
    def coder(self) -> Codec:
        """The codec object."""
        return codec_named(self.codec, self.name)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token."""
        return self.coder.bytes_per_value * (self.width or 1)

    def field(self) -> pa.Field:
        """The Arrow field, with codec and width in its metadata."""
        value: pa.DataType = self.coder.arrow
        if self.width is not None:
            value = pa.list_(pa.field("item", value, nullable=False), self.width)
        metadata = {"codec": self.codec, "width": str(self.width or 1)}
        kind = pa.large_list(pa.field("item", value, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata=metadata)


def token_columns(
    layers: tuple[int, ...], hidden_size: int, supervision: str, vocab_size: int
) -> tuple[Column, ...]:
    """The token columns of a dataset, in file order.

    `supervision` is "final-hidden", "topk:K" or "logits"; argmax and logsumexp are always there.
    """
    columns = [
        Column(name="input_ids", codec="int32"),
        Column(name="loss_mask", codec="bool8"),
        *(Column(name=layer_column(k), codec="bf16", width=hidden_size) for k in layers),
    ]
    kind, _, k = supervision.partition(":")
    if kind == "final-hidden":
        columns.append(Column(name=FINAL, codec="bf16", width=hidden_size))
    elif kind == "topk":
        columns.append(Column(name="topk_ids", codec="int32", width=int(k)))
        columns.append(Column(name="topk_logits", codec="float32", width=int(k)))
    else:
        columns.append(Column(name="logits", codec="bf16", width=vocab_size))
    columns.append(Column(name="target_argmax", codec="int32"))
    columns.append(Column(name="target_logsumexp", codec="float32"))
    return tuple(columns)


def arrow_schema(columns: tuple[Column, ...]) -> pa.Schema:
    """The schema of every shard of a dataset."""
    fields = [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(column.field() for column in columns),
        pa.field("turns", TURNS_TYPE, nullable=False),
    ]
    return pa.schema(fields, metadata={"spec-data": FORMAT_VERSION})


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the manifest says of one shard."""

    file: str
    rows: int
    tokens: int
    supervised: int
    bytes: int
    sha256: str


class Manifest:
    """manifest.json, validated. `raw` is the whole JSON; the properties are what code uses."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        """Check format, version and required parts of `raw`, read from `where`."""
        self.raw = raw
        self.where = where
        if raw.get("format") != FORMAT:
            raise DatasetError(f"{where}: not a spec-data manifest (format {raw.get('format')!r})")
        version = str(raw.get("format_version", ""))
        if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise DatasetError(
                f"{where}: format version {version or '(none)'}, this release reads "
                f"{FORMAT_VERSION}; install the spec-data release that wrote it"
            )
        missing = [k for k in _REQUIRED if k not in raw]
        if missing:
            raise DatasetError(f"{where}: manifest lacks {', '.join(missing)}; it was edited")
        if "fingerprint" in raw and raw["fingerprint"] != fingerprint(raw):
            raise DatasetError(
                f"{where}: the manifest does not match its own fingerprint; it was edited or "
                "damaged. Restore it, or generate the dataset again"
            )

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read and validate a manifest file."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingError(f"{path}: no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}: not valid JSON ({error}); restore it") from None
        if not isinstance(raw, dict):
            raise DatasetError(f"{path}: not a spec-data manifest (a JSON {type(raw).__name__})")
        return cls(raw, str(path))

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Token columns in file order."""
        return tuple(
            Column(name=c["name"], codec=c["codec"], width=c["width"]) for c in self.raw["columns"]
        )

    @cached_property
    def shards(self) -> tuple[ShardRecord, ...]:
        """Shards in unit order."""
        return tuple(ShardRecord(**s) for s in self.raw["shards"])

    @property
    def layers(self) -> tuple[int, ...]:
        """Captured layer ids, ascending."""
        return tuple(self.raw["layers"])

    @cached_property
    def head(self) -> HeadSpec:
        """The LM head as data."""
        return HeadSpec(**self.raw["head"])

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.head.hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.head.vocab_size

    @property
    def target(self) -> dict[str, Any]:
        """The target's identity."""
        return self.raw["target"]

    @property
    def supervision(self) -> str:
        """ "final-hidden", "topk:K" or "logits"."""
        return self.raw["supervision"]

    @property
    def fingerprint(self) -> str:
        """Hash of the whole manifest: the identity of the dataset."""
        return self.raw.get("fingerprint") or fingerprint(self.raw)


_REQUIRED = [
    "settings",
    "target",
    "tokenizer",
    "corpus",
    "layers",
    "supervision",
    "columns",
    "head",
    "packing",
    "shards",
    "totals",
    "documents",
]


def fingerprint(raw: dict[str, Any]) -> str:
    """Hash of a manifest without its own fingerprint field."""
    return sha256_json({k: v for k, v in raw.items() if k != "fingerprint"})


def head_to_json(head: HeadSpec) -> dict[str, Any]:
    """The manifest's form of a head."""
    return asdict(head)
