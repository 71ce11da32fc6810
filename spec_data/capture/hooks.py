"""Find the decoder blocks and the head of a causal LM, and capture states with forward hooks.

Final norm and head are also described as data: what the logits are, of which states.

Hooks are used instead of `output_hidden_states` because they keep only the wanted layers in memory.
Layer id k is the output of decoder block k, counted from 0; -1 is the embedding output (the input
of block 0).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spec_data.models.loading import LAYER_PATHS, shares_weight, whole
from spec_data.models.reading import text_config
from spec_data.models.streams import refuse_streams, streams_of
from spec_data.shards.errors import TargetError
from spec_data.shards.layer_ids import EMBEDDING, check_layers
from spec_data.shards.schema import FINAL, HeadSpec, layer_column

_NORM_PATHS = (
    "model.norm",
    "model.final_layernorm",
    "model.embedding_norm",
    "model.language_model.norm",
    "model.text_model.norm",
    "language_model.model.norm",
    "model.decoder.final_layer_norm",
    "transformer.ln_f",
    "gpt_neox.final_layer_norm",
    "backbone.norm_f",
)
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_FORMS = (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0))
_MULTIPLIED = {"hyperclovax"}  # model types whose logits_scaling is a factor; elsewhere a divisor


def module_at(model: Any, path: str) -> Any:
    """Return the module at a path such as "model.layers", None if there is none."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder blocks of a causal LM in order.

    They are in a ModuleList, or in a ModuleDict whose keys are numbers, in the order of these.

    Raises:
        TargetError: no known layout matches with as many blocks as the config has.
    """
    expected = getattr(text_config(getattr(model, "config", None)), "num_hidden_layers", None)
    for path in LAYER_PATHS:
        container, blocks = module_at(model, path), list[nn.Module]()
        if isinstance(container, nn.ModuleList):
            blocks = list(container)
        elif isinstance(container, nn.ModuleDict) and all(map(str.isdecimal, container)):
            blocks = [container[key] for key in sorted(container, key=int)]
        if blocks and expected in (None, len(blocks)):
            return blocks
    raise TargetError(
        f"{type(model).__name__}: no decoder blocks found (looked for {', '.join(LAYER_PATHS)}"
        f" with {expected} blocks); only decoder-only causal language models can be captured"
    )


def output_head(model: Any) -> Any:
    """Return the LM head module, whose input is the final hidden state; TargetError without one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or getattr(head, "weight", None) is None:
        raise TargetError(f"{type(model).__name__} has no LM head; is it a causal language model?")
    return head


def input_embedding(model: Any) -> nn.Module:
    """Return the module that embeds token ids; TargetError without one."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # transformers raises it where it finds none
        found = None
    if getattr(found, "weight", None) is None:
        raise TargetError(
            f"{type(model).__name__} has no input embedding that can be found: its class needs a "
            "get_input_embeddings that returns the module whose weight is the embedding"
        )
    embedding: nn.Module = found
    return embedding


@dataclass(kw_only=True)
class States:
    """The states of one forward, unshifted, in the dtype and on the device of the target.

    Either of all slots of a batch, [B, T, H] each, or of its N real tokens in order, [N, H].
    `layers` has the raw output of decoder block k by layer id (-1: the embedding output), `final`
    the input of the LM head (after the final norm).
    """

    layers: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor | None = None  # the model's own, V wide, if they were asked for

    def each(self, change: Callable[[Tensor], Tensor]) -> "States":
        """Return what `change` makes of every tensor."""
        layers = {k: change(v) for k, v in self.layers.items()}
        logits = None if self.logits is None else change(self.logits)
        return States(layers=layers, final=change(self.final), logits=logits)

    @staticmethod
    def joined(parts: "Sequence[States]") -> "States":
        """Return the states of several documents or calls, [n, H] each, in their order."""
        logits = [part.logits for part in parts if part.logits is not None]
        return States(
            layers={k: torch.cat([part.layers[k] for part in parts]) for k in parts[0].layers},
            final=torch.cat([part.final for part in parts]),
            logits=torch.cat(logits) if logits else None,
        )

    @property
    def columns(self) -> dict[str, Tensor]:
        """The layers and the final states, by the names of their columns."""
        return {layer_column(k): v for k, v in self.layers.items()} | {FINAL: self.final}


@contextmanager
def capturing(
    model: Any,
    layers: Sequence[int],
    *,
    skip_head: bool = True,
    device: torch.device | None = None,
) -> Iterator[States]:
    """Capture the outputs of `layers` and the input of the head during forwards in the context.

    The states are moved to `device`; None leaves each on the device of its block. Several residual
    streams become the state that engines make of them (`models.streams`).

    With `skip_head` the head receives only the first slot of each row ([B, 1, H]), so no [B, T, V]
    logits exist and the logits that the model returns are not usable. The hooks are removed when
    the context ends, also after an exception.

    Raises:
        TargetError: invalid layer ids (raised before any hook is registered); after a forward: what
            was captured is no state any more, or one of several.
    """
    blocks = decoder_layers(model)
    check_layers(layers, len(blocks))
    captured, versions = States(), dict[str, tuple[Tensor, int]]()
    streams = streams_of(text_config(getattr(model, "config", None)))

    def kept(name: str, states: Tensor) -> Tensor:
        if name in versions:
            raise TargetError(
                f"the target computes its {name} several times in one forward (it runs its blocks "
                "in a loop), so it has no one state per token to capture"
            )
        versions[name] = states, 0 if states.is_inference() else states._version
        states = streams.contract(states.detach())
        return states if device is None else states.to(device)

    def keep_output(layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, (tuple, list)) else output
        captured.layers[layer] = kept(f"output of block {layer}", states)

    def keep_embedding(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        captured.layers[EMBEDDING] = kept("embedding output", states)

    def keep_final(_module: nn.Module, args: tuple) -> tuple | None:
        captured.final = kept("final state", args[0])  # [B, T, H]
        return (args[0][:, :1], *args[1:]) if skip_head else None

    with ExitStack() as handles:
        for layer in layers:
            if layer == EMBEDDING:
                handle = blocks[0].register_forward_pre_hook(keep_embedding, with_kwargs=True)
            else:
                handle = blocks[layer].register_forward_hook(partial(keep_output, layer))
            handles.callback(handle.remove)
        handles.callback(output_head(model).register_forward_pre_hook(keep_final).remove)
        yield captured
    for name, (states, version) in versions.items():
        if not states.is_inference() and states._version != version:
            raise TargetError(
                f"the target changes its {name} in place after it was computed, so what is left is "
                "another state: change the code of the model (h = h + x instead of h += x)"
            )


def check_captured(captured: States, layers: Sequence[int], shape: tuple[int, int, int]) -> None:
    """Raise TargetError unless every layer was captured, in the shape (B, T, H)."""
    missing = [k for k in layers if k not in captured.layers]
    if missing or not captured.final.numel():
        raise TargetError(
            f"the forward produced no states for {missing or 'the final hidden'}: the target skips "
            "these blocks or runs them outside torch modules, so it cannot be captured"
        )
    states = {f"layer {k}": captured.layers[k] for k in layers} | {"final hidden": captured.final}
    for name, value in states.items():
        if value.dim() > 3:
            count = value.numel() // (shape[0] * shape[1] * shape[2])
            refuse_streams(name, count, "its config.json names no family with a known rule")
        if tuple(value.shape) != shape:
            raise TargetError(
                f"{name} has shape {tuple(value.shape)}, but a dataset holds one state of the "
                f"hidden size per token: {shape}"
            )


# -- several residual streams ----------------------------------------------------------------------

# Where families contract the streams of the last block, before the final norm.
_CONTRACTING = ("model.hc_head", "model.language_model.hc_head")
_ALLOWED_OF_STREAMS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@torch.no_grad()
def prove_streams(model: Any, ids: Tensor) -> None:
    """Prove, on tokens int64 [T], that residual streams are what they are taken for.

    The input of block 0 must be the embedding output once in each stream, and the streams of the
    last block, run through the contraction and the norm of the model itself, must be the input of
    its LM head. A target with one stream has nothing to prove.

    Raises:
        TargetError: they are not, or this release of transformers contracts them elsewhere.
    """
    streams = streams_of(text_config(model.config))
    if streams.contraction is None:
        return
    blocks, seen = decoder_layers(model), dict[str, Tensor]()

    def keep(name: str, states: Tensor) -> None:
        seen[name] = states.detach()

    def first(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        keep("input of block 0", args[0] if args else kwargs["hidden_states"])

    def last(_module: nn.Module, _args: Any, output: Any) -> None:
        keep("output of the last block", output[0] if isinstance(output, tuple) else output)

    with ExitStack() as handles:
        handles.callback(blocks[0].register_forward_pre_hook(first, with_kwargs=True).remove)
        handles.callback(blocks[-1].register_forward_hook(last).remove)
        embedding = input_embedding(model)
        named = embedding.register_forward_hook(lambda _m, _a, output: keep("embedding", output))
        handles.callback(named.remove)
        with capturing(model, (), skip_head=True) as captured:
            model(input_ids=ids[None], use_cache=False)
    contract = next((m for path in _CONTRACTING if (m := module_at(model, path)) is not None), None)
    norm = _final_norm(model)
    name, shape = type(model).__name__, (1, len(ids), streams.count, captured.final.shape[-1])
    for what in ("input of block 0", "output of the last block"):
        if tuple(seen[what].shape) != shape:
            raise TargetError(
                f"{name}: the {what} has shape {tuple(seen[what].shape)}, not that of "
                f"{streams.count} residual streams {shape}; is transformers another release?"
            )
    if contract is None or norm is None:
        raise TargetError(
            f"{name}: this release of transformers contracts the residual streams elsewhere "
            f"(looked for {', '.join(_CONTRACTING)}), so they cannot be proven; 5.23 is tested"
        )
    final = norm(contract(seen["output of the last block"]))
    pairs = {
        "the streams into block 0 are not the embedding output": (
            seen["input of block 0"],
            seen["embedding"].unsqueeze(2).expand(shape),
        ),
        "the streams of the last block do not become the final state": (final, captured.final),
    }
    allowed = _ALLOWED_OF_STREAMS.get(final.dtype, 2e-2)
    for problem, (actual, expected) in pairs.items():
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        if not float(error) <= allowed:
            raise TargetError(f"{name}: {problem} (error {float(error):.1e}); they are others")


# -- final norm and head as data -------------------------------------------------------------------


def _final_norm(model: Any) -> nn.Module | None:
    modules = (module_at(model, path) for path in _NORM_PATHS)
    return next((m for m in modules if getattr(m, "weight", None) is not None), None)


@torch.no_grad()
def read_norm(model: Any) -> dict[str, Any]:
    """Return `kind`, `eps` and `offset` of the final norm, as its outputs prove them; else {}."""
    module = _final_norm(model)
    numbers = (getattr(module, name, None) for name in _EPS)
    eps = next((number for number in numbers if isinstance(number, float)), None)
    weight = None if module is None else whole(module, "weight")
    if module is None or eps is None or weight is None:
        return {}
    generator = torch.Generator().manual_seed(0)
    # of the size of eps, so that another eps is seen
    x = torch.randn(4, len(weight), generator=generator) * max(eps, 1e-12) ** 0.5
    x = x.to(weight.device, weight.dtype)
    try:
        actual = module(x).float()
    except Exception:  # another signature
        return {}
    bias = whole(module, "bias")
    allowed = 8 * torch.finfo(weight.dtype).eps
    for kind, offset in _FORMS:
        wide = x.float()
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        expected = expected * (weight.float() + offset) + (0 if bias is None else bias.float())
        scale = expected.abs().amax().clamp_min(1e-6)
        if bool(((actual - expected).abs() <= allowed * scale).all()):
            return {"kind": kind, "eps": eps, "offset": offset}
    return {}


def check_head(head: Any) -> None:
    """Raise TargetError for a quantised LM head: logits are computed from the one that is stored.

    Its weight must be a plain tensor of a floating dtype of 2 or 4 bytes.
    """
    weight = head.weight
    kind = type(weight.data)
    plain = weight.is_floating_point() and weight.element_size() > 1
    wrapped = is_traceable_wrapper_subclass(weight.data)  # as of torchao; torch's own are DTensors
    if not plain or (wrapped and kind.__module__.partition(".")[0] != "torch"):
        raise TargetError(
            f"the LM head of this target is quantised ({kind.__name__}, {weight.dtype}); a dataset "
            "holds the head as it is served, so quantise the checkpoint without lm_head"
        )


def describe_head(model: Any) -> HeadSpec:
    """Return the head as data, from its module and the config fields that scale or cap logits."""
    head, config = output_head(model), text_config(model.config)
    check_head(head)
    vocab_size, hidden_size = head.weight.shape
    return HeadSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tied=shares_weight(head, input_embedding(model)),
        has_bias=getattr(head, "bias", None) is not None,
        scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: Any) -> float:
    """Return the factor on the logits, under the names that families have for it."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None):
            return float(getattr(config, name))
    derived = isinstance(getattr(type(config), "logits_scaling", None), property)
    if derived or not getattr(config, "logits_scaling", None):
        return 1.0  # a derived one (MiniCPM3) scales the states before the head, not the logits
    value = float(config.logits_scaling)
    return value if config.model_type in _MULTIPLIED else 1.0 / value


def head_parts(model: Any, tied: bool) -> dict[str, Tensor]:
    """Return embedding, head and final norm of a model, on the devices of their modules.

    embed_tokens [V, H]; lm_head [V, H] unless it is `tied` to the embedding; lm_head_bias [V] and
    norm [H] if the target has them.
    """
    head, norm = output_head(model), _final_norm(model)
    tensors = {
        "embed_tokens": whole(model.get_input_embeddings(), "weight"),
        "lm_head": None if tied else whole(head, "weight"),
        "lm_head_bias": whole(head, "bias"),
        "norm": None if norm is None else whole(norm, "weight"),
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
