"""Run the target on stored documents: prove that it is theirs, and capture further layers.

Every forward returns the new layers, the stored layers and the final states. On sampled documents
the latter two are compared with what is stored, at the tolerance of `verify --target`. Before the
first file, a sample of the whole dataset is compared; while capturing, a document of each shard.

Shapes: T tokens of a document, N tokens of a batch or a sample, H hidden size.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.added_layers.wider import Wider, refuse_findings
from spec_data.capture.backend import BackendOptions, States, TargetBackend, open_backend
from spec_data.capture.proofs import proof_documents, proof_length
from spec_data.generation.batch_size import choose_batch_tokens
from spec_data.generation.calibrate import (
    capture_sample,
    check_bounds,
    measure,
    sample_budget,
    sample_documents,
)
from spec_data.generation.capture import unit_forwards
from spec_data.generation.plan import Plan
from spec_data.generation.running import running_facts
from spec_data.generation.transfers import PlainTransfers, encode_columns, store
from spec_data.options.layer_options import AddLayersConfig
from spec_data.shards.codec_tables import TABLES, error_text, make_tables, save_tables
from spec_data.shards.errors import RunError
from spec_data.shards.lossy import Tables
from spec_data.shards.schema import FINAL, layer_column
from spec_data.shards.writer import UnitData
from spec_data.verification.findings import Findings
from spec_data.verification.fresh import check_positions, compare_states

logger = logging.getLogger(__name__)

_NOT_THE_SAME = "this target does not compute the states that are stored"


def open_target(config: AddLayersConfig, wider: Wider, plan: Plan) -> closing[TargetBackend]:
    """Load the target as it was loaded for the dataset; closing it frees its memory.

    Raises:
        TargetError: it cannot be loaded.
        DatasetError: its positions, or its quantisation, are not those of the dataset.
    """
    manifest = wider.manifest
    recorded = manifest.target
    hooked = sorted({*manifest.layers, *wider.layers})
    options = BackendOptions(
        path=wider.model_dir,
        layers=hooked,
        dtype=recorded["dtype"],
        device=config.device,
        attn=recorded.get("attn", "auto") if recorded.get("backend", "hf") == "hf" else "auto",
        trust_remote_code=config.trust_remote_code,
        rope_factors=recorded.get("rope_factors"),
        spread=config.spread,
        longest=int(plan.lengths.max()),
        batch_tokens=config.forward_tokens,
    )
    target = open_backend("hf", options)
    try:
        findings = Findings()
        findings.check(lambda: check_positions(wider.stored.dataset, target, findings))
        found, expected = target.describe().get("quantised_as"), recorded.get("quantised_as")
        if found != expected:
            findings.fail(f"quantised_as: the dataset has {expected}, this target {found}")
        refuse_findings(config.data, findings, "this is not the target of the dataset")
    except BaseException:
        target.close()
        raise
    return closing(target)


def prove(
    config: AddLayersConfig, wider: Wider, plan: Plan, target: TargetBackend
) -> tuple[dict[str, Any], bytes | None]:
    """Prove packing and sameness, and make the tables of lossy columns, before the first file.

    Returns:
        What was proven: `packing` (form and its proof), `batch_tokens`, `captured_with`, `evidence`
        (by stored column, how far a new capture differs), and the manifest's `codec` and entries of
        the new `columns`, by name. And the bytes of codec.safetensors; None: nothing new is lossy.

    Raises:
        RunError: no mask form can be proven, or the error of a codec is above its bound.
        DatasetError: the target does not compute what is stored.
    """
    packing = wider.manifest.raw["settings"].get("packing", "auto")
    proof = target.prove(_documents_to_prove(wider, plan), plan.pack_length, packing)
    logger.info("packing: %s", proof)
    asked = config.forward_tokens
    batch_tokens = choose_batch_tokens(target, plan, proof.form, wider.columns, asked)
    columns = (*wider.columns, *wider.compared)
    budget = sample_budget(plan.tokens, 4 * sum(c.width or 1 for c in columns))
    documents = sample_documents(plan.lengths, budget)
    states, numbers = capture_sample(plan, target, proof.form, documents, columns, batch_tokens)
    evidence = _compare_sample(config, wider, documents, states, numbers)
    codec, errors, tables = _tables(wider, states, numbers, target)
    exact = target.dtype == torch.bfloat16
    entries = {
        c.name: asdict(c)
        | {
            "bytes_per_token": c.bytes_per_token,
            "exact": not c.lossy and (c.codec != "bf16" or exact),
        }
        | ({"error": errors[c.name]} if c.name in errors else {})
        for c in wider.columns
    }
    proven = {
        "packing": proof.to_json() | {"pack_length": plan.pack_length},
        "batch_tokens": batch_tokens,
        "captured_with": running_facts(target, batch_tokens),
        "evidence": evidence,
        "columns": entries,
        "codec": codec,
    }
    return proven, tables


def _documents_to_prove(wider: Wider, plan: Plan) -> list[Tensor]:
    """Return the token ids int64 [T] of the documents that prove the mask form."""
    offsets, ids = plan.documents.offsets, plan.documents.tokens["input_ids"]
    limit = proof_length(wider.model_config, plan.pack_length)
    chosen = proof_documents(plan.lengths.tolist(), plan.pack_length, limit=limit)
    return [torch.from_numpy(ids[offsets[d] : offsets[d + 1]]).long() for d in chosen]


def _compare_sample(
    config: AddLayersConfig,
    wider: Wider,
    documents: Sequence[int],
    states: Mapping[str, Tensor],
    numbers: np.ndarray,
) -> dict[str, Any]:
    """Compare sampled states [N, H] with the stored ones; `numbers` int64 [N] has the documents.

    Return `documents`, and by column the largest `difference` of a document and what is `allowed`.

    Raises:
        DatasetError: they differ by more; the message has the figures.
    """
    findings = Findings()
    worst: dict[str, tuple[float, float]] = {}
    for number, document in enumerate(documents):
        own = torch.from_numpy(np.flatnonzero(numbers == number))
        fresh = {column.name: states[column.name][own] for column in wider.compared}
        for name, pair in compared_with_stored(wider, document, fresh, findings).items():
            worst[name] = max(worst.get(name, pair), pair, key=lambda found: found[0] / found[1])
    refuse_findings(config.data, findings, _NOT_THE_SAME)
    found = {
        name: {"difference": float(f"{mean:.2g}"), "allowed": float(f"{allowed:.2g}")}
        for name, (mean, allowed) in worst.items()
    }
    shown = ", ".join(
        f"{name} {figures['difference']:.1e} (allowed {figures['allowed']:.1e})"
        for name, figures in found.items()
    )
    logger.info(
        "same target: captured again, %d documents differ from the stored states by %s",
        *(len(documents), shown),
    )
    return {"documents": len(documents), "columns": found}


def compared_with_stored(
    wider: Wider, document: int, fresh: Mapping[str, Tensor], findings: Findings
) -> dict[str, tuple[float, float]]:
    """Compare the states [T, H] of a document, by column, with those that are stored.

    Return the mean difference of each column and what is allowed; failures go to `findings`.
    """
    dataset = wider.stored.dataset
    row = dataset[document]
    where = f"document {document}"
    return {
        name: compare_states(dataset, row, name, value.cpu(), where, findings)
        for name, value in fresh.items()
    }


def _tables(
    wider: Wider, states: Mapping[str, Tensor], numbers: np.ndarray, target: TargetBackend
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], bytes | None]:
    """Make the tables of the new columns from a sample, and measure their error.

    Return the manifest's `codec`, the `error` of each column, and the bytes of codec.safetensors
    with the tables of all columns; {}, {} and None if nothing new is lossy.

    Raises:
        RunError: the error of a column is above its bound.
    """
    lossy = [column for column in wider.columns if column.lossy]
    if not lossy:
        return {}, {}, None
    few = int(numbers.max()) < 3
    held_out = np.ones(len(numbers), bool) if few else numbers % 4 == 3
    used = torch.from_numpy(held_out if few else ~held_out)
    made = {c.name: make_tables(states[c.name][used], c.codec) for c in lossy}
    errors = {}
    for column in lossy:
        errors[column.name] = measure(column, states[column.name], held_out, made, target)
        logger.info("codec: %s %s", column.name, error_text(column.codec, errors[column.name]))
    check_bounds(lossy, errors)
    data = save_tables(wider.stored.dataset.tables | made)
    about = wider.manifest.codec | {"file": TABLES, "sha256": hashlib.sha256(data).hexdigest()}
    return about, errors, data


@torch.inference_mode()
def capture_side(
    wider: Wider,
    plan: Plan,
    unit: int,
    target: TargetBackend,
    proven: Mapping[str, Any],
    tables: Mapping[str, Tables],
) -> UnitData:
    """Capture the new layers of the documents of a shard; compare its first document meanwhile.

    Raises:
        RunError: states are not finite, or constant.
        DatasetError: the states of the first document are not the stored ones.
    """
    data = plan.unit_documents(unit, wider.columns)
    placed = {name: table.to(target.device) for name, table in tables.items()}
    broken: dict[int, str] = {}
    form, batch_tokens = proven["packing"]["form"], proven["batch_tokens"]
    for batch, _ in unit_forwards(plan, unit, form, batch_tokens):
        states = target.capture(batch, form)
        values = {layer_column(k): states.layers[k] for k in wider.layers}  # [N, H] each
        arrival = PlainTransfers().start(encode_columns(values, wider.columns, placed))
        store(arrival, values, batch, wider.columns, data, broken)
        if 0 in batch.documents:
            start = sum(batch.lengths[: batch.documents.index(0)])
            own = slice(start, start + batch.lengths[batch.documents.index(0)])
            _compare_first(wider, plan.units[unit][0], states, own)
    if broken:
        first = min(broken)
        raise RunError(
            f"{wider.manifest.shards[unit].file}: {len(broken)} documents have unusable states in "
            f"the new layers (first: document {data.doc_ids[first]}, {broken[first]}), and the "
            "dataset has them already. Write one without them (`spec-data select --not-in` or "
            "--ids), or leave this layer out"
        )
    return data


def _compare_first(wider: Wider, document: int, states: States, own: slice) -> None:
    """Compare the tokens `own` of a batch, which are a document, with what is stored of it."""
    found = {layer_column(k): value for k, value in states.layers.items()} | {FINAL: states.final}
    fresh = {column.name: found[column.name][own] for column in wider.compared}
    findings = Findings()
    compared_with_stored(wider, document, fresh, findings)
    refuse_findings(wider.stored.dataset.path, findings, _NOT_THE_SAME)
