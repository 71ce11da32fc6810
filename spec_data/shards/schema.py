"""The manifest and the columns: how a dataset describes itself. Both are validated when read.

A token column holds one value (width None) or one vector (width W) per token of a document, as
`large_list<storage>` or `large_list<fixed_size_list<storage>[W]>`. A column with a lossy codec has
several such fields, its parts: the codes under the column's own name, the scale of every token, and
the tokens stored in bf16. A sparse column stores only tokens whose next token is supervised.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.codecs import Codec, codec_named, lossy_codec
from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.files import sha256_json
from spec_data.shards.lossy import LossyCodec
from spec_data.shards.manifest_rules import MANIFEST, contradictions, problems, refuse, safe_path

# -- head spec -------------------------------------------------------------------------------------
# The target's LM head as data: logits = softcap(scale * (W f + b)).
#
# Both programs compute logits from `hidden.final` with `apply_head`. Generation proves it against
# the model, and training and verification then use the same function.


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The head without its tensors: `scale` multiplies logits z, `softcap` c is c * tanh(z / c)."""

    vocab_size: int
    hidden_size: int
    tied: bool
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


def apply_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec) -> Tensor:
    """Compute logits [..., V'] of final hidden states [..., H].

    The dtype is that of the inputs, and the order of operations is that of the models.

    Args:
        hidden: final hidden states [..., H].
        weight: rows of the head [V', H]: all of them, or those of a draft vocabulary.
        bias: [V'] or None.
        spec: scale and softcap.
    """
    logits = F.linear(hidden, weight, bias)
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits


def logit_error(logits: Tensor, argmax: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the error of argmax (int64 [T]) and logsumexp (float32 [T]) against logits [T, V].

    It is float32 [T], relative to the largest |logit| of the token. `generate` measures it of what
    a codec leaves of the final states, and `verify` compares it with that.
    """
    scale = logits.abs().amax(-1).clamp_min(1e-6)
    gap = logits.amax(-1) - logits.gather(-1, argmax[:, None])[:, 0]
    return torch.maximum(gap, (logits.logsumexp(-1) - logsumexp).abs()) / scale


# -- schema ----------------------------------------------------------------------------------------


FORMAT = "spec-data"
FORMAT_VERSION = "1.0"
LAYER_CONVENTION = "layer id k is the output of decoder block k, counted from 0"
FINAL = "hidden.final"


def layer_column(layer: int) -> str:
    """Return the column name of a captured layer."""
    return f"hidden.L{layer}"


ALL, SUPERVISED = "all", "supervised"
TEACHERS = ("topk_ids", "topk_logits", "logits", "target_argmax", "target_logsumexp")
"""The columns that are made from logits."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A token column: `width` values per token (None: one number, not a vector).

    With `tokens` "supervised", only tokens t whose x_{t+1} is supervised have a row.
    """

    name: str
    codec: str
    width: int | None = None
    tokens: str = ALL

    @property
    def coder(self) -> Codec:
        """The codec of a plain column."""
        return codec_named(self.codec, self.name)

    @cached_property
    def lossy(self) -> LossyCodec | None:
        """The codec of a lossy column; None for a plain one."""
        return lossy_codec(self.codec, self.name)

    @property
    def sparse(self) -> bool:
        """Whether only some tokens have a row."""
        return self.tokens == SUPERVISED

    @property
    def parts(self) -> tuple["Column", ...]:
        """The stored fields with one row per stored token: the column, or codes and scale."""
        return (self, self.scale_part) if self.lossy else (self,)

    @cached_property
    def scale_part(self) -> "Column":
        """The field with the scale of every token of a lossy column."""
        return Column(name=f"{self.name}.scale", codec="bf16", tokens=self.tokens)

    @cached_property
    def escape_parts(self) -> tuple["Column", "Column"]:
        """The fields with row numbers and bits of a lossy column's escaped tokens."""
        index = Column(name=f"{self.name}.escape_index", codec="int32")
        return index, Column(name=f"{self.name}.escape", codec="bf16", width=self.width)

    @property
    def stored_width(self) -> int | None:
        """Number of `storage` values per row; None: one number, not a vector."""
        lossy = self.lossy
        return lossy.code_width(self.width or 1) if lossy else self.width

    @property
    def storage(self) -> np.dtype:
        """numpy type of the stored values."""
        return (self.lossy or self.coder).storage

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of one stored token, by part."""
        return {p.name: p.storage.itemsize * (p.stored_width or 1) for p in self.parts}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one stored token, not counting what escaped tokens add."""
        return sum(self.part_bytes.values())

    @property
    def words(self) -> str:
        """The declaration for a message."""
        return f"{self.name} with codec {self.codec}, width {self.width} and {self.tokens} tokens"

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of all parts, with codec and width in their metadata."""
        if self.lossy is None:
            return [self._field()]
        rest = (self.scale_part, *self.escape_parts)
        return [self._field(), *(p._field({"part of": self.name}) for p in rest)]

    def _field(self, more: dict[str, str] | None = None) -> pa.Field:
        value: pa.DataType = (self.lossy or self.coder).arrow
        if self.stored_width is not None:
            value = pa.list_(pa.field("item", value, nullable=False), self.stored_width)
        metadata = {"codec": self.codec, "width": str(self.width or 1)} | (more or {})
        if self.sparse:
            metadata["tokens"] = self.tokens
        kind = pa.large_list(pa.field("item", value, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata=metadata)


def token_columns(
    layers: tuple[int, ...],
    hidden_size: int,
    supervision: str,
    vocab_size: int,
    *,
    aux_codec: str = "bf16",
    final_codec: str = "bf16",
    final_tokens: str = ALL,
    teacher_tokens: str = ALL,
) -> tuple[Column, ...]:
    """Return the token columns of a dataset, in file order.

    `supervision` is "final-hidden", "topk:K" or "logits"; argmax and logsumexp are always stored.
    `final_tokens` and `teacher_tokens` say at which tokens `hidden.final` and `TEACHERS` are.

    Raises:
        ConfigError: a codec that cannot pack vectors of `hidden_size`.
    """
    for name in (aux_codec, final_codec):
        codec = lossy_codec(name, "hidden.*")
        if codec and hidden_size % codec.multiple:
            raise ConfigError(
                f"--codec {name} packs {codec.multiple} channels together, and hidden size "
                f"{hidden_size} is no multiple of {codec.multiple}; use int8c"
            )
    columns = [
        Column(name="input_ids", codec="int32"),
        Column(name="loss_mask", codec="bool8"),
        *(Column(name=layer_column(k), codec=aux_codec, width=hidden_size) for k in layers),
    ]
    kind, _, k = supervision.partition(":")
    if kind == "final-hidden":
        columns.append(
            Column(name=FINAL, codec=final_codec, width=hidden_size, tokens=final_tokens)
        )
    elif kind == "topk":
        columns.append(Column(name="topk_ids", codec="int32", width=int(k)))
        columns.append(Column(name="topk_logits", codec="float32", width=int(k)))
    else:
        columns.append(Column(name="logits", codec="bf16", width=vocab_size))
    columns.append(Column(name="target_argmax", codec="int32"))
    columns.append(Column(name="target_logsumexp", codec="float32"))
    return tuple(replace(c, tokens=teacher_tokens) if c.name in TEACHERS else c for c in columns)


def declared_columns(raw: dict[str, Any]) -> tuple[Column, ...]:
    """Return the token columns that a manifest declares, in file order."""
    return tuple(
        Column(name=c["name"], codec=c["codec"], width=c["width"], tokens=c.get("tokens", ALL))
        for c in raw["columns"]
    )


def predicts_supervised(loss_mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return which tokens sparse columns store: those whose next token is supervised, bool [N].

    Args:
        loss_mask: of D documents one after another, [N].
        offsets: int64 [D+1]; document d has tokens offsets[d] to offsets[d + 1].
    """
    kept = np.zeros(len(loss_mask), dtype=bool)
    kept[:-1] = loss_mask[1:] != 0
    kept[offsets[1:] - 1] = False  # the last token of a document has no next one
    return kept


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The manifest's entry of one shard."""

    file: str
    rows: int
    tokens: int
    supervised: int
    bytes: int
    sha256: str
    outline: str

    def __post_init__(self) -> None:
        if not safe_path(self.file):
            raise DatasetError(
                f"a shard has the path {self.file!r}: shards lie inside the dataset's directory; "
                "the manifest or unit record was edited, so restore it"
            )


class Manifest:
    """manifest.json, validated. `raw` is the whole JSON; code reads it through the properties."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        """Check format, version, required parts, fingerprint and types of `raw`, from `where`.

        A manifest without a fingerprint is accepted here, as sealing adds it last.

        Raises:
            DatasetError: not a manifest, of an unknown version, incomplete, or edited.
        """
        self.raw = raw
        self.where = where
        if raw.get("format") != FORMAT:
            raise DatasetError(f"{where}: not a spec-data manifest (format {raw.get('format')!r})")
        if raw.get("format_version") != FORMAT_VERSION:
            raise DatasetError(
                f"{where}: format version {raw.get('format_version', '(none)')}, this release "
                f"reads {FORMAT_VERSION}; install the spec-data release that wrote it"
            )
        missing = [k for k in _REQUIRED if k not in raw]
        if missing:
            raise DatasetError(
                f"{where}: the manifest lacks {', '.join(missing)}: it was edited; "
                "restore it, or generate the dataset again"
            )
        try:
            own = fingerprint(raw)
        except (UnicodeEncodeError, RecursionError):
            own = "none: a text is not Unicode, or values are nested too deeply"
        if "fingerprint" in raw and raw["fingerprint"] != own:
            raise DatasetError(
                f"{where}: the manifest does not match its own fingerprint; it was edited or "
                "damaged. Restore it, or generate the dataset again"
            )
        refuse(where, problems(raw, MANIFEST))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read and validate a manifest file.

        Raises:
            MissingError: no such file. DatasetError: not a valid manifest.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingError(f"{path}: no such file") from None
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:  # also numbers of more than 4,300 digits
            raise DatasetError(f"{path}: not valid JSON ({error}); restore it") from None
        if not isinstance(raw, dict):
            raise DatasetError(f"{path}: not a spec-data manifest (a JSON {type(raw).__name__})")
        manifest = cls(raw, str(path))
        if "fingerprint" not in raw:
            raise DatasetError(f"{path}: no fingerprint, so the manifest was edited; restore it")
        refuse(manifest.where, (f"{k} is missing" for k in _SEALED if k not in raw))
        refuse(manifest.where, contradictions(raw))
        refuse(manifest.where, manifest._wrong_columns())
        return manifest

    def _wrong_columns(self) -> Iterator[str]:
        """Yield how `columns` differs from the columns that layers and supervision make."""
        codecs = {c.name: c.codec for c in self.columns}
        aux = next((codecs[n] for k in self.layers if (n := layer_column(k)) in codecs), "bf16")
        try:
            expected = token_columns(
                self.layers,
                self.hidden_size,
                self.supervision,
                self.vocab_size,
                aux_codec=aux,
                final_codec=codecs.get(FINAL, "bf16"),
                final_tokens=self.final,
                teacher_tokens=self.teacher,
            )
        except ConfigError as error:
            yield str(error)
            return
        if [c.name for c in expected] != [c.name for c in self.columns]:
            names = ", ".join(c.name for c in self.columns)
            yield f"columns has {names}; layers and supervision make others"
            return
        for own, other in zip(self.columns, expected, strict=True):
            if own != other:
                yield f"columns has {own.words}; the other keys make {other.words}"

    def __repr__(self) -> str:
        totals = self.raw.get("totals", {})
        counts = ", ".join(f"{count:,} {name}" for name, count in totals.items())
        name, layers = self.target.get("name"), ", ".join(map(str, self.layers))
        return f"Manifest({self.where!r}, target {name!r}, layers {layers}: {counts})"

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Token columns in file order."""
        return declared_columns(self.raw)

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
    def final(self) -> str:
        """ "all", or "supervised": `hidden.final` is kept only where x_{t+1} is supervised."""
        return self.raw.get("final", ALL)

    @property
    def teacher(self) -> str:
        """ "all", or "supervised": `TEACHERS` are kept only where x_{t+1} is supervised."""
        return self.raw.get("teacher", ALL)

    @property
    def codec(self) -> dict[str, Any]:
        """Hash of the codec tables and size of their sample; empty when no column is lossy."""
        return self.raw.get("codec") or {}

    @property
    def fingerprint(self) -> str:
        """Hash of the whole manifest; it identifies the dataset."""
        return self.raw.get("fingerprint") or fingerprint(self.raw)


_REQUIRED = [name for name in MANIFEST.keys if not name.endswith("?")]
_SEALED = (
    "layer_convention",
    "policy",
    "card",
)  # required of a sealed dataset, not of a view of it


def fingerprint(raw: dict[str, Any]) -> str:
    """Return the hash of a manifest without its own fingerprint field."""
    return sha256_json({k: v for k, v in raw.items() if k != "fingerprint"})


def head_to_json(head: HeadSpec) -> dict[str, Any]:
    """Return a head in the form of the manifest."""
    return asdict(head)


# -- draft needs -----------------------------------------------------------------------------------
# Which drafts a dataset can train: one rule for `generate`, which warns, and `fit`.


def data_problem(draft: str, supervision: str, final: str) -> str | None:
    """Return why a draft cannot be fitted on a dataset, and what to do; None if it can.

    `supervision` and `final` are those of the manifest.
    """
    if draft == "eagle" and supervision != "final-hidden":
        return (
            f"--supervision {supervision} keeps no {FINAL}, and an eagle draft reads and predicts "
            "the final hidden states. Generate with --supervision final-hidden, or fit eagle3"
        )
    if draft == "eagle" and final != ALL:
        return (
            f"--final {final} keeps {FINAL} only where the next token is supervised; an eagle "
            "draft reads it at every token of the prompt too. Generate with --final all, or fit "
            "eagle3"
        )
    return None
