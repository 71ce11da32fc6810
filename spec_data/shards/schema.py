"""The manifest and the columns: how a dataset describes itself. Both are validated when read.

FORMAT.md explains the fields. A token column holds one value (width None) or one vector (width W)
per token of a document. A lossy column has two more fields for tokens that are stored in bf16. A
sparse column stores only tokens whose next token is supervised.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from msgspec import Meta, structs
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.blobs import LOSSY, PACKED
from spec_data.shards.codecs import Codec, codec_named
from spec_data.shards.draft_kinds import default_kind
from spec_data.shards.errors import DatasetError, an
from spec_data.shards.files import MANIFEST, sha256_json
from spec_data.shards.layer_ids import EMBEDDING, recipe_count
from spec_data.shards.likelihood import AgreementTable
from spec_data.shards.records import (
    Count,
    JsonRecord,
    LayerId,
    Sha256,
    Share,
    Size,
    Xxh3,
    as_record,
    check_path,
    explicit,
    plain,
    read_json,
)

# -- head ------------------------------------------------------------------------------------------


class HeadSpec(JsonRecord, frozen=True, kw_only=True):
    """The LM head without its tensors: z = scale * (W f + b), then softcap * tanh(z / softcap).

    Generation proves `apply_head` against the model; training and verification use it, too.
    """

    vocab_size: Size
    hidden_size: Size
    tied: bool
    has_bias: bool = False
    scale: float = explicit(1.0)
    softcap: float | None = None


def apply_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec) -> Tensor:
    """Compute logits [..., V'] of final hidden states [..., H], in their dtype.

    `weight` [V', H] and `bias` [V'] are rows of the head: all, or those of a draft vocabulary. The
    order of operations is that of the models.
    """
    logits = F.linear(hidden, weight, bias)
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits


_BLOCK = 64  # entries of which the largest one is found at once


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of [..., V], and its index, int64; both [...].

    Of equal entries it is the first. torch's own CPU kernel is several times slower.
    """
    width = x.shape[-1] // _BLOCK * _BLOCK
    if x.device.type != "cpu" or width < 16 * _BLOCK:
        peak, best = x.max(-1)
        return peak, best
    blocks = x[..., :width].unflatten(-1, (-1, _BLOCK))
    peak, block = blocks.amax(-1).max(-1)  # [...] each
    chosen = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, _BLOCK))
    best = block * _BLOCK + chosen.squeeze(-2).argmax(-1)
    if width < x.shape[-1]:
        rest, at = x[..., width:].max(-1)
        later = rest > peak
        peak, best = torch.where(later, rest, peak), torch.where(later, at + width, best)
    return peak, best


def logit_error(logits: Tensor, argmax: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the error of argmax (int64 [T]) and logsumexp (float32 [T]) against logits [T, V].

    It is float32 [T], relative to the largest |logit| of the token.
    """
    scale = logits.abs().amax(-1).clamp_min(1e-6)
    gap = logits.amax(-1) - logits.gather(-1, argmax[:, None])[:, 0]
    return torch.maximum(gap, (logits.logsumexp(-1) - logsumexp).abs()) / scale


# -- schema ----------------------------------------------------------------------------------------


FORMAT = "spec-data"
FORMAT_VERSION = "1.1"
OLD_VERSION = "1.0"
"""Of a dataset without the column `prompt` in its index; both are read. Shards are as in 1.0."""
LAYER_CONVENTION = "layer id k is the output of decoder block k, counted from 0"
FINAL = "hidden.final"


def layer_column(layer: int) -> str:
    """Return the column name of a captured layer."""
    return f"hidden.L{layer}"


ALL, SUPERVISED = "all", "supervised"
Tokens = Annotated[str, Meta(pattern="^(all|supervised)$")]
TEACHERS = ("topk_ids", "topk_logits", "logits", "target_argmax", "target_logsumexp")
"""The columns that are made from logits."""


class CodecError(JsonRecord, frozen=True, kw_only=True):
    """What a lossy codec loses of a column, measured on held-out `tokens`.

    `total`: squared error over variance, summed over channels; `mse_median` and `mse_max`: of one
    channel. `escaped`: the share of tokens stored in bf16, which are not in these. `bits`: stored,
    per value.
    """

    total: Share
    mse_median: Share
    mse_max: Share
    escaped: Share
    bits: Share
    tokens: Count = 0
    kl: float | None = None
    logit_median: Share | None = None
    logit_q99: Share | None = None
    logit_max: Share | None = None

    def __str__(self) -> str:
        """In one line."""
        kl = f", teacher KL {self.kl:.1e}" if self.kl is not None else ""
        return (
            f"{self.bits:.2f} bits a value, error / variance {self.total:.1e} (worst "
            f"channel {self.mse_max:.1e}){kl}, {self.escaped:.2%} of tokens escape"
        )


class Column(JsonRecord, frozen=True, kw_only=True, dict=True):
    """A token column: `width` values per token (None: one number, not a vector).

    With `tokens` "supervised", only tokens t whose x_{t+1} is supervised have a row. `exact`: its
    codec loses nothing. `quality`: the largest `total` error that a lossy column may have; `error`:
    what was measured.
    """

    name: str
    codec: str
    width: Size | None = None
    tokens: Tokens = explicit(ALL)
    exact: bool = False
    quality: Share = explicit(0.0)
    error: CodecError | None = None

    @property
    def layout(self) -> tuple[str, str, int | None, str]:
        """What decides how it is stored."""
        return self.name, self.codec, self.width, self.tokens

    @property
    def coder(self) -> Codec:
        """The codec of a plain column."""
        return codec_named(self.codec, self.name)

    @cached_property
    def lossy(self) -> bool:
        """Whether encoding loses something. DatasetError: this release has no such codec."""
        return self.codec in LOSSY or not self.coder

    @property
    def loss(self) -> str:
        """What was measured of its codec, in one line; empty if nothing was."""
        if self.error is None:
            return ""
        return f"{self.codec}: {self.error}" if self.lossy else str(self.error)  # decoded by a view

    @property
    def sparse(self) -> bool:
        """Whether only some tokens have a row."""
        return self.tokens == SUPERVISED

    @property
    def absent(self) -> float:
        """What a document has at a token without a row: NaN, or -1 in a column of whole numbers.

        Zero would be a token id, a logit or a state like any other.
        """
        return math.nan if self.logical.is_floating_point else -1

    @cached_property
    def escape_parts(self) -> tuple["Column", "Column"]:
        """The fields with row numbers and bits of a lossy column's tokens that are stored raw."""
        index = Column(name=f"{self.name}.escape_index", codec="int32")
        return index, Column(name=f"{self.name}.escape", codec="bf16", width=self.width)

    @property
    def may_be_constant(self) -> bool:
        """Whether all values of a token may be equal: top logits, and the embedding of padding."""
        equal = self.name in ("topk_logits", layer_column(EMBEDDING))
        return equal or self.width in (None, 1)

    @property
    def storage(self) -> np.dtype:
        """numpy type of the stored values."""
        return np.dtype(np.uint8) if self.lossy else self.coder.storage

    @property
    def logical(self) -> torch.dtype:
        """torch type of the values that are read."""
        return torch.bfloat16 if self.lossy else self.coder.logical

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one stored token: of a lossy column as measured, or at most so."""
        width = self.width or 1
        if not self.lossy:
            return self.coder.storage.itemsize * width
        return width / 8 * (self.error.bits if self.error else bits_range(self.quality)[1])

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of all parts, with codec and width in their metadata."""
        if not self.lossy:
            return [self._field(self.coder.arrow, self.width)]
        parts = (p._field(p.coder.arrow, p.width, self.name) for p in self.escape_parts)
        return [self._field(pa.uint8(), None), *parts]

    def _field(self, value: pa.DataType, width: int | None, part_of: str = "") -> pa.Field:
        if width is not None:
            value = pa.list_(pa.field("item", value, nullable=False), width)
        metadata = {"codec": self.codec, "width": str(self.width or 1)}
        if part_of:
            metadata["part of"] = part_of
        if self.sparse:
            metadata["tokens"] = self.tokens
        kind = pa.large_list(pa.field("item", value, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata=metadata)


def bits_range(quality: float) -> tuple[float, float]:
    """Return how many bits a value takes at least and at most with an error of `quality`.

    The most is half as many again as of any target so far; a quarter of the error takes one more.
    """
    more = math.log2(0.02 / quality) / 2
    return max(0.5, 1 + more), max(1.0, 4 + more)


def token_columns(
    layers: tuple[int, ...],
    hidden_size: int,
    supervision: str,
    vocab_size: int,
    *,
    qualities: Mapping[str, float] = MappingProxyType({}),
    final_tokens: str = ALL,
    teacher_tokens: str = ALL,
) -> tuple[Column, ...]:
    """Return the token columns of a dataset, in file order.

    `supervision` is "final-hidden", "topk:K" or "logits"; argmax and logsumexp are always stored.
    `qualities` has those of lossy columns, by name; the others are bf16. `final_tokens` and
    `teacher_tokens` say at which tokens `hidden.final` and `TEACHERS` are.
    """

    def states(name: str, tokens: str = ALL) -> Column:
        quality = qualities.get(name, 0.0)
        codec = PACKED if quality else "bf16"
        return Column(name=name, codec=codec, width=hidden_size, tokens=tokens, quality=quality)

    def teacher(name: str, codec: str, width: int | None = None) -> Column:
        return Column(name=name, codec=codec, width=width, tokens=teacher_tokens)

    kind, _, k = supervision.partition(":")
    if kind == "final-hidden":
        given = [states(FINAL, final_tokens)]
    elif kind == "topk":
        given = [teacher("topk_ids", "int32", int(k)), teacher("topk_logits", "float32", int(k))]
    else:
        given = [teacher("logits", "bf16", vocab_size)]
    return (
        Column(name="input_ids", codec="int32"),
        Column(name="loss_mask", codec="bool8"),
        *(states(layer_column(k)) for k in layers),
        *given,
        teacher("target_argmax", "int32"),
        teacher("target_logsumexp", "float32"),
    )


def predicts_supervised(loss_mask: np.ndarray, offsets: np.ndarray | None = None) -> np.ndarray:
    """Return which tokens sparse columns store: those whose next token is supervised, bool [N].

    `loss_mask` [N] is of D documents; document d has tokens offsets[d] to offsets[d + 1]. None: of
    one document.
    """
    stored = np.zeros(len(loss_mask), dtype=bool)
    stored[:-1] = loss_mask[1:] != 0
    if offsets is not None:
        stored[offsets[1:] - 1] = False  # the last token of a document has no next one
    return stored


def mask_counts(loss_mask: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the supervised tokens of D documents, and find their first; int64 [D] each.

    Where there is none, the first is the length. The arguments are those of `predicts_supervised`.
    """
    total = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
    before = total[offsets[:-1]]
    count = total[offsets[1:]] - before
    first = np.searchsorted(total, before + 1) - 1 - offsets[:-1]
    return count, np.where(count > 0, first, np.diff(offsets))


# -- manifest --------------------------------------------------------------------------------------

_RESTORE = "The manifest was edited or damaged: restore it, or generate the dataset again"


class ShardRecord(JsonRecord, frozen=True, kw_only=True):
    """The manifest's entry of one shard."""

    file: str
    rows: Count
    tokens: Count
    supervised: Count
    bytes: Count
    sha256: Sha256
    outline: Xxh3

    def __post_init__(self) -> None:
        check_path(self.file)


class FileRecord(JsonRecord, frozen=True, kw_only=True):
    """Size and checksums of a small file of a dataset."""

    bytes: Count
    sha256: Sha256
    xxh3: Xxh3


class Quantised(JsonRecord, frozen=True, kw_only=True):
    """How the weights of a target are quantised."""

    method: str
    dequantised: bool = False

    def __str__(self) -> str:
        return f"{self.method}{', dequantised when it was loaded' * self.dequantised}"


class Evidence(JsonRecord, frozen=True, kw_only=True):
    """What states stored by another tool are, and how that was measured.

    `stored_layers` are layer ids in the stored order. The last state is the one "after" or "before"
    the final norm, and entry t of a mask is about "token" t or the "next" one. `differences`:
    relative, from the target's own states, by chunk; `masks`: how they agree with the template.
    """

    tool: str
    stored_layers: list[int]
    final_norm: str
    mask_frame: str
    documents: Count
    tokens: Count
    differences: dict[str, float]
    masks: str


class TargetRecord(JsonRecord, frozen=True, kw_only=True):
    """The target, and what ran it."""

    name: str
    dtype: str
    revision: str | None = None
    model_type: str | None = None
    architectures: list[str] = []
    num_layers: Size | None = None
    hidden_size: Size | None = None
    quantised_as: Quantised | None = None
    attn: str = explicit("auto")
    rope_factors: str | None = None
    streams: str | None = None
    backend: str = explicit("")
    backend_version: str = explicit("")
    devices: str = explicit("")
    state_proof: dict[str, Any] | None = None
    converted: Evidence | None = None


class SourceRecord(JsonRecord, frozen=False, kw_only=True):  # type: ignore[misc]
    """A source of the corpus: what was read of it, counted while it is read.

    `path` is not in manifests. `format` is that of most good rows, `rows` counts good and bad ones,
    and `unrendered` good ones that were broken when they were rendered. `sha256` is that of the
    bytes on disk; of a Hub dataset, its fingerprint. `unread` counts rows by what neither the
    reader nor the chat template knows: columns, and `messages.KEY`; `notes` by facts that are not
    used as they are given; `nulls` by where nulls were left out, as those that Arrow adds.
    """

    source: str
    path: str = explicit("")
    kind: str = explicit("")
    format: str = explicit("none")
    formats: dict[str, Count] = {}
    rows: Count = 0
    bad: Count = 0
    unrendered: Count = 0
    bad_examples: list[str] = []
    sha256: str | None = None
    licence: str | None = None
    unused_columns: list[str] = []
    unread: dict[str, Count] = {}
    notes: dict[str, Count] = {}
    nulls: dict[str, Count] = {}


class CodecTables(JsonRecord, frozen=True, kw_only=True):
    """The tables of the lossy columns: their file, and the sample that they were made from."""

    file: str
    sha256: Sha256
    documents: Count = 0
    tokens: Count = 0
    held_out_tokens: Count = 0

    def __post_init__(self) -> None:
        check_path(self.file)


class RopeRecord(JsonRecord, frozen=True, kw_only=True):
    """A table of rotary frequencies."""

    dimensions: Size
    factor: float = explicit(1.0)
    limit: Size | None = None
    factors: str | None = None


class PositionsRecord(JsonRecord, frozen=True, kw_only=True):
    """How the target tells positions apart."""

    kind: str = explicit("unknown")
    proven: bool = False
    reason: str = explicit("")
    proven_to: Count = 0
    difference: Share = explicit(0.0)
    norm: dict[str, Any] = {}
    tables: dict[str, RopeRecord] = {}


class PackingRecord(JsonRecord, frozen=True, kw_only=True):
    """The mask form of capture, and the measurements that it was chosen by (`capture.proofs`).

    All differences are relative. `tolerance`: the largest allowed; `noise`: between two batch
    shapes of the plain forward (None: not measured); `differences`: the largest of a document by
    candidate, or why it could not run. `documents` and `longest` (tokens) are those of the proof.
    """

    form: str = explicit("unknown")
    tolerance: Share = explicit(0.0)
    noise: float | None = None
    differences: dict[str, float | str] = {}
    documents: Count = 0
    longest: Count = 0
    pack_length: Count = 0
    utilisation: Share | None = None


class CountsRecord(JsonRecord, frozen=True, kw_only=True, omit_defaults=False):
    """What happened to every corpus row and every document: rendered = stored + dropped."""

    read: Count = 0
    bad_rows: Count = 0
    unrendered: dict[str, Count] = {}
    unrendered_examples: dict[str, list[str]] = {}
    rendered: Count = 0
    dropped: dict[str, Count] = {}
    cut: Count = 0
    tokens_cut: Count = 0
    tail_tokens_trimmed: Count = 0
    rendering: dict[str, Count] = {}
    stored: Count = 0


class LeftOut(JsonRecord, frozen=True, kw_only=True):
    """The documents of left_out.arrow: numbers in the plan, units, and `prompt` in hexadecimal."""

    places: list[Count] = []
    units: list[Count] = []
    prompts: list[Xxh3] = []


class Totals(JsonRecord, frozen=True, kw_only=True, omit_defaults=False):
    """Sums over all shards."""

    documents: Count = 0
    tokens: Count = 0
    supervised: Count = 0
    bytes: Count = 0


class ProvenanceInput(JsonRecord, frozen=True, kw_only=True):
    """A dataset that another one was made of."""

    fingerprint: Sha256
    documents: Count
    provenance: "Provenance | None" = None


class Provenance(JsonRecord, frozen=True, kw_only=True):
    """Of a dataset that was made of others: the command, the options that decide it, the inputs."""

    command: str
    options: dict[str, Any]
    of: list[ProvenanceInput]


# A view has no shards: it refers to rows and columns of stored datasets, never of views. A document
# has one location for each group of its columns; only `join` makes several groups.


class ViewSource(JsonRecord, frozen=True, kw_only=True):
    """A stored dataset that a view refers to: where it is, which it is, and its documents."""

    path: str
    fingerprint: Sha256
    documents: Count


MOST_SOURCES = 4096
"""Datasets that a view may refer to: to open it, the manifest of each is read."""


class View(JsonRecord, frozen=True, kw_only=True):
    """The manifest's `view`: what it refers to, and names of columns that are read together.

    `remasked`: the index has loss masks of its own, instead of those of the sources.
    """

    sources: list[ViewSource]
    groups: list[list[str]]
    remasked: bool = False

    def __post_init__(self) -> None:
        if not self.sources or not all(self.groups) or not self.groups:
            raise ValueError("it refers to nothing")
        if len(self.sources) > MOST_SOURCES:
            raise ValueError(f"{len(self.sources):,} sources, at most {MOST_SOURCES:,}")


class Manifest(JsonRecord, frozen=True, kw_only=True, dict=True):
    """manifest.json: everything that decided the bytes of a dataset.

    `where` is the file, for messages; it is not stored. Without shards and fingerprint it is the
    draft of a dataset, or the common part of several.
    """

    where: str = explicit(MANIFEST)
    format: str = explicit(FORMAT)
    format_version: str = explicit(FORMAT_VERSION)
    settings: dict[str, Any]
    target: TargetRecord
    identity: dict[str, Any] = {}
    corpus: list[SourceRecord]
    mask: str | None = None
    layers: tuple[LayerId, ...]
    draft_layers: dict[str, tuple[LayerId, ...]] = {}
    supervision: Annotated[str, Meta(pattern="^(final-hidden|logits|topk:[1-9][0-9]{0,8})$")]
    final: Tokens = explicit(ALL)
    teacher: Tokens = explicit(ALL)
    codec: CodecTables | None = None
    columns: tuple[Column, ...]
    head: HeadSpec
    head_error: float | None = None
    positions: PositionsRecord = PositionsRecord()
    packing: PackingRecord
    policy: Annotated[str, Meta(pattern="^(on|off)-policy$")]
    captured_with: dict[str, Any] = {}
    also_captured_with: list[dict[str, Any]] = []
    documents: CountsRecord
    agreement: AgreementTable | None = None
    left_out: LeftOut = LeftOut()
    provenance: Provenance | None = None
    view: View | None = None
    files: dict[str, FileRecord] = {}
    shards: tuple[ShardRecord, ...] = ()
    totals: Totals = Totals()
    card: Sha256 | None = None
    mixed: list[str] = []  # fingerprints of datasets that are read as one; never stored
    planned: str | None = None  # digest of the documents of an unsealed dataset; never stored
    fingerprint: str = explicit("")

    def __post_init__(self) -> None:
        for name in self.files:
            check_path(name)

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str = MANIFEST) -> "Manifest":
        """Return the manifest that plain values describe.

        DatasetError: not a manifest, of another version, incomplete, or with a wrong value.
        """
        if raw.get("format") != FORMAT:
            raise DatasetError(f"{where}: not a spec-data manifest (format {raw.get('format')!r})")
        if raw.get("format_version") not in (OLD_VERSION, FORMAT_VERSION):
            raise DatasetError(
                f"{where}: format version {raw.get('format_version', '(none)')}, this release "
                f"reads {OLD_VERSION} and {FORMAT_VERSION}; install the spec-data release that "
                "wrote it"
            )
        return as_record({**raw, "where": where}, cls, where, _RESTORE)

    @classmethod
    def read(cls, path: Path | str, text: bytes | None = None) -> "Manifest":
        """Read the manifest of a sealed dataset; `text` is its content where that is known.

        Raises:
            MissingError: no such file. DatasetError: not a manifest, or damaged, or edited.
        """
        raw = read_json(path, text)
        if not isinstance(raw, dict):
            raise DatasetError(f"{path}: not a spec-data manifest (a JSON {type(raw).__name__})")
        manifest = cls.of(raw, str(path))
        if manifest.fingerprint != fingerprint(raw):
            raise DatasetError(
                f"{path}: the manifest does not match its own fingerprint; it was edited or "
                "damaged. Restore it, or generate the dataset again"
            )
        for wrong in _contradictions(manifest):
            raise DatasetError(f"{path}: {wrong}. {_RESTORE}")
        return manifest

    def ancestors(self) -> set[str]:
        """Return the fingerprints of the datasets that it was made of, and of theirs."""
        inputs = [*self.provenance.of] if self.provenance else []
        for one in inputs:  # it grows
            inputs += one.provenance.of if one.provenance else []
        return {one.fingerprint for one in inputs}

    def parts(self) -> set[str]:
        """Return the fingerprints of the datasets of which it has all documents, its own first."""
        made = [self.provenance] if self.provenance else []
        found = {self.fingerprint}
        for one in made:  # it grows
            if one.command in ("merge", "copy", "recode"):
                found |= {part.fingerprint for part in one.of}
                made += [part.provenance for part in one.of if part.provenance]
        return found

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the dataset but those made from the manifest."""
        sums = {record.file: record.sha256 for record in self.shards}
        sums |= {name: record.sha256 for name, record in self.files.items()}
        return sums | ({self.codec.file: self.codec.sha256} if self.codec else {})

    def to_json(self) -> dict[str, Any]:
        """Return the plain values of the file."""
        fields = {name: value for name, value in plain(self).items() if name != "where"}
        return {"format": FORMAT, "format_version": self.format_version, **fields}

    def changed(self, **fields: Any) -> "Manifest":
        """Return a copy with other values of some fields, without a fingerprint."""
        return msgspec.structs.replace(self, **{"fingerprint": ""} | fields)

    def with_fingerprint(self) -> "Manifest":
        """Return a copy with its fingerprint."""
        return self.changed(fingerprint=fingerprint(self.to_json()))

    def __repr__(self) -> str:
        totals = ", ".join(f"{n:,} {name}" for name, n in structs.asdict(self.totals).items())
        layers = ", ".join(map(str, self.layers))
        return f"Manifest({self.where!r}, target {self.target.name!r}, layers {layers}: {totals})"

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.head.hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.head.vocab_size

    @property
    def on_policy(self) -> bool:
        """Whether --on-policy said that the target wrote the responses; `policy` is the verdict."""
        return bool(self.settings.get("on_policy"))

    @property
    def sampling_temperature(self) -> float | None:
        """The temperature at which the target wrote the responses; None: not stated."""
        return self.settings.get("sampling_temperature")

    @property
    def suspicions(self) -> list[str]:
        """What is suspicious about the texts of a sealed dataset, in words."""
        if self.agreement is None:
            return []
        settings = self.vocab_size, self.sampling_temperature, self.policy == "on-policy"
        return self.agreement.suspicions(*settings, self.on_policy)


def fingerprint(raw: Mapping[str, Any]) -> str:
    """Return the hash of the JSON of a manifest without its own fingerprint."""
    return sha256_json({k: v for k, v in raw.items() if k != "fingerprint"})


def totals_of(shards: Sequence[ShardRecord]) -> Totals:
    """Return the sums over shards."""
    fields = {"documents": "rows", "tokens": "tokens", "supervised": "supervised", "bytes": "bytes"}
    return Totals(**{name: sum(getattr(s, of) for s in shards) for name, of in fields.items()})


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield what keys of a sealed manifest, each of the right type, say against each other."""
    shards, left_out = manifest.shards, manifest.left_out
    if (manifest.view is None) != (manifest.card is not None) or (manifest.view and shards):
        yield "a dataset with shards has a card, and a view has neither"
    if "index.arrow" not in manifest.files:
        yield "files has no index.arrow"
    if manifest.view is not None:
        grouped = sorted(name for group in manifest.view.groups for name in group)
        if grouped != sorted(column.name for column in manifest.columns):
            yield "view.groups does not name every column once"
    if manifest.view is None and manifest.totals != totals_of(shards):
        yield f"totals is {plain(manifest.totals)}, but the shards have others"
    if not all(shard.rows for shard in shards):
        yield "a shard has no rows"
    for name, layers in (("layers", manifest.layers), *manifest.draft_layers.items()):
        if list(layers) != sorted(set(layers)) or not set(layers) <= set(manifest.layers):
            yield f"{name} is {list(layers)}: expected ascending ids, among layers"
    places, units = left_out.places, left_out.units
    many = {len(places), len(units), len(left_out.prompts or places)}
    if len(many) > 1 or places != sorted(set(places)) or units != sorted(units):
        yield "left_out has places and units that do not belong together"
    if ("target/positions.safetensors" in manifest.files) != bool(manifest.positions.tables):
        yield "positions and the list of files disagree on target/positions.safetensors"
    expected = token_columns(
        manifest.layers,
        manifest.hidden_size,
        manifest.supervision,
        manifest.vocab_size,
        qualities={c.name: c.quality for c in manifest.columns if c.lossy},
        final_tokens=manifest.final,
        teacher_tokens=manifest.teacher,
    )
    for stored, made in itertools.zip_longest(manifest.columns, expected):
        if stored and made and stored.lossy and made.lossy:
            made = structs.replace(made, codec=stored.codec)  # perhaps an older one
        layouts = [column and column.layout for column in (stored, made)]
        if layouts[0] != layouts[1]:
            yield f"columns has {layouts[0]}; layers, supervision and codecs make {layouts[1]}"


def data_problem(draft: str, supervision: str, final: str) -> str | None:
    """Return why a draft cannot be fitted on a dataset, and what to do; None if it can."""
    if recipe_count(draft):
        return None
    if supervision == "final-hidden" and final == ALL:
        return None
    return (
        f"{an(draft)} draft reads and predicts {FINAL} at every token, which --supervision "
        f"{supervision} --final {final} does not keep. Generate with --supervision final-hidden "
        f"--final all, or fit {default_kind()}"
    )
