"""The backend of vLLM: the engine runs the target, transformers tells what the engine cannot.

vLLM packs requests by itself and keeps them apart, so the only packed form is "requests": several
documents per forward, one request each. `prove` compares documents that share a forward with
documents alone, and the states with transformers block by block (`skeleton.prove_states`).
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.capture.backend import BackendOptions, ForwardBatch
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.capture.proofs import (
    FLOOR,
    IsolationProof,
    head_error,
    largest_difference,
    prove_head,
)
from spec_data.capture.skeleton import SkeletonTarget, needed_layers, prove_states
from spec_data.capture.vllm_engine import Engine, joined, vllm_version
from spec_data.models.devices import DTYPES, usable_device
from spec_data.models.quantisation import quantisation_of
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.layer_ids import choose_layers

log = logging.getLogger(__name__)

_BATCH_TOKENS = 8192  # of a forward, if nobody says otherwise


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
        self._engine = Engine(
            self._path,
            layers,
            dtype=DTYPES.get(options.dtype, self.dtype),
            device=device,
            longest=longest,
            most_tokens=options.batch_tokens or _BATCH_TOKENS,
            tensor_parallel=self._workers,
            memory=options.engine_memory,
            trust=self._trust,
        )
        self.move_to(device)  # the head computes the logits of the states
        if self._engine.facts["blocks"] != self.num_layers:
            raise TargetError(
                f"vLLM runs {self._engine.facts['blocks']} decoder blocks of {self._path}"
            )
        self._proof: dict[str, float] = {}

    @classmethod
    def open(cls, options: BackendOptions) -> "VLLMBackend":
        return cls(options)

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; `state_proof` once `prove` was called."""
        count, kind = self._workers, self.device.type
        return super().describe() | {
            "attn": ", ".join(self._engine.facts["attention"]),
            "backend": "vllm",
            "backend_version": vllm_version(),
            "devices": kind if count == 1 else f"{count} {kind}",
            **({"state_proof": self._proof} if self._proof else {}),
        }

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> IsolationProof:
        """Prove that documents of one forward do not see each other, and what the states are.

        Raises:
            TargetError: `packing` is a mask of transformers.
            RunError: the states are not those of transformers' blocks.
        """
        if packing not in ("auto", ROWS, REQUESTS, SINGLE):
            raise TargetError(f"--packing {packing}: vLLM packs requests itself; use auto")
        alone = [_columns(self._run([ids])) for ids in documents]
        together = [
            part
            for group in self._groups(documents)
            for part in _columns(self._run(group)).split([len(ids) for ids in group])
        ]
        tolerance = FLOOR.get(self.dtype, 3e-2)
        shared = max(largest_difference(a, b) for a, b in zip(alone, together, strict=True))
        differences: dict[str, float | str] = {} if packing == SINGLE else {REQUESTS: shared}
        form = REQUESTS
        if packing == SINGLE or not shared <= tolerance:
            form, differences[SINGLE] = SINGLE, 0.0
        self._prove_states(documents)
        return IsolationProof(
            form=form,
            tolerance=tolerance,
            noise=shared if form == REQUESTS else 0.0,
            differences=differences,
            documents=len(documents),
            longest=max(map(len, documents)),
        )

    def _prove_states(self, documents: Sequence[Tensor]) -> None:
        """Prove layers and final state with transformers, see `prove_states`."""
        self._engine.record(needed_layers(self.layers, self.num_layers))
        try:
            states = [(ids, self._run([ids])) for ids in documents]
        finally:
            self._engine.record(self.layers)
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
        """Compare the head as data with vLLM's logits, and with the tokens that vLLM chooses.

        Raises:
            TargetError: they differ by more than rounding.
        """

        def error(ids: Tensor) -> float:
            recorded, (chosen,) = self._engine.run([ids], full_logits=True)
            states = self._states(recorded)
            derived = self.logits_of(states.final).float()  # [T, V]
            assert states.logits is not None
            last, scale = derived[-1], states.logits[-1].float().abs().amax()
            short = (last.amax() - last[chosen]) / scale  # 0, but for ties
            return max(head_error(derived, states.logits), float(short))

        return prove_head(error, documents, self.dtype, "vLLM's")

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        """Run the documents of a batch as requests, and return the states of their tokens.

        Raises:
            RunError: vLLM did not compute every token.
            TargetError: a document is longer than what the engine was opened for.
        """
        real = batch.input_ids[batch.document_ids >= 0]  # int64 [N]
        documents = real.split(batch.lengths)
        groups = [[ids] for ids in documents] if form == SINGLE else self._groups(documents)
        return self._states(joined([self._engine.run(g, full_logits)[0] for g in groups]))

    def _groups(self, documents: Sequence[Tensor]) -> list[list[Tensor]]:
        """Divide documents into calls of the engine, in their order."""
        groups: list[list[Tensor]] = []
        left = 0
        for ids in documents:
            if len(ids) > self._engine.most_tokens:
                raise TargetError(
                    f"a document has {len(ids)} tokens, but the engine was opened for "
                    f"{self._engine.most_tokens}"
                )
            if len(ids) > left:
                groups.append([])
                left = self._engine.most_tokens
            groups[-1].append(ids)
            left -= len(ids)
        return groups

    def _run(self, documents: Sequence[Tensor]) -> States:
        """Run documents in one call, and return their states on the device."""
        return self._states(self._engine.run(documents)[0])

    def _states(self, recorded: States) -> States:
        """Return what the engine recorded on the device, without logits of no token."""
        logits = recorded.logits
        if logits is not None:
            logits = logits[:, : self.head.vocab_size].to(self.device)
        layers = {k: v.to(self.device) for k, v in recorded.layers.items()}
        return States(layers=layers, final=recorded.final.to(self.device), logits=logits)

    def close(self) -> None:
        self._engine.close()


def _columns(states: States) -> Tensor:
    """Return all states of a call, float32 [N, C, H]."""
    return torch.stack([x.float() for x in (*states.layers.values(), states.final)], 1)
