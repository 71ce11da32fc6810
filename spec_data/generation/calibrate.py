"""Make the tables of the lossy codecs from a sample of the plan, and measure their error.

This happens once, before the first shard. Documents spread evenly over the plan are captured in the
proven form; of a small plan all are, and these forwards are data (see `early`). Three of four make
the tables; every fourth is held out and measures the error. A column whose error is above the
declared bound of its codec stops the run, before any unit is captured. With the tables of another
dataset (`--tables-of`), all documents of the sample measure their error.

Shapes: N tokens of the sample, H width of a column, V vocabulary size.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.capture import forward_batches
from spec_data.generation.early import EarlyForwards
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
from spec_data.shards.head_spec import HeadSpec, apply_head
from spec_data.shards.lossy import LossyCodec, Tables
from spec_data.shards.schema import FINAL, Column, layer_column, predicts_supervised
from spec_data.target.backend import TargetBackend

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS, _SHARE = 8192, 65536, 16  # the sample is 1/16 of the plan
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
    early: EarlyForwards | None = None,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Make codec.safetensors in `folder` unless it exists, and measure its error.

    Args:
        setup, plan, target: what is captured.
        form: the proven mask form.
        batch_tokens: tokens per forward.
        folder: the dataset directory.
        early: the forwards of the whole plan, which are then the sample.

    Returns:
        The manifest's `codec`, and the `error` of every lossy column by name. Both are empty if
        there is no lossy column.

    Raises:
        RunError: there are no usable states, or the error of a column is above its bound.
    """
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return {}, {}
    given = setup.given
    if given is not None:
        given.check_loaded(setup.target | target.describe())
    if early is not None:
        documents = list(range(len(plan.lengths)))
        numbers = np.repeat(np.arange(len(documents)), plan.lengths)
        states = {c.name: early.states(plan, c, form, batch_tokens) for c in lossy}
    else:
        documents = sample_documents(plan.lengths, _budget(plan, setup, target))
        states, numbers = capture_sample(plan, target, form, documents, lossy, batch_tokens)
    kept = {name: _usable(name, value) for name, value in states.items()}  # bool [N] each
    split = len(documents) > 3 and given is None
    held_out = numbers % 4 == 3 if split else np.ones(len(numbers), bool)  # [N]
    file = folder / TABLES
    if not file.is_file() and given is not None:
        write_once(file, save_tables(given.tables))
    elif not file.is_file():
        used = ~held_out if split else held_out
        made = {c.name: make_tables(_take(states, kept, c, used), c.codec) for c in lossy}
        write_once(file, save_tables(made))
    # Use the tables on disk: another worker may have written them first.
    tables = load_tables(file, {c.name: c.width or 1 for c in lossy}, None)
    errors = {}
    for column in lossy:
        measured = held_out & kept[column.name]
        errors[column.name] = measure(column, states[column.name], measured, tables, target)
        logger.info("codec: %s %s", column.name, error_text(column.codec, errors[column.name]))
    check_bounds(lossy, errors)
    about: dict[str, Any] = {
        "file": TABLES,
        "sha256": sha256_file(file),
        "documents": len(documents),
        "tokens": len(numbers),
        "held_out_tokens": int(held_out.sum()),
    }
    if given is not None:
        given.warn_of_errors(errors)
        about["tables_of"] = given.about
    return about, errors


def sample_documents(lengths: np.ndarray, budget: int) -> list[int]:
    """Return indices of documents spread evenly over the plan, at least one.

    `lengths` are the tokens per document, int64 [D]; the sample has about `budget` tokens.
    """
    count = int(min(len(lengths), max(1, budget * len(lengths) // max(1, int(lengths.sum())))))
    return [(2 * i + 1) * len(lengths) // (2 * count) for i in range(count)]


def _budget(plan: Plan, setup: Setup, target: TargetBackend) -> int:
    """Return the tokens of the sample."""
    size = torch.empty(0, dtype=target.dtype).element_size()
    per_token = size * sum(c.width or 1 for c in setup.columns if c.lossy)
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
    bounds = plan.documents.offsets
    spans = [np.arange(bounds[d], bounds[d + 1]) for d in documents]  # token indices in the plan
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in spans])]).astype(np.int64)
    tokens = {n: a[np.concatenate(spans)] for n, a in plan.documents.tokens.items()}  # [N] each
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
) -> dict[str, Any]:
    """Measure the error of encoding a column: the manifest's `error` of that column.

    Args:
        column: a lossy column.
        states: its states [N, H].
        chosen: the held-out tokens, bool [N]; if none is set, all usable tokens are measured.
        tables: the codec tables by column name.
        target: its head turns hidden.final into logits.

    Returns:
        `mse_median` and `mse_max`: median and maximum over channels of (mean squared error /
        variance of the channel), for tokens that do not escape; `escaped`: share of tokens that
        escape; `kl` (hidden.final only): see `teacher_kl`; `tokens`: tokens measured. Figures have
        three digits, so that they do not depend on the number of threads.

    Raises:
        RunError: every token escapes the codec.
    """
    chosen = chosen if chosen.any() else _usable(column.name, states)
    source = states[torch.from_numpy(chosen)]  # [n, H]
    codec, table = column.lossy, tables[column.name]
    if codec is None:
        raise ValueError(f"{column.name} is not lossy")
    decoded, escaped = round_trip(codec, source.to(target.device), table)  # [n, H], bool [n]
    coded = ~escaped
    if not coded.any():
        raise RunError(f"column {column.name}: every held-out token escapes {codec.name}; use bf16")
    error = channel_error(source[coded], decoded.cpu()[coded], table)  # [H]
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


def teacher_kl(target: HasHead, states: Tensor, decoded: Tensor) -> float:
    """Return the mean of KL(softmax(head(states)) || softmax(head(decoded))) in nats, in float32.

    `states` and `decoded` are [N, H]; at most 2,048 tokens, spread evenly over N, are used.
    """
    head = {k: v.float().to(states.device) for k, v in target.head_tensors().items()}
    weight, bias = head.get("lm_head", head["embed_tokens"]), head.get("lm_head_bias")
    step = max(1, -(-len(states) // _KL_TOKENS))
    states, decoded = states[::step], decoded[::step]
    total = 0.0
    for part in target.logit_chunks(len(states)):
        p, q = (  # float32 [n, V]
            apply_head(f[part].float(), weight, bias, target.head).log_softmax(-1)
            for f in (states, decoded)
        )
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return max(0.0, total / len(states))


def check_bounds(columns: Sequence[Column], errors: dict[str, dict[str, Any]]) -> None:
    """Refuse codecs whose measured error is above their bound.

    Raises:
        RunError: with the columns, their errors and bounds, and the next codecs to try.
    """
    failed, advice = [], {}
    for column in columns:
        codec, error = column.lossy, errors[column.name]
        if codec is None:
            continue
        bound = codec.bound
        limits = {"mse_median": bound.median, "mse_max": bound.worst, "kl": bound.kl}
        worse = [f"{k} {error[k]:.2g} > {v:g}" for k, v in limits.items() if error.get(k, 0) > v]
        if worse:
            failed.append(f"{column.name} ({codec.name}): {', '.join(worse)}")
            advice["final" if column.name == FINAL else "aux"] = codec.stronger
    if failed:
        suggestion = ",".join(f"{kind}={name}" for kind, name in sorted(advice.items()))
        raise RunError(
            "the codec error is above its bound, so nothing was captured:\n  "
            + "\n  ".join(failed)
            + f"\nUse --codec {suggestion} (with another --out, or after deleting this one)"
        )
