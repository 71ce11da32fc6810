"""The target's own MTP block (multi-token prediction): its tensors in a checkpoint, its modules.

transformers drops these tensors when it loads a target, so they are read from the safetensors files
by their names. The block joins a token's embedding and the state before it, each after a norm, by a
projection `fc`; a decoder layer of the target's family and a norm follow. Our names are `enorm`,
`hnorm`, `fc`, `norm` and `block.*`, the latter as transformers names the layer's tensors, with all
experts in one tensor. Of several MTP blocks, the first one is read.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.models.families import block_count, text_table
from spec_data.models.weight_files import INDEX, weight_names
from spec_data.shards.errors import MissingError, TargetError, an
from spec_data.shards.files import weight_map

log = logging.getLogger(__name__)

MTP = "target/mtp.safetensors"
"""Of a dataset: the MTP tensors, as the checkpoint names them."""
_ATTENTION = "spec_train"
_COPIES = ("shared_head.head.", "embed_tokens.", "rotary_emb.")
"""Beside an MTP block; the target's own head and embedding are used instead."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Layout:
    """How checkpoints name an MTP block.

    Attributes:
        prefix: of all names; `{blocks}` is the number of decoder blocks.
        block: follows the prefix in the names of the decoder layer.
        names: theirs, by ours.
        states_first: whether `fc` reads [state ; embedding] instead of [embedding ; state].
    """

    prefix: str
    block: str
    names: dict[str, str]
    states_first: bool = False

    def whole(self, ours: str, blocks: int) -> str:
        """Return their name of one of our tensors."""
        module, _, kind = ours.rpartition(".")
        prefix = self.prefix.format(blocks=blocks)
        if module in self.names:
            return f"{prefix}{self.names[module]}.{kind}"
        return f"{prefix}{self.block}{ours.removeprefix('block.')}"


def _names(enorm: str, hnorm: str, fc: str, norm: str) -> dict[str, str]:
    return {"enorm": enorm, "hnorm": hnorm, "fc": fc, "norm": norm}


LAYOUTS = {
    "deepseek": Layout(  # also of GLM-4.5 and its successors
        "model.layers.{blocks}.", "", _names("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ),
    "qwen": Layout(  # Qwen3-Next, Qwen3.5
        "mtp.", "layers.0.", _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    ),
    "mimo": Layout(
        "model.mtp_layers.0.",
        "",
        _names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        states_first=True,
    ),
}
_SAME_BLOCK = {"mimo": "qwen2"}
"""Families that transformers does not know, and the one that has their blocks."""


_PARTS = {
    name.partition(".")[0] for layout in LAYOUTS.values() for name in layout.names.values()
} - {"norm", "fc"}


def is_mtp_part(name: str) -> bool:
    """Whether the module `name` of a block is one that only MTP blocks have."""
    return name in _PARTS


def find_layout(names: Iterable[str], blocks: int) -> Layout | None:
    """Return the layout of a checkpoint with these names; None: it has no MTP block."""
    given = set(names)
    return next((x for x in LAYOUTS.values() if x.whole("fc.weight", blocks) in given), None)


def _mtp_files(directory: Path, blocks: int) -> dict[str, Path]:
    """Return the file of every tensor of `mtp_tensors`."""
    files = weight_names(directory)
    layout = find_layout(files, blocks)
    if layout is None:
        return {}
    prefix = layout.prefix.format(blocks=blocks)
    own, copies = prefix + layout.block, tuple(prefix + name for name in _COPIES)
    heads = tuple(layout.whole(f"{name}.weight", blocks) for name in layout.names)
    return {
        name: file
        for name, file in files.items()
        if name in heads or (name.startswith(own) and not name.startswith(copies))
    }


def mtp_bytes(directory: Path, blocks: int) -> int:
    """Return the bytes of `mtp_tensors`, by headers; 0 where the weights are not here."""
    try:
        parts = _headers(_mtp_files(directory, blocks))
    except (TargetError, MissingError):
        return 0
    if not {kind for kind, _ in parts.values()} <= _WIDTHS.keys():  # quantised: none is copied
        return 0
    return sum(_WIDTHS[kind] * math.prod(shape) for kind, shape in parts.values())


_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def _headers(files: Mapping[str, Path]) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of tensors, given the file of each."""
    found = {}
    for file in set(files.values()):
        with safe_open(file, "pt") as weights:
            for name in (name for name in files if files[name] == file):
                part = weights.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    return found


def check_block(directory: Path, config: dict[str, Any]) -> None:
    """Check, by headers, that `fit mtp` can start from the MTP block of a checkpoint.

    `config` is the target's config.json. Where the weights are not here, their index is asked; if
    that is not here either, nothing is known.

    Raises:
        TargetError: there is no such block, it is quantised, or it is not that of this config.
    """
    index, blocks = directory / INDEX, block_count(config) or 0
    try:
        files, here = weight_names(directory), True
    except (TargetError, MissingError):
        files, here = weight_map(index, TargetError) if index.is_file() else {}, False
    if not files and not here:
        return
    instead = "Pass a checkpoint that has one, or leave mtp out of --for"
    if find_layout(files, blocks) is None:
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
        said = [f"{k} = {n}" for k, n in text_table(config).items() if k in keys and n]
        but = f"config.json says {said[0]}, but the" if said else "its"
        raise TargetError(
            f"--for mtp: {directory}: {but} weight files hold no MTP block of a known layout "
            f"(save_pretrained and many quantisers drop it). {instead}"
        )
    if not here:
        return
    parts = _headers(_mtp_files(directory, blocks))
    if odd := sorted({kind for kind, _ in parts.values()} - _WIDTHS.keys()):
        raise TargetError(
            f"--for mtp: {directory}: its MTP block is quantised ({', '.join(odd)}), and `fit mtp` "
            f"needs one in 16 or 32 bits. {instead}"
        )
    with torch.device("meta"):
        own, _ = own_tensors({n: torch.empty(shape) for n, (_, shape) in parts.items()}, blocks)
        block, norm = make_block(config)
        size = int(text_table(config)["hidden_size"])
        wanted = {f"block.{n}": value.shape for n, value in block.state_dict().items()}
        wanted |= {f"{n}.weight": norm().weight.shape for n in ("enorm", "hnorm", "norm")}
        wanted["fc.weight"] = torch.Size([size, 2 * size])
    found = {name: value.shape for name, value in own.items()}
    wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if wrong:
        raise TargetError(
            f"--for mtp: {directory}: its MTP block lacks {', '.join(wrong[:3])}, or has it in "
            f"another shape than config.json describes. {instead}"
        )


def mtp_tensors(directory: Path, blocks: int) -> dict[str, Tensor]:
    """Read the MTP tensors of a checkpoint of `blocks` decoder blocks, under its own names.

    Empty: there are none, or they are quantised, which is logged.

    Raises:
        TargetError, MissingError: as `weight_files.weight_files`.
    """
    files, tensors = _mtp_files(directory, blocks), dict[str, Tensor]()
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as weights:
            tensors |= {n: weights.get_tensor(n) for n in files if files[n] == file}
    odd = (t for t in tensors.values() if t.element_size() < 2 or not t.is_floating_point())
    kinds = sorted({str(t.dtype) for t in odd})  # int32: several weights in one number
    if kinds:
        log.warning(
            "warning[mtp]: the target's MTP block is quantised (%s) and not copied: `spec-train "
            "fit mtp` needs one in 16 or 32 bits",
            ", ".join(kinds),
        )
        return {}
    return tensors


def own_tensors(tensors: Mapping[str, Tensor], blocks: int) -> tuple[dict[str, Tensor], Layout]:
    """Return the tensors of `mtp_tensors` under our names, and their layout.

    Raises:
        TargetError: they have no known layout.
    """
    layout = find_layout(tensors, blocks)
    if layout is None:
        raise TargetError(f"no MTP block of a known layout among {', '.join(sorted(tensors)[:5])}")
    ours = {layout.whole(f"{name}.weight", blocks): f"{name}.weight" for name in layout.names}
    prefix = layout.prefix.format(blocks=blocks) + layout.block
    own: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in tensors.items():
        own_name = ours.get(name) or f"block.{name.removeprefix(prefix)}"
        if match := _EXPERT.fullmatch(own_name):
            kinds = experts.setdefault(match[1], {"gate": {}, "up": {}, "down": {}})
            kinds[match[3]][int(match[2])] = value
        else:
            own[own_name] = value
    for name, kinds in experts.items():
        gate, up, down = ([part[e] for e in sorted(part)] for part in kinds.values())
        pairs = zip(gate, up, strict=True)
        own[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        own[f"{name}.down_proj"] = torch.stack(down)
    return own, layout


def target_tensors(
    own: Mapping[str, Tensor], blocks: int, names: Iterable[str]
) -> dict[str, Tensor]:
    """Return our tensors under the names of a checkpoint, whose `names` decide their form.

    Raises:
        TargetError: the checkpoint has no MTP block, or lacks one of these tensors.
    """
    given = set(names)
    layout = find_layout(given, blocks)
    if layout is None:
        raise TargetError("the target's weight files hold no MTP block")
    out: dict[str, Tensor] = {}
    for ours, value in own.items():
        name = layout.whole(ours, blocks)
        if name in given or value.ndim < 3:
            out[name] = value
            continue
        folder, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for number, expert in enumerate(value):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                out[f"{folder}.{number}.{part}.weight"] = weight.contiguous()
    if lacking := sorted(out.keys() - given):
        raise TargetError(f"the target's weight files have no {', '.join(lacking[:5])}")
    return out


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, attend: Any, **_: Any
) -> tuple[Tensor, None]:
    """Let the caller of `make_block` attend; values of another size than keys are padded."""
    size = v.shape[-1]
    heads = attend(q, k, F.pad(v, (0, k.shape[-1] - size)))[..., :size]
    return heads.transpose(1, 2), None


def make_block(config: dict[str, Any]) -> tuple[nn.Module, Callable[[], nn.Module]]:
    """Make a decoder layer as the MTP block of a target has, and what makes a norm of its family.

    Its forward takes x [B, T, H], `position_embeddings` (cos and sin [B, T, r]) and `attend`, which
    gets rotated queries [B, h, T, d], keys and values [B, g, T, d] and returns heads [B, h, T, d].
    Weights are random. `config` is the target's config.json.

    Raises:
        TargetError: transformers does not know the family, or its layer attends in another way.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModel  # seconds of imports

    text = text_table(config)
    kind = str(text.get("model_type"))
    table = {name: value for name, value in text.items() if name != "model_type"}
    try:
        settings = AutoConfig.for_model(_SAME_BLOCK.get(kind, kind), **table)
        with torch.device("meta"):
            layers = AutoModel.from_config(settings).layers
    except (ValueError, AttributeError, TypeError) as error:
        raise TargetError(
            f"the MTP block of {an(kind)} target: transformers cannot make its layers ({error})"
        ) from None
    kinds = getattr(settings, "layer_types", None) or ["full_attention"] * len(layers)
    full = [i for i, name in enumerate(kinds) if name == "full_attention"] or [len(layers) - 1]
    AttentionInterface.register(_ATTENTION, _attend)
    settings._attn_implementation = _ATTENTION
    settings._experts_implementation = "eager"
    block = type(layers[full[-1]])(settings, full[-1])
    attention = getattr(block, "self_attn", None)
    problem = (
        "has no attention over all earlier tokens"
        if attention is None or getattr(attention, "sliding_window", None)
        else "selects the tokens that it sees"
        if hasattr(attention, "indexer")
        else "has attention sinks"
        if getattr(attention, "sinks", None) is not None
        else None
    )
    if problem is not None:
        raise TargetError(f"the MTP block of {an(kind)} target: its layer {problem}; not supported")
    for parameter in block.parameters():
        if parameter.ndim > 2:  # experts, which transformers leaves uninitialised
            nn.init.normal_(parameter, std=settings.initializer_range)

    def norm() -> nn.Module:
        made: nn.Module = type(block.input_layernorm)(
            settings.hidden_size, eps=settings.rms_norm_eps
        )
        return made

    return block, norm
