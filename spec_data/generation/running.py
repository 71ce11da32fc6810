"""What a run captured with, beside what decides the data: device, batch size, releases.

These settings change states by rounding at most, so a directory may be resumed with others. That is
measured, not assumed: the run that proved the target keeps the states of a few documents (the
witness), and one with other settings captures them again before its first unit. Both settings and
the difference are recorded in the manifest.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from spec_data.capture.backend import TargetBackend
from spec_data.generation.capture import forward_batches
from spec_data.generation.plan import ALSO, WITNESS
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import dump_json, write_once
from spec_data.shards.follow import WORK
from spec_data.shards.schema import FINAL, Manifest, layer_column

logger = logging.getLogger(__name__)

_DOCUMENTS, _TOKENS = 8, 256  # of the witness, and of each of its documents


def running_facts(target: TargetBackend, batch_tokens: int) -> dict[str, Any]:
    """Return what a run captures with, as the manifest records it."""
    about = target.describe()
    return {
        "device": about["devices"],
        "batch_tokens": batch_tokens,
        "backend": about["backend"],
        "backend_version": about["backend_version"],
        "torch": torch.__version__.split("+")[0],
        "machine": platform.machine(),
    }


class Witness:
    """The states of a few documents, captured once; kept in OUT/.generate."""

    def __init__(self, out: Path, documents: Sequence[Tensor], form: str, pack_length: int) -> None:
        """Choose the first proof documents (int64 [T_d]), in the proven form."""
        self.file = out / WORK / WITNESS
        self.documents = [ids[:_TOKENS] for ids in documents[:_DOCUMENTS]]
        self.form, self.pack_length = form, pack_length

    def capture(self, target: TargetBackend, batch_tokens: int) -> dict[str, Tensor]:
        """Return the states of the documents, [N, H] per column, in the dtype of the target."""
        offsets = np.concatenate([[0], np.cumsum([len(d) for d in self.documents])])
        ids = torch.cat(self.documents).numpy()
        parts: dict[str, list[Tensor]] = {}
        for batch in forward_batches(offsets, ids, self.form, self.pack_length, batch_tokens):
            states = target.capture(batch, self.form)
            columns = {layer_column(k): v for k, v in states.layers.items()}
            for name, value in (columns | {FINAL: states.final}).items():
                parts.setdefault(name, []).append(value.cpu())
        return {name: torch.cat(values) for name, values in parts.items()}

    def save(self, target: TargetBackend, batch_tokens: int) -> None:
        """Capture and write the witness, unless it is there."""
        write_once(self.file, save(self.capture(target, batch_tokens)))

    def difference(self, target: TargetBackend, batch_tokens: int) -> float | None:
        """Return the largest relative difference of a column from the witness; None without one."""
        if not self.file.is_file():
            return None
        kept, fresh = load_file(self.file), self.capture(target, batch_tokens)
        worst = 0.0
        for name, before in kept.items():
            a, b = before.float(), fresh[name].float()
            relative = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30)  # [N]
            value = float(relative.mean())
            worst = max(worst, value if value == value else float("inf"))  # NaN never passes
        return worst


def check_running(
    out: Path, draft: Manifest, mine: dict[str, Any], witness: Witness, target: TargetBackend
) -> None:
    """Compare what this run captures with what the proven one did; prove and record a difference.

    Args:
        out: the directory.
        draft: what was proven, target.json.
        mine: the facts of this run.
        witness, target: capture the same documents with both.

    Raises:
        ConfigError: an older release proved the target, and kept no witness.
        RunError: the states differ by more than rounding.
    """
    before = draft.captured_with
    if before == mine:
        return
    changes = "; ".join(
        f"{name} {before.get(name)}, now {value}"
        for name, value in mine.items()
        if before.get(name) != value
    )
    worst = witness.difference(target, mine["batch_tokens"])
    if worst is None:
        raise ConfigError(
            f"{out} was begun with other settings, by a release that cannot resume it with these: "
            f"{changes}. Use the old settings, or another --out"
        )
    packing = draft.packing
    if not worst <= packing.tolerance:
        raise RunError(
            f"{out} was begun with other settings ({changes}), and with these the states differ "
            f"by {worst:.1e}, more than rounding (allowed {packing.tolerance:.1e}). Use the "
            "old settings, or another --out"
        )
    noise = float(f"{max(worst, packing.noise or 0.0):.2g}")
    logger.warning(
        "warning: finished units were captured with other settings (%s). The states are equal up "
        "to rounding of %.1e, and the manifest records both",
        *(changes, noise),
    )
    record = dump_json(mine | {"difference": noise})
    write_once(out / WORK / f"also-{_digest(mine)}.json", record)


def also_captured_with(work: Path) -> list[dict[str, Any]]:
    """Return the other settings that units were captured with, in a fixed order."""
    files = sorted(work.glob(ALSO))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
