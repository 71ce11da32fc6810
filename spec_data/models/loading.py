"""Load a target completely or not at all: every tensor comes from its safetensors files.

transformers fills a missing tensor with random numbers and logs it, and decides by itself whether
the head is tied to the embedding. Both change the states without an error, so both are refused.
"""

import atexit
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)

from spec_data.models.devices import DTYPES, check_devices, usable_device
from spec_data.models.placement import shares_weight
from spec_data.models.quantisation import check_quantisation
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.spread import Spread
from spec_data.models.weight_files import weight_files
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.files import cache_directory

# -- slow dtypes -----------------------------------------------------------------------------------
# Which dtypes this CPU computes slowly: half precision, where it has no instructions for it.


SLOW = 4.0
"""A dtype is called slow where a matrix product takes this many times as long as in float32."""

_SIZE = 256  # rows and columns of the product that is timed: 33 MFLOP, 30 ms where it is slow
_REPEATS = 3
_SMALL = 1_000_000  # parameters: smaller models are fast in any dtype


def slow_model(model: nn.Module) -> str | None:
    """Return the warning of `slow_dtype` for a model that is large enough to be worth it."""
    weight = next(model.parameters())
    if sum(p.numel() for p in model.parameters()) < _SMALL:
        return None
    return slow_dtype(weight.dtype, weight.device)


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a warning if `device` is a CPU that computes in `dtype` slowly, else None.

    A CPU without AVX-512 BF16 or AMX multiplies bfloat16 matrices with scalar code. The matrix
    product is timed here, because what is fast depends on PyTorch's build too.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    ratio = _seconds(dtype) / max(_seconds(torch.float32), 1e-9)
    if ratio < SLOW:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this CPU multiplies {name} matrices about {ratio:.0f} times more slowly than float32 "
        "ones; --dtype float32 is faster here, but the states then differ from those of a target "
        f"that is served in {name} by its rounding"
    )


def _seconds(dtype: torch.dtype) -> float:
    """Return the seconds of one matrix product, the shortest of a few."""
    values = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times = []
    for _ in range(_REPEATS + 1):  # the first one also prepares kernels
        start = time.perf_counter()
        torch.mm(values, values)
        times.append(time.perf_counter() - start)
    return min(times)


# -- tied places -----------------------------------------------------------------------------------
# A head that is tied to the embedding is one tensor, so a device map must keep both together.


_OFFLOADED = ("cpu", "disk")


def asks_to_tie(config: Any) -> bool:
    """Whether a transformers configuration ties the head to the embedding."""
    return any(getattr(c, "tie_word_embeddings", False) for c in (config, text_config(config)))


def check_tied_places(config: Any, device_map: object, empty: Callable[[], Any]) -> None:
    """Refuse a map that offloads the embedding or the head, but not both, if they are tied.

    accelerate would look for a weight of the head, which the files do not hold.

    Args:
        config: the transformers configuration.
        device_map: a device by module name; a policy keeps tied modules together by itself.
        empty: returns the model without weights; called only if it is needed.

    Raises:
        ConfigError: they would lie on different devices.
    """
    if not isinstance(device_map, Mapping) or not asks_to_tie(config):
        return
    model = empty()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for end in ends for name, module in model.named_modules() if module is end]
    places = [_place(name, device_map) for name in names]
    if len(places) < 2 or None in places or places[0] == places[1]:
        return
    if any(str(place) in _OFFLOADED for place in places):
        raise ConfigError(
            f"--device-map puts {names[0]} on {places[0]} and {names[1]} on {places[1]}, but in "
            "this target they are one tensor (tie_word_embeddings): name the same device for both"
        )


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a module: that of the longest name in the map which contains it."""
    found = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
    return device_map[max(found, key=len)] if found else None


# -- loading ---------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

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
    known: Any = dtype if dtype == "auto" else DTYPES.get(str(dtype), dtype)
    config = load_config(directory, trust)  # refuses what is no decoder-only model
    check_quantisation(path, config)
    check_tied_places(config, spread.device_map, partial(_empty, config, trust))
    try:
        model, info = _class_for(config, trust, change).from_pretrained(
            directory,
            dtype=known,
            attn_implementation=None if attn == "auto" else attn,
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **where,
        )
    except (ValueError, KeyError, OSError, ImportError, SafetensorError) as error:
        raise TargetError(f"cannot load {path} as a causal language model: {error}") from None
    _check_complete(path, info if change is None else info | {"unexpected_keys": ()})
    _check_tied(path, model)
    if warning := slow_model(model):
        log.warning("%s", warning)
    return model.eval().requires_grad_(False)


def _where(device: torch.device, spread: Spread) -> dict[str, Any]:
    """Return the options of `from_pretrained` that place the weights."""
    if spread.tensor_parallel:
        return {"distributed_config": _tensor_parallel()}
    if spread.device_map is not None:
        return {
            "device_map": spread.device_map,
            "max_memory": spread.max_memory,
            "offload_folder": _offload_folder(),
        }
    # Without a map, weights are read to the CPU: nothing would move them to another device.
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _offload_folder() -> str:
    """Return a new folder for weights on disk that run in another form than they are stored in.

    It is removed at the end of the program.
    """
    cache = cache_directory("offload")
    cache.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=cache)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _tensor_parallel() -> Any:
    """Return the plan that splits layers over the processes of torchrun.

    Raises:
        TargetError: this release of transformers has none.
    """
    try:
        from transformers.distributed import DistributedConfig

        return DistributedConfig(tp_plan="auto")
    except (ImportError, TypeError):
        raise TargetError(
            "--tp-plan needs a newer release of transformers (5.23 is tested); or use --device-map"
        ) from None


def _auto_class(config: Any) -> Any:
    """Return the class that loads a model; a few multimodal ones have no text-only class."""
    kind = getattr(config, "model_type", None)
    if kind in IMAGE_TEXT and kind not in CAUSAL:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _empty(config: Any, trust: bool) -> Any:
    """Return the model of a config without weights."""
    with torch.device("meta"):
        return _auto_class(config).from_config(config, trust_remote_code=trust)


def _class_for(config: Any, trust: bool, change: Callable[[Any], None] | None) -> Any:
    """Return the class that loads a model; with `change`, one that changes what it has built."""
    if change is None:
        return _auto_class(config)
    plain = type(_empty(config, trust))

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        change(self)

    changed = {"__init__": build, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), changed | {"_keys_to_ignore_on_load_unexpected": ["."]})


def _check_complete(path: str, info: dict[str, Any]) -> None:
    """Refuse a model of which a tensor was not loaded; warn about tensors that it does not have."""
    missing, unexpected = info.get("missing_keys") or (), info.get("unexpected_keys") or ()
    if missing:
        raise TargetError(
            f"{path}: its weight files lack {_names(missing)}, which config.json asks for; "
            "transformers would fill them with random numbers. Copy the model again, or correct "
            "config.json (tie_word_embeddings, num_hidden_layers)"
        )
    wrong = sorted(str(key[0]) for key in info.get("mismatched_keys") or ())
    if wrong:
        raise TargetError(
            f"{path}: {_names(wrong)} in its weight files has another shape than config.json "
            "describes; use the config.json of these weights"
        )
    if unexpected:
        log.warning(
            "warning: %s: its weight files also hold %s, which the model of config.json does not "
            "have; they are not used",
            *(path, _names(unexpected)),
        )


def _check_tied(path: str, model: Any) -> None:
    """Refuse a head that is tied against the config, or untied against it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(head, "weight", None) is None or embedding is None:  # a quantised head may have none
        return
    asked = asks_to_tie(model.config)
    if asked == shares_weight(head, embedding):
        return
    if asked:
        raise TargetError(
            f"{path}: config.json has tie_word_embeddings true, but the weight files hold a head "
            "that differs from the embedding; set it to false if that head is right, or remove "
            "the head from the files"
        )
    raise TargetError(
        f"{path}: config.json has tie_word_embeddings false, but transformers tied the head to the "
        "embedding; set it to true if the model has no head of its own, or copy the model again"
    )


def _names(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
