"""Compare a dataset with its target: its identity, then its states with a fresh forward.

Shapes: T tokens of the document, H hidden size, K top logits, V vocabulary size.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import TargetBackend
from spec_data.capture.evidence import ROUNDING
from spec_data.capture.mask_forms import SINGLE
from spec_data.generation.capture import forward_batches
from spec_data.models.identify import identify_files
from spec_data.shards.identity import compare
from spec_data.shards.pictures import images_of
from spec_data.shards.position_data import load_positions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import TEACHERS, Manifest
from spec_data.terminal.progress import progress
from spec_data.verification.findings import VerifyReport, declared_error, stored_tokens

# Largest plausible rounding difference between two kernels, relative, by the dtype of capture.
STATE_TOLERANCE = {"float32": 6e-3, "float16": 1e-2, "bfloat16": 5e-2}
LOGIT_TOLERANCE = {"float32": 2e-2, "float16": 2e-2, "bfloat16": 4e-2}


def check_identity(manifest: Manifest, path: Path, trust: bool, findings: VerifyReport) -> None:
    """Compare the model in `path` with the target that the manifest records, fact by fact.

    What decides the states is a failure. Another tokenizer or chat template is a warning: the
    dataset is sound, but an engine would serve other prompts.
    """
    facts, problems = identify_files(path, trust)
    comparison = compare(
        manifest.identity,
        facts,
        of_recorded="the dataset was captured with",
        of_current="this target has",
        states=True,
    )
    for line in comparison.refused:
        findings.fail(f"{path}: {line}")
    for line in comparison.warned:
        findings.warn(f"{path}: {line}")
    for problem in problems:
        findings.warn(f"not compared: {problem}")
    if comparison.not_compared:
        findings.warn(f"not compared, because only one side tells it: {comparison.not_compared}")
    quantised = manifest.target.quantised_as
    if quantised:
        findings.passed(f"the target was captured quantised: {quantised}")
    findings.passed("the given target is the one that was captured (weights and config)")


def check_positions(
    dataset: HiddenStatesDataset, target: TargetBackend, findings: VerifyReport
) -> None:
    """Compare the stored rotary frequencies and final norm with those of `target`."""
    stored = load_positions(dataset)
    if not stored.proven:
        return
    fresh = target.positions(int(dataset.lengths.max()))
    if not fresh.proven:
        findings.fail(f"positions: not proven for this target ({fresh.reason})")
    for name, table in stored.tables.items():
        other = fresh.tables.get(name)
        if fresh.proven and (other is None or not table.equals(other)):
            findings.fail(f"positions: the rotary frequencies of {name} are not this target's")
    if fresh.norm and stored.norm and fresh.norm != stored.norm:
        findings.fail(f"the final norm is recorded as {stored.norm}, this target has {fresh.norm}")
    findings.passed("rotary frequencies and final norm are those of the given target")


def check_fresh(
    dataset: HiddenStatesDataset, sampled: list[int], target: TargetBackend, findings: VerifyReport
) -> None:
    """Compare sampled documents, by their indices, with what `target` computes for them now."""
    pictured = images_of(dataset)
    texts = [index for index in sampled if dataset.doc_ids[index] not in pictured]
    if len(texts) < len(sampled):
        findings.warn(
            f"{len(sampled) - len(texts)} of {len(sampled)} sampled documents have images, whose "
            "pixels are not stored: their states are not compared with the target"
        )
    if not (sampled := texts):
        return
    worst_state, worst_logit = (0.0, 1.0), 0.0
    for index in progress(sampled, desc="fresh forward", unit="docs", leave=False):
        document = dataset[index]
        ids = document["input_ids"].numpy()  # [T]
        offsets = np.array([0, len(ids)])
        (batch,) = forward_batches(offsets, ids, SINGLE, len(ids), len(ids))
        states = target.capture(batch, SINGLE, full_logits=True)
        where = f"document {index}"
        for name, value in states.columns.items():
            if name in document:
                error = _compare_states(dataset, document, name, value.cpu(), where, findings)
                worst_state = max(worst_state, error, key=lambda pair: pair[0] / pair[1])
        if states.logits is not None:
            logits = states.logits.float().cpu()
            worst = _compare_logits(dataset, document, logits, where, findings)
            worst_logit = max(worst_logit, worst)
    state, allowed = worst_state
    findings.passed(
        f"fresh forward of {len(sampled)} documents: states differ by at most {state:.1e} (allowed "
        f"{allowed:.1e}), logit columns, relative to the largest logit, by {worst_logit:.1e}"
    )


def _compare_states(
    dataset: HiddenStatesDataset,
    document: dict,
    name: str,
    fresh: Tensor,
    where: str,
    findings: VerifyReport,
) -> tuple[float, float]:
    """Return the relative difference of a column from `fresh`, both [T, H], and its bound.

    The difference is averaged over tokens. One token in a hundred may differ by much, because
    rounding can select another expert; more such tokens are a failure.
    """
    present = stored_tokens(dataset, name, document)  # bool [T], n of them True
    a, b = document[name][present].float(), fresh[present].float()  # [n, H]
    length = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    size = length(b)  # [n]
    allowed = STATE_TOLERANCE.get(dataset.manifest.target.dtype, 5e-2) + _rounded(dataset)
    if lost := declared_error(dataset, name, "mse_max"):
        allowed += 1.5 * math.sqrt(lost)
        size = size.clamp_min(float(size.median()))  # a codec loses as much of a small state
    error = length(a - b) / size.clamp_min(1e-300)
    mean = float(error.mean())
    far = error > 5 * allowed
    if not mean <= allowed:
        findings.fail(
            f"{where}, column {name}: differs from a fresh forward by {mean:.1e} "
            f"(allowed {allowed:.0e})"
        )
    elif int(far.sum()) > len(error) // 100:
        findings.fail(
            f"{where}, column {name}: {int(far.sum())} of {len(error)} tokens differ from a fresh "
            f"forward by more than {5 * allowed:.0e} (first: token "
            f"{int(present.nonzero()[far.nonzero()[0]])})"
        )
    return mean, allowed


def _rounded(dataset: HiddenStatesDataset) -> float:
    """Return what the states of another tool may differ by more; 0 where `generate` wrote them.

    It found by how much they differ, and warned of more than rounding, as to 8-bit floats.
    """
    converted = dataset.manifest.target.converted
    difference = max(converted.differences.values(), default=0.0) if converted else 0.0
    return 1.5 * difference if difference <= ROUNDING else 0.0


def _compare_logits(
    dataset: HiddenStatesDataset, document: dict, logits: Tensor, where: str, findings: VerifyReport
) -> float:
    """Compare argmax, logsumexp, top-k and full logits with fresh logits, float32 [T, V].

    Return the largest difference of a column relative to the largest |logit| of its token, averaged
    over tokens.
    """
    present = stored_tokens(dataset, "target_argmax", document)  # bool [T], n of them True
    document = {n: v[present] for n, v in document.items() if n in TEACHERS}
    logits = logits[present]  # [n, V]
    scale = logits.abs().amax(-1).clamp_min(1e-6)  # [n]
    chosen = logits.gather(-1, document["target_argmax"][:, None])[:, 0]
    errors = {  # [n] each
        "target_argmax": logits.amax(-1) - chosen,
        "target_logsumexp": (logits.logsumexp(-1) - document["target_logsumexp"]).abs(),
    }
    if "topk_ids" in document:
        stored, width = document["topk_logits"], document["topk_ids"].shape[1]
        pairs = (logits.gather(-1, document["topk_ids"]) - stored).abs().amax(-1)
        best = (logits.topk(width, -1).values - stored).abs().amax(-1)
        errors["topk_ids / topk_logits"] = torch.maximum(pairs, best)
    if "logits" in document:
        errors["logits"] = (logits - document["logits"].float()).abs().amax(-1)
    allowed = LOGIT_TOLERANCE.get(dataset.manifest.target.dtype, 4e-2) + _rounded(dataset)
    worst = 0.0
    for name, error in errors.items():
        relative = error / scale
        far = relative > allowed
        worst = max(worst, float(relative.mean()))
        if int(far.sum()) > len(far) // 100:
            findings.fail(
                f"{where}, column {name}: token {int(present.nonzero()[far.nonzero()[0]])} and "
                f"{int(far.sum()) - 1} more differ from a fresh forward by over {allowed:.0e} of "
                "the largest logit"
            )
    return worst
