"""What a path is: a corpus, a dataset, a target, a draft, a run, or something else.

Paths of a command are easily exchanged. Only names and config.json are read, and no library is
imported, so a wrong path is refused before torch is loaded.
"""

import os
import re
from enum import Enum
from pathlib import Path

from spec_data.shards.draft_kinds import draft_kinds
from spec_data.shards.errors import MissingError
from spec_data.shards.file_system import followed
from spec_data.shards.files import MANIFEST
from spec_data.shards.json_texts import read_json_text
from spec_data.shards.passing import PASS_ON
from spec_data.shards.regular_files import special_kind


class Kind(Enum):
    """What a path can be; the value says it in an error."""

    NOTHING = "nothing is there"
    EMPTY = "an empty directory"
    CORPUS = "a corpus"
    DATASET = "a dataset"
    UNFINISHED = "a dataset that is not sealed yet"
    PASSED_ON = "a dataset whose shards are passed on and then deleted (--pass-on)"
    TARGET = "a target model"
    DRAFT = "a draft"
    MODEL = "a model"  # a target or a draft: its files do not say which
    ADAPTER = "an adapter (PEFT)"
    NATIVE = "a model in its makers' own form (params.json, consolidated.*: Mistral, Meta)"
    GGUF = "a GGUF model of llama.cpp"
    SHARDED = "a checkpoint in parts of several processes (torch, DeepSpeed, Megatron)"
    CHECKPOINTS = "a folder of another trainer's checkpoints"
    PIPELINE = "a pipeline of diffusers"
    PART = "one file of a model"
    RUN = "a run of `spec-train fit`"
    FILE = "a file"
    SPECIAL = "a pipe, a socket or a device"
    OTHER = "another kind of directory"


ROWS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".csv", ".tsv", ".arrow")
"""Suffixes of files that may hold the rows of a corpus; one of PACKED may follow."""
PACKED = (".gz", ".bz2", ".zst")
_WORK = {".generate", ".view"}
_SAVED = {"dataset_dict.json", "state.json", "dataset_info.json"}  # of `datasets`
_PARTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
_RUN = {"fit.json", "run.json", "metrics.jsonl", "best", "last"}
_PUBLISHED = [kind.published for kind in draft_kinds().values()]
_OUR_CHECKPOINT = re.compile(r"checkpoint-\d{8}")
_OTHER_CHECKPOINT = re.compile(r"checkpoint-\d+")
_SHARDED = re.compile(
    r"zero_to_fp32\.py|latest_checkpointed_iteration\.txt|global_step\d+"
    r"|.*_model_states\.pt|.*\.distcp"
)
_OF_MODEL = re.compile(
    r"tokenizer.*\.json|vocab\.json|special_tokens_map\.json|added_tokens\.json|merges\.txt"
    r"|generation_config\.json|(pre)?processor_config\.json|chat_template\.json|.*\.index\.json"
)
"""Names of files beside a model's weights that end as files of rows do."""
_DRAFT_KEYS = {
    *("speculators_model_type", "speculators_config", "draft_vocab_size", "target_layer_ids"),
    *("target_hidden_size", "num_target_layers", "spec_train", "pard_token"),
    *(key for published in _PUBLISHED for key in published.keys),
}
_NAMES = ("draft", "assistant", "speculator", "medusa", *(c for p in _PUBLISHED for c in p.classes))
_DRAFT_NAME = re.compile(
    rf"({'|'.join(_NAMES)})(?!.*ConditionalGeneration)", re.IGNORECASE
)  # NVIDIA's Eagle2.5-VL is a target
_WHOLE_NAME = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")


def what_is(path: str | Path) -> Kind:
    """Return what a path is, by the names of its files and its config.json."""
    path = followed(Path(path))
    try:
        if not path.is_dir():
            if not path.exists():
                return Kind.NOTHING
            if special_kind(path):
                return Kind.SPECIAL
            if path.suffix in _PARTS or path.name in ("config.json", "params.json"):
                return Kind.GGUF if path.suffix == ".gguf" else Kind.PART
            return Kind.CORPUS if _holds_rows(path.name) else Kind.FILE
        names = {entry.name for entry in os.scandir(path)}
    except OSError:  # unreadable: who opens it says why
        return Kind.OTHER
    if MANIFEST in names:
        return Kind.DATASET
    if names & _WORK:
        passed_on = (path / ".generate" / PASS_ON).is_file()
        return Kind.PASSED_ON if passed_on else Kind.UNFINISHED
    if "shards" in names:  # a dataset without its manifest, but with what `datasets` saves
        return Kind.OTHER
    if "config.json" in names:
        return _kind_of_model(path)
    if "adapter_config.json" in names:
        return Kind.ADAPTER
    if "params.json" in names and any(n.startswith(("consolidated", "tekken")) for n in names):
        return Kind.NATIVE
    if any(name.endswith(".gguf") for name in names):
        return Kind.GGUF
    if any(map(in_parts, names)):
        return Kind.SHARDED
    if "model_index.json" in names:
        return Kind.PIPELINE
    if names & _RUN or any(map(_OUR_CHECKPOINT.fullmatch, names)):
        return Kind.RUN
    if any(map(_OTHER_CHECKPOINT.fullmatch, names)):
        return Kind.CHECKPOINTS
    if any(n.endswith(".safetensors") or n.startswith("pytorch_model") for n in names):
        return Kind.OTHER  # a model without its config.json
    if names & _SAVED or any(_holds_rows(n) for n in names if not _OF_MODEL.fullmatch(n)):
        return Kind.CORPUS
    return Kind.OTHER if names else Kind.EMPTY


def in_parts(name: str) -> bool:
    """Whether a name is of a checkpoint of several processes: torch's, DeepSpeed's, Megatron's."""
    return bool(_SHARDED.fullmatch(name))


def _holds_rows(name: str) -> bool:
    path = Path(name)
    return (path.stem if path.suffix in PACKED else name).endswith(ROWS)


def _kind_of_model(path: Path) -> Kind:
    """Tell a draft from a target by keys of its config and by the name of its class."""
    try:
        config = read_json_text(path / "config.json")
        names = [str(n) for n in config.get("architectures") or () if n]
        if config.keys() & _DRAFT_KEYS or any(map(_DRAFT_NAME.search, names)):
            return Kind.DRAFT
        layers = config.get("num_hidden_layers")
    except (OSError, ValueError, AttributeError, TypeError):
        return Kind.MODEL  # who reads it says what is wrong
    # one layer: SafeAILab's EAGLE-1 has the class of its target
    whole = any(map(_WHOLE_NAME.search, names)) and layers != 1
    return Kind.TARGET if whole else Kind.MODEL


_WANTED: dict[Kind, tuple[str, str, str]] = {
    Kind.DATASET: ("a spec-data dataset", "dataset directory", MANIFEST),
    Kind.UNFINISHED: ("a dataset", "directory", ""),
    Kind.TARGET: ("a target model", "directory", "config.json"),
    Kind.DRAFT: ("a draft or a run", "draft directory or run", ""),
    Kind.CORPUS: ("a corpus", "file or directory", ""),
    Kind.RUN: ("a run", "file or run directory", ""),
}
"""What an option wants: in an error about something else, after "no such", and its main file."""
_ACCEPTED = {
    Kind.UNFINISHED: (Kind.DATASET, Kind.UNFINISHED, Kind.PASSED_ON, Kind.EMPTY, Kind.OTHER),
    Kind.TARGET: (Kind.TARGET, Kind.MODEL),
    Kind.DRAFT: (Kind.DRAFT, Kind.MODEL, Kind.RUN),
    Kind.CORPUS: (Kind.CORPUS, Kind.OTHER, Kind.MODEL),  # rows further down, or beside a config
}
_OF_TRANSFORMERS = "pass the directory of its transformers form: config.json and *.safetensors"
JOIN_PARTS = (
    "`accelerate merge-weights`, zero_to_fp32.py of DeepSpeed or Megatron's converter joins the "
    "parts"
)
_KIND_ADVICE = {
    Kind.NATIVE: (
        f"{_OF_TRANSFORMERS}. It is in the same repository, or transformers' scripts "
        "convert_*_weights_to_hf.py write it"
    ),
    Kind.GGUF: f"{_OF_TRANSFORMERS}, of which the GGUF was made",
    Kind.SHARDED: f"{_OF_TRANSFORMERS}. {JOIN_PARTS}",
    Kind.CHECKPOINTS: "pass one of them, the directory that has the config.json",
    Kind.PIPELINE: "a draft needs a language model",
    Kind.PART: "pass its directory",
}
"""What to do about a path of this kind where a target or a draft is wanted."""
_CAPTURE = "run `spec-data generate --target {} --corpus {} --out DIR` first, and pass DIR"
_ADVICE = {
    (Kind.DATASET, Kind.CORPUS): _CAPTURE.format("MODEL", "{path}"),
    (Kind.DATASET, Kind.TARGET): _CAPTURE.format("{path}", "FILE"),
    (Kind.TARGET, Kind.ADAPTER): (
        "merge it into its base model (merge_and_unload, then save_pretrained), and pass that"
    ),
    (Kind.DATASET, Kind.UNFINISHED): (
        "run what writes it (`spec-data generate`, `copy`, `recode` or `convert`) again to finish "
        "it, once all its workers are done"
    ),
    (Kind.DATASET, Kind.PASSED_ON): (
        "one `spec-train fit --follow` trains on it, once; for anything else, generate without "
        "--pass-on into another --out"
    ),
}


WITHOUT_MANIFEST = (
    f"shards of a dataset without their {MANIFEST}, which alone says what they are. Restore that "
    "file from a copy. Without one, capture the whole dataset again into another directory: from "
    "the same machine and releases it has the same bytes, and its manifest is the lost one"
)


def shards_alone(path: str | Path) -> bool:
    """Return whether a directory holds a finished dataset but for its manifest."""
    path = Path(path)
    begun = any((path / name).is_dir() for name in _WORK)
    lacks = not (path / MANIFEST).exists() and not begun
    return lacks and (path / "shards").is_dir() and (path / "index.arrow").is_file()


def wrong_kind(path: str | Path, wanted: Kind, option: str = "") -> MissingError:
    """Return the error about a path that is not what is wanted; `option` is how it was given."""
    kind, where = what_is(path), f"{option} {path}".strip()
    need, absent, main_file = _WANTED[wanted]
    if kind is Kind.NOTHING:
        hub = wanted is Kind.DRAFT and str(path).count("/") == 1 and not Path(path).parent.exists()
        load = f", or load it from the Hub: hf download {path} --local-dir DIR" if hub else ""
        return MissingError(f"{where}: no such {absent}; check the path{load}")
    if wanted is Kind.DATASET and shards_alone(path):
        return MissingError(f"{where}: {WITHOUT_MANIFEST}")
    if kind is Kind.OTHER and main_file:
        return MissingError(f"{where}: no {main_file} in it, so this is not {need}; check the path")
    advice = _ADVICE.get((wanted, kind), "check the path").format(path=path)
    if wanted in (Kind.TARGET, Kind.DRAFT):
        advice = _KIND_ADVICE.get(kind, advice)
    contrast = "" if kind in (Kind.UNFINISHED, Kind.PASSED_ON) else f", not {need}"
    return MissingError(f"{where}: this is {kind.value}{contrast}; {advice}")


def expect(path: str | Path, wanted: Kind, option: str = "") -> None:
    """Check that a local path is what an option wants, with a MissingError."""
    if what_is(path) not in _ACCEPTED.get(wanted, (wanted,)):
        raise wrong_kind(path, wanted, option)


def like_a_path(text: str) -> bool:
    """Return whether a text can only be a path, and no name on the Hub."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1
