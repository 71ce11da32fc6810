"""What runs a target: the interface that generation, proofs and verification talk to.

What every backend must satisfy is a test class, `tests/spec_data/capture/backend_contract.py`.

Shapes: N real tokens of a batch, H hidden size, V vocabulary size.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.hooks import States
from spec_data.models.target_options import Spread
from spec_data.shards.errors import MissingError
from spec_data.shards.packing import row_layout
from spec_data.shards.position_data import Positions
from spec_data.shards.schema import HeadSpec, PackingRecord

BACKENDS = {
    "hf": "spec_data.capture.model.Target",
    "vllm": "spec_data.capture.vllm_backend.VLLMBackend",
    "served": "spec_data.capture.served.ServedBackend",
}
"""The class of each value of --backend, imported when it is opened by `open(BackendOptions)`."""
_SHARED = {  # "hf" on several processes, by the option
    "--tp-plan": "spec_data.capture.processes.ShardedTarget",
    "--context-parallel": "spec_data.capture.context_parallel.SplitTarget",
}
VLLM_MISSING = (
    "--backend vllm needs vLLM, which is not installed here: pip install vllm, in an "
    "environment of its own, because vLLM pins its releases of PyTorch and transformers"
)


def vllm_version() -> str:
    """Return the installed release of vLLM, without importing it.

    Raises:
        MissingError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingError(VLLM_MISSING)
    names = importlib.metadata.packages_distributions()["vllm"]
    return importlib.metadata.version(names[0])  # builds for CPUs have another name


@dataclass
class ForwardBatch:
    """The inputs of one forward, int64 [B, T] on the CPU, and the documents they hold."""

    input_ids: Tensor  # 0 in padding
    document_ids: Tensor  # -1 in padding
    position_ids: Tensor  # restart per document
    documents: list[int]  # indices of the documents in the order of their tokens (row by row)
    lengths: list[int]  # tokens of each of them
    images: tuple[bytes, ...] = ()  # files of those of the one document, in order

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], tokens: Callable[[int], Tensor]) -> "ForwardBatch":
        """Return the batch with these documents in each row; `tokens` gives the int64 [T_d] of one.

        T is the length of the longest row.
        """
        parts = [[tokens(d) for d in row] for row in rows]
        lengths = [[len(part) for part in row] for row in parts]
        input_ids = torch.zeros(len(rows), max(map(sum, lengths)), dtype=torch.long)  # [B, T]
        for ids, row in zip(input_ids, parts, strict=True):
            ids[: sum(map(len, row))] = torch.cat(row)
        document_ids, position_ids = row_layout(lengths, input_ids.shape[1])
        documents = [d for row in rows for d in row]
        return cls(
            input_ids, document_ids, position_ids, documents, [n for row in lengths for n in row]
        )

    @property
    def tokens(self) -> int:
        """The number of real tokens N."""
        return sum(self.lengths)

    def token_index(self, offsets: np.ndarray) -> np.ndarray:
        """Return the index of each real token in all documents, int64 [N]; `offsets` [D + 1]."""
        return np.concatenate([np.arange(offsets[d], offsets[d + 1]) for d in self.documents])


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Which target is loaded, and how; see `spec_data.models.loading.load_model`."""

    path: str | Path
    layers: Sequence[int] | str = "auto"  # to capture, as ids or as the text of --layers
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "auto"
    trust_remote_code: bool = False
    rope_factors: str | None = None  # "short" or "long" of a longrope target
    spread: Spread | None = None  # several devices instead of `device`
    # Tokens of the longest document, for which an engine reserves memory; None: the context.
    longest: int | None = None
    batch_tokens: int | None = None  # of a forward; None: what the backend likes
    tensor_parallel: int = 1  # devices that share each layer, in a backend that can do that
    engine_memory: float = 0.8  # share of each GPU's memory that an engine takes
    server: str | None = None  # the URL of a server that hands over states
    states_dir: str | os.PathLike[str] | None = None  # where it may write files of them


class TargetBackend(Protocol):
    """A loaded target whose states can be captured."""

    layers: tuple[int, ...]  # the captured layer ids, ascending
    num_layers: int  # decoder blocks
    head: HeadSpec
    dtype: torch.dtype  # of the states and logits that are returned
    device: torch.device
    architecture: str  # the name of the model's class, as a config.json has it
    ready: int | None  # documents of the plan that proofs may read; None: all

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records of how the target runs, as plain values.

        `dtype`, `attn`, `backend`, `backend_version` and `devices` (their kinds, in words) always;
        `rope_factors` where they were chosen, `quantised_as` of a quantised checkpoint, `streams`
        of one with several residual streams.
        """

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        """Prove that packing changes no captured state, see `proofs.prove_isolation`."""

    def prove_head(self, documents: Sequence[Tensor]) -> float:
        """Compare the head as data with the model's own logits, see `proofs.prove_head`."""

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        """Run one forward and return the states [N, H] of its real tokens, finite or not.

        `form` is a proven mask form, or "rows" or "single": each row holds one document. With
        `full_logits` the model's own logits are returned too.

        Raises:
            TargetError, RunError: the target does not produce the states.
        """

    def logits_of(self, final: Tensor) -> Tensor:
        """Compute logits [..., V] of final states [..., H] with the head as data, in its dtype."""

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices of an axis of `tokens` tokens whose float32 logits fit in memory."""

    def head_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `hooks.head_parts` on the CPU, in the dtype of the target."""

    def positions(self, length: int) -> Positions:
        """Read rotary frequencies and final norm, and say whether `length` tokens prove them."""

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        """Run something; return the share of the fullest device's memory that was in use at its
        peak, 0 to 1. Return None, and run nothing, where memory is not measured.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """

    def close(self) -> None:
        """Free the memory of the target. Nothing else may be called afterwards."""


def open_backend(name: str, options: BackendOptions) -> TargetBackend:
    """Load a target with the backend of this name.

    Raises:
        ConfigError: the device is not usable here.
        MissingError: there is no such model, or a package of the backend is missing.
        TargetError: the target cannot be loaded, or does not have these layers.
    """
    flag = None if options.spread is None else options.spread.over_processes[0]
    module, _, kind = (_SHARED[flag] if flag else BACKENDS[name]).rpartition(".")
    return getattr(import_module(module), kind).open(options)
