"""The backend of vLLM: the engine runs the target, transformers tells what the engine cannot.

vLLM packs requests by itself and keeps them apart, so the only packed form is "requests": several
documents per forward, one request each. Head, final norm and rotary modules are those of a
`skeleton`. `prove` compares documents that share a forward with documents alone, and the states
with transformers block by block (`block_proof`).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from spec_data.capture.backend import BackendOptions, ForwardBatch, States
from spec_data.capture.hf_backend import HFBackend, SkeletonFacts
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.capture.model import Target
from spec_data.capture.proofs import FLOOR, HEAD_TOLERANCE, IsolationProof
from spec_data.capture.skeleton import load_skeleton, needed_layers, prove_states
from spec_data.capture.vllm_engine import Engine, joined, vllm_version
from spec_data.models.devices import DTYPES, usable_device
from spec_data.models.quantisation import quantisation_of
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.layer_ids import choose_layers
from spec_data.shards.position_data import Positions

log = logging.getLogger(__name__)

_BATCH_TOKENS = 8192  # of a forward, if nobody says otherwise


class VLLMBackend(SkeletonFacts):
    """A target in vLLM, see `backend.TargetBackend`."""

    def __init__(self, engine: Engine, rest: HFBackend, options: BackendOptions) -> None:
        """Join an engine with a skeleton of the same target (`rest`)."""
        super().__init__(rest)
        self._engine, self._options = engine, options
        self._proof: dict[str, float] = {}
        directory, _ = resolve_model(str(options.path))
        self._quantised = quantisation_of(load_config(directory, options.trust_remote_code))

    @classmethod
    def open(cls, options: BackendOptions) -> "VLLMBackend":
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
        path, _ = resolve_model(str(options.path))
        trust = options.trust_remote_code
        config = load_config(path, trust)
        text = text_config(config)
        layers, _ = choose_layers(options.layers, (), text.num_hidden_layers)
        skeleton = load_skeleton(path, (), dtype=options.dtype, trust=trust)
        rest = HFBackend(Target(skeleton, layers, rope_factors=options.rope_factors))
        longest = options.longest or getattr(text, "max_position_embeddings", None) or _BATCH_TOKENS
        engine = Engine(
            path,
            layers,
            dtype=DTYPES.get(options.dtype, rest.dtype),
            device=device,
            longest=longest,
            most_tokens=options.batch_tokens or _BATCH_TOKENS,
            tensor_parallel=options.tensor_parallel,
            memory=options.engine_memory,
            trust=trust,
        )
        skeleton.to(device)  # its head computes the logits of the states
        rest.target.device = rest.target.states_device = device
        if engine.facts["blocks"] != rest.num_layers:
            raise TargetError(f"vLLM runs {engine.facts['blocks']} decoder blocks of {path}")
        return cls(engine, rest, options)

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; `state_proof` once `prove` was called."""
        factors, proof = self._options.rope_factors, self._proof
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": ", ".join(self._engine.facts["attention"]),
            **({"rope_factors": factors} if factors else {}),
            "backend": "vllm",
            "backend_version": vllm_version(),
            "devices": self._devices,
            **({"quantised_as": self._quantised} if self._quantised else {}),
            **({"state_proof": proof} if proof else {}),
        }

    @property
    def _devices(self) -> str:
        count, kind = self._options.tensor_parallel, self.device.type
        return kind if count == 1 else f"{count} {kind}"

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
        alone = [self._run([ids]) for ids in documents]
        together = [s for group in self._groups(documents) for s in self._split(group)]
        tolerance = FLOOR.get(self.dtype, 3e-2)
        shared = max(_difference(a, b) for a, b in zip(alone, together, strict=True))
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
        """Prove layers and final state with transformers, see `block_proof`."""
        self._engine.record(needed_layers(self.layers, self.num_layers))
        try:
            states = [self._run([ids]) for ids in documents]
        finally:
            self._engine.record(self.layers)
        self._proof = prove_states(
            resolve_model(str(self._options.path))[0],
            documents,
            [(s.layers, s.final) for s in states],
            self.layers,
            blocks=self.num_layers,
            dtype=self.dtype,
            quantised=self._quantised is not None,
            trust=self._options.trust_remote_code,
        )
        worst = max(self._proof, key=lambda name: self._proof[name])
        log.info(
            "states: vLLM's are those of transformers' blocks; the largest error is %.1e (%s)",
            *(self._proof[worst], worst),
        )

    def prove_head(self, documents: Sequence[Tensor], tokens: int = 512) -> float:
        """Compare the head as data with vLLM's logits, and with the tokens that vLLM chooses.

        Raises:
            TargetError: they differ by more than rounding.
        """
        worst, seen = 0.0, 0
        allowed = HEAD_TOLERANCE.get(self.dtype, 2e-2)
        for ids in documents:
            ids = ids[: tokens - seen]
            found, (chosen,) = self._engine.run([ids], full_logits=True)
            derived = self.logits_of(found["final"].to(self.device)).float()  # [T, V]
            own = found["logits"].to(self.device).float()[:, : self.head.vocab_size]
            scale = own.abs().amax(-1)
            error = (derived - own).abs().amax(-1) / scale
            short = (derived[-1].amax() - derived[-1, chosen]) / scale[-1]  # 0, but for ties
            worst = max(worst, float(error.max()), float(short))
            seen += len(ids)
            if seen >= tokens:
                break
        if not worst <= allowed:
            raise TargetError(
                f"head(final hidden) is not vLLM's logits (relative error {worst:.1e}, allowed "
                f"{allowed:.0e}). Use --supervision logits, which stores vLLM's own, or "
                "--backend hf"
            )
        return worst

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

    def _states(self, found: dict[str, Any]) -> States:
        """Return what the engine recorded as states on the device."""
        logits = found["logits"]
        if logits is not None:
            logits = logits[:, : self.head.vocab_size].to(self.device)
        return States(
            layers={k: v.to(self.device) for k, v in found["layers"].items()},
            final=found["final"].to(self.device),
            logits=logits,
        )

    def _split(self, documents: Sequence[Tensor]) -> list[States]:
        """Run documents in one call, and return the states of each."""
        states, lengths = self._run(documents), [len(ids) for ids in documents]
        finals = states.final.split(lengths)
        layers = {k: v.split(lengths) for k, v in states.layers.items()}
        return [
            States(layers={k: v[d] for k, v in layers.items()}, final=finals[d])
            for d in range(len(documents))
        ]

    def logits_of(self, final: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute logits of final hidden states, see `Target.logits_of`."""
        return self._rest.logits_of(final, ids)

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices whose logits fit in memory, see `Target.logit_chunks`."""
        return self._rest.logit_chunks(tokens)

    def head_tensors(self) -> dict[str, Tensor]:
        """Return embedding, head and final norm on the CPU."""
        return self._rest.head_tensors()

    def positions(self, length: int) -> Positions:
        """Read rotary frequencies and final norm of the skeleton, see `read_positions`.

        `prove` shows that they are those of vLLM: its states are the output of blocks with them.
        """
        return self._rest.positions(length)

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        """Return None: vLLM reserves its memory when it loads, --vllm-memory says how much."""
        return None

    def close(self) -> None:
        """Free the memory of the engine."""
        self._engine.close()


def _difference(a: States, b: States) -> float:
    """Return the largest relative difference of a column of a document, the mean over tokens."""
    worst = 0.0
    for x, y in [(a.final, b.final), *((a.layers[k], b.layers[k]) for k in a.layers)]:
        error = (x.float() - y.float()).norm(dim=-1) / x.float().norm(dim=-1).clamp_min(1e-30)
        value = float(error.mean())
        worst = max(worst, value if value == value else float("inf"))  # NaN never passes
    return worst
