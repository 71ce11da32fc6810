"""The tables of forms: which kind of draft can be written in which form, and how it is read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spec_data.models.families import TARGETS
from spec_data.shards.errors import DraftError
from spec_train.formats import dspark, eagle, eagle3, peagle, read_blocks, speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION, differing_leaves, some_of
from spec_train.formats.flat import FORM
from spec_train.formats.preflight import REFUSE, Subject, of_engine
from spec_train.formats.target_facts import TargetFacts

# -- other classes ---------------------------------------------------------------------------------
# Drafts of other projects whose arithmetic this project does not have, and what it is.
#
# Known by the class, by the type in speculators' files, and by names of keys and tensors: some of
# them have the class of a plain draft, and would be read as that draft without their own parts.


_GEMMA = "Gemma 4's layers: four norms each, keys that are also values, scaled embeddings"
_LATENT = "multi-head latent attention"
_DFLASH2 = "DFlash 2's convolutions inside the layers and its candidate selector"
_DOMINO = "Domino's recurrent head"
_LILICORR = "LiLiCorr's correlator of candidates"
_XPRESS = "XPress's refining head"
_MTP = "MTP, layers for several tokens that come with their target"

OTHER_CLASSES = {
    "Gemma4DSparkModel": _GEMMA,
    "Gemma4Eagle3DraftModel": _GEMMA,
    "DeepseekV4DSparkModel": _LATENT,
    "DeepSeekV4DSparkModel": _LATENT,
    "Glm5_2DSparkModel": _LATENT,
    "KimiK3DSparkModel": _LATENT,
    "K3DSparkModel": _LATENT,
    "KimiK3DFlashDraftModel": _LATENT,
    "MiniMaxM3DSparkModel": "MiniMax M3's layers",
    "LingDSparkModel": "Ling's layers",
    "Lfm2DSparkDraftModel": "LFM2's layers, some of them convolutions",
    "Qwen3OmniDSparkModel": "Qwen3-Omni's layers with positions in three dimensions",
    "DFlash2DraftModel": _DFLASH2,
    "Qwen3DFlash2DraftModel": _DFLASH2,
    "DominoDraftModel": _DOMINO,
    "DFlareDraftModel": "states of other layers in each layer",
    "DFlash2BeamDraftModel": _DFLASH2,
    "LiLiCorrDraftModel": _LILICORR,
    "Qwen3XPressModel": _XPRESS,
    "XPressDraftModel": _XPRESS,
    "JetSpecDraftModel": "JetSpec's causal head",
}
"""architecture -> what its drafts have."""
_TYPES = {"dflash2": _DFLASH2, "xpress": _XPRESS, "mtp": _MTP}
"""speculators_model_type -> what its drafts have."""
_PARTS = {"lilicorr": _LILICORR, "xpress": _XPRESS}
"""Start of the names of keys and tensors -> the part that they belong to."""
_TABLE = "dflash_config"


def other_draft(files: DraftFiles) -> tuple[str, str] | None:
    """Return how files of another project are recognised and what they have; None if they are not.

    A key that is null, false or 0 switches nothing on.
    """
    raw = files.config
    for name in raw.get("architectures") or ():
        if name in OTHER_CLASSES:
            return f"a {name}", OTHER_CLASSES[name]
        if "MTP" in name:
            return f"a {name}", _MTP
    kind = raw.get("speculators_model_type")
    if kind in _TYPES:
        return f"speculators_model_type = {kind}", _TYPES[kind]
    nested = raw.get(_TABLE)
    pairs = nested.items() if isinstance(nested, dict) else ()
    named = [(name, f"{_TABLE}.{name}") for name, value in pairs if value]
    named += [(name, name) for name, value in raw.items() if value]
    named += [(name.removeprefix("model."), name) for name in files.tensors]
    if any(name.startswith("mtp.") for name in files.tensors):  # keys: also of copied targets
        return "tensors mtp.*", _MTP
    for name, shown in named:
        for part, what in _PARTS.items():
            if name.startswith((f"{part}_", f"{part}.")):
                return shown, what
    return None


# -- forms -----------------------------------------------------------------------------------------


Writer = Callable[[DraftFiles, TargetFacts], DraftFiles]
"""(our checkpoint, its target) -> files of another form."""
Reader = Callable[[DraftFiles, int | None, TargetFacts], DraftFiles]
"""(flat files, tokens per round if known, their target) -> our checkpoint."""


def _as_it_is(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    return own


WRITERS: dict[tuple[str, str], Writer] = {
    ("eagle", "hf"): _as_it_is,
    ("eagle", "vllm"): _as_it_is,
    ("eagle", "sglang"): eagle.to_sglang,
    ("eagle3", "hf"): _as_it_is,
    ("eagle3", "vllm"): eagle3.to_flat,
    ("eagle3", "sglang"): eagle3.to_sglang,
    ("eagle3", "speculators"): eagle3.to_speculators,
    ("eagle3", "deepspec"): eagle3.to_deepspec,
    ("peagle", "hf"): _as_it_is,
    ("peagle", "vllm"): _as_it_is,
    ("peagle", "speculators"): peagle.to_speculators,
    **{
        (kind, form): writer
        for kind in ("dspark", "dflash")
        for form, writer in (
            ("hf", _as_it_is),
            ("vllm", dspark.to_flat),
            ("sglang", dspark.to_flat),
            ("speculators", dspark.to_speculators),
            ("deepspec", dspark.to_deepspec),
        )
    },
    ("dflash", "transformers"): dspark.to_transformers,
}
_OWN_CLASS = ("deepspec", "transformers")
"""Forms of one program each; what its class does not have, such files cannot hold."""
FLAT_READERS: dict[str, Reader] = {
    "eagle": eagle.from_flat,
    "eagle3": eagle3.from_flat,
    "peagle": peagle.from_flat,
    "dspark": read_blocks.from_flat,
    "dflash": read_blocks.from_flat,
}
SPECULATORS_READERS: dict[str, Reader] = {
    "eagle3": eagle3.from_speculators,
    "peagle": peagle.from_speculators,
    "dspark": read_blocks.from_speculators,
    "dflash": read_blocks.from_speculators,
}
_KINDS: dict[str, tuple[str, ...]] = {
    "eagle": eagle.ARCHITECTURES,
    "eagle3": eagle3.ARCHITECTURES,
    "peagle": peagle.ARCHITECTURES,
    "dspark": dspark.ARCHITECTURES,
    "dflash": dspark.DFLASH_ARCHITECTURES,
}


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
    if found := other_draft(files):
        shown, what = found
        raise DraftError(
            f"{files.config_path}: {shown}: the draft has {what}. Drafts of spec-train do not, and "
            "without it the draft would be another one, so it cannot be read"
        )
    if speculators.TYPE in files.config:
        kind, flat, depth = speculators.unwrap(files)
        if kind not in SPECULATORS_READERS:
            raise DraftError(
                f"{files.config_path}: speculators drafts of type {kind} are unknown; known: "
                f"{', '.join(SPECULATORS_READERS)}"
            )
        return SPECULATORS_READERS[kind](flat, depth, target)
    return FLAT_READERS[_kind_of(files)](files, None, target)


def changed_keys(files: DraftFiles, own: DraftFiles) -> tuple[list[str], list[str]]:
    """Compare files of this project with what it would write for the same draft in that form.

    `own` is the draft that was read from `files`, in our own form. Most keys of a config.json are
    for engines only and follow from the few that are read here, so this finds edits of any key.

    Returns:
        The keys with another value, and those that are missing or that this project never writes.

    Raises:
        DraftError: the form cannot hold the draft.
    """
    form = files.config[SECTION].get(FORM)
    wanted = own.config if form is None else write_form(own, form, _facts_in(files)).config
    wanted, found = ({k: v for k, v in c.items() if k != SECTION} for c in (wanted, files.config))
    differing = list(differing_leaves(wanted, found, "would be written as"))
    changed = [text for kind, text in differing if kind == "changed"]
    return changed, [text for kind, text in differing if kind != "changed"]


def refuse_changed_keys(files: DraftFiles, own: DraftFiles) -> None:
    """Refuse files of this project with keys for engines that contradict the draft.

    Missing and additional keys are accepted: other releases write other keys.

    Raises:
        DraftError: names the keys and their values.
    """
    if changed := changed_keys(files, own)[0]:
        raise DraftError(
            f"{files.config_path}: engines would read another draft than spec-train does: "
            f"{some_of(changed)}. The file was edited or damaged: copy or export the draft again"
        )


def with_facts_in(files: DraftFiles, target: TargetFacts) -> TargetFacts:
    """Return a target's facts; its class and number of blocks, if unknown, as the files say."""
    found = _facts_in(files)
    return replace(
        target,
        architectures=target.architectures or found.architectures,
        num_layers=target.num_layers or found.num_layers,
    )


def _facts_in(files: DraftFiles) -> TargetFacts:
    """Return the facts of the target that the files themselves contain."""
    raw = files.config
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return TargetFacts(
        name=verifier.get("name_or_path", ""),
        architectures=tuple(verifier.get("architectures") or ()),
        num_layers=raw.get("target_num_hidden_layers") or raw.get("num_target_layers"),
        head=files.tensors.get("lm_head.weight"),
    )


def _kind_of(files: DraftFiles) -> str:
    """Return the kind of a flat draft: by its tensors where names are shared, else by its name."""
    names = files.config.get("architectures") or []
    tensors = {name.removeprefix("model.") for name in files.tensors}
    if peagle.MASK_STATES in tensors:  # its architecture may have EAGLE-3's name
        return "peagle"
    if eagle.SHARED in names:  # SafeAILab's EAGLE-1/2 and EAGLE-3 have one name
        wide = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & tensors
        return "eagle3" if wide else "eagle"
    for kind, known in _KINDS.items():
        if set(names) & set(known):
            return kind
    if shared := sorted(set(names) & set(TARGETS)):
        raise DraftError(
            f"{files.config_path}: {shared[0]} is a target, and no draft; give the directory of a "
            "draft, such as the --out of `spec-train fit`"
        )
    raise DraftError(
        f"{files.config_path}: architectures {names} are not a known draft; known: "
        f"{', '.join(name for known in _KINDS.values() for name in known)}"
    )
