"""Tables of the lossy codecs from a sample of the plan, and the error they make on the rest of it.

Happens once, before the first shard: documents spread evenly over the plan are captured in the
proven form; three of four make the tables, the fourth measures them. A column that is worse than
its codec's declared bound stops the run while nothing has been captured yet.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.capture import asked_form, packed_batches
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.shards.codec_tables import (
    TABLES,
    channel_error,
    error_text,
    load_tables,
    make_tables,
    save_tables,
)
from spec_data.shards.coded import StoredRows, decode_rows
from spec_data.shards.errors import RunError
from spec_data.shards.files import sha256_file, write_once
from spec_data.shards.head_spec import apply_head
from spec_data.shards.lossy import LossyCodec, Tables
from spec_data.shards.schema import FINAL, Column, layer_column, predicts_supervised
from spec_data.target.hooks import output_head
from spec_data.target.model import Target

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS, _SHARE = 8192, 65536, 16
_BYTES = 512 << 20  # states of the sample held at once
_KL_TOKENS = 2048


def calibrate(
    setup: Setup, plan: Plan, target: Target, form: str, folder: Path
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Make codec.safetensors in `folder` if it is not there, and measure it.

    Gives the manifest's `codec` and the `error` of every lossy column; nothing when there is none.

    Raises:
        RunError: no usable states, or a column is worse than its bound.
    """
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return {}, {}
    documents = sample_documents(plan.lengths, _budget(plan, setup, target))
    states, numbers = capture_sample(plan, target, form, documents, lossy, setup)
    kept = {name: _usable(name, value) for name, value in states.items()}
    held_out = numbers % 4 == 3 if len(documents) > 3 else np.ones(len(numbers), bool)
    file = folder / TABLES
    if not file.is_file():
        used = ~held_out if len(documents) > 3 else held_out
        made = {c.name: make_tables(_take(states, kept, c, used), c.codec) for c in lossy}
        write_once(file, save_tables(made))
    # What is on disk counts: another worker may have written it first.
    tables = load_tables(file, {c.name: c.width or 1 for c in lossy}, None)
    errors = {}
    for column in lossy:
        rows = held_out & kept[column.name]
        errors[column.name] = measure(column, states[column.name], rows, tables, target)
        logger.info("codec: %s %s", column.name, error_text(column.codec, errors[column.name]))
    check_bounds(lossy, errors)
    about = {
        "file": TABLES,
        "sha256": sha256_file(file),
        "documents": len(documents),
        "tokens": len(numbers),
        "held_out_tokens": int(held_out.sum()),
    }
    return about, errors


def sample_documents(lengths: np.ndarray, budget: int) -> list[int]:
    """Documents spread evenly over the plan, of about `budget` tokens together; at least one."""
    count = int(min(len(lengths), max(1, budget * len(lengths) // max(1, int(lengths.sum())))))
    return [(2 * i + 1) * len(lengths) // (2 * count) for i in range(count)]


def _budget(plan: Plan, setup: Setup, target: Target) -> int:
    """Tokens of the sample: a sixteenth of the plan within limits, and what memory allows."""
    size = torch.empty(0, dtype=target.dtype).element_size()
    per_token = size * sum(c.width or 1 for c in setup.columns if c.lossy)
    wanted = max(_LEAST_TOKENS, min(_MOST_TOKENS, plan.tokens // _SHARE))
    return max(1, min(wanted, _BYTES // per_token))


def capture_sample(
    plan: Plan,
    target: Target,
    form: str,
    documents: Sequence[int],
    columns: Sequence[Column],
    setup: Setup,
) -> tuple[dict[str, Tensor], np.ndarray]:
    """States [N, H] of the sampled documents (CPU, dtype of the target), and whose each token is.

    States that a sparse column does not store are NaN: nothing looks at them.
    """
    bounds = plan.documents.offsets
    spans = [np.arange(bounds[d], bounds[d + 1]) for d in documents]
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in spans])]).astype(np.int64)
    tokens = {n: a[np.concatenate(spans)] for n, a in plan.documents.tokens.items()}
    shape = int(offsets[-1])
    states = {c.name: torch.empty(shape, c.width or 1, dtype=target.dtype) for c in columns}
    length, batch = plan.pack_length, setup.config.batch_tokens
    for packed in packed_batches(offsets, tokens["input_ids"], form, length, batch):
        captured, _ = target.capture(
            packed.input_ids, packed.document_ids, packed.position_ids, asked_form(form)
        )
        real = (packed.document_ids >= 0).to(target.device)
        found = {layer_column(k): value for k, value in captured.layers.items()}
        if captured.final is not None:
            found[FINAL] = captured.final
        order = np.concatenate([np.arange(offsets[d], offsets[d + 1]) for d in packed.documents])
        for name, value in states.items():
            value[torch.from_numpy(order)] = found[name][real].to(target.dtype).cpu()
    sparse = ~torch.from_numpy(predicts_supervised(tokens["loss_mask"], offsets))
    for column in columns:
        if column.sparse:
            states[column.name][sparse] = torch.nan
    return states, np.repeat(np.arange(len(documents)), np.diff(offsets))


def _usable(name: str, states: Tensor) -> np.ndarray:
    """Tokens with finite states, bool [N]."""
    good = torch.isfinite(states.amin(-1)) & torch.isfinite(states.amax(-1))
    if not bool(good.any()):
        raise RunError(f"no token of the calibration sample has finite states in column {name}")
    return good.numpy()


def _take(
    states: dict[str, Tensor], kept: dict[str, np.ndarray], column: Column, used: np.ndarray
) -> Tensor:
    """The usable states of the documents that make the tables (all documents if they have none)."""
    rows = used & kept[column.name]
    return states[column.name][torch.from_numpy(rows if rows.any() else kept[column.name])]


@torch.inference_mode()
def measure(
    column: Column, states: Tensor, rows: np.ndarray, tables: dict[str, Tables], target: Target
) -> dict[str, Any]:
    """What encoding does to the held-out `rows` of a column: the manifest's `error`.

    `mse_median`, `mse_max`: over channels, of the mean squared error over the channel's variance,
    of tokens that did not escape; `escaped`: share of those that did; `kl`: mean nats from the
    teacher to its decoded self (hidden.final). Three digits, so that no thread count shows.
    """
    rows = rows if rows.any() else _usable(column.name, states)
    source = states[torch.from_numpy(rows)]
    codec, table = column.lossy, tables[column.name]
    if codec is None:
        raise ValueError(f"{column.name} is not lossy")
    decoded, escaped = round_trip(codec, source.to(target.device), table)
    coded = ~escaped
    if not coded.any():
        raise RunError(f"column {column.name}: every held-out token escapes {codec.name}; use bf16")
    error = channel_error(source[coded], decoded.cpu()[coded], table)
    error = error[~np.isnan(error)]
    figures = {
        "mse_median": float(np.median(error)) if len(error) else 0.0,
        "mse_max": float(error.max()) if len(error) else 0.0,
        "escaped": float(escaped.numpy().mean()),
    }
    if column.name == FINAL:
        figures["kl"] = teacher_kl(target, source.to(target.device), decoded)
    return {k: float(f"{v:.3g}") for k, v in figures.items()} | {"tokens": len(source)}


def round_trip(codec: LossyCodec, states: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """States [N, H] as a reader gives them back (bf16, same device), and which tokens escaped."""
    encoded = codec.encode(states, tables)
    escaped = torch.zeros(len(states), dtype=torch.bool)
    escaped[torch.from_numpy(encoded.escape_index)] = True
    out = torch.empty(states.shape, dtype=torch.bfloat16)
    index, bits = encoded.escape_index, encoded.escape
    decode_rows(codec, StoredRows(encoded.codes, encoded.scale, index, bits), tables, out)
    return out.to(states.device), escaped


def teacher_kl(target: Target, states: Tensor, decoded: Tensor) -> float:
    """Mean KL in nats from softmax(head(states)) to softmax(head(decoded)), in float32.

    Of at most 2,048 tokens spread over the rows [N, H].
    """
    head = output_head(target.model)
    weight = head.weight.float()
    bias = head.bias.float() if target.head.has_bias else None
    step = max(1, -(-len(states) // _KL_TOKENS))
    states, decoded = states[::step], decoded[::step]
    total = 0.0
    for part in target.logit_chunks(len(states)):
        p, q = (
            apply_head(f[part].float(), weight, bias, target.head).log_softmax(-1)
            for f in (states, decoded)
        )
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return max(0.0, total / len(states))


def check_bounds(columns: Sequence[Column], errors: dict[str, dict[str, Any]]) -> None:
    """Refuse codecs whose measured error is beyond what they promise.

    Raises:
        RunError: says which column, by how much, and the next codec to try.
    """
    told, advice = [], {}
    for column in columns:
        codec, error = column.lossy, errors[column.name]
        if codec is None:
            continue
        bound = codec.bound
        limits = {"mse_median": bound.median, "mse_max": bound.worst, "kl": bound.kl}
        worse = [f"{k} {error[k]:.2g} > {v:g}" for k, v in limits.items() if error.get(k, 0) > v]
        if worse:
            told.append(f"{column.name} ({codec.name}): {', '.join(worse)}")
            advice["final" if column.name == FINAL else "aux"] = codec.stronger
    if told:
        suggestion = ",".join(f"{kind}={name}" for kind, name in sorted(advice.items()))
        raise RunError(
            "the states lose more than the codec promises, so nothing was captured:\n  "
            + "\n  ".join(told)
            + f"\nUse --codec {suggestion} (with another --out, or after deleting this one)"
        )
