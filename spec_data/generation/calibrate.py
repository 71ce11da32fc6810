"""Choose how coarsely each lossy column is stored: as coarsely as its quality allows.

This happens once, before the first shard. Documents spread evenly over the plan are captured in the
proven form: 1/16 of its tokens, and at least 8,192 where it has so many. Three of four make the
tables; every fourth is held out and measures the error. With a quality of q, `default` is 0.02:

    error / variance, over all channels        at most q
    the same of the median channel             at most 3 q, so that a few wide channels hide nothing
    KL of the teacher, hidden.final only       at most 2.5 q nats

A column that cannot be stored so is stored in bf16, with a warning.

Shapes: N tokens of the sample, H width of a column, V vocabulary size.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from spec_data.capture.backend import TargetBackend
from spec_data.generation.capture import forward_batches
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.shards.blobs import compress
from spec_data.shards.codecs import (
    TABLES,
    Basis,
    Tables,
    decode,
    encode_tensors,
    load_tables,
    save_tables,
)
from spec_data.shards.errors import RunError
from spec_data.shards.files import sha256_file, write_once
from spec_data.shards.packing import sample_documents
from spec_data.shards.schema import (
    FINAL,
    CodecError,
    CodecTables,
    Column,
    HeadSpec,
    apply_head,
    logit_error,
    predicts_supervised,
)
from spec_data.terminal.parts import part

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS, _SHARE = 8192, 65536, 16  # the sample is 1/16 of the plan
_BYTES = 512 << 20  # largest size of the states of the sample, which are in memory together
_KL_TOKENS = 1024  # tokens of which the KL is measured
_LOGIT_ROWS = 128  # of them, whose logits are in memory together
_FIRST_STEP, _TRIES = 0.7, 8  # mean deviations of a component
_AIM, _NEAR = 0.95, 0.85  # of what the quality allows
_TOO_MANY = 12.0  # bits of a value, for which bf16 is better


@dataclass(frozen=True)
class Head:
    """What measures a KL: where logits are computed, the head as data, and its tensors.

    `tensors` are those of `TargetBackend.head_tensors`.
    """

    device: torch.device
    spec: HeadSpec
    tensors: dict[str, Tensor]


def calibrate(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    form: str,
    batch_tokens: int,
    folder: Path | None,
) -> tuple[tuple[Column, ...], CodecTables | None]:
    """Choose how each column is stored, measure it, and make codec.safetensors in `folder`.

    `form` is the proven mask form. Without a `folder` nothing is written.

    Returns:
        The columns, with what was measured of them; and the tables, None if no column is lossy or
        nothing is written.

    Raises:
        RunError: there are no usable states.
    """
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return setup.columns, None
    size = torch.empty(0, dtype=target.dtype).element_size()
    per_token = size * sum(c.width or 1 for c in lossy)
    documents = sample_documents(
        plan.lengths[: target.ready], sample_budget(plan.tokens, per_token)
    )
    states = capture_sample(plan, target, form, documents, lossy, batch_tokens)
    head = Head(target.device, target.head, target.head_tensors())
    columns, tables, sample = fit_columns(setup.columns, plan.lengths, documents, states, head)
    if not tables or folder is None:
        return columns, None
    file = folder / TABLES
    write_once(file, save_tables(tables))
    widths = {c.name: c.width or 1 for c in columns if c.lossy}
    load_tables(file, widths, None)  # perhaps another worker's
    return columns, CodecTables(file=TABLES, sha256=sha256_file(file), **sample)


def fit_columns(
    columns: Sequence[Column],
    lengths: np.ndarray,
    documents: Sequence[int],
    states: Mapping[str, Tensor],
    head: Head,
) -> tuple[tuple[Column, ...], dict[str, Tables], dict[str, int]]:
    """Choose how the lossy columns that have `states` are stored.

    Args:
        lengths: tokens of all documents of the dataset, int64 [D].
        documents: the sampled ones.
        states: of their tokens, [N, H] by column; not finite where none is stored.
        head: turns hidden.final into logits; the work is done on its device.

    Returns:
        The columns, bf16 where the quality cannot be met; the tables of the lossy ones; and the
        figures of the sample, as `CodecTables` has them.

    Raises:
        RunError: a column has no usable states.
    """
    numbers = np.repeat(np.arange(len(documents)), lengths[list(documents)])  # of documents, [N]
    held_out = numbers % 4 == 3 if len(documents) > 3 else np.ones(len(numbers), bool)  # [N]
    stored: list[Column] = []
    tables: dict[str, Tables] = {}
    for column in columns:
        if column.name in states:
            part(f"codec of {column.name}", len(tables), len(states))
            values = states[column.name]
            column, table = fitted(column, *split(column, values, numbers, held_out), head)
            if table is not None:
                tables[column.name] = table
        stored.append(column)
    sample = {"documents": len(documents), "tokens": len(numbers)}
    return tuple(stored), tables, sample | {"held_out_tokens": int(held_out.sum())}


def sample_budget(tokens: int, bytes_per_token: int) -> int:
    """Return the tokens of a sample of `tokens`: 1/16 of them within limits, and as memory allows.

    `bytes_per_token` are those of the states of one token that are held in memory.
    """
    wanted = max(_LEAST_TOKENS, min(_MOST_TOKENS, tokens // _SHARE))
    return max(1, min(wanted, _BYTES // bytes_per_token))


def capture_sample(
    plan: Plan,
    target: TargetBackend,
    form: str,
    documents: Sequence[int],
    columns: Sequence[Column],
    batch_tokens: int,
) -> dict[str, Tensor]:
    """Capture some documents, by their indices in the plan, in the proven mask form.

    Returns:
        The states [N, H] of each column, on the CPU in the dtype of the target. Those that a sparse
        column does not store are NaN; no later step uses them.
    """
    offsets, tokens = plan.documents.beginnings(documents)
    total = int(offsets[-1])
    part("states of a sample for the codec")
    states = {c.name: torch.empty(total, c.width or 1, dtype=target.dtype) for c in columns}
    given = (form, plan.pack_length, batch_tokens, plan.documents.images_of(documents))
    for batch in forward_batches(offsets, tokens["input_ids"], *given):
        captured = target.capture(batch, form).columns  # [n, H] each
        order = torch.from_numpy(batch.token_index(offsets))
        for name, value in states.items():
            value[order] = captured[name].to(target.dtype).cpu()
    not_stored = ~torch.from_numpy(predicts_supervised(tokens["loss_mask"], offsets))  # bool [N]
    for column in columns:
        if column.sparse:
            states[column.name][not_stored] = torch.nan
    return states


def split(
    column: Column, states: Tensor, numbers: np.ndarray, held_out: np.ndarray
) -> tuple[Tensor, list[Tensor]]:
    """Return the states [n, H] that tables are made from, and [T, H] of each held-out document.

    Tokens whose states are not finite are left out. If nothing but held-out tokens is left, or none
    of them, all are used for both.
    """
    finite = torch.isfinite(states.amin(-1)) & torch.isfinite(states.amax(-1))
    good = finite.numpy()
    if not good.any():
        raise RunError(
            f"column {column.name}: no token of the calibration sample has finite states; try "
            "--dtype float32 or --attn eager"
        )
    measured, made_from = good & held_out, good & ~held_out
    if not (measured.any() and made_from.any()):
        measured = made_from = good
    chosen = np.flatnonzero(measured)
    cuts = np.flatnonzero(np.diff(numbers[chosen])) + 1
    documents = [states[torch.from_numpy(part)] for part in np.split(chosen, cuts)]
    return states[torch.from_numpy(made_from)], documents


@torch.inference_mode()
def fitted(
    column: Column, states: Tensor, held_out: Sequence[Tensor], head: Head
) -> tuple[Column, Tables | None]:
    """Return a lossy column with its error, and its tables; or a bf16 column, and None.

    The tables are made from `states` [n, H] and measured on the documents `held_out`, [T, H] each.
    """
    documents = [part.to(head.device) for part in held_out]
    basis = Basis(states.to(head.device))
    step, best = _FIRST_STEP, None
    for _ in range(_TRIES):
        tables = basis.tables(step)
        error = measure(column, documents, tables, head)
        excess = _excess(column, error)
        if excess <= 1 and error.bits < _TOO_MANY:
            best = structs.replace(column, error=error), tables.to("cpu")
        if _NEAR <= excess <= 1:
            break
        if excess > 1 and best is not None:
            break
        step *= min(4.0, max(0.2, (_AIM / max(excess, 1e-9)) ** 0.5))
    if best is not None:
        logger.info("codec: %s %s", column.name, best[0].loss)
        return best
    logger.warning(
        "warning[codec]: %s is stored in bf16, because --codec cannot reach a quality of %g with "
        "few bits (%s)",
        *(column.name, column.quality, str(error)),
    )
    return structs.replace(column, codec="bf16", quality=0.0), None


def _excess(column: Column, error: CodecError) -> float:
    """Return the largest of a column's errors, over what its quality allows."""
    return max(error.total, error.mse_median / 3, (error.kl or 0.0) / 2.5) / column.quality


def measure(column: Column, documents: Sequence[Tensor], tables: Tables, head: Head) -> CodecError:
    """Measure the error of encoding the held-out states [T, H] of documents, with three digits.

    It is that of tokens that do not escape; `kl` and `logit_*` (hidden.final only) are those of
    `head_errors`, by `head`, on whose device the documents are.
    """
    states = torch.cat(list(documents))
    codes, away = encode_tensors(states, tables)
    decoded = torch.where(away[:, None], states.to(torch.bfloat16), decode(codes, tables))
    figures = {"total": 0.0, "mse_median": 0.0, "mse_max": 0.0}
    if bool((~away).any()):
        source = states[~away].double()  # squares of small states are 0 in float32
        error = (source - decoded[~away]).square_().mean(0)
        variance = source.var(0, correction=0)
        varying = variance > 0
        share = error[varying] / variance[varying]
        if len(share):
            figures["total"] = float(error.sum() / variance.sum())
            figures["mse_median"], figures["mse_max"] = float(share.median()), float(share.max())
    figures["escaped"] = float(away.double().mean())
    parts = codes.split([*map(len, documents)])
    blobs = (compress(part.cpu().numpy(), column.codec) for part in parts)
    raw = int(away.sum()) * (2 * states.shape[1] + 4)
    figures["bits"] = 8 * (sum(blob.nbytes for blob in blobs) + raw) / states.numel()
    if column.name == FINAL:
        figures |= head_errors(head, states, decoded)
    rounded = {k: float(f"{v:.3g}") for k, v in figures.items()}
    return CodecError(**rounded, tokens=len(states))


def head_errors(head: Head, states: Tensor, decoded: Tensor) -> dict[str, float]:
    """Return what a codec changes of the target's distribution, computed in float32.

    `states` and `decoded` are [N, H]; at most 1,024 tokens, spread evenly over N, are used.

    Returns:
        `kl`: mean of KL(softmax(head(states)) || softmax(head(decoded))), in nats; `logit_median`,
        `logit_q99`, `logit_max`: median, 99th percentile and maximum of `logit_error`.
    """
    weight = head.tensors.get("lm_head", head.tensors["embed_tokens"])  # [V, H]
    weight, bias = weight.to(states.device).float(), head.tensors.get("lm_head_bias")
    bias = None if bias is None else bias.to(states.device).float()
    step = max(1, -(-len(states) // _KL_TOKENS))
    states, decoded = states[::step], decoded[::step]
    total, errors = 0.0, []
    for pair in zip(states.split(_LOGIT_ROWS), decoded.split(_LOGIT_ROWS), strict=True):
        true, other = (apply_head(f.float(), weight, bias, head.spec) for f in pair)  # [n, V]
        errors.append(logit_error(other, true.argmax(-1), true.logsumexp(-1)).cpu())
        p, q = true.log_softmax(-1), other.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    middle, most, largest = np.quantile(torch.cat(errors).numpy(), [0.5, 0.99, 1.0]).tolist()
    return {
        "kl": max(0.0, total / len(states)),
        **{"logit_median": middle, "logit_q99": most, "logit_max": largest},
    }
