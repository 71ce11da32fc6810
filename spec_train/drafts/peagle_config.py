"""Configuration of a P-EAGLE draft: an EAGLE-3 configuration with more layers and a mask token.

config.json is vLLM's flat form (`method: eagle3` with `parallel_drafting: true`): no other engine
drafts in parallel. The architecture has a name of its own, so that nobody takes the draft for an
EAGLE-3 and feeds it its own states. Both keys for the mask token are written: vLLM reads the first
it finds, and older releases know only the second.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.drafts.eagle3_config import Eagle3Config, special_ids, text_config
from spec_train.options import PeagleOptions

ARCHITECTURE = "PeagleLlamaForCausalLM"


@dataclass(frozen=True, kw_only=True)
class PeagleConfig(Eagle3Config):
    """Everything that decides the draft's shapes and arithmetic. Layer id: block output, from 0."""

    draft: ClassVar[str] = "peagle"
    architecture: ClassVar[str] = ARCHITECTURE
    options_class: ClassVar[type] = PeagleOptions

    num_hidden_layers: int  # of the draft
    mask_token_id: int

    def to_json(self, options: PeagleOptions) -> dict[str, Any]:
        """config.json of the draft."""
        out = super().to_json(options)
        out["ptd_token_id"] = self.mask_token_id
        return out


def choose_mask_token(
    wanted: int, target_config: dict[str, Any], vocab_size: int, counts: Tensor | None
) -> int:
    """The token whose embedding the rows with an unknown token get.

    Any row of the frozen embedding will do that no answer uses: what these rows mean is learned in
    `mask_hidden`. So by default the target's pad token, if it is no other special token as well;
    else the highest id that is no supervised token of the data: vocabularies end in reserved tokens
    or in the padding of the embedding.

    Args:
        wanted: the option; -1: choose.
        target_config: the target's config.json.
        vocab_size: V.
        counts: supervised tokens by id, int64 [V]; None: unknown.

    Raises:
        DraftError: `wanted` is not in the vocabulary.
    """
    if wanted >= vocab_size:
        raise DraftError(f"mask_token_id = {wanted}: the target's vocabulary has {vocab_size}")
    if wanted >= 0:
        return wanted
    special = special_ids(target_config)
    tables = (text_config(target_config), target_config)
    pads = [t["pad_token_id"] for t in tables if isinstance(t.get("pad_token_id"), int)]
    if pads and 0 <= pads[-1] < vocab_size and special.count(pads[-1]) == 1:
        return pads[-1]
    free = (i for i in reversed(range(vocab_size)) if counts is None or not counts[i])
    return next((i for i in free if i not in special), vocab_size - 1)
