"""The stored states of another tool, behind the interface of a target that is run.

Generation asks a backend for the states of documents; this one finds the sample that a document was
made from, and reads them. Embedding, head, final norm and positions come from the weights of the
target, without its decoder blocks. A document may be a beginning of its sample: the target is
causal, so its states are the first ones.

Shapes: N tokens of a batch, T tokens of a document, H hidden size.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import ForwardBatch, States
from spec_data.capture.hf_backend import HFBackend, SkeletonFacts
from spec_data.capture.mask_forms import REQUESTS
from spec_data.capture.model import Target
from spec_data.capture.proofs import FLOOR, IsolationProof
from spec_data.capture.skeleton import load_skeleton, run_from
from spec_data.conversion.stored_samples import BEFORE, Layout, SampleStates
from spec_data.corpus.bad_rows import BadRow
from spec_data.generation.plan import Plan
from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.position_data import Positions

_BEGINNING = 16  # tokens by which the document of a shorter one is looked for


class Head:
    """Embedding, head, final norm and positions of a target, without its decoder blocks."""

    def __init__(
        self, path: Path, layers: Sequence[int], *, dtype: str, device: torch.device, trust: bool
    ) -> None:
        """Load them from a model directory; `layers` are the ids to capture.

        Raises:
            MissingError, TargetError: see `load_skeleton`.
        """
        self.model = load_skeleton(path, (), dtype=dtype, trust=trust)
        self.backend = HFBackend(Target(self.model, sorted(layers)))
        self.model.to(device)
        self.backend.target.device = self.backend.target.states_device = device

    @torch.no_grad()
    def final_states(self, ids: Tensor, last: Tensor, norm: str) -> Tensor:
        """Return final states [T, H] of the tokens int64 [T], in the dtype of the target.

        `last` [T, H] is the state of the last block if `norm` is `BEFORE`, else the final state.
        """
        states = last.to(self.backend.device, self.backend.dtype)
        if norm != BEFORE:
            return states
        blocks = self.backend.num_layers
        return run_from(self.model, ids.to(states.device), blocks - 1, states, None)


class StoredBackend(SkeletonFacts):
    """A `backend.TargetBackend` whose states were stored by another tool."""

    def __init__(
        self, layout: Layout, plan: Plan, samples: Sequence[int], head: Head, facts: dict[str, Any]
    ) -> None:
        """Join stored states with what the target's weights tell.

        Args:
            layout: the stored states.
            plan: the documents; samples: the number of the sample of each.
            head: of the target.
            facts: what the manifest records of the conversion.
        """
        super().__init__(head.backend)
        self._layout, self._head = layout, head
        self._samples, self._facts, self._plan = samples, facts, plan
        self._order = np.argsort(layout.conventions.layers)  # of the chunks, ascending
        self._known: dict[bytes, int] = {}
        self._beginnings: defaultdict[bytes, list[int]] = defaultdict(list)
        for number in range(len(plan.documents)):
            ids = self._ids(number)
            self._known.setdefault(_digest(ids), number)
            self._beginnings[_digest(ids[:_BEGINNING])].append(number)

    def _ids(self, number: int) -> np.ndarray:
        """Return the token ids int32 [T] of a planned document."""
        bounds = self._plan.documents.offsets
        return self._plan.documents.tokens["input_ids"][bounds[number] : bounds[number + 1]]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; `converted` names the tool and the evidence."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": "auto",
            "backend": "stored",
            "backend_version": self._layout.tool,
            "devices": self.device.type,
            "converted": self._facts,
        }

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> IsolationProof:
        """Return the form in which nothing is packed: documents were stored one by one.

        What the states are was proven before, see `evidence`; its largest difference is the noise.
        """
        worst = float(max(self._facts["differences"].values()))
        return IsolationProof(
            form=REQUESTS,
            tolerance=FLOOR.get(self.dtype, 3e-2),
            noise=worst,
            differences={REQUESTS: 0.0},
            documents=len(documents),
            longest=max(map(len, documents)),
        )

    def prove_head(self, documents: Sequence[Tensor], tokens: int = 512) -> float:
        """Compare the head as data with the logits of the target's own head."""
        return self._rest.prove_head(documents, tokens)

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        """Read the states of the documents of a batch.

        Raises:
            RunError: full logits are asked for, which nothing stores.
            DatasetError: a sample cannot be read any more, or has other tokens.
        """
        if full_logits:
            raise RunError("logits are not stored, so they cannot be read; compute them afterwards")
        real = batch.input_ids[batch.document_ids >= 0]  # int64 [N]
        found = [self._read(ids) for ids in real.split(batch.lengths)]
        layers = {
            k: torch.cat([aux[:, place] for aux, _ in found])
            for k, place in zip(self.layers, self._order.tolist(), strict=True)
        }
        return States(layers=layers, final=torch.cat([final for _, final in found]))

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return aux states [T, n, H] and final states [T, H] of tokens int64 [T]."""
        tokens = ids.numpy().astype(np.int32)
        number = self._known.get(_digest(tokens))
        if number is None:
            number = self._longer(tokens)
        found = self.sample_states(self._samples[number])
        length = len(tokens)
        aux = found.aux[:length].to(self.device, self.dtype)
        norm = self._layout.conventions.final_norm
        return aux, self._head.final_states(ids, found.last[:length], norm)

    def sample_states(self, sample: int) -> SampleStates:
        """Read the states of a sample.

        Raises:
            DatasetError: it cannot be read any more.
        """
        try:
            return self._layout.states(sample)
        except BadRow as error:
            raise DatasetError(
                f"{self._layout.where(sample)}: changed since the conversion began: {error}"
            ) from None

    def _longer(self, tokens: np.ndarray) -> int:
        """Return a planned document that begins with these tokens."""
        for number in self._beginnings[_digest(tokens[:_BEGINNING])]:
            if np.array_equal(self._ids(number)[: len(tokens)], tokens):
                return number
        raise RunError("states of tokens that are not planned; this is a bug, please report it")

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
        """Read rotary frequencies and final norm from the target's modules."""
        return self._rest.positions(length)

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        """Return None: nothing large runs on the device."""
        return None

    def close(self) -> None:
        """Free the memory of the head."""
        self._rest.close()


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes()).digest()[:16]
