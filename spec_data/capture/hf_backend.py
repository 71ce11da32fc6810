"""The backend of transformers: a `Target` behind the interface of all backends."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from spec_data.capture.backend import BackendOptions, ForwardBatch, States
from spec_data.capture.head_form import head_tensors
from spec_data.capture.live_positions import read_positions
from spec_data.capture.mask_forms import ROWS, SINGLE
from spec_data.capture.model import Target
from spec_data.capture.proofs import IsolationProof, prove_head, prove_isolation
from spec_data.models.devices import sent
from spec_data.models.placement import devices_of
from spec_data.shards.errors import TargetError
from spec_data.shards.position_data import Positions
from spec_data.shards.schema import HeadSpec


class HFBackend:
    """A `Target`, with the states of real tokens only; see `backend.TargetBackend`.

    Attributes:
        target: the target; generic code must not use it.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def open(cls, options: BackendOptions) -> "HFBackend":
        """Load a model directory (or Hub id).

        Raises:
            ConfigError, MissingError, TargetError: see `Target.from_pretrained`.
        """
        return cls(
            Target.from_pretrained(
                options.path,
                options.layers,
                dtype=options.dtype,
                device=options.device,
                attn=options.attn,
                trust_remote_code=options.trust_remote_code,
                rope_factors=options.rope_factors,
                spread=options.spread,
            )
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layer ids, ascending."""
        return self.target.layers

    @property
    def num_layers(self) -> int:
        """The number of decoder blocks."""
        return self.target.num_layers

    @property
    def head(self) -> HeadSpec:
        """The LM head as data."""
        return self.target.head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return self.target.dtype

    @property
    def device(self) -> torch.device:
        """The device of the states and logits."""
        return self.target.states_device

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self.target.model).__name__

    def describe(self) -> dict[str, Any]:
        """Return dtype, attention, longrope factors, and the release of transformers."""
        target = self.target
        return {
            "dtype": str(target.dtype).removeprefix("torch."),
            "attn": target.attn,
            **({"rope_factors": target.rope_factors} if target.rope_factors else {}),
            "backend": "hf",
            "backend_version": transformers.__version__,
            "devices": self.devices,
            **({"quantised_as": target.quantisation} if target.quantisation else {}),
        }

    @property
    def devices(self) -> str:
        """The kinds of devices that hold the target, such as "cuda" or "2 cuda, cpu"."""
        kinds = Counter(d.type for d in devices_of(self.target.model))
        weights = (p for p in self.target.model.parameters())
        if any(p.device.type == "meta" for p in weights):
            kinds["offloaded"] = 1
        return ", ".join(k if n == 1 else f"{n} {k}" for k, n in sorted(kinds.items()))

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> IsolationProof:
        """Prove a mask form, see `prove_isolation`."""
        return prove_isolation(self.target, documents, pack_length, packing)

    def prove_head(self, documents: Sequence[Tensor], tokens: int = 512) -> float:
        """Compare the head as data with the model's own logits, see `proofs.prove_head`."""
        return prove_head(self.target, documents, tokens)

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        """Run one forward and return the states of its N real tokens.

        Raises:
            TargetError: the target does not produce the states of a layer.
        """
        packed = None if form in (ROWS, SINGLE) else form
        captured, logits = self.target.capture(
            batch.input_ids,
            batch.document_ids,
            batch.position_ids,
            packed,
            full_logits=full_logits,
        )
        if captured.final is None:
            raise TargetError("no final hidden was captured")
        # The slots of real tokens are known on the host; a mask on the device would be waited for.
        real = sent((batch.document_ids >= 0).flatten().nonzero()[:, 0], self.device)  # [N]
        return States(
            layers={k: captured.layers[k].flatten(0, 1)[real] for k in self.layers},
            final=captured.final.flatten(0, 1)[real],
            logits=logits.flatten(0, 1)[real] if logits is not None else None,
        )

    def logits_of(self, final: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute logits of final hidden states, see `Target.logits_of`."""
        return self.target.logits_of(final, ids)

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices whose logits fit in memory, see `Target.logit_chunks`."""
        return self.target.logit_chunks(tokens)

    def head_tensors(self) -> dict[str, Tensor]:
        """Return embedding, head and final norm on the CPU."""
        return head_tensors(self.target.model, self.head.tied)

    def positions(self, length: int) -> Positions:
        """Read and prove rotary frequencies and final norm, see `read_positions`."""
        return read_positions(self.target.model, length)

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        """Run something; return the largest share of a GPU's memory in use, None on a CPU."""
        devices = [d for d in devices_of(self.target.model) if d.type == "cuda"]
        if not devices:
            return None
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            run()
            return max(map(_peak_share, devices))
        finally:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the memory of the model."""
        self.__dict__.pop("target", None)  # the last reference to the model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _peak_share(device: torch.device) -> float:
    """Return the share of a GPU that was in use at the peak, that of other processes included."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (torch.cuda.max_memory_reserved(device) + others) / total


# -- skeleton facts --------------------------------------------------------------------------------
# What a backend knows from the skeleton of its target, where the states come from elsewhere.


class SkeletonFacts:
    """The part of `backend.TargetBackend` that a target without decoder blocks answers."""

    def __init__(self, rest: HFBackend) -> None:
        """Take a target with embedding, final norm, head and positions."""
        self._rest = rest

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layer ids, ascending."""
        return self._rest.layers

    @property
    def num_layers(self) -> int:
        """The number of decoder blocks."""
        return self._rest.num_layers

    @property
    def head(self) -> HeadSpec:
        """The LM head as data."""
        return self._rest.head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return self._rest.dtype

    @property
    def device(self) -> torch.device:
        """The device of the states and logits."""
        return self._rest.device

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers."""
        return self._rest.architecture
