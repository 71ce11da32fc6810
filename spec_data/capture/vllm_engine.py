"""vLLM's offline engine in this process: documents in, recorded states out.

One document is one request, and the engine computes it whole in one forward: prefix caching, which
would skip tokens, is off, and a call never exceeds the tokens of a forward, so no prefill is split.
Both are checked on every call, by the token ids and positions of the forwards themselves. vLLM
schedules in this process, so what shares a forward depends on the call alone.

Shapes: T tokens of a document, N tokens of a call, H hidden size, V vocabulary size.
"""

import gc
import importlib.metadata
import importlib.util
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.capture.hooks import States
from spec_data.shards.errors import ConfigError, MissingError, RunError, TargetError

MISSING = (
    "--backend vllm needs vLLM, which is not installed here: pip install vllm, in an "
    "environment of its own, because vLLM pins its releases of PyTorch and transformers"
)
_WORKER = "spec_data.capture.vllm_worker.CaptureWorker"
_REQUESTS = 256  # that share a forward at most; each takes a row of logits
_CPU_CACHE = 1 << 29  # bytes of the key-value cache on a CPU, unless vLLM's own variable says
_FIXED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "safetensors",  # never pickle
    "enforce_eager": True,  # compiled code calls no hooks
    "enable_prefix_caching": False,  # a cached prefix has no states
    "async_scheduling": False,
    "generation_config": "vllm",
    "language_model_only": True,
    "worker_extension_cls": _WORKER,
    "seed": 0,
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler sees all requests before its first step
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the one token that is sampled may exceed the context
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_engines: list[Any] = []  # kept, because the end of one ends the process groups of all
_open: set[int] = set()


def vllm_version() -> str:
    """Return the installed release of vLLM, without importing it.

    Raises:
        MissingError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingError(MISSING)
    names = importlib.metadata.packages_distributions()["vllm"]
    return importlib.metadata.version(names[0])  # builds for CPUs have another name


class Engine:
    """vLLM's `LLM` with recording workers.

    Attributes:
        most_tokens: tokens that a call may have.
        device: where recorded states are.
        facts: `blocks` (their number) and `attention` (names of vLLM's attention backends).
    """

    def __init__(
        self,
        path: str | Path,
        layers: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        most_tokens: int,
        tensor_parallel: int,
        memory: float,
        trust: bool,
    ) -> None:
        """Load a target into vLLM.

        Args:
            path: a model directory.
            layers: the layers to record.
            dtype, device: of the states.
            longest: tokens of the longest document; most_tokens: of a forward.
            tensor_parallel: GPUs (or groups of CPU cores) that share each layer.
            memory: share of each GPU's memory that vLLM may use.
            trust: run code that comes with the model.

        Raises:
            MissingError, ConfigError, TargetError: vLLM is not installed, does not run on the
                device, or cannot load the target.
        """
        self.most_tokens = max(most_tokens, longest)
        self._workers = tensor_parallel
        llm, parameters = _import(device)
        options: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": longest + 1,  # with the one token that vLLM samples
            "max_num_batched_tokens": self.most_tokens,
            "max_num_seqs": min(_REQUESTS, self.most_tokens),
            "tensor_parallel_size": tensor_parallel,
            "trust_remote_code": trust,
            "gpu_memory_utilization": memory,
        }
        if device.type == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            options["kv_cache_memory_bytes"] = _CPU_CACHE
        if tensor_parallel > 1:
            options["distributed_executor_backend"] = "mp"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of vLLM's own imports
                self._llm = llm(model=str(path), **_FIXED | options)
        except (ValueError, RuntimeError, OSError, KeyError, AssertionError) as error:
            raise TargetError(
                f"vLLM {vllm_version()} cannot load {path}: {error}. --backend hf may"
            ) from None
        _engines.append(self._llm)
        _open.add(id(self))
        self._sampling = parameters(max_tokens=1, temperature=0.0, detokenize=False)
        self.facts = self.record(layers)
        self.device = torch.device("cpu") if tensor_parallel > 1 else device

    def record(self, layers: Sequence[int]) -> dict[str, Any]:
        """Record these layers from now on."""
        return self._llm.collective_rpc("capture_layers", args=(tuple(layers),))[0]

    def run(
        self, documents: Sequence[Tensor], full_logits: bool = False
    ) -> tuple[States, list[int]]:
        """Run documents, int64 [T] each with N tokens together, in one call of the engine.

        Attention of vLLM reads its whole cache blocks, so what is not finite in a block stays there
        for later documents: the cache is cleared, and the documents of the call run one by one.

        Returns:
            The states [N, H] of the layers that are recorded, in the order of the documents; and
            the token that vLLM chose after each document.

        Raises:
            RunError: vLLM did not compute every token of every document.
        """
        self._llm.collective_rpc("capture_start", args=(full_logits,))
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in documents]
        answers = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        taken = self._llm.collective_rpc("capture_take", args=(self._workers > 1,))
        forwards = next(worker for worker in taken if worker is not None)
        spans = spans_of([(f["ids"], f["positions"]) for f in forwards], documents)
        states = joined([_part(forwards[f], tokens) for f, tokens in spans])
        chosen = [answer.outputs[0].token_ids[0] for answer in answers]
        if bool(torch.isfinite(states.final).all()):
            return states, chosen
        self._llm.collective_rpc("capture_clear")
        if len(documents) == 1:
            return states, chosen
        each = [self.run([ids], full_logits) for ids in documents]
        return joined([states for states, _ in each]), [token for _, (token,) in each]

    def close(self) -> None:
        """Free the memory of the engine, unless another one is open in this process.

        vLLM's engines of a process share its process groups, and each ends them when it is shut
        down: so all are shut down when the last one is closed.
        """
        llm = self.__dict__.pop("_llm", None)
        if llm is None:
            return
        del llm
        _open.discard(id(self))
        if _open:
            return
        while _engines:
            _engines.pop().llm_engine.engine_core.shutdown()
        gc.collect()


def _part(forward: dict[str, Any], tokens: slice) -> States:
    """Return the states of some tokens of a recorded forward."""
    logits = forward["logits"]
    return States(
        layers={k: v[tokens] for k, v in forward["layers"].items()},
        final=forward["final"][tokens],
        logits=None if logits is None else logits[tokens],
    )


def joined(parts: Sequence[States]) -> States:
    """Join states [n, H] of several documents or calls, in their order."""
    logits = [part.logits for part in parts if part.logits is not None]
    return States(
        layers={k: torch.cat([part.layers[k] for part in parts]) for k in parts[0].layers},
        final=torch.cat([part.final for part in parts]),
        logits=torch.cat(logits) if logits else None,
    )


def spans_of(
    forwards: Sequence[tuple[Tensor, Tensor]], documents: Sequence[Tensor]
) -> list[tuple[int, slice]]:
    """Return where each document is: the number of its forward, and its tokens there.

    Args:
        forwards: token ids and positions of each forward, int64 [n]. A document begins where the
            position is 0, and ends where the next one begins.
        documents: token ids, int64 [T] each. Equal documents take equal spans in turn.

    Raises:
        RunError: a document is in no forward as a whole: its beginning was taken from a cache, its
            prefill was split, or it did not run.
    """
    spans: dict[bytes, list[tuple[int, slice]]] = defaultdict(list)
    for number, (ids, positions) in enumerate(forwards):
        starts = (positions == 0).nonzero()[:, 0].tolist()
        for start, stop in pairwise([*starts, len(ids)]):
            if torch.equal(positions[start:stop], torch.arange(stop - start)):
                spans[ids[start:stop].numpy().tobytes()].append((number, slice(start, stop)))
    found = []
    for d, ids in enumerate(documents):
        equal = spans.get(ids.long().numpy().tobytes())
        if not equal:
            raise RunError(
                f"vLLM did not compute document {d} of the batch ({len(ids)} tokens) as a whole; "
                "prefix caching or chunked prefill is on, or this release of vLLM runs requests in "
                "another way. Use --backend hf"
            )
        found.append(equal.pop(0))
    return found


def _import(device: torch.device) -> tuple[Any, Any]:
    """Import vLLM with the environment that a capture needs; return `LLM` and `SamplingParams`.

    Raises:
        MissingError: it is not installed.
        ConfigError: this build does not run on the device.
    """
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingError(f"{MISSING} ({error})") from None
    if current_platform.device_type != device.type or device.index:
        raise ConfigError(
            f"--device {device}: this vLLM runs on {current_platform.device_type}. Leave --device "
            "to auto, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    return LLM, SamplingParams
