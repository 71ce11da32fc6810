"""What is said of a step that failed: of a number that is not finite, and of memory.

When a step's loss is read, its buffers already hold other documents, so the responsible micro-batch
is read from the dataset again. If only the gradient of the whole step is not finite, its
micro-batches run again one by one. With several ranks, rank 0 does this for all: a micro-batch is
the same on every rank.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from spec_data.models.devices import SMALLER_PIECES, is_memory_error, memory_error_text
from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import RunError
from spec_train.data.mixture import Documents
from spec_train.data.order import Pack
from spec_train.data.stream import BatchStream
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DraftOptions
from spec_train.options.training import Training
from spec_train.training.loss import arithmetic, seed_micro_batch

_SHOWN = 8  # documents

Part = tuple[int, list[Pack], float]
"""A micro-batch of a step: how many packs of the epoch come before it, its packs, its loss."""


def describe_failure(
    parts: Sequence[Part],
    epoch: int,
    grad_norm: float,
    counts: Tensor,
    draft: Draft,
    head: TargetHead,
    stream: BatchStream,
    seed: int,
) -> str:
    """Say which documents it was, and which stored states or weights are not finite.

    `parts` are the micro-batches of all ranks; slot `counts`, float64 [S], those of the whole step.
    The draft has its complete weights from before the step.
    """
    bad = [i for i, (_, _, loss) in enumerate(parts) if not math.isfinite(loss)]
    what = f"loss is {parts[bad[0]][2]}" if bad else f"gradient norm is {grad_norm}"
    if not bad:
        norms = []
        for first, packs, _ in parts:
            seed_micro_batch(seed, "train", epoch, first)
            norms.append(_gradient_norm(draft, head, stream.read(packs), counts))
        infinite = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
        bad = infinite or [norms.index(max(norms))]  # or only their sum overflows
    dataset, batch = stream.dataset, stream.read(parts[bad[0]][1])
    rows = [document for pack in batch.rows for document in pack]
    documents = [f"{dataset.id_array[row].as_py()} in {dataset.shard_of(row)}" for row in rows]
    more = f"; and {len(documents) - _SHOWN} more" if len(documents) > _SHOWN else ""
    causes = [_non_finite_states(batch, dataset) or "Their stored states are finite"]
    weights = [name for name, p in draft.named_parameters() if not bool(p.isfinite().all())]
    causes += [f"the weights of {name} are not finite" for name in weights[:1]]
    return (
        f"the {what}; the step was not applied. Documents of micro-batch {bad[0] + 1} of "
        f"{len(parts)}: {'; '.join(documents[:_SHOWN])}{more}. {'; '.join(causes)}. Check the data "
        f"with `spec-data verify {dataset.path}`; if they are correct, lower --lr. The same "
        "command resumes from the last checkpoint and comes to this step again"
    )


def _gradient_norm(draft: Draft, head: TargetHead, batch: DraftBatch, counts: Tensor) -> float:
    device, dtype = head.head_weight.device, head.head_weight.dtype
    draft.zero_grad(set_to_none=True)
    with arithmetic(device, dtype):
        loss = draft.scored(batch.to(device, dtype), head, counts).loss
    loss.backward()
    gradients = [p.grad for p in draft.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(gradients))


def _non_finite_states(batch: DraftBatch, dataset: Documents) -> str:
    """Return in words which stored states of a batch are the first that are not finite, else ""."""
    for pack, rows in enumerate(batch.rows):
        for number, row in enumerate(rows):
            span = batch.document_ids[pack] == number
            for name, values in batch.hidden.items():
                finite = values[pack, span].flatten(1).isfinite().all(-1)
                if not finite.all():
                    tokens = (~finite).nonzero().flatten().tolist()
                    return (
                        f"Stored states are not finite: {name} of {dataset.id_array[row].as_py()} "
                        f"at {len(tokens)} tokens, first at token {tokens[0]}"
                    )
    return ""


# -- memory ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_memory(
    config: Training, options: DraftOptions, doing: Callable[[], str]
) -> Iterator[None]:
    """Turn full device memory into a RunError that names what was `doing`, and what helps."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        packs = config.batch_size
        half = packs // 2 if packs % 2 == 0 else 1
        passes = config.accumulation * packs // half
        helps = [f"--batch-size {half} --accumulation {passes}"] if packs > 1 else []
        if not getattr(options, "gradient_checkpointing", True):
            helps.append("--gradient-checkpointing")
        helps.append("--sharding fsdp2 with several GPUs")
        fresh = ["--seq-len"]
        if (segments := getattr(options, "segments", None)) is not None:
            fresh.insert(0, f"--segments {2 * segments}")
        raise RunError(
            f"{memory_error_text(error, doing())}. The same command "
            f"goes on from the last checkpoint with {' or '.join(helps)}; in a "
            f"new --out, {' or a smaller '.join(fresh)} takes less too. {SMALLER_PIECES} in the "
            "environment helps where free memory lies in pieces; --dry-run prints the peak"
        ) from None
