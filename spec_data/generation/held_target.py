"""A target that a Python program has loaded: whose files it is of, and how it is run.

A dataset names its target by the hash of weight files. So the model is compared with the files that
it was loaded from and, if it is no longer what they hold, with a copy that is saved for a while:
the same weights, bit for bit, and the same logits. Then it is captured from as it is, on its device
and in its dtype, and left as it was found.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spec_data.capture.backend import TargetBackend
from spec_data.capture.model import Target
from spec_data.generation.options import AUTO, CaptureOptions
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.models.devices import DTYPES
from spec_data.models.identify import TargetFiles, read_target, tokenizer_facts
from spec_data.models.loading import chosen_factors, devices_of, load_model, without_bars
from spec_data.models.resolve import cached_model
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import ConfigError, MissingError, RunError, TargetError, an
from spec_data.shards.files import cache_directory
from spec_data.terminal.config import flag
from spec_data.terminal.given import changed
from spec_data.terminal.memory_models import pair_of

logger = logging.getLogger(__name__)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OF_FILES = ("revision", "device_map", "max_memory", "tp_plan", "context_parallel")
"""Options about how weights are found and placed."""
_TRIED = 16  # tokens on which logits are compared
_ROUNDING = {torch.float32: 1e-3}  # relative, of logits; other dtypes, and other devices, below
_COARSE = 5e-2
_LEAST = 1e-30
_SPARE = 1 << 20  # bytes beside the weights
CONFIG = "config.json"


@dataclass(frozen=True)
class HeldTarget:
    """A loaded model, and the files that hold what it computes.

    Attributes:
        files: of the directory it was loaded from, or of a copy that lasts as long as the run.
        name: the target as a command line names it; None: no directory that stays has it.
        options: those of the run, with its device, dtype and attention.
    """

    model: PreTrainedModel
    files: TargetFiles
    name: str | None
    options: CaptureOptions

    def load(self, setup: Setup, plan: Plan) -> TargetBackend:
        """Return the model under hooks, as `generation.proof.load_target` does."""
        longest = int(plan.lengths.max())
        factors = chosen_factors(setup.options.rope_factors, setup.model_config, longest)
        return Target(self.model, setup.layers, rope_factors=factors)


@contextmanager
def held_target(name: str, options: CaptureOptions, engine: str) -> Iterator[HeldTarget | None]:
    """Give the model that is kept under a name, frozen until the block ends; None: it is a path.

    Raises:
        ConfigError: an option contradicts it. TargetError: a model that cannot be captured from, or
            that no files hold. RunError: no room for the copy.
    """
    pair = pair_of(name)
    if pair is None:
        yield None
        return
    model, tokenizer = pair
    _check_model(model)
    options = _as_loaded(model, options, engine)
    folder = cache_directory("loaded")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, _frozen(model):
        yield _find(model, tokenizer, options, Path(scratch))


# -- what can be used ------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    """Raise TargetError unless this is a whole causal LM of transformers, in plain weights."""
    kind = type(model).__name__
    problem = ""
    if hasattr(model, "_orig_mod"):
        problem = "a compiled model; pass the one inside: model._orig_mod"
    elif hasattr(model, "merge_and_unload"):
        problem = "a model of peft; merge its adapter: model.merge_and_unload()"
    elif not isinstance(model, PreTrainedModel):
        inside = isinstance(getattr(model, "module", None), nn.Module)
        advice = "pass the model inside: accelerator.unwrap_model(model), or model.module"
        problem = advice if inside else "no model of transformers; pass one, or a directory"
    elif getattr(model, "_hf_peft_config_loaded", False):
        problem = "a model with an adapter; merge it with peft: merge_and_unload()"
    elif getattr(model, "hf_quantizer", None) or hasattr(model.config, "quantization_config"):
        problem = "quantised in memory; pass the directory or Hub id that it was loaded from"
    elif model.get_output_embeddings() is None:
        problem = "no LM head; load it with AutoModelForCausalLM"
    elif any(isinstance(p, DTensor) or p.is_meta for p in model.parameters()):
        problem = (
            "only a part of its weights is in memory (sharded or offloaded); pass its directory, "
            "with device_map or tp_plan"
        )
    elif _dtype(model) not in _NAMES:
        problem = f"{_dtype(model)} weights; convert it to {', '.join(_NAMES.values())}"
    if problem:
        raise TargetError(f"--target: {an(kind)} in memory: {problem}")


def _as_loaded(model: PreTrainedModel, options: CaptureOptions, engine: str) -> CaptureOptions:
    """Return the options with the device of a model; raise ConfigError where they contradict it."""
    if engine != "local" or options.backend != "hf":
        option = f"--engine {engine}" if engine != "local" else f"--backend {options.backend}"
        raise ConfigError(f"{option} loads the target itself; pass the directory of the model")
    for name in _OF_FILES:
        if name in options.given:
            raise ConfigError(
                f"{flag(name)}: the target is loaded already; leave it out, or pass the directory "
                "of the model"
            )
    devices = devices_of(model)
    own = str(devices[0]) if len(devices) == 1 else "auto"
    dtype, attention = _NAMES[_dtype(model)], model.config._attn_implementation
    stated = {"dtype": dtype, "attn": attention, "device": ", ".join(map(str, devices))}
    for name, value in stated.items():
        asked = getattr(options, name)
        if name not in options.given or asked in ("auto", value):
            continue
        if name == "device" and own != "auto" and _same_device(asked, own):
            continue
        raise ConfigError(
            f"{flag(name)} {asked}: the loaded model has {value}; leave the option out, or load "
            "the model so"
        )
    return changed(options, device=own)


def _same_device(asked: str, own: str) -> bool:
    """Whether a device is that of a model; one without a number is any of its kind."""
    kind, _, number = asked.partition(":")
    return own.partition(":")[0] == kind and (not number or asked == own)


def _dtype(model: Any) -> torch.dtype:
    """Return the dtype of the head, in which states are captured."""
    dtype: torch.dtype = model.get_output_embeddings().weight.dtype
    return dtype


# -- left as it was --------------------------------------------------------------------------------


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Put a model in evaluation mode without gradients, and back into what it was."""
    training = [(module, module.training) for module in model.modules()]
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    # compiled code does not call the hooks that read states
    compiled = [(m, c) for m in model.modules() if (c := m._compiled_call_impl) is not None]
    ropes = [
        (module, dict(rope_type=kind), module.inv_freq.clone())
        for module in model.modules()
        if (kind := getattr(module, "rope_type", None)) == "longrope"
    ]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        model.eval().requires_grad_(False)
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for parameter, asked in learned:
            parameter.requires_grad_(asked)
        for module, call in compiled:
            module._compiled_call_impl = call
        for module, kind, frequencies in ropes:
            module.inv_freq.copy_(frequencies)
            vars(module).update(kind)


# -- whose weights these are -----------------------------------------------------------------------


def _find(
    model: PreTrainedModel, tokenizer: Any, options: CaptureOptions, scratch: Path
) -> HeldTarget:
    """Return the model with the first directory that holds it.

    Raises:
        TargetError: neither the files it was loaded from nor a saved copy compute what it does.
    """
    called, trust = model.name_or_path, options.trust_remote_code
    kwargs = options.chat_template_kwargs or {}
    words = scratch / "tokenizer"
    tokenizer.save_pretrained(words)
    given = load_tokenizer(words, trust)
    original, why = _loaded_from(model), "nothing says which files it was loaded from"
    if original is not None:
        stored = _Stored(model, original, trust)
        if not (why := stored.difference):
            revision = None if (Path(called) / CONFIG).is_file() else model.config._commit_hash
            files = read_target(called, revision, kwargs, trust, weights=True)
            if tokenizer_facts(given) != tokenizer_facts(files.tokenizer):
                logger.info("the tokenizer in memory is not that of %s, and is used", called)
                files = files.with_tokenizer(given)
            return HeldTarget(model, files, called, stored.settled(options))
        del stored  # its memory, before that of the next
    copy = scratch / (Path(called).name or type(model).__name__)
    _save(model, copy)
    tokenizer.save_pretrained(copy)
    stored = _Stored(model, copy, trust)
    if stored.difference:
        raise TargetError(
            f"--target: {an(type(model).__name__)} in memory: what save_pretrained writes of it is "
            f"another model ({stored.difference}). Its code or its modules were changed in this "
            "process, so no files compute its states: load it again, or pass a directory"
        )
    logger.warning(
        "warning[unsaved-target]: the target is in memory alone (%s). The dataset has its hash; "
        "save model and tokenizer with save_pretrained: verify and eval ask for their files",
        why,
    )
    files = read_target(str(copy), None, kwargs, trust, weights=True)
    return HeldTarget(model, files, None, stored.settled(options))


def _loaded_from(model: PreTrainedModel) -> Path | None:
    """Return the directory that a model was loaded from, if it is on this machine."""
    called = model.name_or_path
    if not called or (Path(called) / CONFIG).is_file():
        return Path(called) if called else None
    return cached_model(called, model.config._commit_hash)


def _save(model: PreTrainedModel, folder: Path) -> None:
    needed = sum(p.numel() * p.element_size() for p in model.parameters()) + _SPARE
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise RunError(
            f"--target: the model in memory is saved for a while in {folder.parent.parent}, which "
            f"has {free:,} bytes left of {needed:,}; set SPEC_DATA_CACHE to another disk, or save "
            "it yourself and pass the directory"
        )
    with without_bars():
        model.save_pretrained(folder)


class _Stored:
    """What the files of a directory make of a loaded model.

    Attributes:
        difference: how the loaded one differs from it, in words; "": nohow.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, trust: bool) -> None:
        self.attention, dtype = model.config._attn_implementation, _dtype(model)
        try:
            other = load_model(str(folder), device="cpu", trust=trust)
            self.is_own_dtype = _dtype(other) == dtype
            if not self.is_own_dtype:
                del other
                other = load_model(str(folder), dtype=dtype, device="cpu", trust=trust)
        except (TargetError, MissingError) as error:
            self.difference = str(error)
            return
        self.is_own_attention = other.config._attn_implementation == self.attention
        self.dtype = _NAMES[dtype]
        name = _first_other_tensor(model.state_dict(), other.state_dict())
        if name:
            self.difference = f"{name} is not as in {folder.name}"
        else:
            self.difference = _other_logits(model, other)

    def settled(self, options: CaptureOptions) -> CaptureOptions:
        """Return the options by which the files run as the model does; "auto" is their own."""
        found: dict[str, Any] = {}
        if options.dtype == AUTO and not self.is_own_dtype:
            found["dtype"] = self.dtype
        if options.attn == AUTO and not self.is_own_attention:
            found["attn"] = self.attention
        return changed(options, **found)


def _first_other_tensor(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Return the name of a tensor that only one of two models has, or that differs in a bit."""
    if names := sorted(one.keys() ^ other.keys()):
        return names[0]
    for name, value in one.items():
        value, stored = value.detach().cpu(), other[name]
        if value.dtype != stored.dtype or value.shape != stored.shape:
            return name
        pair = (x.contiguous().flatten().view(torch.uint8) for x in (value, stored))
        if not torch.equal(*pair):
            return name
    return ""


@torch.no_grad()
def _other_logits(model: PreTrainedModel, other: Any) -> str:
    """Say by how much a few logits differ from those of a model of equal weights; "": by rounding.

    Another device sums in another order, and may choose other experts at a token: there, the error
    is that of the median token.
    """
    embedding = model.get_input_embeddings().weight
    ids = (torch.arange(_TRIED) * 7919 + 1).remainder(len(embedding))[None]  # [1, T]
    own, wanted = (
        m(input_ids=ids.to(device), use_cache=False, return_dict=True).logits[0].float().cpu()
        for m, device in ((model, embedding.device), (other, "cpu"))
    )
    errors = (own - wanted).abs().amax(-1) / wanted.abs().amax(-1).clamp(min=_LEAST)  # [T]
    if embedding.device.type == "cpu":
        error, allowed = float(errors.max()), _ROUNDING.get(embedding.dtype, _COARSE)
    else:
        error, allowed = float(errors.median()), _COARSE
    text = f"its logits differ from those of the same weights by {error:.1e} of the largest"
    return "" if error <= allowed else text
