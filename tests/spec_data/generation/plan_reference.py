"""Planning in the slowest way: one row at a time, every render tokenised, everything in memory."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.documents import Document, RenderCounts
from spec_data.corpus.record_reader import CorpusReader
from spec_data.shards.schema import CountsRecord
from spec_data.shards.serving import PromptCounts


@dataclass
class Reference:
    """The documents of a corpus as Python lists, and the counts of a plan."""

    ids: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    turns: list[list[tuple[str, int, int]]] = field(default_factory=list)
    doc_ids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    counts: tuple[Any, ...] = ()
    sums: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)


def slow_renderer(*args: Any, **options: Any) -> Renderer:
    """Return a renderer that tokenises every render by itself."""
    renderer = Renderer(*args, **options)
    renderer.template.tokens.direct = False
    return renderer


def one_by_one(
    reader: CorpusReader, renderer: Renderer, max_length: int, records: Iterable | None = None
) -> Reference:
    """Return the documents of a corpus and their counts; `records` are those of the reader."""
    found, rendered, prompts = Reference(), RenderCounts(), PromptCounts()
    for record in reader if records is None else records:
        try:
            result = renderer.render(record)
        except RenderError as error:
            reader.refuse(error)
            continue
        rendered.count(result)
        for document in result.documents:
            before = len(found.masks)
            _add(found, document, max_length)
            for mask in found.masks[before:]:  # it was kept
                prompts.add(result.prompt, sum(mask))
    found.dropped.update(rendered.dropped)
    found.sums["rendered"] += sum(rendered.dropped.values())
    outside = sum(
        sum(bit and not any(a <= t < b for _, a, b in turns) for t, bit in enumerate(mask))
        for mask, turns in zip(found.masks, found.turns, strict=True)
        if {role for role, _, _ in turns} <= {"assistant"}
    )
    if outside:
        rendered.counts["supervised tokens outside answers"] = outside
    counts = CountsRecord(
        read=sum(r.rows for r in reader.reports),
        bad_rows=sum(r.bad for r in reader.reports),
        unrendered=dict(sorted(reader.refused.items())),
        unrendered_examples=dict(sorted(reader.refused_examples.items())),
        dropped=dict(sorted(found.dropped.items())),
        rendering=dict(rendered.methods + rendered.counts),
        **found.sums,
    )
    found.counts = counts, prompts.facts()
    return found


def _add(found: Reference, document: Document, max_length: int) -> None:
    counts = found.sums
    counts["rendered"] += 1
    if not any(document.loss_mask[1:]):
        found.dropped["nothing-supervised"] += 1
        return
    document = _trimmed(counts, document)
    if len(document.input_ids) > max_length:
        counts["cut"] += 1
        counts["tokens_cut"] += len(document.input_ids) - max_length
        document = _cut(document, max_length)
        if not any(document.loss_mask[1:]):
            found.dropped["nothing-supervised-within-max-length"] += 1
            return
        document = _trimmed(counts, document)
    data = b"".join(i.to_bytes(4, "little") for i in document.input_ids)
    whole = hashlib.sha256(data + bytes(document.loss_mask)).hexdigest()
    doc_id = hashlib.sha256(data).hexdigest()[:16] + whole[:16]
    if doc_id in found.seen:
        found.dropped["duplicate"] += 1
        return
    found.seen.add(doc_id)
    found.ids.append(document.input_ids)
    found.masks.append(document.loss_mask)
    found.turns.append(list(document.turns))
    found.doc_ids.append(doc_id)
    found.sources.append(document.source)


def _trimmed(counts: Counter[str], document: Document) -> Document:
    tail = document.loss_mask[::-1].index(1)
    if not tail:
        return document
    counts["tail_tokens_trimmed"] += tail
    return _cut(document, len(document.input_ids) - tail)


def _cut(document: Document, length: int) -> Document:
    """Return the first `length` tokens of a document with its turns clipped."""
    return replace(
        document,
        input_ids=document.input_ids[:length],
        loss_mask=document.loss_mask[:length],
        turns=tuple(t._replace(end=min(t.end, length)) for t in document.turns if t.start < length),
    )
