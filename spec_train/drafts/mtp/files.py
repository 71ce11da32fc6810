"""The files of an MTP block: our checkpoint, and a copy of its target with the block in it."""

from collections.abc import Iterator, Mapping
from typing import Any

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import KindFiles, unchanged
from spec_train.formats.names import TYPE
from spec_train.formats.write import TARGET

_SHARING = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_WHAT = "MTP, layers for several tokens that come with their target"


def _foreign(files: DraftFiles) -> Iterator[tuple[str, str]]:
    """Yield what published drafts have of it: they are no drafts of their own."""
    for name in files.config.get("architectures") or ():
        if "MTP" in name or name.endswith("NextN"):
            yield f"a {name}", _WHAT
        elif name in _SHARING:
            yield f"a {name}", "layers that read the target's own keys and values"
    if files.config.get(TYPE) == "mtp":
        yield f"{TYPE} = mtp", _WHAT
    if any(name.startswith("mtp.") for name in files.tensors):  # keys: also of copied targets
        yield "tensors mtp.*", _WHAT


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    base = config[SECTION].get("target") or {}  # the target's config
    blocks = base.get("num_nextn_predict_layers") or 1
    return {"target_type": base.get("model_type"), "mtp_blocks": blocks}


FILES = KindFiles(
    title="MTP",
    what="an MTP draft",
    forms={"hf": unchanged, TARGET: unchanged},
    foreign=_foreign,
    facts=_facts,
)
