"""Configuration of a P-EAGLE draft: an EAGLE-3 configuration with more layers and a mask token.

config.json is vLLM's flat form (`method: eagle3` with `parallel_drafting: true`): no other engine
drafts in parallel. There vLLM puts "Eagle3" before every architecture that has it neither in front
nor at the end, PeagleLlamaForCausalLM too, and then knows none of that name. Of the two names that
are left for a Llama draft, this is the one that EAGLE-3 drafts of this project do not have, nor
SGLang, which would feed the draft its own states. Both keys for the mask token are written: vLLM
reads the first it finds, older releases know only the second.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from spec_train.draft_options import PeagleOptions
from spec_train.drafts.eagle3.config import Eagle3Config

ARCHITECTURE = "Eagle3LlamaForCausalLM"


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
