"""Read the configuration of a model directory, without its weights."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from transformers import AutoConfig

from spec_data.models.config_values import wrong_value
from spec_data.models.streams import check_streams
from spec_data.shards.errors import TargetError
from spec_data.shards.file_heads import check_files
from spec_data.shards.files import read_object
from spec_data.shards.schema import Quantised


def text_config(config: Any) -> Any:
    """Return the configuration of the decoder: the nested one of multimodal models, else `config`.

    `config` is a transformers configuration.
    """
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def end_token_ids(directory: Path) -> list[int]:
    """Return the token ids that end generation, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        ids = read_object(file, TargetError).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def drops_softcap(config: Any, attn: str) -> bool:
    """Return whether an attention leaves out the softcapping of a config, as Gemma 2's.

    sdpa does; transformers before 5.21 loads such a model with it all the same.
    """
    return attn == "sdpa" and bool(getattr(text_config(config), "attn_logit_softcapping", None))


_TASKS = (
    ("ForSequenceClassification", "scores or classifies texts, as reward models do"),
    ("ForTokenClassification", "classifies tokens"),
    ("ForMaskedLM", "fills masks, and sees the tokens after a position"),
    ("ForPreTraining", "is no causal language model"),
    ("ForQuestionAnswering", "marks spans of a text"),
    ("ForMultipleChoice", "chooses among answers"),
    ("Classification", "classifies images or sounds"),
    ("ForCTC", "writes down speech"),
    ("RewardModel", "scores texts"),
    ("Model", "has no LM head: it makes embeddings of texts or images"),
)
"""How the name of a class ends that is no target, and what such a model does."""


def check_task(file: Path, config: dict[str, Any]) -> None:
    """Raise TargetError if the class that a config.json names is no causal language model's.

    With code of its own (`auto_map`), a class may have any name.
    """
    names = config.get("architectures")
    name = next(iter(names or ()), "")
    if config.get("auto_map") or not isinstance(name, str) or name.endswith("LMHeadModel"):
        return
    for ending, what in _TASKS:
        if name.endswith(ending):
            raise TargetError(
                f"{file}: its class {name} {what}. A draft needs a causal language model with an "
                "LM head, such as a ...ForCausalLM"
            )


_OTHER_PARTS = ("vision", "audio", "image", "speech")
"""In names of parts of a config.json that a draft does not see."""


def load_config(directory: Path, trust: bool = False) -> Any:
    """Return the configuration of a model directory, with the defaults of its family.

    Raises:
        TargetError: transformers does not know the family, it is not a decoder-only text model, or
            its blocks output streams of which no engine makes one state.
    """
    file = directory / "config.json"
    check_files(directory, TargetError)
    if file.is_file():
        raw = read_object(file, TargetError)  # transformers has no words for these
        if wrong := wrong_value(raw, _OTHER_PARTS):
            raise TargetError(f"{file}: {wrong}; copy the config.json of these weights again")
        check_task(file, raw)
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust)
    except Exception as error:  # a config that does not validate raises an error of its own
        raise TargetError(f"{file}: transformers cannot load it: {error}") from None
    text, sizes = text_config(config), ("num_hidden_layers", "hidden_size", "vocab_size")
    lacking = [name for name in sizes if not getattr(text, name, None)]
    if lacking or getattr(config, "is_encoder_decoder", False):
        why = f"it has no {', '.join(lacking)}" if lacking else "it is an encoder-decoder model"
        raise TargetError(f"{file}: {why}; drafts need a decoder-only language model")
    check_streams(str(file), text)
    return config


# -- quantised checkpoints -------------------------------------------------------------------------


def quantisation_of(config: Any) -> Quantised | None:
    """Return how a checkpoint with this transformers configuration is quantised, if it is."""
    if not (table := _table(config)):
        return None
    method = table.get("quant_method")
    return Quantised(method=str(getattr(method, "value", method)))


def loaded_quantisation(config: Any, model: Any) -> Quantised | None:
    """Return the quantisation of a checkpoint (`config`) as `model` runs it, with `dequantised`.

    transformers runs some checkpoints in the dtype of their other weights where the device has no
    kernel (fp8 on a CPU). The states are then not those of a GPU, which rounds activations too.
    """
    quantised = quantisation_of(config)
    return quantised and replace(quantised, dequantised=not _table(model.config))


def check_quantisation(path: str, config: Any) -> None:
    """Raise TargetError, before anything is read, if this machine cannot load quantised weights."""
    quantised = quantisation_of(config)
    if quantised is None:
        if isinstance(getattr(config, "quantization", None), dict):
            raise TargetError(
                f"{path}: its weights are quantised by MLX, which only MLX reads; pass the model "
                "in 16 bits, or one quantised for transformers"
            )
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(_table(config), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise TargetError(
            f"{path}: its weights are quantised ({quantised}), and cannot be loaded here: {reason}"
        ) from None


def _table(config: Any) -> dict[str, Any]:
    """Return `quantization_config` as a dict, empty if there is none."""
    for holder in (config, text_config(config)):
        table = getattr(holder, "quantization_config", None)
        if table:
            return table.to_dict() if hasattr(table, "to_dict") else dict(table)
    return {}
