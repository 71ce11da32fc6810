"""The tables of forms: which kind of draft can be written in which form, and how it is read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.formats import read_blocks, read_eagle, write
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import FORM
from spec_train.formats.names import kind_of, refuse_other_drafts
from spec_train.formats.preflight import REFUSE, Subject, of_engine
from spec_train.formats.target_facts import TargetFacts

# -- forms -----------------------------------------------------------------------------------------


Writer = Callable[[DraftFiles, TargetFacts], DraftFiles]
"""(our checkpoint, its target) -> files of another form."""
_FOR_ENGINES = {"vllm": write.blocks_to_flat, "sglang": write.blocks_to_flat}
_BLOCKS: dict[str, Writer] = {
    "hf": write.unchanged,
    **_FOR_ENGINES,
    "speculators": write.to_speculators,
    "deepspec": write.blocks_to_deepspec,
}
_WRITERS: dict[str, dict[str, Writer]] = {
    "eagle": {"hf": write.unchanged, "vllm": write.unchanged, "sglang": write.eagle_to_sglang},
    "eagle3": {
        "hf": write.unchanged,
        "vllm": write.unchanged,
        "sglang": write.eagle3_to_sglang,
        "speculators": write.to_speculators,
        "deepspec": write.eagle3_to_deepspec,
    },
    "peagle": {
        "hf": write.unchanged,
        "vllm": write.unchanged,
        "speculators": write.to_speculators,
    },
    "dspark": _BLOCKS,
    "dflash": {**_BLOCKS, "transformers": write.dflash_to_transformers},
}
WRITERS = {(kind, form): w for kind, forms in _WRITERS.items() for form, w in forms.items()}
_OWN_CLASS = ("deepspec", "transformers")
"""Forms of one program each; what its class does not have, such files cannot hold."""
_SPECULATORS_KINDS = ("eagle3", "peagle", "dspark", "dflash")


def write_form(own: DraftFiles, form: str, target: TargetFacts) -> DraftFiles:
    """Convert our checkpoint to the form `form`.

    Raises:
        DraftError: this kind of draft has no such form, or the class of the form cannot hold it.
    """
    kind = own.config[SECTION]["draft"]
    if (kind, form) not in WRITERS:
        known = [name for other, name in WRITERS if other == kind]
        raise DraftError(
            f"{own.where}: there is no {form} form of {kind} drafts; use one of {', '.join(known)}"
        )
    if form in _OWN_CLASS:
        found = of_engine(Subject(own, target, form), form)
        if faults := [finding.text for finding in found if finding.level == REFUSE]:
            raise DraftError(f"{own.where}: the {form} form cannot hold it: {'; '.join(faults)}")
    files = WRITERS[kind, form](own, target)
    if files is own:
        return own
    marked = {**files.config[SECTION], FORM: form}
    return DraftFiles({**files.config, SECTION: marked}, files.tensors, files.where)


def is_own_form(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of our own checkpoint, which has all of a draft."""
    section = config.get(SECTION)
    return isinstance(section, dict) and FORM not in section


def own_form(files: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Convert files of any known form to our checkpoint; the inverse of an export, bit for bit.

    Our own checkpoint is returned unchanged; its class checks it.

    Raises:
        DraftError: the form or kind is unknown, or the draft cannot be represented.
    """
    if is_own_form(files.config):
        return files
    refuse_other_drafts(files)
    if write.TYPE not in files.config:
        kind = kind_of(files)
        return _reader(kind).from_flat(kind, files, None, target)
    kind, flat, depth = write.from_wrapped(files)
    if kind not in _SPECULATORS_KINDS:
        raise DraftError(
            f"{files.config_path}: speculators drafts of type {kind} are unknown; known: "
            f"{', '.join(_SPECULATORS_KINDS)}"
        )
    return _reader(kind).from_speculators(kind, flat, depth, target)


def _reader(kind: str) -> Any:
    return read_blocks if kind in ("dspark", "dflash") else read_eagle


def with_facts_in(files: DraftFiles, target: TargetFacts) -> TargetFacts:
    """Return a target's facts; its class and number of blocks, if unknown, as the files say."""
    raw = files.config
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    blocks = raw.get("target_num_hidden_layers") or raw.get("num_target_layers")
    return replace(
        target,
        architectures=target.architectures or tuple(verifier.get("architectures") or ()),
        num_layers=target.num_layers or blocks,
    )
