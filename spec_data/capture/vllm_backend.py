"""The backend of vLLM: its offline engine runs the target in this process.

One document is one request, and the engine computes it whole in one forward: prefix caching, which
would skip tokens, is off, and a call never exceeds the tokens of a forward, so no prefill is split.
Both are checked on every call, by the token ids and positions of the forwards themselves. vLLM
schedules in this process, so what shares a forward depends on the call alone.

vLLM packs requests by itself and keeps them apart, so the only packed form is "requests". `prove`
compares documents that share a forward with documents alone, and the states with transformers block
by block (`skeleton.prove_states`). Head, final norm and positions are those of the skeleton.

Shapes: T tokens of a document, N tokens of a call, H hidden size, V vocabulary size.
"""

import gc
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from spec_data.capture.backend import VLLM_MISSING, BackendOptions, ForwardBatch, vllm_version
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.capture.proofs import (
    FLOOR,
    columns_of,
    head_error,
    largest_difference,
    prove_head,
)
from spec_data.capture.skeleton import SkeletonTarget, needed_layers, prove_states
from spec_data.models.devices import DTYPES, usable_device
from spec_data.models.reading import load_config, quantisation_of, text_config
from spec_data.models.resolve import resolve_model
from spec_data.shards.errors import ConfigError, MissingError, RunError, TargetError
from spec_data.shards.layer_ids import choose_layers
from spec_data.shards.packing import cut_units
from spec_data.shards.schema import PackingRecord

log = logging.getLogger(__name__)

_BATCH_TOKENS = 8192  # of a forward, if nobody says otherwise
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
    "worker_extension_cls": "spec_data.capture.vllm_worker.CaptureWorker",
    "seed": 0,
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler sees all requests before its first step
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the one token that is sampled may exceed the context
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
# vLLM's engines of a process share its process groups, and each ends them when it is shut down: so
# closed engines are kept until the last one is closed.
_open: list[Any] = []
_closed: list[Any] = []


class VLLMBackend(SkeletonTarget):
    """A target in vLLM, see `backend.TargetBackend`; its positions are those of the skeleton.

    `prove` shows that they are vLLM's: its states are the output of blocks with them.
    """

    def __init__(self, options: BackendOptions) -> None:
        """Load a model directory (or Hub id) into vLLM.

        Raises:
            ConfigError: an option of transformers' backend, or vLLM does not run on the device.
            MissingError: there is no such model, or vLLM is not installed.
            TargetError: vLLM or transformers cannot load it.
        """
        if options.attn != "auto":
            raise ConfigError(f"--attn {options.attn}: vLLM chooses its attention; leave it auto")
        vllm_version()
        device = usable_device(options.device)
        self._path, _ = resolve_model(str(options.path))
        self._trust, self._workers = options.trust_remote_code, options.tensor_parallel
        config = load_config(self._path, self._trust)
        text = text_config(config)
        layers, _ = choose_layers(options.layers, (), text.num_hidden_layers)
        super().__init__(
            *(self._path, layers, options.dtype, self._trust),
            rope_factors=options.rope_factors,
            quantisation=quantisation_of(config),
        )
        longest = options.longest or getattr(text, "max_position_embeddings", None) or _BATCH_TOKENS
        self._most_tokens = max(options.batch_tokens or _BATCH_TOKENS, longest)
        llm, parameters = _import(device)
        given: dict[str, Any] = {
            "dtype": str(DTYPES.get(options.dtype, self.dtype)).removeprefix("torch."),
            "max_model_len": longest + 1,  # with the one token that vLLM samples
            "max_num_batched_tokens": self._most_tokens,
            "max_num_seqs": min(_REQUESTS, self._most_tokens),
            "tensor_parallel_size": self._workers,
            "trust_remote_code": self._trust,
            "gpu_memory_utilization": options.engine_memory,
        }
        if device.type == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            given["kv_cache_memory_bytes"] = _CPU_CACHE
        if self._workers > 1:
            given["distributed_executor_backend"] = "mp"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of vLLM's own imports
                self._llm = llm(model=str(self._path), **_FIXED | given)
        except (ValueError, RuntimeError, OSError, KeyError, AssertionError) as error:
            raise TargetError(
                f"vLLM {vllm_version()} cannot load {self._path}: {error}. --backend hf may"
            ) from None
        _open.append(self._llm)
        self._sampling = parameters(max_tokens=1, temperature=0.0, detokenize=False)
        self._facts = self._record(layers)
        self.move_to(device)  # the head computes the logits of the states
        if self._facts["blocks"] != self.num_layers:
            raise TargetError(f"vLLM runs {self._facts['blocks']} decoder blocks of {self._path}")
        self._proof: dict[str, float] = {}

    @classmethod
    def open(cls, options: BackendOptions) -> "VLLMBackend":
        return cls(options)

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; `state_proof` once `prove` was called."""
        count, kind = self._workers, self.device.type
        return super().describe() | {
            "attn": ", ".join(self._facts["attention"]),
            "backend": "vllm",
            "backend_version": vllm_version(),
            "devices": kind if count == 1 else f"{count} {kind}",
            **({"state_proof": self._proof} if self._proof else {}),
        }

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        """Prove that documents of one forward do not see each other, and what the states are."""
        if packing not in ("auto", ROWS, REQUESTS, SINGLE):
            raise TargetError(f"--packing {packing}: vLLM packs requests itself; use auto")
        batch = ForwardBatch.of([[d] for d in range(len(documents))], documents.__getitem__)
        alone, together = (
            columns_of(self.capture(batch, form)).split(batch.lengths)
            for form in (SINGLE, REQUESTS)
        )
        tolerance = FLOOR.get(self.dtype, 3e-2)
        sound = [pair for pair in zip(alone, together, strict=True) if pair[0].isfinite().all()]
        shared = max((largest_difference(*pair) for pair in sound), default=inf)
        differences: dict[str, float | str] = {SINGLE: 0.0}
        if packing != SINGLE:
            measured = shared if isfinite(shared) else "not finite"
            differences = {REQUESTS: measured} | ({} if shared <= tolerance else differences)
        form = list(differences)[-1]
        self._prove_states(documents)
        return PackingRecord(
            form=form,
            tolerance=tolerance,
            noise=shared if form == REQUESTS else 0.0,
            differences=differences,
            documents=len(documents),
            longest=max(map(len, documents)),
        )

    def _prove_states(self, documents: Sequence[Tensor]) -> None:
        self._record(needed_layers(self.layers, self.num_layers))
        try:
            states = [(ids, self._run([ids])[0]) for ids in documents]
        finally:
            self._record(self.layers)
        self._proof = prove_states(
            self._path,
            [(ids, s.layers, s.final) for ids, s in states],
            self.layers,
            blocks=self.num_layers,
            dtype=self.dtype,
            quantised=self.quantisation is not None,
            trust=self._trust,
        )
        worst = max(self._proof, key=lambda name: self._proof[name])
        log.info(
            "states: vLLM's are those of transformers' blocks; the largest error is %.1e (%s)",
            *(self._proof[worst], worst),
        )

    def prove_head(self, documents: Sequence[Tensor]) -> float:
        """Compare the head as data with vLLM's logits, and with the tokens that vLLM chooses."""

        def error(ids: Tensor) -> float:
            states, (chosen,) = self._run([ids], full_logits=True)
            derived = self.logits_of(states.final).float()  # [T, V]
            assert states.logits is not None
            last, scale = derived[-1], states.logits[-1].float().abs().amax()
            short = (last.amax() - last[chosen]) / scale  # 0, but for ties
            return max(head_error(derived, states.logits), float(short))

        return prove_head(error, documents, self.dtype, "vLLM's")

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        real = batch.input_ids[batch.document_ids >= 0]  # int64 [N]
        documents = real.split(batch.lengths)
        most = 1 if form == SINGLE else self._most_tokens
        groups = [documents[a:b] for a, b in cut_units(batch.lengths, most)]
        return States.joined([self._run(group, full_logits)[0] for group in groups])

    def _record(self, layers: Sequence[int]) -> dict[str, Any]:
        """Record these layers from now on; return facts about the model in vLLM."""
        return self._llm.collective_rpc("capture_layers", args=(tuple(layers),))[0]

    def _run(
        self, documents: Sequence[Tensor], full_logits: bool = False
    ) -> tuple[States, list[int]]:
        """Run documents, int64 [T] each with N tokens together, in one call of the engine.

        Return the states [N, H] of the recorded layers, in the order of the documents, and the
        token that vLLM chose after each. Its attention reads whole cache blocks, so what is not
        finite stays there for later documents: the cache is cleared, and they run one by one.
        """
        self._llm.collective_rpc("capture_start", args=(full_logits,))
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in documents]
        answers = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        taken = self._llm.collective_rpc("capture_take", args=(self._workers > 1,))
        forwards = next(worker for worker in taken if worker is not None)
        spans = spans_of([(f["ids"], f["positions"]) for f in forwards], documents)
        states = States.joined([self._part(forwards[f], tokens) for f, tokens in spans])
        chosen = [answer.outputs[0].token_ids[0] for answer in answers]
        if bool(torch.isfinite(states.final).all()):
            return states, chosen
        self._llm.collective_rpc("capture_clear")
        if len(documents) == 1:
            return states, chosen
        each = [self._run([ids], full_logits) for ids in documents]
        return States.joined([states for states, _ in each]), [token for _, (token,) in each]

    def _part(self, forward: dict[str, Any], tokens: slice) -> States:
        """Return the states of some tokens of a forward, without logits of no token."""
        states = States(**{name: forward[name] for name in ("layers", "final", "logits")})
        if states.logits is not None:
            states.logits = states.logits[:, : self.head.vocab_size]
        return states.each(lambda values: values[tokens].to(self.device))

    def close(self) -> None:
        """Free the memory of the engine, unless another one is open in this process."""
        if (llm := vars(self).pop("_llm", None)) is None:
            return
        _open.remove(llm)
        _closed.append(llm)
        del llm
        if not _open:
            while _closed:
                _closed.pop().llm_engine.engine_core.shutdown()
            gc.collect()


def spans_of(
    forwards: Sequence[tuple[Tensor, Tensor]], documents: Sequence[Tensor]
) -> list[tuple[int, slice]]:
    """Return where each document is: the number of its forward, and its tokens there.

    `forwards` are token ids and positions, int64 [n] each: a document begins where the position is
    0, and ends where the next one begins. `documents` are int64 [T]; equal ones take equal spans in
    turn.

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
    ordered = []
    for d, ids in enumerate(documents):
        equal = spans.get(ids.long().numpy().tobytes())
        if not equal:
            raise RunError(
                f"vLLM did not compute document {d} of the batch ({len(ids)} tokens) as a whole; "
                "prefix caching or chunked prefill is on, or this release of vLLM runs requests in "
                "another way. Use --backend hf"
            )
        ordered.append(equal.pop(0))
    return ordered


def _import(device: torch.device) -> tuple[Any, Any]:
    """Import vLLM with the environment that a capture needs; return `LLM` and `SamplingParams`."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingError(f"{VLLM_MISSING} ({error})") from None
    if current_platform.device_type != device.type or device.index:
        raise ConfigError(
            f"--device {device}: this vLLM runs on {current_platform.device_type}. Leave --device "
            "to auto, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    return LLM, SamplingParams
