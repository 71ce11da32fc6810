"""`spec-train replay RUN/failed-step-<n>`: compute loss and gradients of a failed batch again.

The directory holds batch, weights, options and random seed. It does not hold the target's head,
which may be larger than all of these: the head is read from the dataset, of which manifest.json and
target/ are enough. On the machine and device of the run, the numbers equal those of the run.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spec_data.models.devices import compute_dtype, usable_device
from spec_data.shards.errors import DatasetError, DraftError, MissingError
from spec_data.shards.reader import MANIFEST
from spec_data.shards.schema import Manifest
from spec_data.terminal.command import Result
from spec_data.terminal.config import from_dict
from spec_train.data.batch import PLAIN, DraftBatch
from spec_train.drafts import draft_class
from spec_train.losses.head import TargetHead
from spec_train.training.failure import (
    BATCH,
    FAILURE,
    STATES_TEXT,
    cast_draft,
    head_hash,
    loss_and_norm,
    non_finite_states,
)

_SHOWN = 5
_MODULES_TEXT = (
    "{module} ({kind}): {count:,} of {total:,} values of its {what}, first at index {first}"
)


@dataclass(frozen=True, kw_only=True)
class Replayed(Result):
    """What a failed batch gives when it is run again: every figure."""

    report: dict[str, Any]
    next_command: Sequence[str]

    def __str__(self) -> str:
        report = self.report
        end = "" if report["reproduced"] else ": all values are finite here, so not reproduced"
        lines = [
            f"step {report['step']}: loss {report['loss']} (in the run {report['loss_then']}), "
            f"gradient norm {report['grad_norm']}{end}"
        ]
        for what, items in (
            ("weights", report["weights"]),
            ("stored states", [STATES_TEXT.format(**bad) for bad in report["states"]]),
            ("modules with values", [_MODULES_TEXT.format(**bad) for bad in report["modules"]]),
            ("gradients", report["gradients"]),
        ):
            order = ", in order" if what.startswith("modules") else ""
            lines += [f"{what} that are not finite{order}"] if items else []
            lines += [f"  {item}" for item in items[:_SHOWN]]
            lines += [f"  and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """Return every figure."""
        return self.report


def replay_step(folder: Path, data: Path | None = None, device: str = "auto") -> Replayed:
    """Run a failed batch again.

    Args:
        folder: the failed-step-N of a run.
        data: the run's dataset, where it has moved.
        device: where to compute.

    Raises:
        MissingError, DatasetError, DraftError: the directory or the dataset's head is absent, or
            is not the one of the run.
    """
    state, tensors = read_failure(folder)
    used = usable_device(device)
    dtype = compute_dtype(state["dtype"], used)
    where = data or Path(state["dataset"])
    if not (where / MANIFEST).is_file():
        raise MissingError(
            f"{where}: no finished dataset; replay reads the target's head from it. Its "
            "manifest.json and target/ are enough: copy them to any directory and pass --data"
        )
    manifest = Manifest.read(where / MANIFEST)
    if head_hash(manifest) != state["head"]:
        raise DatasetError(
            f"{where}: its target/head.safetensors is not the one that the run used (sha256 "
            f"{head_hash(manifest)}, not {state['head']}); pass --data with the run's own dataset"
        )
    head = TargetHead.from_dataset(where, dtype, used, manifest)
    kind = draft_class(state["draft"])
    draft: Any = kind.from_pretrained(folder)
    draft.use_options(from_dict(kind.options_class, state["options"], where=str(folder / FAILURE)))
    draft.join(head, manifest, str(folder))
    draft.to(used).train()
    cast_draft(draft, dtype)
    plain: dict[str, Any] = {name: tensors[name] for name in PLAIN if name in tensors}
    hidden = {n.removeprefix("states."): t for n, t in tensors.items() if n.startswith("states.")}
    packs: list[list[int]] = [[] for _ in plain["input_ids"]]
    for number, document in enumerate(state["documents"]):
        packs[document["pack"]].append(number)
    batch = DraftBatch(**plain, hidden=hidden, rows=packs)

    torch.manual_seed(state["random_seed"])
    with _non_finite_modules(draft) as modules:
        loss, norm = loss_and_norm(draft, head, batch, tensors["counts"].to(used))
    weights = dict(draft.named_parameters())
    gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
    states = non_finite_states(batch, state["documents"])
    report = {
        **{name: state[name] for name in ("draft", "dataset", "step")},
        "loss": str(loss),
        "loss_then": state["losses"][state["micro_batch"]],
        "grad_norm": str(norm),
        "reproduced": not (math.isfinite(loss) and math.isfinite(norm)),
        "weights": [name for name, p in weights.items() if not bool(p.isfinite().all())],
        "states": states,
        "modules": list(modules.values()),
        "gradients": [name for name, g in gradients.items() if not bool(g.isfinite().all())],
    }
    again = ["spec-train", "fit", state["draft"], "--config", str(folder.parent / "fit.json")]
    return Replayed(
        report=report, next_command=["spec-data", "verify", str(where)] if states else again
    )


def read_failure(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read failure.json and the tensors of a failed step's directory.

    Raises:
        MissingError: it is not such a directory. DraftError: it is damaged.
    """
    for name in (FAILURE, BATCH):
        if not (folder / name).is_file():
            raise MissingError(
                f"{folder / name}: no such file; pass a failed-step-<n> directory of a run"
            )
    try:
        state = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
        return state, load_file(folder / BATCH)
    except (ValueError, SafetensorError) as error:
        raise DraftError(f"{folder}: damaged ({error}); copy it again") from None


@contextmanager
def _non_finite_modules(model: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield a dict that collects, in order, the modules with values that are not finite.

    Each module appears once, with its input if that is not finite, otherwise with its output.
    """
    modules: dict[str, dict[str, Any]] = {}

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for what, values in (("input", inputs), ("output", output)):
            for tensor in tree_leaves(values):
                if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
                    continue
                bad = (~tensor.detach().isfinite()).nonzero()
                if len(bad):
                    size = {"count": len(bad), "total": tensor.numel(), "first": bad[0].tolist()}
                    where = {"module": name, "kind": type(module).__name__, "what": what}
                    modules.setdefault(name, where | size)

    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: hook(name, m, i, o))
        for name, module in model.named_modules()
    ]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()
