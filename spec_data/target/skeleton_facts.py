"""What a backend knows from the skeleton of its target, where the states come from elsewhere."""

import torch

from spec_data.shards.head_spec import HeadSpec
from spec_data.target.hf_backend import HFBackend


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
