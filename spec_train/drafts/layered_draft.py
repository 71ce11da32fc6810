"""What all drafts over captured layers share: every kind except EAGLE-1/2.

In: a dataset's manifest and training options. Out: the checks of a dataset, the configuration of a
fresh draft, and the columns that are read. A teacher is the target's distribution over the draft
vocabulary, from the final hidden states with the head, from all logits, or from the K largest.
"""

from typing import Any, ClassVar

from torch import Tensor

from spec_data.shards.layer_ids import recorded_layers
from spec_data.shards.schema import FINAL, Manifest, layer_column
from spec_train.drafts.base import BaseDraft, DatasetFacts
from spec_train.drafts.targets import special_ids
from spec_train.drafts.teacher import LOGITS, TOPK
from spec_train.drafts.vocabulary import choose_vocabulary
from spec_train.origin import origin_of


class LayeredDraft(BaseDraft):
    """A draft that reads captured layers, and one column for its teachers."""

    config_class: ClassVar[type[Any]]

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise an error if a dataset lacks the layers of the draft.

        Every supervision supplies teachers.

        Raises:
            DraftError: what is missing, and how to generate it.
        """
        cls.layers_of(options, manifest)

    @classmethod
    def layers_of(cls, options: Any, manifest: Manifest) -> tuple[int, ...]:
        """Return the ascending layer ids that a fresh draft reads of a dataset.

        Raises:
            DraftError: the dataset does not have them.
        """
        recorded = recorded_layers(manifest.raw).get(cls.name)
        return options.layer_ids(manifest.layers, recorded)

    @classmethod
    def why_layers(cls, options: Any, manifest: Manifest) -> str:
        """Say why a fresh draft reads the layers of `layers_of`."""
        if options.layers != "auto":
            return "as --layers says"
        if cls.name in recorded_layers(manifest.raw):
            return f"the recipe of {cls.name}, which the dataset was captured for (--for)"
        return f"every captured layer, because the dataset was not captured with --for {cls.name}"

    @classmethod
    def choose_vocabulary(
        cls, options: Any, facts: DatasetFacts, counts: Tensor | None
    ) -> Tensor | None:
        """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all tokens.

        Raises:
            DraftError: the options cannot be met, see `drafts.vocabulary`.
        """
        special = special_ids(facts.target_config)
        return choose_vocabulary(options, facts.head.spec.vocab_size, counts, special)

    @classmethod
    def make_config(cls, options: Any, facts: DatasetFacts) -> Any:
        """Return the configuration of a fresh draft for a dataset."""
        vocab, manifest = facts.head.spec.vocab_size, facts.manifest
        chosen = facts.vocabulary
        return cls.config_class.from_target(
            facts.target_config,
            layers=cls.layers_of(options, manifest),
            vocab_size=vocab,
            draft_vocab_size=vocab if chosen is None else len(chosen),
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
            positions=facts.positions,
            **cls.own_settings(options, facts),
        )

    @classmethod
    def own_settings(cls, options: Any, facts: DatasetFacts) -> dict[str, Any]:
        """Return the configuration fields that only this kind of draft has."""
        return {}

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The columns of the captured layers, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that the loss reads of a dataset with that supervision."""
        teachers: tuple[str, ...] = (LOGITS if supervision == LOGITS else FINAL, "target_argmax")
        if supervision.startswith("topk"):
            teachers = (*TOPK, "target_argmax", "target_logsumexp")
        return ("input_ids", "loss_mask", *self.state_columns, *teachers)
