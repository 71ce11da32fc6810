"""One unit of documents through the target: forwards, checks, encoded columns.

States are gathered at real tokens only, checked, encoded on the device and copied straight into
the unit's arrays; no [B, T, V] logits and no second copy of a column exist.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.plan import Plan, unit_batches
from spec_data.shards.errors import RunError
from spec_data.shards.lossy import Tables
from spec_data.shards.packing import row_layout
from spec_data.shards.schema import FINAL, Column, layer_column
from spec_data.shards.writer import UnitData
from spec_data.target.mask_forms import ROWS, SINGLE
from spec_data.target.model import Target


@dataclass
class CapturedUnit:
    """A unit's arrays, ready to write, and the documents left out of it: counted by reason, and
    their places in the unit."""

    data: UnitData
    dropped: dict[str, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)


@dataclass
class _Packed:
    """One batch of rows: tensors for the forward and, per document, where its tokens are."""

    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    documents: list[int]
    lengths: list[int]


def capture_unit(
    target: Target,
    plan: Plan,
    unit: int,
    columns: tuple[Column, ...],
    form: str,
    batch_tokens: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    tables: Mapping[str, Tables] | None = None,
) -> CapturedUnit:
    """Run a unit's documents and fill its columns; lossy ones are encoded with their `tables`.

    Documents with a non-finite, all-zero or constant state vector are left out and counted.

    Raises:
        RunError: more than 1 % of the unit's documents (and more than one) have such states: the
            capture itself is broken.
    """
    data = plan.unit_documents(unit, columns)
    source = plan.unit_tokens(unit)
    broken: dict[int, str] = {}
    tables = {name: table.to(target.device) for name, table in (tables or {}).items()}
    length = plan.pack_length
    for packed in packed_batches(data.offsets, source["input_ids"], form, length, batch_tokens):
        values = forward_columns(target, packed, form, columns)
        _find_broken(values, packed, broken)
        _scatter(values, packed, columns, data, tables)
        on_tokens(sum(packed.lengths))
    if not np.array_equal(data.tokens["input_ids"], source["input_ids"]):
        raise RunError(f"unit {unit}: stored token ids are not those of the plan; this is a bug")
    return _without(data, broken, unit, columns)


def packed_batches(
    offsets: np.ndarray, ids: np.ndarray, form: str, pack_length: int, batch_tokens: int
) -> Iterator[_Packed]:
    """The forwards of a list of documents, as tensors, trimmed to the longest row of each batch."""
    lengths = np.diff(offsets).tolist()
    for rows in unit_batches(lengths, form, pack_length, batch_tokens):
        row_lengths = [[lengths[d] for d in row] for row in rows]
        width = max(sum(row) for row in row_lengths)
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        for b, row in enumerate(rows):
            tokens = np.concatenate([ids[offsets[d] : offsets[d + 1]] for d in row])
            input_ids[b, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        document_ids, position_ids = row_layout(row_lengths, width)
        documents = [d for row in rows for d in row]
        yield _Packed(
            input_ids, document_ids, position_ids, documents, [lengths[d] for d in documents]
        )


def asked_form(form: str) -> str | None:
    """The mask form to ask the target for: None for one document per row."""
    return None if form in (ROWS, SINGLE) else form


@torch.inference_mode()
def forward_columns(
    target: Target, packed: _Packed, form: str, columns: tuple[Column, ...]
) -> dict[str, Tensor]:
    """One forward; every column but the loss mask at the batch's real tokens, [N] or [N, W]."""
    names = {c.name: c for c in columns}
    captured, logits = target.capture(
        packed.input_ids,
        packed.document_ids,
        packed.position_ids,
        asked_form(form),
        full_logits="logits" in names,
    )
    real = (packed.document_ids >= 0).to(target.device)
    values = {layer_column(k): captured.layers[k][real] for k in target.layers}
    values["input_ids"] = packed.input_ids.to(target.device)[real]
    if captured.final is None:
        raise RunError("no final hidden was captured")
    final = captured.final[real]
    values |= _logit_columns(target, final, logits[real] if logits is not None else None, names)
    if FINAL in names:
        values[FINAL] = final
    return values


def _logit_columns(
    target: Target, final: Tensor, logits: Tensor | None, names: dict[str, Column]
) -> dict[str, Tensor]:
    """argmax, logsumexp and, where asked, top-k or full logits, in blocks of tokens."""
    argmax, logsumexp, top_ids, top_logits = [], [], [], []
    for part in target.logit_chunks(len(final)):
        block = logits[part] if logits is not None else target.logits_of(final[part])
        argmax.append(block.argmax(-1))
        logsumexp.append(block.float().logsumexp(-1))
        if "topk_ids" in names:
            top = block.float().topk(names["topk_ids"].width or 1, dim=-1)
            top_ids.append(top.indices)
            top_logits.append(top.values)
    out = {"target_argmax": torch.cat(argmax), "target_logsumexp": torch.cat(logsumexp)}
    if top_ids:
        out |= {"topk_ids": torch.cat(top_ids), "topk_logits": torch.cat(top_logits)}
    if logits is not None:
        out["logits"] = logits
    return out


def _find_broken(values: dict[str, Tensor], packed: _Packed, broken: dict[int, str]) -> None:
    """Note documents in which some token's vector is non-finite, all zero or constant."""
    for name, value in values.items():
        if not value.is_floating_point():
            continue
        low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
        finite = torch.isfinite(low) & torch.isfinite(high)
        flat = (low == high) if value.ndim == 2 and value.shape[1] > 1 else torch.zeros_like(finite)
        if bool(finite.all()) and not bool(flat.any()):
            continue
        finite, flat, start = finite.cpu(), flat.cpu(), 0
        for d, length in zip(packed.documents, packed.lengths, strict=True):
            span = slice(start, start + length)
            if not bool(finite[span].all()):
                broken[d] = f"non-finite-{name}"
            elif bool(flat[span].any()):
                broken.setdefault(d, f"constant-{name}")
            start += length


def _scatter(
    values: dict[str, Tensor],
    packed: _Packed,
    columns: tuple[Column, ...],
    data: UnitData,
    tables: Mapping[str, Tables],
) -> None:
    """Encode each column and copy every document's tokens to its place in the unit."""
    for column in columns:
        if column.name == "loss_mask":
            continue
        value = values[column.name]
        if column.sparse:
            kept = [data.kept[data.offsets[d] : data.offsets[d + 1]] for d in packed.documents]
            value = value[torch.from_numpy(np.concatenate(kept)).to(value.device)]
        bounds = data.row_offsets(column)
        places = [slice(int(bounds[d]), int(bounds[d + 1])) for d in packed.documents]
        if column.lossy is None:
            stored = {column.name: column.coder.encode(value)}
        else:
            encoded = column.lossy.encode(value, tables[column.name])
            stored = {column.name: encoded.codes, column.scale_part.name: encoded.scale}
            if len(encoded.escape_index):
                rows = np.concatenate([np.arange(p.start, p.stop) for p in places])
                data.escapes[column.name].add(rows[encoded.escape_index], encoded.escape)
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            for name, array in stored.items():
                data.tokens[name][place] = array[start:stop]
            start = stop


def _without(
    data: UnitData, broken: dict[int, str], unit: int, columns: tuple[Column, ...]
) -> CapturedUnit:
    if not broken:
        return CapturedUnit(data)
    count = len(data.doc_ids)
    reasons = dict(sorted(Counter(broken.values()).items()))
    if len(broken) == count or len(broken) > max(1, count // 100):
        first = min(broken)
        raise RunError(
            f"unit {unit}: {len(broken)} of {count} documents have unusable states ({reasons}; "
            f"first: document {data.doc_ids[first]}). The capture is broken, not the data: try "
            "--dtype float32 or --attn eager"
        )
    kept = [d for d in range(count) if d not in broken]
    return CapturedUnit(data.select(kept, columns), reasons, sorted(broken))
