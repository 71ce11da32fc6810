"""Drafts in the forms of engines and of other trainers, read as our checkpoint.

Which kind a draft is, and what no kind can read, is decided here; how a kind reads its files is in
its folder (`kind_files`). Nothing here changes the result of a forward pass.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_data.models.families import TARGETS
from spec_data.shards.errors import an
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import Source, every_kind, files_of
from spec_train.formats.names import (
    BLOCK_TABLE,
    FORM,
    TYPE,
    plain_names,
    refuse_quantised,
    table_of,
)
from spec_train.formats.speculators import flat_files
from spec_train.formats.target_facts import TargetFacts

_SHARED = "LlamaForCausalLM"
"""The class of a plain language model, which drafts have too."""
_MOST_LAYERS = 2
"""Of the published drafts of that class; a Llama of more is a target."""
_MASK_EMBEDDING = "mask_embedding.pt"
"""The file of a block draft whose row engines put in place of the mask token's."""


def is_own_form(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of our own checkpoint, which has all of a draft."""
    section = config.get(SECTION)
    return isinstance(section, dict) and FORM not in section


def own_form(files: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Convert files of any known form to our checkpoint; the inverse of an export, bit for bit.

    Our own checkpoint is returned unchanged; its class checks it.

    Raises:
        DraftError: the form or kind is unknown, the draft computes something that ours does not, or
            weights are missing.
    """
    if is_own_form(files.config):
        return files
    refuse_other_drafts(files)
    refuse_quantised(files)
    files = replace(files, tensors=plain_names(files.tensors, files.weights_path))
    source = Source()
    if TYPE in files.config:  # its states come from vLLM, which passes them in ascending order
        kind, files, depth = flat_files(files)
        source = Source(depth, collected=True)
    else:
        kind = kind_of(files)
    read = files_of(kind).read
    assert read is not None  # of every kind that has classes
    return read(files, target, source)


def kind_of(files: DraftFiles) -> str:
    """Return the kind of a flat draft: by its tensors where names are shared, else by its name."""
    kinds, names = every_kind(), files.config.get("architectures") or []
    for kind, one in kinds.items():
        if one.claims(files):
            return kind
    if _SHARED in names and "fc.weight" not in files.tensors:
        raise files.bad_weights(
            "has no fc.weight, by which a draft joins a token and states of the target. It is "
            "a whole language model: a target, or the small model of plain speculative "
            "decoding, which spec-train does not train"
        )
    for kind, one in kinds.items():
        if set(names) & set(one.classes):
            return kind
    if shared := sorted(set(names) & set(TARGETS)):
        raise files.bad_config(
            f"{shared[0]} is a target, and no draft; give the directory of a draft, such as the "
            "--out of `spec-train fit`"
        )
    raise files.bad_config(
        f"architectures {names} are not a known draft; known: "
        f"{', '.join(name for one in kinds.values() for name in one.classes)}"
    )


def kind_of_config(files: DraftFiles, kind: str) -> str:
    """Return the kind of a flat draft without its tensors; of `kind` if it names no class."""
    raw, kinds = files.config, every_kind()
    stated = table_of(raw, SECTION).get("draft")
    names = set(raw.get("architectures") or ())
    claimed = next((name for name, one in kinds.items() if one.claims_config(raw)), None)
    if isinstance(stated, str):
        found = stated
    elif claimed is not None:
        found = claimed
    elif not names:
        found = kind
    elif _SHARED in names:
        found = kind
        if not files_of(kind).shared_class:
            title = next(one.title for one in kinds.values() if one.shared_class)
            raise files.bad_config(f"{_SHARED} is the class of a target or of {an(title)} draft")
        if (raw.get("num_hidden_layers") or 1) > _MOST_LAYERS:
            raise files.bad_config(
                f"{_SHARED} with {raw['num_hidden_layers']} layers is a target, and no draft; name "
                "the config.json of a draft"
            )
    else:
        found = kind_of(files)
    found = files_of(found).refined(raw | table_of(raw, BLOCK_TABLE)) or found
    if found not in kinds:
        raise files.bad_config(
            f"is of {an(found)} draft; --shape-of reads files of {', '.join(kinds)}, and "
            "those of other kinds bring their shape with --init-from"
        )
    return found


def refuse_other_drafts(files: DraftFiles) -> None:
    """Refuse drafts of other projects whose arithmetic this project does not have.

    Some of them have the class of a plain draft, and would be read as that draft without their own
    parts.
    """
    for shown, what in _other_parts(files):
        raise files.bad_config(
            f"{shown}: the draft has {what}. Drafts of spec-train do not, and without it the draft "
            "would be another one, so it cannot be read"
        )


def _other_parts(files: DraftFiles) -> Iterator[tuple[str, str]]:
    raw, kinds = files.config, every_kind().values()
    if (Path(files.where) / _MASK_EMBEDDING).is_file():
        yield f"the file {_MASK_EMBEDDING}", "an embedding of its own for the mask token"
    for name in raw.get("architectures") or ():
        for one in kinds:
            if name in one.others:
                yield an(name), one.others[name]
    if (
        "pard_token" in raw
        and files.tensors
        and not {"fc.weight", "mask_hidden"} & files.tensors.keys()
    ):
        yield "pard_token", "the form of PARD, a whole small language model that drafts in parallel"
    for one in kinds:
        yield from one.foreign(files)
