"""Configuration of a P-EAGLE draft: an EAGLE-3 configuration with more layers and a mask token.

In: the target's config.json, or the draft's own. Out: `PeagleConfig`, and the draft's config.json.
The file has vLLM's flat form (`method: eagle3` with `parallel_drafting: true`), because no other
engine drafts in parallel.

The architecture name is `Eagle3LlamaForCausalLM`. vLLM puts "Eagle3" before every architecture name
that neither starts nor ends with it, also before PeagleLlamaForCausalLM, and then does not know the
result. That leaves two names for a Llama draft. This is the one that neither the EAGLE-3 drafts of
this project nor SGLang use; SGLang would feed the draft its own states. Both keys for the mask
token are written: vLLM reads the first that it finds, older releases know only the second.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from spec_train.drafts.eagle3.config import Eagle3Config
from spec_train.formats.peagle import OWN as ARCHITECTURE
from spec_train.options.draft_options import PeagleOptions


@dataclass(frozen=True, kw_only=True)
class PeagleConfig(Eagle3Config):
    """Shapes and arithmetic of the draft. Layer id: block output, counted from 0."""

    draft: ClassVar[str] = "peagle"
    architecture: ClassVar[str] = ARCHITECTURE
    options_class: ClassVar[type] = PeagleOptions

    mask_token_id: int

    def to_json(self, options: PeagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        out = super().to_json(options)
        out["ptd_token_id"] = self.mask_token_id
        return out
