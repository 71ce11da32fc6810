"""What is proven about a loaded target before the first shard, once per directory.

It is stored in OUT/.generate/target.json, so that every worker, every replica of Ray and every
resumed run captures in the same way.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from spec_data.capture.backend import TargetBackend, open_backend
from spec_data.capture.proofs import proof_documents, proof_length, proof_text
from spec_data.generation.batch_size import choose_batch_tokens
from spec_data.generation.calibrate import calibrate
from spec_data.generation.capture import CaptureSettings, forward_batches
from spec_data.generation.plan import ALSO, PROOF, WITNESS, Plan
from spec_data.generation.sample_check import check_agreement
from spec_data.generation.setup import Setup, backend_options, find_positions
from spec_data.generation.target_files import manifest_draft, save_target_files
from spec_data.generation.transfers import copy_stream
from spec_data.models.identify import versions
from spec_data.shards.codec_tables import TABLES, load_tables
from spec_data.shards.errors import RunError
from spec_data.shards.files import dump_json, write_once
from spec_data.shards.follow import WORK
from spec_data.shards.records import read_json
from spec_data.shards.schema import Manifest
from spec_data.shards.seal import file_records, target_file_names

logger = logging.getLogger(__name__)

_REFERENCE_DOCUMENTS, _REFERENCE_TOKENS = 8, 256  # and tokens of each of them


def load_target(setup: Setup, plan: Plan) -> TargetBackend:
    """Load the target with the backend and the options of the run, or open what was stored.

    Raises:
        TargetError: the target cannot be loaded.
    """
    if setup.stored is not None:
        return setup.stored.load(setup, plan)
    return open_backend(setup.options.backend, backend_options(setup, plan))


def prepare_capture(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    out: Path,
    share: Callable[[], bool] = lambda: True,
) -> CaptureSettings:
    """Prove a loaded target, or read what was proven in `out`; return how units are captured.

    `share` is called after the proof; it returns False if it has replaced the proof in `out` by
    that of another worker.

    Raises:
        TargetError, RunError, CorpusError, ConfigError: as `prove_target`; or this run captures
            other states than the one that proved the target.
    """
    draft = prove_target(setup, plan, target, out)
    if not share():
        draft = prove_target(setup, plan, target, out)
    columns, codec, form = draft.columns, draft.codec, draft.packing.form
    lossy = [c for c in columns if c.lossy]
    proven, batch_tokens = draft.captured_with, setup.options.tokens_per_forward
    if proven != running_facts(target, proven["batch_tokens"]):  # other devices
        batch_tokens = choose_batch_tokens(target, plan, form, columns, batch_tokens)
    settings = CaptureSettings(
        columns=columns,
        form=form,
        batch_tokens=batch_tokens or proven["batch_tokens"],
        tables=load_tables(out / TABLES, lossy, codec.sha256 if codec else None) if lossy else {},
        temperature=setup.options.own_temperature,
        stream=copy_stream(target.device, [c.name for c in columns]),
    )
    _check_running(setup, plan, target, out, draft, settings.batch_tokens)
    return settings


def documents_to_prove(setup: Setup, plan: Plan) -> tuple[list[int], list[Tensor]]:
    """Return the documents of the proofs: their numbers in the plan, and their ids int64 [T_d]."""
    limit = proof_length(setup.model_config, plan.pack_length)
    chosen = proof_documents(plan.lengths.tolist(), plan.pack_length, limit=limit)
    offsets, tokens = plan.documents.beginnings(chosen)
    ids = torch.from_numpy(tokens["input_ids"]).long()
    return chosen, list(ids.split(np.diff(offsets).tolist()))


def prove_target(setup: Setup, plan: Plan, target: TargetBackend, out: Path) -> Manifest:
    """Return what was proven about a target in `out`; prove it, if nobody has.

    The proof: head and packing; a sample of the corpus; the codecs and their tables; reference
    states. The files of the target are saved. The result is a manifest without shards.

    Raises:
        TargetError, RunError: a proof fails.
        CorpusError, ConfigError: the target could not have written the corpus.
    """
    file = out / WORK / PROOF
    if file.is_file():
        return Manifest.of(read_json(file), str(file))
    positions = find_positions(setup, plan, target)
    chosen, documents = documents_to_prove(setup, plan)
    head_error = None
    if not setup.options.supervision.startswith("logits"):
        head_error = target.prove_head(documents)
    proof = target.prove(documents, plan.pack_length, setup.options.packing)
    level = logging.INFO if "rows" not in proof.form else logging.WARNING
    logger.log(level, "packing: %s", proof_text(proof))
    asked = setup.options.tokens_per_forward
    batch_tokens = choose_batch_tokens(target, plan, proof.form, setup.columns, asked)
    check_agreement(setup, plan, target, proof.form, batch_tokens, chosen)
    save_target_files(setup, target, positions, out / "target")
    columns, codec = calibrate(setup, plan, target, proof.form, batch_tokens, out)
    setup = replace(setup, columns=columns)
    reference = reference_states(documents, target, proof.form, plan.pack_length, batch_tokens)
    write_once(out / WORK / WITNESS, save(reference))
    draft = manifest_draft(setup, plan, target, proof, head_error, positions, codec).changed(
        captured_with=running_facts(target, batch_tokens),
        files=file_records(out, target_file_names(out)),
    )
    write_once(file, dump_json(draft.to_json()))
    return Manifest.of(read_json(file), str(file))


# -- runs with other settings ----------------------------------------------------------------------
# Device, batch size and releases change states by rounding at most, so a directory may be resumed
# with others. That is measured: the run that proved the target keeps the states of a few documents,
# and one with other settings captures them again before its first unit. The manifest has both
# settings and the difference.


def _check_running(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    out: Path,
    draft: Manifest,
    batch_tokens: int,
) -> None:
    """Prove, and record, that this run captures what the proven one did."""
    proven, here = draft.captured_with, running_facts(target, batch_tokens)
    if here == proven:
        return
    changes = "; ".join(f"{k} {proven[k]}, now {v}" for k, v in here.items() if proven[k] != v)
    packing, documents = draft.packing, documents_to_prove(setup, plan)[1]
    states = reference_states(documents, target, packing.form, plan.pack_length, batch_tokens)
    difference = largest_difference(load_file(out / WORK / WITNESS), states)
    if not difference <= packing.tolerance:
        raise RunError(
            f"{out} was begun with other settings ({changes}), and with these the states differ by "
            f"{difference:.1e}, more than rounding (allowed {packing.tolerance:.1e}). Use the old "
            "settings, or another --out"
        )
    noise = float(f"{max(difference, packing.noise or 0.0):.2g}")
    logger.warning(
        "warning: finished units were captured with other settings (%s). The states are equal up "
        "to rounding of %.1e, and the manifest records both",
        *(changes, noise),
    )
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
    write_once(out / WORK / ALSO.replace("*", digest), dump_json(here | {"difference": noise}))


def running_facts(target: TargetBackend, batch_tokens: int) -> dict[str, Any]:
    """Return what a run captures with, as the manifest records it."""
    about, here = target.describe(), versions()
    return {
        "device": about["devices"],
        "batch_tokens": batch_tokens,
        "backend": about["backend"],
        "backend_version": about["backend_version"],
        "torch": here["torch"],
        "machine": here["machine"],
    }


def reference_states(
    documents: Sequence[Tensor],
    target: TargetBackend,
    form: str,
    pack_length: int,
    batch_tokens: int,
) -> dict[str, Tensor]:
    """Return the states of the beginnings of the first documents, int64 [T_d], in a proven form.

    They are [N, H] per column, in the dtype of the target.
    """
    documents = [ids[:_REFERENCE_TOKENS] for ids in documents[:_REFERENCE_DOCUMENTS]]
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
    parts: dict[str, list[Tensor]] = {}
    ids = torch.cat(documents).numpy()
    for batch in forward_batches(offsets, ids, form, pack_length, batch_tokens):
        states = target.capture(batch, form)
        for name, value in states.columns.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat(values) for name, values in parts.items()}


def largest_difference(before: dict[str, Tensor], now: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a column, the mean over its tokens."""
    worst = 0.0
    for name, values in before.items():
        a, b = values.float(), now[name].float()
        relative = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30)  # [N]
        worst = max(worst, float(relative.nan_to_num(torch.inf).mean()))  # NaN never passes
    return worst


def also_captured_with(work: Path) -> list[dict[str, Any]]:
    """Return the other settings that units were captured with, in a fixed order."""
    return [read_json(file) for file in sorted(work.glob(ALSO))]
