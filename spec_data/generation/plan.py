"""The plan of a dataset: every document, tokenised, in order, cut into units.

A unit is a fixed list of documents that becomes one shard. The plan is a pure function of the
corpus, the tokenizer and the settings. The bytes of a unit depend on nothing else, so units can be
captured on any machine, in any order, and after any crash.

Several processes render; one counts rows and compares and writes documents, in the order of the
rows. So the plan is the same for any number of them.

Shapes: D documents of the plan.
"""

import hashlib
import logging
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.documents import (
    EDITED,
    OUTSIDE,
    UNPROVABLE,
    UNSUPERVISED,
    Document,
    RenderCounts,
    count_warnings,
)
from spec_data.corpus.in_order import default_processes, in_order
from spec_data.corpus.record_reader import CorpusReader, RawRow, RowResult, parsed_row
from spec_data.corpus.records import Record
from spec_data.corpus.sources import expected_rows
from spec_data.generation.options import AUTO
from spec_data.shards.checksums import numbers
from spec_data.shards.errors import ConfigError, CorpusError, DatasetError
from spec_data.shards.files import dump_json, parse_size, sha256_file, write_atomically
from spec_data.shards.follow import PROMPTS, PlannedDocuments
from spec_data.shards.index import PROMPT, document_digest
from spec_data.shards.packing import pack_documents
from spec_data.shards.pictures import FOLDER, IMAGES, Placed, first_line, line, read_images
from spec_data.shards.schema import Column, CountsRecord, SourceRecord, predicts_supervised
from spec_data.shards.seal import arrow_stream
from spec_data.shards.serving import PromptCounts
from spec_data.shards.writer import ShardStream, UnitData, shard_bytes
from spec_data.terminal import NOTICE
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)

PLAN_COLUMNS = (Column(name="input_ids", codec="int32"), Column(name="loss_mask", codec="bool8"))
BATCH_TOKENS = 8192
"""Tokens per forward of the target where its memory is not measured."""

# -- truncated documents ---------------------------------------------------------------------------


class TruncatedDocument(NamedTuple):
    """A document as a plan stores it, or the reason why it stores none.

    Attributes:
        dropped: the reason; None for a document that is stored.
        cut: tokens lost by the maximum length; tail: tokens removed after the last supervised one.
        digest: its doc_id, 16 bytes.
        ids, mask: int32 and uint8 per token, as bytes.
        turns: (role, start, end) of each.
        prompt: the number of its prompt.
        images, files: its images, and the bytes of each by its SHA-256.
    """

    source: str
    dropped: str | None = None
    cut: int = 0
    tail: int = 0
    digest: bytes = b""
    ids: bytes = b""
    mask: bytes = b""
    turns: tuple[tuple[str, int, int], ...] = ()
    prompt: int = 0
    images: tuple[Placed, ...] = ()
    files: Mapping[str, bytes] = {}  # a dict: it comes from other processes by pickle


def truncate(document: Document, max_length: int) -> TruncatedDocument:
    """Return a document cut at `max_length` tokens and after its last supervised token.

    Serving sees beginnings of documents, too. No draft learns from what follows the last supervised
    token: the target is causal, nothing is drafted there, and the teacher of that token is the
    state before it.
    """
    mask = np.asarray(document.loss_mask, np.uint8)
    if not mask[1:].any():
        return TruncatedDocument(document.source, "nothing-supervised")
    length = _supervised_length(mask)
    tail, cut = len(mask) - length, max(0, length - max_length)
    if cut:
        mask = mask[:max_length]
        if not mask[1:].any():
            reason = UNSUPERVISED
            return TruncatedDocument(document.source, reason, cut, tail)
        length = _supervised_length(mask)
        tail += len(mask) - length
    ids = np.asarray(document.input_ids[:length], np.int32).tobytes()
    mask_bytes = mask[:length].tobytes()
    turns = ((role, a, min(b, length)) for role, a, b in document.turns if a < length)
    # The end is a supervised token, and none stands for a part of an image.
    images = tuple(image for image in document.images if image.start < length)
    digest = document_digest(ids, mask_bytes, "".join(i.sha256 for i in images).encode())
    prompt = document.prompt
    return TruncatedDocument(
        *(document.source, None, cut, tail, digest, ids, mask_bytes, tuple(turns), prompt, images),
        {image.sha256: document.files[image.sha256] for image in images},
    )


def _supervised_length(mask: np.ndarray) -> int:
    """Return the number of tokens up to the last supervised one."""
    return int(np.flatnonzero(mask)[-1]) + 1


# -- plan.arrow ------------------------------------------------------------------------------------
# Documents are written while they are rendered, and read from a memory map: memory holds those of
# one record batch while writing. What is read is a copy: a view of a map must not be written to.

DOCUMENTS = "plan.arrow"
_ROWS, _BATCH_BYTES = 4096, 32 << 20  # of documents that are written together


class CorpusDocuments(PlannedDocuments):
    """The documents of a plan file with their texts."""

    @cached_property
    def predicting(self) -> int:
        """Number of tokens whose next token is supervised, which sparse columns store."""
        return sum(int(predicts_supervised(*chunk).sum()) for chunk in self._masks)

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.processor, placed = read_images(file.with_name(IMAGES))
        self.images: dict[int, list[Placed]] = {}  # of documents, by their numbers
        if placed:
            ids = self.ids.to_pylist()
            self.images = {n: placed[one] for n, one in enumerate(ids) if one in placed}
        self._folder = file.with_name(FOLDER)

    def images_text(self) -> bytes:
        """Return images.jsonl; b"" without images."""
        file = self._folder.with_name(IMAGES)
        return file.read_bytes() if file.is_file() else b""

    def images_of(self, documents: Sequence[int]) -> dict[int, Callable[[], tuple[bytes, ...]]]:
        """Return what reads the images of those documents that have some, by their place."""
        return {
            place: partial(self.image_files, document)
            for place, document in enumerate(documents)
            if document in self.images
        }

    def image_files(self, document: int) -> tuple[bytes, ...]:
        """Return the files of the images of a document, in order.

        Raises:
            DatasetError: one is missing, or is not the one that was planned.
        """
        files = []
        for image in self.images.get(document, ()):
            file = self._folder / image.sha256
            data = file.read_bytes() if file.is_file() else b""
            if hashlib.sha256(data).hexdigest() != image.sha256:
                raise DatasetError(
                    f"{file}: missing or damaged; delete {file.parent.parent} and run `spec-data "
                    "generate` again"
                )
            files.append(data)
        return tuple(files)

    @cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the ids and sources of all documents."""
        columns = (self._table[name] for name in ("doc_id", "source"))
        return sum(pc.sum(pc.binary_length(column)).as_py() for column in columns)

    @cached_property
    def sources(self) -> list[str]:
        """The source of every document, [D]; equal texts are one object."""
        codes = self._table["source"].combine_chunks().dictionary_encode()
        names = codes.dictionary.to_pylist()
        return [names[code] for code in numbers(codes.indices)]

    def read(self, first: int, last: int) -> UnitData:
        """Return documents `first` to `last` - 1."""
        rows = self._table.slice(first, last - first)
        bounds = self.offsets[first : last + 1]
        return UnitData(
            rows["doc_id"].to_pylist(),
            rows["source"].to_pylist(),
            [
                [(turn["role"], turn["start"], turn["end"]) for turn in turns]
                for turns in rows["turns"].to_pylist()
            ],
            bounds - bounds[0],
            self.tokens(first, last),
        )

    def select(self, documents: Sequence[int]) -> UnitData:
        """Return some documents, at least one, in the order of their numbers in `documents`."""
        parts = [self.read(d, d + 1) for d in documents]
        return UnitData(
            [part.doc_ids[0] for part in parts],
            [part.sources[0] for part in parts],
            [part.turns[0] for part in parts],
            *self.beginnings(documents),
        )

    def beginnings(
        self, documents: Sequence[int], longest: int | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the first `longest` tokens (None: all) of documents; all of those with images.

        Returns:
            Their offsets, int64 [len(documents) + 1], and `input_ids` and `loss_mask` of their
            tokens, one document after another.
        """
        parts = [self.tokens(d, d + 1) for d in documents]
        # an image in parts is none
        ends = [None if d in self.images else longest for d in documents]
        tokens = {
            c.name: [part[c.name][:end] for part, end in zip(parts, ends, strict=True)]
            for c in PLAN_COLUMNS
        }
        offsets = np.cumsum([0, *map(len, tokens["loss_mask"])], dtype=np.int64)
        return offsets, {name: np.concatenate(arrays) for name, arrays in tokens.items()}


class PlanWriter:
    """Write truncated documents to a plan file, without duplicates.

    Attributes:
        counts: documents rendered, and those cut; tokens cut off and trimmed.
        dropped: documents that were dropped, by reason.
        outside: supervised tokens outside the answers of chats.
        sha256, prompts_sha256: of the file, and of the one of their prompts, when complete.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Write to `folder`; None: to a temporary one, removed with the documents."""
        self.counts, self.dropped = Counter[str](), Counter[str]()
        self.outside = 0
        self.images_sha256 = ""
        self._digests: set[bytes] = set()
        self._prompts: list[int] = []
        self._images: list[str] = []  # lines of images.jsonl
        self.processor = ""  # the hash of the target's
        self._waiting: list[TruncatedDocument] = []
        self._bytes = 0
        self._temporary = Path(tempfile.mkdtemp()) if folder is None else None
        self._file = (folder or self._temporary or Path()) / DOCUMENTS
        self._stream = ShardStream(self._file, PLAN_COLUMNS)

    def add(self, document: TruncatedDocument) -> bool:
        """Add one document, or count it as dropped and return False."""
        cut, tail = document.cut, document.tail
        self.counts.update(rendered=1, cut=int(cut > 0), tokens_cut=cut, tail_tokens_trimmed=tail)
        dropped = "duplicate" if document.digest in self._digests else document.dropped
        if dropped is not None:
            self.dropped[dropped] += 1
            return False
        self._digests.add(document.digest)
        if document.images:
            document = self._without_files(document)
        if all(role == "assistant" for role, _, _ in document.turns):  # or all are cut off
            self.outside += document.mask.count(1) - sum(b - a for _, a, b in document.turns)
        self._prompts.append(document.prompt)
        self._waiting.append(document)
        self._bytes += len(document.ids) + len(document.mask)
        if len(self._waiting) == _ROWS or self._bytes >= _BATCH_BYTES:
            self._write()
        return True

    def _without_files(self, document: TruncatedDocument) -> TruncatedDocument:
        """Write the images of a document beside the plan, and return it without their bytes."""
        folder = self._file.with_name(FOLDER)
        folder.mkdir(exist_ok=True)
        for name, data in document.files.items():
            if not (folder / name).is_file():
                write_atomically(folder / name, data)
        self._images.append(line(document.digest.hex(), document.images))
        return document._replace(files={})

    def _write(self) -> None:
        documents, self._waiting, self._bytes = self._waiting, [], 0
        if not documents:
            return
        unit = UnitData(
            [d.digest.hex() for d in documents],
            [d.source for d in documents],
            [list(d.turns) for d in documents],
            np.cumsum([0, *(len(d.mask) for d in documents)], dtype=np.int64),
            {
                "input_ids": np.frombuffer(b"".join(d.ids for d in documents), np.int32),
                "loss_mask": np.frombuffer(b"".join(d.mask for d in documents), np.uint8),
            },
        )
        self._stream.write(unit)

    @property
    def has_images(self) -> bool:
        """Whether a document holds one."""
        return bool(self._images)

    def discard(self) -> None:
        """Remove what was written."""
        self._stream.discard()
        for file in (self._file, *map(self._file.with_name, (PROMPTS, IMAGES))):
            file.unlink(missing_ok=True)
        shutil.rmtree(self._file.with_name(FOLDER), ignore_errors=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def finish(self) -> CorpusDocuments:
        """Complete the file and return the documents, at least one."""
        self._write()
        prompts = pa.record_batch({PROMPT: pa.array(self._prompts, pa.uint64())})
        data = arrow_stream(prompts)
        write_atomically(self._file.with_name(PROMPTS), data)
        self.prompts_sha256 = hashlib.sha256(data).hexdigest()
        if self._images:
            lines = [first_line(self.processor), *self._images]
            data = "".join(lines).encode()
            write_atomically(self._file.with_name(IMAGES), data)
            self.images_sha256 = hashlib.sha256(data).hexdigest()
        self.sha256 = self._stream.finish().sha256
        documents = CorpusDocuments(self._file)
        if self._temporary is not None:
            weakref.finalize(documents, shutil.rmtree, self._temporary, ignore_errors=True)
        return documents


# -- rendering a corpus ----------------------------------------------------------------------------


def render_row(
    renderer: Renderer, max_length: int, parse: Callable[..., Record], row: RawRow
) -> RowResult:
    """Parse, render and truncate one row, in any process.

    The result has a `Rendering` without its documents, and these truncated; or a RenderError.
    """
    result = parsed_row(row, parse)
    if result.bad is None:
        try:
            rendering = renderer.render(result.made)
            documents = [truncate(d, max_length) for d in rendering.documents]
            result.made = replace(rendering, documents=[]), documents
        except RenderError as error:
            result.made = error
    return result


def render_corpus(
    reader: CorpusReader,
    renderer: Renderer,
    max_length: int,
    processes: int = 0,
    folder: Path | None = None,
    on_policy: bool = False,
) -> tuple[CorpusDocuments, dict[str, Any]]:
    """Render all rows of `reader`; return the documents, and what a `PlanRecord` says of them.

    `folder` receives plan.arrow; None: a temporary folder, removed with the documents.

    Raises:
        ConfigError: with `on_policy`, answers were edited after `regenerate` wrote them.
        CorpusError: the corpus cannot be read, too many rows are bad, or no document is left.
        RunError: a process ended.
    """
    writer, rendered, prompts = PlanWriter(folder), RenderCounts(), PromptCounts()
    total = expected_rows(reader.sources, reader.limit)
    work = partial(render_row, renderer, max_length, reader.parse)
    processes = processes or default_processes()
    rows = reader.results(lambda rows: in_order(rows, work, processes))
    try:
        with closing(rows) as results:
            for result in progress(results, desc="render", unit="rows", total=total):
                if isinstance(result.made, RenderError):
                    reader.refuse(result.made)
                    continue
                rendering, documents = result.made
                rendered.count(rendering)
                lost = len(rendering.causes)
                reader.drop(
                    lost + sum(len(d.turns) for d in documents), UNPROVABLE, rendering.causes
                )
                for document in documents:
                    if writer.add(document):
                        prompts.add(rendering.prompt, document.mask.count(1))
        writer.counts.update(rendered=rendered.dropped.total())
        # Documents that were dropped while rendering were never added.
        counts = CountsRecord(
            **writer.counts,
            read=sum(r.rows for r in reader.reports),
            bad_rows=sum(r.bad for r in reader.reports),
            unrendered=dict(sorted(reader.refused.items())),
            unrendered_examples=dict(sorted(reader.refused_examples.items())),
            dropped=dict(sorted((writer.dropped + rendered.dropped).items())),
            rendering=dict(rendered.methods + rendered.counts + Counter({OUTSIDE: writer.outside})),
        )
        if counts.rendered == sum(counts.dropped.values()):
            reasons = {"bad rows": counts.bad_rows} | counts.unrendered | counts.dropped
            left_out = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items() if n)
            raise CorpusError(
                f"no document is left to capture of {counts.read:,} rows; left out: {left_out}"
            )
        if on_policy and rendered.edited:
            raise ConfigError(
                f"--on-policy: {rendered.counts[EDITED]:,} {EDITED} (the first: "
                f"{rendered.edited}). They are not the target's own: restore them, leave them out, "
                "or leave --on-policy out"
            )
        if renderer.template.vision is not None and writer.has_images:
            writer.processor = renderer.template.vision.digest
        planned = writer.finish()
    except BaseException:
        writer.discard()
        raise
    for warning in count_warnings(msgspec.structs.asdict(counts), int(planned.offsets[-1])):
        logger.warning("warning[corpus]: %s", warning)
    if renderer.mask != "all":
        for line in rendered.of_masks():
            logger.log(NOTICE, "masks      %s", line)
    elif (ignored := rendered.ignored_masks()) is not None:
        logger.warning("warning[corpus]: %s", ignored)
    return planned, {
        "documents_sha256": writer.sha256,
        "prompts_sha256": writer.prompts_sha256,
        "images_sha256": writer.images_sha256,
        "counts": counts,
        "prompts": prompts.facts(),
        # A path is one of this machine.
        "corpus": [msgspec.structs.replace(report, path="") for report in reader.reports],
    }


# -- plan ------------------------------------------------------------------------------------------

_LEAST_PACK, _MOST_PACK = 512, 2048
"""Tokens of a pack: those of the longest document within these bounds. Attention in a pack grows
with the square of its length, and so does its mask; longer documents have rows of their own."""
_UNIT_BYTES, _UNIT_TOKENS, _UNITS = 500_000_000, 262_144, 16


@dataclass(kw_only=True)
class PlanRecord:
    """plan.json: a plan without its documents.

    Attributes:
        settings: everything that decides the bytes of the dataset.
        documents_sha256, prompts_sha256, images_sha256: of plan.arrow, prompts.arrow and
            images.jsonl; the last one is "" without images.
        units: [first, last) of consecutive documents, which partition them.
        counts, corpus: what was read, rendered and dropped, in all and of each source.
        prompts: what renders the prompts of the documents, as facts of `shards.serving`.
    """

    settings: dict[str, Any]
    documents_sha256: str
    prompts_sha256: str = ""
    images_sha256: str = ""
    units: list[tuple[int, int]]
    counts: CountsRecord
    prompts: dict[str, Any] = field(default_factory=dict)
    corpus: list[SourceRecord]


@dataclass(kw_only=True)
class Plan(PlanRecord):
    """The documents of a corpus, cut into units."""

    documents: CorpusDocuments

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [D]."""
        return self.documents.lengths

    @cached_property
    def pack_length(self) -> int:
        """Most tokens of a row of the target's batch that several documents share."""
        return min(max(int(self.lengths.max()), _LEAST_PACK), _MOST_PACK)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.documents.offsets[-1])

    def unit_documents(self, unit: int, columns: tuple[Column, ...]) -> UnitData:
        """Return the arrays of a unit's shard: texts, turns and mask are set, states are zero."""
        first, last = self.units[unit]
        data = self.documents.read(first, last)
        lengths = self.lengths[first:last].tolist()
        texts = data.doc_ids, data.sources, data.turns
        return UnitData.allocate(columns, *texts, lengths, data.tokens["loss_mask"])

    def unit_tokens(self, unit: int) -> dict[str, np.ndarray]:
        """Return `input_ids` (int32 [n]) and `loss_mask` (uint8 [n]) of the tokens of a unit."""
        return self.documents.tokens(*self.units[unit])

    def unit_set_tokens(self, units: Iterable[int]) -> int:
        """Return the number of tokens of several units."""
        return sum(int(self.lengths[a:b].sum()) for a, b in (self.units[u] for u in units))

    def unit_bytes(self, unit: int, columns: tuple[Column, ...]) -> int:
        """Return the size of a unit's shard, see `shard_bytes`; no state is needed for it."""
        return shard_bytes(self.unit_documents(unit, columns), columns)

    def utilisation(self) -> float:
        """Return the share of the slots of all rows that hold a token, 0 to 1."""
        slots = 0
        for a, b in self.units:
            lengths = self.lengths[a:b]
            long = lengths > self.pack_length  # each has a row of its own length
            packs = pack_documents(lengths[~long].tolist(), self.pack_length)
            slots += len(packs) * self.pack_length + int(lengths[long].sum())
        return self.tokens / slots


def unit_tokens(size: str, bytes_per_token: float, tokens: int, batch_tokens: int) -> int:
    """Return the most tokens of a unit, at least 1.

    A unit is what a killed worker captures again, what workers share out, and the step in which a
    training run beside generation sees data. "auto" keeps it below each of:

        500 MB of shard     an 8B target (hidden size 4,096, 3 layers and hidden.final) takes at
                            most 8 KB per token: 61,000 tokens, 6 s at 10,000 tokens/s
        262,144 tokens      for small targets, and slow ones: 4.4 minutes at 1,000 tokens/s
        1/16 of the corpus  so that a small corpus, too, has units to share out and to resume from;
                            but at least one batch, below which the target is used badly

    `tokens` are those of all documents, `batch_tokens` those of a forward of the target.
    """
    if size != AUTO:
        return max(1, int(parse_size(size) / bytes_per_token))
    most = min(int(_UNIT_BYTES / bytes_per_token), _UNIT_TOKENS)
    return max(1, min(most, max(-(-tokens // _UNITS), batch_tokens)))


# -- plan on disk ----------------------------------------------------------------------------------

PLAN, PROOF, WITNESS, ALSO = "plan.json", "target.json", "witness.safetensors", "also-*.json"
"""In OUT/.generate: the plan; what was proven about the target, and reference states of the run
that proved it; the settings of runs that capture with others (see `generation.proof`)."""


def save_plan(work: Path, plan: Plan) -> None:
    """Write plan.json beside plan.arrow: the plan is complete if it exists."""
    record = {part.name: getattr(plan, part.name) for part in fields(PlanRecord)}
    write_atomically(work / PLAN, dump_json(msgspec.to_builtins(record)))


def read_plan_record(work: Path) -> PlanRecord | None:
    """Return the saved plan without its documents, or None if there is no complete plan.

    Raises:
        DatasetError: plan.json is damaged.
    """
    file = work / PLAN
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=PlanRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{file}: damaged ({error}); delete {work.parent} and run `spec-data generate` again"
        ) from None


def read_units(work: Path) -> list[tuple[int, int]]:
    """Return the units [first, last) of a saved plan, without reading its documents; [] if none."""
    record = read_plan_record(work)
    return record.units if record else []


def load_plan(work: Path) -> Plan:
    """Return a saved plan.

    Raises:
        DatasetError: plan.arrow is not the one that plan.json describes.
    """
    record, file = read_plan_record(work), work / DOCUMENTS
    sums = [] if record is None else [record.documents_sha256, record.prompts_sha256]
    sums += [] if record is None else [record.images_sha256]
    files = (file, work / PROMPTS, work / IMAGES)
    if sums != [sha256_file(one) if one.is_file() else "" for one in files] or record is None:
        raise DatasetError(
            f"{file}: damaged; delete {work.parent} and run `spec-data generate` again"
        )
    return Plan(documents=CorpusDocuments(file), **vars(record))
