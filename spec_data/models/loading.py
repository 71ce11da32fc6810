"""Load a target completely or not at all: every tensor comes from its safetensors files.

transformers fills a missing tensor with random numbers and logs it, and decides by itself whether
the head is tied to the embedding. Both change the states without an error, so both are refused.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)

from spec_data.models.devices import DTYPES, check_devices, usable_device
from spec_data.models.placement import is_offloaded, shares_weight
from spec_data.models.quantisation import check_quantisation
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.target_options import Spread
from spec_data.models.weight_files import weight_files
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.files import cache_directory

_SHOWN = 5  # tensor names in a message


def load_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    attn: str = "auto",
    trust: bool = False,
    spread: Spread | None = None,
    change: Callable[[Any], None] | None = None,
) -> Any:
    """Load a causal LM in evaluation mode, without gradients, on `device`.

    Each weight is read from its file to the device on which it stays.

    Args:
        path: a local model directory or a Hub id.
        dtype: a dtype or its name, such as "bfloat16"; "auto" is the dtype of the checkpoint.
        device: "auto", "cpu", "cuda", ...
        attn: the attention implementation; "auto" is sdpa, or what the family supports.
        trust: run the code that comes with the model (`trust_remote_code`).
        spread: several devices instead of `device`.
        change: changes the modules of the model before any weight is read. Weights of modules
            that it removes are not read.

    Raises:
        MissingError: there is no such model.
        TargetError: not a decoder-only causal LM that this transformers release can load, weights
            that are damaged or incomplete, or a head that contradicts the config.
        ConfigError: the device is not usable here.
    """
    spread = spread or Spread()
    check_devices(device, spread.device_map)  # before the weights are read
    where = _where(usable_device(device), spread)
    directory, _ = resolve_model(path)
    weight_files(directory)
    wanted: Any = dtype if dtype == "auto" else DTYPES.get(str(dtype), dtype)
    config = load_config(directory, trust)  # refuses what is no decoder-only model
    check_quantisation(path, config)
    try:
        model, info = _class_for(config, trust, change).from_pretrained(
            directory,
            dtype=wanted,
            attn_implementation=None if attn == "auto" else attn,
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **where,
        )
    except (ValueError, KeyError, OSError, ImportError, SafetensorError) as error:
        raise TargetError(f"cannot load {path} as a causal language model: {error}") from None
    _check_complete(path, info)
    _check_tied(path, model)
    return model.eval().requires_grad_(False)


def _where(device: torch.device, spread: Spread) -> dict[str, Any]:
    """Return the options of `from_pretrained` that place the weights."""
    if spread.tensor_parallel:
        try:
            from transformers.distributed import DistributedConfig

            return {"distributed_config": DistributedConfig(tp_plan="auto")}
        except (ImportError, TypeError):
            raise TargetError(
                "--tp-plan needs a newer release of transformers (5.23 is tested); or use "
                "--device-map"
            ) from None
    if spread.device_map is not None:
        cache = cache_directory("offload")  # of weights that run in another form than stored
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=cache)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        options = {"device_map": spread.device_map, "max_memory": spread.max_memory}
        return options | {"offload_folder": folder}
    # Without a map, weights are read to the CPU: nothing would move them to another device.
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _class_for(config: Any, trust: bool, change: Callable[[Any], None] | None) -> Any:
    """Return the class that loads a model; with `change`, one that changes what it has built."""
    kind, auto = getattr(config, "model_type", None), AutoModelForCausalLM
    if kind in IMAGE_TEXT and kind not in CAUSAL:  # a few multimodal ones have no text-only class
        auto = AutoModelForImageTextToText
    if change is None:
        return auto
    with torch.device("meta"):
        plain = type(auto.from_config(config, trust_remote_code=trust))

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        change(self)

    changed = {"__init__": build, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), changed | {"_keys_to_ignore_on_load_unexpected": ["."]})


def _check_complete(path: str, info: dict[str, Any]) -> None:
    """Refuse a model of which a tensor was not loaded."""
    if missing := info.get("missing_keys"):
        raise TargetError(
            f"{path}: its weight files lack {_names(missing)}, which config.json asks for; "
            "transformers would fill them with random numbers. Copy the model again, or correct "
            "config.json (tie_word_embeddings, num_hidden_layers)"
        )
    if wrong := [str(key[0]) for key in info.get("mismatched_keys") or ()]:
        raise TargetError(
            f"{path}: {_names(wrong)} in its weight files has another shape than config.json "
            "describes; use the config.json of these weights"
        )


def _names(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_tied(path: str, model: Any) -> None:
    """Refuse a head that is tied against the config, or untied against it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(head, "weight", None) is None or embedding is None:  # a quantised head may have none
        return
    configs = model.config, text_config(model.config)
    asked = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    tied = shares_weight(head, embedding)
    if asked and is_offloaded(head) != is_offloaded(embedding):
        # accelerate would look for a weight of the head, which the files do not hold
        raise ConfigError(
            "--device-map puts embedding and head on different devices, but in this target they "
            "are one tensor (tie_word_embeddings): name the same device for both"
        )
    if asked and not tied:
        raise TargetError(
            f"{path}: config.json has tie_word_embeddings true, but the weight files hold a head "
            "that differs from the embedding; set it to false if that head is right, or remove "
            "the head from the files"
        )
    if tied and not asked:
        raise TargetError(
            f"{path}: config.json has tie_word_embeddings false, but transformers tied the head to "
            "the embedding; set it to true if the model has no head of its own, or copy the model "
            "again"
        )
