"""Load a target completely or not at all: every tensor comes from its safetensors files.

transformers fills a missing tensor with random numbers and logs it, and decides by itself whether
the head is tied to the embedding. Both change the states without an error, so both are refused.
Other weights (`pytorch_model.bin`, adapters) are never loaded, because they are not hashed: a
dataset could be captured from a model that its manifest does not name.
"""

import atexit
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from spec_data.models.devices import DTYPES, check_devices, is_memory_error, use_device
from spec_data.models.mtp import is_mtp_part
from spec_data.models.reading import (
    check_quantisation,
    drops_softcap,
    load_config,
    quantisation_of,
    text_config,
)
from spec_data.models.resolve import resolve_model
from spec_data.models.target_options import Spread
from spec_data.models.weight_files import weight_names
from spec_data.shards.errors import ConfigError, SpecDataError, TargetError
from spec_data.shards.files import cache_directory
from spec_data.terminal.parts import one_part

logger = logging.getLogger(__name__)

_SHOWN = 5  # tensor names in a message
_META = torch.device("meta")
_LONGROPE, _FIXED = "longrope", "longrope, fixed"


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
        attn: the attention implementation; "auto" is sdpa, or what the family supports
            (eager, if it has softcapping).
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
    where = _where(use_device(device), spread)
    directory, _ = resolve_model(path)
    names = weight_names(directory)
    config = load_config(directory, trust)  # refuses what is no decoder-only model
    check_quantisation(path, config)
    _check_blocks(path, names, text_config(config), whole=change is None)
    if quantisation_of(config) is None:
        _check_numbers(path, names)
    if (other := other_class(config)) is not None:
        logger.warning("warning[architectures]: %s: %s", path, other)
    _check_memory(directory, names, config, trust)
    if spread.tensor_parallel:
        _check_heads(path, text_config(config))
    if attn == "auto" and drops_softcap(config, "sdpa"):
        attn = "eager"
    try:
        with without_bars(), one_part("load", "the target"):
            model, info = _class_for(config, trust, change).from_pretrained(
                directory,
                dtype=DTYPES.get(str(dtype), dtype),
                attn_implementation=None if attn == "auto" else attn,
                trust_remote_code=trust,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **where,
            )
    except (ValueError, KeyError, OSError, ImportError, SafetensorError) as error:
        raise TargetError(f"cannot load {path} as a causal language model: {error}") from None
    except RuntimeError as error:  # of parts of a tensor, such as experts, that do not fit together
        if isinstance(error, SpecDataError) or is_memory_error(error):
            raise
        raise TargetError(
            f"{path}: tensors of its weight files do not fit each other or config.json "
            f"({' '.join(str(error).split())[:300]}); copy or download the model again"
        ) from None
    _check_loaded(path, model, info, names, quantised=quantisation_of(config) is not None)
    if (slow := slow_model(model)) is not None:
        logger.warning("warning[slow-dtype]: %s", slow)
    return model.eval().requires_grad_(False)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing bars: in Python too, nothing is printed."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


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


def _check_heads(path: str | Path, config: Any) -> None:
    """Refuse a number of processes that cannot share the heads which the family's plan splits."""
    plan, count = getattr(config, "base_model_tp_plan", None) or {}, dist.get_world_size()
    names = {"num_attention_heads": "q_proj", "num_key_value_heads": "k_proj"}
    if any(key.endswith("self_attn") for key in plan):  # these plans split otherwise
        return
    for name, part in names.items():
        heads = getattr(config, name, None)
        split = any(key.endswith(part) and how == "colwise" for key, how in plan.items())
        if split and isinstance(heads, int) and heads % count:
            raise TargetError(
                f"--tp-plan: {path} has {name} = {heads}, which {count} processes cannot share; "
                f"start {math.gcd(heads, count)} or another divisor of {heads}, or use "
                "--device-map auto or --context-parallel"
            )


def _class_for(config: Any, trust: bool, change: Callable[[Any], None] | None) -> Any:
    """Return the class that loads a model; with `change`, one that changes what it has built."""
    kind, auto = getattr(config, "model_type", None), AutoModelForCausalLM
    multimodal = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if multimodal and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # no text-only class
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


def other_class(config: Any) -> str | None:
    """Return how `architectures` of a config contradicts its `model_type`, None if it does not.

    transformers chooses the class by the type, engines by its name. Names that transformers does
    not know say nothing.
    """
    kind, type_of = getattr(config, "model_type", None), dict[str, set[str]]()
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for type_, names in table.items():
            for name in [names] if isinstance(names, str) else names:
                type_of.setdefault(name, set()).add(type_)
    named = list(getattr(config, "architectures", None) or ())
    types = [type_of[name] for name in named if name in type_of]
    if not types or kind not in set().union(*type_of.values()) or any(kind in t for t in types):
        return None
    return (
        f"config.json names {', '.join(named)} under architectures, which is no class of its "
        f"model_type {kind}: transformers loads it by the type, engines by the class, which may be "
        "another model. Use the config.json of these weights"
    )


def count_parameters(config: Any, trust: bool = False) -> int:
    """Return the number of parameters of the model of a transformers configuration.

    Raises:
        TargetError: transformers makes no model of it, as its numbers do not fit each other.
    """
    try:
        with _META:
            model = _class_for(config, trust, None).from_config(config, trust_remote_code=trust)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of any line of a family's code, that numbers lead astray
        raise TargetError(
            f"{Path(config.name_or_path) / 'config.json'}: transformers makes no model of it "
            f"({type(error).__name__}: {error}); its numbers do not fit each other: copy the "
            "config.json of these weights again"
        ) from None
    return sum(p.numel() for p in model.parameters())


_PER_BYTE = 8  # parameters in a file, at most: no form has less than one bit of each


def _check_memory(directory: Path, names: dict[str, Path], config: Any, trust: bool) -> None:
    """Refuse a config of a far larger model than its files hold, before memory is taken for it."""
    held = sum(file.stat().st_size for file in set(names.values()))
    if (count := count_parameters(config, trust)) > _PER_BYTE * held + _SMALL:
        raise TargetError(
            f"{directory / 'config.json'}: describes a model of {count:,} parameters, but its "
            f"weight files have {held:,} bytes; copy the config.json of these weights "
            "(hidden_size, vocab_size and the like)"
        )


LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "model.text_model.layers",
    "language_model.model.layers",
    "language_model.layers",
    "model.decoder.layers",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
    "backbone.layers",
    "layers",
)
"""Where families keep their decoder blocks."""
_PATHS = "|".join(map(re.escape, (*LAYER_PATHS, "h")))
_BLOCK = re.compile(rf"(?:model\.)?(?:{_PATHS})\.(\d+)\.(\w+)")
_OTHERS = re.compile(
    r"(^|\.)(vision|visual|audio|image|mtp|embed_(vision|audio)|mm_|multi_modal|connector|aligner)"
    r"|inv_freq$|masked_bias$|attn\.bias$|attention\.bias$"
)
"""Tensors of other parts than the decoder, and buffers of old checkpoints."""
_OF_DECODER = re.compile(r"(lm_head|embed_out|embed_tokens|embed_in|wte|norm|norm_f|ln_f)\.\w+$")
_SCALE = re.compile(r"(scale|scale_inv|zero_point|g_idx|shape)$")
"""Numbers of quantised weights, such as those of a cache of keys, which a model may leave out."""
_OF_QUANTISED = re.compile(
    r"[._](weight_(scale\w*|zero_point|g_idx|shape|packed)|q?scales|qweight|qzeros|SCB|(g|q)_idx"
    r"|weight\.(absmax|quant_map|quant_state\.\w+)|biases)$"
)
"""Without these, the weights of quantised files are other numbers."""
_OF_ADAPTER = re.compile(r"\.(lora_|base_layer\.|modules_to_save\.|ia3_|vera_|hada_|lokr_|oft_)")


def _check_blocks(path: str, names: Iterable[str], config: Any, whole: bool) -> None:
    """Refuse weights with another number of decoder blocks than the config of the decoder has.

    transformers leaves out the blocks that a config does not count. And an MTP block, which has the
    number after the last one, holds a decoder layer that it would take for a block. Without
    `whole`, blocks may be absent.
    """
    count = config.num_hidden_layers
    found: dict[int, set[str]] = {}
    for name in names:
        if match := _BLOCK.match(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    mtp = [k for k, parts in found.items() if any(map(is_mtp_part, parts))]
    last, counted = max(found.keys() - mtp, default=count - 1), min(mtp, default=count)
    if counted >= count and (last == count - 1 or (last < count and not whole)):
        return
    also = f"; {counted} is the MTP block, which does not count" if counted < count else ""
    raise TargetError(
        f"{path}: config.json says num_hidden_layers = {count}, but the highest block of the "
        f"weight files is {last} (the first is 0{also}). Another number of blocks is another "
        f"model: set num_hidden_layers to {last + 1}, or use the config.json of these weights"
    )


_WHOLE = {"BOOL", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))}
"""Whole numbers, as the header of a safetensors file names them."""


def _check_numbers(path: str, names: dict[str, Path]) -> None:
    """Refuse whole numbers in the place of weights: transformers would take them as they are."""
    found = []
    for file in sorted(set(names.values())):
        with safe_open(file, "pt") as weights:
            found += [
                name
                for name in weights.keys()  # noqa: SIM118, it is no dict
                if name.endswith(".weight")
                and _of_decoder(_INNER.sub("", name))
                and weights.get_slice(name).get_dtype() in _WHOLE
            ]
    if found:
        raise TargetError(
            f"{path}: its weights are whole numbers ({_names(found)}), as quantised files hold "
            "them, and config.json has no quantization_config, which says how: use the config.json "
            "of these weights, or the model in 16 bits"
        )


_INNER = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _wrapped_name(missing: Iterable[str], names: Iterable[str]) -> tuple[str, str] | None:
    """Return a missing tensor, and its name in the files, if it was saved inside other modules.

    Not every tensor tells: a head that is tied stands in no file.
    """
    plain = [(name, f".{_INNER.sub('', name)}") for name in names]
    return next(
        (
            (wanted, old)
            for wanted in sorted(missing)
            for old, name in plain
            if name.endswith(f".{wanted}")
        ),
        None,
    )


def _check_loaded(
    path: str, model: Any, info: dict[str, Any], names: Iterable[str], *, quantised: bool
) -> None:
    """Refuse a model that lacks a tensor or leaves one out, or whose head is tied wrongly.

    `names` are those of the tensors in the weight files.
    """
    missing = info.get("missing_keys")
    unexpected = info.get("unexpected_keys") or ()
    if missing or unexpected:
        _check_changed(path, names, quantised)
    if missing:
        if (found := _wrapped_name(missing, names)) is not None:
            wanted, wrapped = found
            raise TargetError(
                f"{path}: saved from a wrapped model: its weight files have {wrapped} for "
                f"{wanted}. Save the model inside (of DDP, FSDP, torch.compile or "
                "Lightning: `accelerator.unwrap_model`; of peft: `merge_and_unload`), or rename "
                "the tensors"
            )
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
    blocks = text_config(model.config).num_hidden_layers
    unused = [
        name
        for name in unexpected
        if not _OTHERS.search(name) and int((_BLOCK.match(name) or [0, 0])[1]) < blocks
    ]
    if lost := [n for n in unused if _of_decoder(n) and not _SCALE.search(n)]:
        raise TargetError(
            f"{path}: the model of config.json does not use {_names(lost)} of its weight files, so "
            "it is another model than the one that was trained: use the config.json of these "
            "weights (attention_bias, num_experts and the like)"
        )
    if unused:
        logger.warning(
            "warning[unused-weights]: %s: the model of config.json does not use %s of its weight "
            "files: are they of another config.json?",
            *(path, _names(unused)),
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(head, "weight", None) is None or embedding is None:  # a quantised head may have none
        return
    # By the config of the model that holds the head, which may be that of a part.
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    asked = any(f"{name}.weight" in tied for name, part in model.named_modules() if part is head)
    if asked and is_offloaded(head) != is_offloaded(embedding):
        # accelerate would look for a weight of the head, which the files do not hold
        raise ConfigError(
            "--device-map puts embedding and head on different devices, but in this target they "
            "are one tensor (tie_word_embeddings): name the same device for both"
        )
    if asked == shares_weight(head, embedding):
        return
    contradiction = (
        "true, but the weight files hold a head that differs from the embedding; set it to false "
        "if that head is right, or remove the head from the files"
        if asked
        else "false, but transformers tied the head to the embedding; set it to true if the model "
        "has no head of its own, or copy the model again"
    )
    raise TargetError(f"{path}: config.json has tie_word_embeddings {contradiction}")


def _check_changed(path: str, names: Iterable[str], quantised: bool) -> None:
    """Refuse weight files that are not of the plain model: of an adapter, or quantised.

    It is called where the model of config.json lacks or leaves out tensors, and names the cause.
    """
    parts = [name for name in names if _of_decoder(_INNER.sub("", name))]
    if found := [name for name in parts if _OF_ADAPTER.search(name)]:
        raise TargetError(
            f"{path}: its weight files hold an adapter that is not merged ({_names(found)}). Merge "
            "it (peft: merge_and_unload, then save_pretrained), and pass the merged model"
        )
    if not quantised and (found := [name for name in parts if _OF_QUANTISED.search(name)]):
        raise TargetError(
            f"{path}: its weight files are quantised ({_names(found)}), and config.json has no "
            "quantization_config, which says how: use the config.json of these weights"
        )


def _of_decoder(name: str) -> bool:
    """Whether a tensor is part of the decoder: of a block, the embedding, a norm or the head."""
    return bool(_BLOCK.match(name) or _OF_DECODER.search(name))


def _names(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- longrope --------------------------------------------------------------------------------------
# Such targets have two sets of RoPE factors; one is chosen for every document of a capture.
# transformers takes the long factors for a batch if its longest document has more than
# `original_max_position_embeddings` positions. So the states of a short document would depend on
# what shares its batch. Engines such as vLLM choose once, at their start: they take the long
# factors for every prompt if their maximum length is above that bound.


def short_positions(config: Any) -> int | None:
    """Return how many positions the short factors cover; None for a target without longrope."""
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    longrope = rope.get("rope_type") == _LONGROPE
    return int(rope["original_max_position_embeddings"]) if longrope else None


def check_choice(choice: str, config: Any) -> None:
    """Raise ConfigError for a --rope-factors other than "auto" of a target without longrope."""
    if choice != "auto" and short_positions(config) is None:
        raise ConfigError(
            f"--rope-factors {choice}: this target has no longrope; leave the option out"
        )


def chosen_factors(choice: str, config: Any, longest: int) -> str | None:
    """Return the factors of every document, "short" or "long"; None without longrope.

    The `choice` "auto" of --rope-factors takes the long ones if a document of `longest` tokens
    needs them.
    """
    limit = short_positions(config)
    if limit is None:
        return None
    factors = choice if choice != "auto" else "long" if longest > limit else "short"
    unusual = factors == "long" and longest <= limit
    logger.log(
        logging.WARNING if unusual else logging.INFO,
        "%s: every document is captured with the %s factors (the longest has %d tokens, the "
        "short ones cover %d). Engines such as vLLM use the long ones for every prompt if their "
        "maximum length is above %d; --rope-factors long captures so",
        *("warning[longrope]" if unusual else "longrope", factors, longest, limit, limit),
    )
    return factors


@torch.no_grad()
def fix_rope_factors(model: Any, factors: str | None) -> None:
    """Make a longrope model use these factors for every batch; None changes nothing."""
    if factors is None:
        return
    limit = short_positions(model.config) or 0
    length = limit + 1 if factors == "long" else None
    for module in model.modules():
        if getattr(module, "rope_type", None) == _LONGROPE:
            device = module.inv_freq.device
            frequencies, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](module.config, device, seq_len=length)
            module.inv_freq.copy_(frequencies)
            module.rope_type = _FIXED  # transformers then updates no frequency


# -- where the parts of a loaded model lie ---------------------------------------------------------
# On one device, on several, partly in memory or on disk until a part runs (accelerate's hooks), or
# in shards on several processes (tensor parallelism).


def device_of(module: Any) -> torch.device:
    """Return the device on which a module computes; a module has tensors, or a hook names it."""
    for hook in _hooks(module):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    first = next(module.parameters(), None)
    if first is None:
        first = next(module.buffers())
    return first.device


def devices_of(model: Any) -> list[torch.device]:
    """Return every device on which a part of a model computes, in a fixed order."""
    devices = {device_of(m) for m in model.modules() if any(True for _ in m.parameters(False))}
    return sorted(devices, key=str)


def whole(module: Any, name: str) -> Tensor | None:
    """Return the tensor `name` of a module: the parameter itself if all of it is in place.

    One that is offloaded is read from memory or disk, to the device on which the module computes.
    One in shards is gathered, which all processes must do together. None if it has none.
    """
    value = getattr(module, name, None)
    if isinstance(value, DTensor):
        return value.full_tensor()
    if value is None or value.device != _META:
        return value
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name].to(device_of(module), value.dtype)
    return value


def is_offloaded(module: Any) -> bool:
    """Whether the tensors of a module are in memory or on disk until it runs."""
    return any(getattr(hook, "weights_map", None) is not None for hook in _hooks(module))


def shares_weight(head: Any, embedding: Any) -> bool:
    """Whether the weight of a head is that of an embedding.

    Offloading and shards keep no common tensor, so the values are compared there.
    """
    weights = head.weight, embedding.weight
    if weights[0] is weights[1]:
        return True
    if not any(isinstance(w, DTensor) or w.device == _META for w in weights):
        return weights[0].data_ptr() == weights[1].data_ptr()
    one, other = whole(head, "weight"), whole(embedding, "weight")
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one, other.to(one.device))


def _hooks(module: Any) -> Iterator[Any]:
    """The hooks of accelerate on a module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


# -- slow dtypes -----------------------------------------------------------------------------------
# A CPU without AVX-512 BF16 or AMX multiplies bfloat16 matrices with scalar code. A matrix product
# is timed, because what is fast depends on PyTorch's build, too.

_SLOW = 4.0  # times as long as in float32
_SIDE, _REPEATS = 256, 3  # of the product: 33 MFLOP, 30 ms where it is slow
_SMALL = 1_000_000  # parameters: smaller models are fast in any dtype


def slow_model(model: Any) -> str | None:
    """Return what to say of a model on a CPU that is slow in its dtype; None: it is not."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if sum(p.numel() for p in model.parameters()) < _SMALL:
        return None
    ratio = _seconds(weight.dtype) / max(_seconds(torch.float32), 1e-9)
    if ratio < _SLOW:
        return None
    name = str(weight.dtype).removeprefix("torch.")
    return (
        f"this CPU multiplies {name} matrices about {ratio:.0f} times as slowly as float32 ones; "
        "--dtype float32 is faster here, but its states differ by rounding from those of a target "
        f"that is served in {name}"
    )


def _seconds(dtype: torch.dtype) -> float:
    """Return the seconds of one matrix product, the shortest of a few."""
    values, times = torch.ones(_SIDE, _SIDE, dtype=dtype), []
    for _ in range(_REPEATS + 1):  # the first one also prepares kernels
        start = time.perf_counter()
        torch.mm(values, values)
        times.append(time.perf_counter() - start)
    return min(times)
