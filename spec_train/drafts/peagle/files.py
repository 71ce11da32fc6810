"""The files of a P-EAGLE draft: those of EAGLE-3 with learned states of unknown tokens.

Our checkpoint has a name of EAGLE-3, because for `method: eagle3` vLLM puts "Eagle3" in front of
any other name, and then finds no such class. It is one that SGLang, which would feed the draft its
own states, does not use.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_train.drafts.eagle.files import own_keys
from spec_train.drafts.eagle3.files import (
    MASK_STATES,
    facts,
    found_in,
    named_class,
    our_files,
    plain_files,
    speculators_fields,
    stated_aux,
    without_midlayer,
)
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat_config import mask_token
from spec_train.formats.kind_files import KindFiles, Source, unchanged
from spec_train.formats.names import HEAD, MASK_KEYS
from spec_train.formats.speculators import speculators_files
from spec_train.formats.target_facts import TargetFacts

WRITTEN = "Eagle3LlamaForCausalLM"
"""The class in our checkpoints."""


def _of_speculators(files: DraftFiles, depth: int | None) -> tuple[str, DraftFiles]:
    return "peagle", replace(files, config={"embed_requires_grad": True} | files.config)


def _read(files: DraftFiles, target: TargetFacts, source: Source) -> DraftFiles:
    files = _checked(plain_files(files, FILES.what))
    found, raw = found_in(files, target, source, FILES.what), files.config
    # nothing is fed back, so no output is normed
    found.config.update({"mask_token_id": mask_token(raw), "norm_output": False})
    found.config.update(named_class(found.config, WRITTEN))
    depths = source.depth or raw.get("num_depths") or None
    return our_files("peagle", FILES.what, files, target, found, depths=depths)


def _checked(files: DraftFiles) -> DraftFiles:
    """Return files of a P-EAGLE draft that has what it needs."""
    raw = files.config
    if raw.get("tie_word_embeddings") and HEAD not in files.tensors:
        raise files.bad_config(
            f"tie_word_embeddings = true, and the file has no {HEAD}: P-EAGLE drafts of spec-train "
            "have a head of their own"
        )
    blocks = raw.get("num_hidden_layers")
    if mask_token(raw) is None or blocks is None or MASK_STATES not in files.tensors:
        raise files.bad_config(
            f"a P-EAGLE draft needs num_hidden_layers, a mask token ({', '.join(MASK_KEYS)}) and "
            f"the tensor {MASK_STATES}"
        )
    return files


def _stated(files: DraftFiles, own: set[str], library: bool) -> dict[str, Any]:
    raw = files.config
    return {
        **stated_aux(files, FILES.what, library),
        "mask_token_id": mask_token(raw),
        "depths": raw.get("num_depths"),
        "norm_output": None,  # nothing is fed back
    }


def _to_speculators(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    raw, section = ours.config, ours.config[SECTION]
    fields = speculators_fields(raw, {"mask_token_id": raw["mask_token_id"]})
    # vLLM reads both only here: else 3 states, and no norms
    layer = {"num_aux_hidden_states": len(section["layers"]), "fc_norm": raw["fc_norm"]}
    return speculators_files(
        *(ours, target, ("peagle", "PEagleDraftModel"), fields, section["options"]["depths"]),
        *(without_midlayer(ours), layer),
    )


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return facts(config) | {"depths": (config[SECTION].get("options") or {}).get("depths", 1)}


FILES = KindFiles(
    title="P-EAGLE",
    what="a P-EAGLE draft",
    classes=(
        *("PeagleLlamaForCausalLM", "PEagleDraftModel", "PEagleSpeculator"),
        "PeagleQwen3ForCausalLM",
    ),
    claims=lambda files: MASK_STATES in files.tensors,  # its architecture may have EAGLE-3's name
    shared_class=True,
    own_keys=own_keys,
    stated=_stated,
    read=_read,
    speculators=_of_speculators,
    forms={"hf": unchanged, "vllm": unchanged, "speculators": _to_speculators},
    facts=_facts,
)
