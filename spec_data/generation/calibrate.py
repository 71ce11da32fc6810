"""Make the tables of the lossy codecs from a sample of the plan, and measure their error.

This happens once, before the first shard. Documents spread evenly over the plan are captured in the
proven form; of a small plan all are. Three of four make the tables; every fourth is held out and
measures the error. A column whose error is above the declared bound of its codec gets the next
finer codec, bf16 at the end.

Shapes: N tokens of the sample, H width of a column, V vocabulary size.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from spec_data.capture.backend import TargetBackend
from spec_data.generation.capture import forward_batches
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
from spec_data.shards.codecs import LOSSY, LossyCodec, Tables
from spec_data.shards.errors import RunError
from spec_data.shards.even_sample import sample_documents
from spec_data.shards.files import sha256_file, write_once
from spec_data.shards.schema import (
    FINAL,
    CodecError,
    CodecTables,
    Column,
    HeadSpec,
    apply_head,
    layer_column,
    logit_error,
    predicts_supervised,
)
from spec_data.shards.shard import StoredRows, decode_rows

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS, _SHARE = 8192, 65536, 16  # the sample is 1/16 of the plan
_WHOLE = 32768  # tokens of the largest plan that is its own sample
_BYTES = 512 << 20  # largest size of the states of the sample, which are in memory together
_KL_TOKENS = 2048  # tokens of which the KL is measured


class HasHead(Protocol):
    """What measures a KL: a target, or a dataset that stores its head."""

    @property
    def device(self) -> torch.device:
        """Where logits are computed."""

    @property
    def head(self) -> HeadSpec:
        """The head as data."""

    def head_tensors(self) -> dict[str, Tensor]:
        """Return embedding and head, see `TargetBackend`."""

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices of an axis of `tokens` tokens whose float32 logits fit in memory."""


def calibrate(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    form: str,
    batch_tokens: int,
    folder: Path,
) -> tuple[tuple[Column, ...], CodecTables | None]:
    """Choose the codecs, make codec.safetensors in `folder` unless it exists, and measure.

    Args:
        setup, plan, target: what is captured.
        form: the proven mask form.
        batch_tokens: tokens per forward.
        folder: the dataset directory.

    Returns:
        The columns, with codecs that keep their bounds and what was measured of them; and the
        tables, None if no column is lossy.

    Raises:
        RunError: there are no usable states.
    """
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return setup.columns, None
    documents = sample_documents(plan.lengths, _budget(plan, setup, target))
    states, numbers = capture_sample(plan, target, form, documents, lossy, batch_tokens)
    kept = {name: _usable(name, value) for name, value in states.items()}  # bool [N] each
    split = len(documents) > 3
    held_out = numbers % 4 == 3 if split else np.ones(len(numbers), bool)  # [N]
    used = ~held_out if split else held_out

    def coded(column: Column) -> tuple[Tables, CodecError]:
        """Return the tables of a column, and their error."""
        name, value = column.name, states[column.name]
        table = make_tables(_take(states, kept, column, used), column.codec)
        error = measure(column, value, held_out & kept[name], {name: table}, target)
        logger.info("codec: %s %s", name, error_text(column.codec, error))
        return table, error

    columns, tables = _settled(setup.columns, coded)
    if not tables:
        return columns, None
    file = folder / TABLES
    write_once(file, save_tables(tables))
    load_tables(file, [c for c in columns if c.lossy], None)  # perhaps another worker's
    return columns, CodecTables(
        file=TABLES,
        sha256=sha256_file(file),
        documents=len(documents),
        tokens=len(numbers),
        held_out_tokens=int(held_out.sum()),
    )


def _settled(
    columns: tuple[Column, ...], coded: Callable[[Column], tuple[Tables, CodecError]]
) -> tuple[tuple[Column, ...], dict[str, Tables]]:
    """Give what loses too much the next finer codec, until all keep their bounds.

    All layers have one codec, and `hidden.final` has its own. `coded` returns the tables of a lossy
    column, and their error. Return the columns, and the tables of the lossy ones by name.
    """
    settled = {c.name: c for c in columns}
    tables: dict[str, Tables] = {}
    lossy = [c for c in columns if c.lossy]
    for kind in ([c for c in lossy if c.name != FINAL], [c for c in lossy if c.name == FINAL]):
        while kind and kind[0].lossy:
            made = {c.name: coded(c) for c in kind}
            worse = over_bounds(kind, {name: error for name, (_, error) in made.items()})
            if not worse:
                tables |= {name: table for name, (table, _) in made.items()}
                settled |= {c.name: structs.replace(c, error=made[c.name][1]) for c in kind}
                break
            codec = _finer(kind[0])
            logger.warning(
                "warning: %s stored with %s, because %s would lose too much: %s",
                ", ".join(c.name for c in kind) + (" is" if len(kind) == 1 else " are"),
                *(codec, kind[0].codec, "; ".join(worse)),
            )
            kind = [
                structs.replace(
                    c, codec=codec, instead_of={**c.instead_of, c.codec: made[c.name][1]}
                )
                for c in kind
            ]
            settled |= {c.name: c for c in kind}
    return tuple(settled.values()), tables


def _finer(column: Column) -> str:
    """Return the next finer codec that can store the width of a lossy column."""
    codec = LOSSY[column.codec].stronger
    while codec in LOSSY and (column.width or 1) % LOSSY[codec].multiple:
        codec = LOSSY[codec].stronger
    return codec


def _budget(plan: Plan, setup: Setup, target: TargetBackend) -> int:
    """Return the tokens of the sample."""
    size = torch.empty(0, dtype=target.dtype).element_size()
    per_token = size * sum(c.width or 1 for c in setup.columns if c.lossy)
    if plan.tokens <= _WHOLE and plan.tokens * per_token <= _BYTES:
        return plan.tokens
    return sample_budget(plan.tokens, per_token)


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
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Capture the sampled documents.

    Args:
        plan, target: what is captured.
        form: the proven mask form.
        documents: indices of the sampled documents in the plan.
        columns: the columns to capture.
        batch_tokens: tokens per forward.

    Returns:
        The states [N, H] of each column, on the CPU in the dtype of the target, and for each token
        the number of its document in the sample, int64 [N]. States that a sparse column does not
        store are NaN; no later step uses them.
    """
    offsets, tokens = plan.documents.beginnings(documents)
    total = int(offsets[-1])
    states = {c.name: torch.empty(total, c.width or 1, dtype=target.dtype) for c in columns}
    for batch in forward_batches(
        offsets, tokens["input_ids"], form, plan.pack_length, batch_tokens
    ):
        captured = target.capture(batch, form)
        found = {layer_column(k): value for k, value in captured.layers.items()}  # [n, H] each
        found[FINAL] = captured.final
        order = batch.token_index(offsets)
        for name, value in states.items():
            value[torch.from_numpy(order)] = found[name].to(target.dtype).cpu()
    not_stored = ~torch.from_numpy(predicts_supervised(tokens["loss_mask"], offsets))  # bool [N]
    for column in columns:
        if column.sparse:
            states[column.name][not_stored] = torch.nan
    return states, np.repeat(np.arange(len(documents)), np.diff(offsets))


def _usable(name: str, states: Tensor) -> np.ndarray:
    """Return which tokens of a column [N, H] have finite states, bool [N].

    Raises:
        RunError: none has.
    """
    good = torch.isfinite(states.amin(-1)) & torch.isfinite(states.amax(-1))
    if not bool(good.any()):
        raise RunError(
            f"column {name}: no token of the calibration sample has finite states; try --dtype "
            "float32 or --attn eager"
        )
    return good.numpy()


def _take(
    states: dict[str, Tensor], kept: dict[str, np.ndarray], column: Column, used: np.ndarray
) -> Tensor:
    """Return the usable states [n, H] of the tokens `used` (bool [N]) that make the tables.

    If none of them is usable, return the usable states of all documents.
    """
    chosen = used & kept[column.name]
    return states[column.name][torch.from_numpy(chosen if chosen.any() else kept[column.name])]


@torch.inference_mode()
def measure(
    column: Column,
    states: Tensor,
    chosen: np.ndarray,
    tables: dict[str, Tables],
    target: HasHead,
) -> CodecError:
    """Measure the error of encoding a column.

    Args:
        column: a lossy column.
        states: its states [N, H].
        chosen: the held-out tokens, bool [N]; if none is set, all usable tokens are measured.
        tables: the codec tables by column name.
        target: its head turns hidden.final into logits.

    Returns:
        The errors, of tokens that do not escape; `kl` and `logit_*` (hidden.final only): see
        `head_errors`. Figures have three digits, so that they do not depend on the number of
        threads.
    """
    chosen = chosen if chosen.any() else _usable(column.name, states)
    source = states[torch.from_numpy(chosen)]  # [n, H]
    codec, table = column.lossy, tables[column.name]
    if codec is None:
        raise ValueError(f"{column.name} is not lossy")
    decoded, escaped = round_trip(codec, source.to(target.device), table)  # [n, H], bool [n]
    coded = ~escaped
    error = np.zeros(0)
    if coded.any():
        error = channel_error(source[coded], decoded.cpu()[coded], table)  # [H]
        error = error[~np.isnan(error)]
    figures = {
        "mse_median": float(np.median(error)) if len(error) else 0.0,
        "mse_max": float(error.max()) if len(error) else 0.0,
        "escaped": float(escaped.numpy().mean()),
    }
    if column.name == FINAL:
        figures |= head_errors(target, source.to(target.device), decoded)
    rounded = {k: float(f"{v:.3g}") for k, v in figures.items()}
    return CodecError(**rounded, tokens=len(source))


def round_trip(codec: LossyCodec, states: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Encode and decode states [N, H].

    Return the states as a reader returns them (bfloat16 [N, H] on the same device), and which
    tokens escape the codec (bool [N] on the CPU).
    """
    encoded = codec.encode(states, tables)
    escaped = torch.zeros(len(states), dtype=torch.bool)
    escaped[torch.from_numpy(encoded.escape_index)] = True
    out = torch.empty(states.shape, dtype=torch.bfloat16)
    index, bits = encoded.escape_index, encoded.escape
    decode_rows(codec, StoredRows(encoded.codes, encoded.scale, index, bits), tables, out)
    return out.to(states.device), escaped


def head_errors(target: HasHead, states: Tensor, decoded: Tensor) -> dict[str, float]:
    """Return what a codec changes of the target's distribution, computed in float32.

    `states` and `decoded` are [N, H]; at most 2,048 tokens, spread evenly over N, are used.

    Returns:
        `kl`: mean of KL(softmax(head(states)) || softmax(head(decoded))), in nats; `logit_median`,
        `logit_q99`, `logit_max`: median, 99th percentile and maximum of `logit_error`.
    """
    head = {k: v.float().to(states.device) for k, v in target.head_tensors().items()}
    weight, bias = head.get("lm_head", head["embed_tokens"]), head.get("lm_head_bias")
    step = max(1, -(-len(states) // _KL_TOKENS))
    states, decoded = states[::step], decoded[::step]
    total, errors = 0.0, []
    for part in target.logit_chunks(len(states)):
        true, other = (  # float32 [n, V]
            apply_head(f[part].float(), weight, bias, target.head) for f in (states, decoded)
        )
        errors.append(logit_error(other, true.argmax(-1), true.logsumexp(-1)).cpu())
        p, q = true.log_softmax(-1), other.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    middle, most, largest = np.quantile(torch.cat(errors).numpy(), [0.5, 0.99, 1.0]).tolist()
    return {
        "kl": max(0.0, total / len(states)),
        **{"logit_median": middle, "logit_q99": most, "logit_max": largest},
    }


def over_bounds(columns: Sequence[Column], errors: dict[str, CodecError]) -> list[str]:
    """Return the lossy columns whose measured error is above the bound of their codec, in words."""
    found = []
    for column in columns:
        codec, error = column.lossy, errors[column.name]
        if codec is None:
            continue
        bound = codec.bound
        limits = {"mse_median": bound.median, "mse_max": bound.worst, "kl": bound.kl}
        found_here = {name: getattr(error, name) or 0.0 for name in limits}
        worse = [f"{k} {found_here[k]:.2g} > {v:g}" for k, v in limits.items() if found_here[k] > v]
        if error.escaped >= 1:
            worse.append("every token escapes it")
        if worse:
            found.append(f"{column.name} ({codec.name}): {', '.join(worse)}")
    return found


def check_bounds(columns: Sequence[Column], errors: dict[str, CodecError]) -> None:
    """Refuse codecs that were asked for and whose measured error is above its bound.

    Raises:
        RunError: with the columns, their errors and bounds, and the next codecs to try.
    """
    failed, advice = [], {}
    for column in columns:
        worse = over_bounds([column], errors)
        if column.lossy and worse:
            failed += worse
            advice["final" if column.name == FINAL else "aux"] = _finer(column)
    if failed:
        suggestion = ",".join(f"{kind}={name}" for kind, name in sorted(advice.items()))
        raise RunError(
            "the codec error is above its bound, so nothing was captured:\n  "
            + "\n  ".join(failed)
            + f"\nUse --codec {suggestion} (with another --out, or after deleting this one)"
        )
