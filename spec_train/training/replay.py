"""`spec-train replay RUN/failed-step-<n>`: compute loss and gradients of a failed batch again.

The directory holds batch, weights, options and random seed. It does not hold the target's head,
which may be larger than all of these: the head is read from the dataset. manifest.json and target/
of the dataset are enough, so the shards need not be on this machine. On the machine and device of
the run, the numbers equal those of the run.
"""

import dataclasses
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

from spec_data.models.devices import compute_dtype, usable_device
from spec_data.shards.errors import DatasetError, DraftError, MissingError
from spec_data.shards.follow import WORK, FollowedDataset
from spec_data.shards.reader import MANIFEST
from spec_data.shards.schema import Manifest
from spec_data.terminal.command import Result
from spec_data.terminal.config import from_dict
from spec_train.data.batch import PLAIN, DraftBatch
from spec_train.drafts import DRAFTS, Draft, draft_class
from spec_train.losses.head import TargetHead
from spec_train.training.failure import (
    BATCH,
    FAILURE,
    FORMAT,
    arithmetic,
    cast_draft,
    gradient_norm,
    head_hash,
    non_finite_states,
)

_SHOWN = 5


@dataclass(frozen=True)
class NonFinite:
    """An input or output tensor of a module with values that are not finite."""

    module: str
    kind: str  # class of the module
    what: str  # "output", or "input" if the values were not finite before the module
    count: int
    total: int
    first: list[int]  # index of the first such value

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else self.kind
        return (
            f"{name}: {self.count:,} of {self.total:,} values of its {self.what}, first at index "
            f"{self.first}"
        )


@dataclass(frozen=True, kw_only=True)
class Replayed(Result):
    """What a failed batch gives when it is run again; `text` says it in lines."""

    report: dict[str, Any]
    text: str
    next_command: Sequence[str]

    def __str__(self) -> str:
        return self.text

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
    head, manifest = _load_head(state, data, dtype, used)
    draft = _load_draft(folder, state, head, manifest)
    params = cast_draft(draft, dtype)
    names = {id(p): name for name, p in draft.named_parameters()}
    batch = read_batch(tensors, state)
    counts = tensors["counts"].to(used)

    torch.manual_seed(state["random_seed"])
    with watched(draft) as seen:
        norm = gradient_norm(draft, head, batch, counts)
    gradients = [
        names[id(p)] for p in params if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    losses = document_losses(draft, head, batch, counts, state)
    torch.manual_seed(state["random_seed"])
    with torch.no_grad(), arithmetic(used, dtype):
        loss = float(draft.loss(batch.to(used, dtype), head, counts).loss)
    stored = [
        {"doc_id": document["doc_id"], "shard": document["shard"], "column": column}
        | {"tokens": count, "first": first}
        for document, column, count, first in non_finite_states(batch, state["documents"])
    ]
    report = {
        "draft": state["draft"],
        "dataset": state["dataset"],
        "step": state["step"],
        "loss": str(loss),
        "loss_then": state["losses"][state["micro_batch"]],
        "grad_norm": str(norm),
        "reproduced": not (math.isfinite(loss) and math.isfinite(norm)),
        "weights": [n for n, p in draft.named_parameters() if not bool(p.isfinite().all())],
        "states": stored,
        "modules": [dataclasses.asdict(found) for found in seen],
        "gradients": gradients,
        "documents": losses,
    }
    following = ["spec-data", "verify", str(data or state["dataset"])]
    if not stored:  # the stored data itself is sound
        file = str(folder.parent / "fit.json")
        following = ["spec-train", "fit", state["draft"], "--config", file]
    return Replayed(report=report, text=table(report, seen, len(params)), next_command=following)


def read_failure(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read failure.json and the tensors of a failed step's directory.

    Raises:
        MissingError: it is not such a directory.
        DraftError: it is damaged, or another release wrote it.
    """
    for name in (FAILURE, BATCH):
        if not (folder / name).is_file():
            raise MissingError(
                f"{folder / name}: no such file; pass a failed-step-<n> directory of a run"
            )
    try:
        state = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
        tensors = load_file(folder / BATCH)
    except (ValueError, SafetensorError) as error:
        raise DraftError(f"{folder}: damaged ({error}); copy it again") from None
    if state.get("format") != FORMAT or state.get("draft") not in DRAFTS:
        raise DraftError(
            f"{folder}: written by another release (format {state.get('format')}, draft "
            f"{state.get('draft')!r}); replay it with that release"
        )
    return state, tensors


def read_batch(tensors: dict[str, Tensor], state: dict[str, Any]) -> DraftBatch:
    """Return the micro-batch of a failed step, on the CPU."""
    states = {
        name.removeprefix("states."): values
        for name, values in tensors.items()
        if name.startswith("states.")
    }
    plain: dict[str, Any] = {name: tensors[name] for name in PLAIN if name in tensors}
    packs: list[list[int]] = [[] for _ in range(len(plain["input_ids"]))]
    for number, document in enumerate(state["documents"]):
        packs[document["pack"]].append(number)
    return DraftBatch(**plain, hidden=states, rows=packs, coded={})


def _load_head(
    state: dict[str, Any], data: Path | None, dtype: torch.dtype, device: torch.device
) -> tuple[TargetHead, Manifest]:
    """Return the head that the run used, and the dataset's manifest."""
    path = data or Path(state["dataset"])
    if (path / MANIFEST).is_file():
        manifest = Manifest.read(path / MANIFEST)
    elif (path / WORK / "target.json").is_file():  # still being generated, or not sealed
        manifest = FollowedDataset(path).manifest
    else:
        raise MissingError(
            f"{path}: dataset not found; replay reads the target's head from it. Its "
            "manifest.json and target/ are enough: copy them to any directory and pass --data"
        )
    if head_hash(manifest) != state["head"]:
        raise DatasetError(
            f"{path}: its target/head.safetensors is not the one that the run used (sha256 "
            f"{head_hash(manifest)}, not {state['head']}); pass --data with the run's own dataset"
        )
    return TargetHead.from_dataset(path, dtype, device, manifest), manifest


def _load_draft(folder: Path, state: dict[str, Any], head: TargetHead, manifest: Manifest) -> Any:
    """Read the draft from before the failed step."""
    kind = draft_class(state["draft"], manifest.target.architectures)
    draft = kind.from_pretrained(folder)
    options: Any = from_dict(kind.options_class, state["options"], where=str(folder / FAILURE))
    draft.use_options(options)
    draft.join(head, manifest, str(folder))
    return draft.to(head.head_weight.device).train()


@contextmanager
def watched(model: nn.Module) -> Iterator[list[NonFinite]]:
    """Yield a list that collects, in order, the modules with values that are not finite.

    Each module appears once, with its input if that is not finite, otherwise with its output.
    """
    found: list[NonFinite] = []
    seen: set[str] = set()

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for what, values in (("input", inputs), ("output", output)):
            for tensor in _floats(values):
                bad = ~tensor.detach().isfinite()
                if name not in seen and bool(bad.any()):
                    seen.add(name)
                    first = bad.nonzero()[0].tolist()
                    count, kind = int(bad.sum()), type(module).__name__
                    found.append(NonFinite(name, kind, what, count, bad.numel(), first))

    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: hook(name, m, i, o))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _floats(value)
    elif isinstance(values, dict):
        yield from _floats(list(values.values()))


@torch.no_grad()
def document_losses(
    draft: Draft, head: TargetHead, batch: DraftBatch, counts: Tensor, state: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the documents, each with its share of the batch's loss.

    Losses are divided by the counts of the whole step, so the shares add up to the loss of the
    batch. For a draft that samples slots this holds only approximately: it draws other numbers.
    """
    device, dtype = head.head_weight.device, head.head_weight.dtype
    table = []
    for document in state["documents"]:
        alone = one_document(batch, document["pack"], document["place"]).to(device, dtype)
        with arithmetic(device, dtype):
            loss = float(draft.loss(alone, head, counts).loss)
        table.append({**document, "loss": str(loss)})
    return table


def one_document(batch: DraftBatch, pack: int, place: int) -> DraftBatch:
    """Return a batch with only the document at `place` of `pack`, B = 1."""
    span = (batch.document_ids[pack] == place).nonzero().flatten()

    def cut(values: Tensor) -> Tensor:
        return values[pack, span][None]

    plain: dict[str, Any] = {name: cut(values) for name, values in batch.plain().items()}
    plain["document_ids"] = torch.zeros_like(plain["document_ids"])
    hidden = {name: cut(values) for name, values in batch.hidden.items()}
    return DraftBatch(**plain, hidden=hidden, rows=[[batch.rows[pack][place]]], coded={})


def table(report: dict[str, Any], seen: list[NonFinite], parameters: int) -> str:
    """Return the report as lines."""
    lines = [
        f"step {report['step']}: loss {report['loss']} (in the run {report['loss_then']}), "
        f"gradient norm {report['grad_norm']}"
        + ("" if report["reproduced"] else ": all values are finite here, so not reproduced")
    ]
    lines += _listed("weights that are not finite", report["weights"])
    lines += _listed(
        "stored states that are not finite",
        [
            f"{s['column']} of {s['doc_id']} ({s['shard']}) at {s['tokens']} tokens, first at "
            f"token {s['first']}"
            for s in report["states"]
        ],
    )
    lines += _listed("modules with values that are not finite, in order", list(map(str, seen)))
    bad = report["gradients"]
    lines += _listed(f"gradients that are not finite: {len(bad)} of {parameters}", bad)
    lines.append("loss per document, divided by the counts of the whole step")
    lines += [
        f"  {d['doc_id']}  {d['tokens']:>6} tokens  {d['loss']}  {d['shard']}"
        for d in sorted(report["documents"], key=lambda d: -_size(d["loss"]))
    ]
    return "\n".join(lines)


def _size(loss: str) -> float:
    value = float(loss)
    return math.inf if value != value else value


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [title, *(f"  {item}" for item in items[:_SHOWN]), *more]
