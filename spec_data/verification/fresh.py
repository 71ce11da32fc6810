"""A fresh forward of stored documents, alone in their rows, against every stored column."""

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.capture import forward_columns, packed_batches
from spec_data.progress import progress
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.target.mask_forms import SINGLE
from spec_data.target.model import Target
from spec_data.verification.findings import Findings, declared_error, stored_tokens

# Largest believable difference between two kernels' rounding, relative, by the dtype of capture.
STATE_TOLERANCE = {"float32": 6e-3, "float16": 1e-2, "bfloat16": 5e-2}
LOGIT_TOLERANCE = {"float32": 2e-2, "float16": 2e-2, "bfloat16": 4e-2}


def check_fresh(
    dataset: HiddenStatesDataset, sampled: list[int], target: Target, findings: Findings
) -> None:
    """Compare sampled documents with what `target` gives for them now."""
    worst_state = worst_logit = 0.0
    for index in progress(sampled, desc="fresh forward", unit=" docs", leave=False):
        row = dataset[index]
        ids = row["input_ids"].numpy()
        offsets = np.array([0, len(ids)])
        (packed,) = packed_batches(offsets, ids, SINGLE, len(ids), len(ids))
        fresh = forward_columns(target, packed, SINGLE, dataset.manifest.columns)
        where = f"document {index}"
        for name, value in fresh.items():
            if name.startswith("hidden."):
                error = _compare_states(dataset, row, name, value.cpu(), where, findings)
                worst_state = max(worst_state, error)
        _, logits = target.capture(
            packed.input_ids, packed.document_ids, packed.position_ids, None, full_logits=True
        )
        if logits is not None:
            error = _compare_logits(dataset, row, logits[0].float().cpu(), where, findings)
            worst_logit = max(worst_logit, error)
    findings.passed(
        f"fresh forward of {len(sampled)} documents: states differ by at most {worst_state:.1e}, "
        f"logit columns by {worst_logit:.1e} of the largest logit"
    )


def _compare_states(
    dataset: HiddenStatesDataset,
    row: dict,
    name: str,
    fresh: Tensor,
    where: str,
    findings: Findings,
) -> float:
    """Relative difference of a column, averaged over tokens; one odd token in a hundred may be far
    off (an expert that flips under rounding), more may not.
    """
    kept = stored_tokens(dataset, name, row)
    a, b = row[name][kept].float(), fresh[kept].float()
    error = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)
    allowed = STATE_TOLERANCE.get(dataset.manifest.target["dtype"], 5e-2)
    allowed += 1.5 * declared_error(dataset, name, "mse_max")
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
            f"{int(kept.nonzero()[far.nonzero()[0]])})"
        )
    return mean


def _compare_logits(
    dataset: HiddenStatesDataset, row: dict, logits: Tensor, where: str, findings: Findings
) -> float:
    """argmax, logsumexp, top-k and full logits against fresh logits float32 [T, V]."""
    scale = logits.abs().amax(-1).clamp_min(1e-6)
    chosen = logits.gather(-1, row["target_argmax"][:, None])[:, 0]
    errors = {
        "target_argmax": logits.amax(-1) - chosen,
        "target_logsumexp": (logits.logsumexp(-1) - row["target_logsumexp"]).abs(),
    }
    if "topk_ids" in row:
        stored, width = row["topk_logits"], row["topk_ids"].shape[1]
        pairs = (logits.gather(-1, row["topk_ids"]) - stored).abs().amax(-1)
        best = (logits.topk(width, -1).values - stored).abs().amax(-1)
        errors["topk_ids / topk_logits"] = torch.maximum(pairs, best)
    if "logits" in row:
        errors["logits"] = (logits - row["logits"].float()).abs().amax(-1)
    allowed = LOGIT_TOLERANCE.get(dataset.manifest.target["dtype"], 4e-2)
    worst = 0.0
    for name, error in errors.items():
        relative = error / scale
        far = relative > allowed
        worst = max(worst, float(relative.mean()))
        if int(far.sum()) > len(far) // 100:
            findings.fail(
                f"{where}, column {name}: token {int(far.nonzero()[0])} and {int(far.sum()) - 1} "
                f"more differ from a fresh forward by over {allowed:.0e} of the largest logit"
            )
    return worst
