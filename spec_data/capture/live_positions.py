"""Read a target's rotary embeddings and final norm from its live modules, and prove what was read.

One short forward shows which modules with inverse frequencies run, and with which arguments. Each
is then called with sampled positions, up to the longest document. The cosines and sines that it
returns must equal those computed from the frequencies that are stored.

Shapes: P sampled positions, r rotary dimensions.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.capture.hooks import read_norm
from spec_data.models.loading import device_of
from spec_data.models.reading import text_config
from spec_data.shards.position_data import FULL, LEARNED, LONG, ROPE, SHORT, Positions, RopeTable

_TOKENS = 4  # of the short forward
_FREQUENCIES = "inv_freq"
_EVENLY = 64  # sampled positions, besides the first ones and the powers of two
_LONGROPE = ("longrope", "longrope, fixed")  # as transformers and `models.loading` name it


class _NotProvenError(Exception):
    """What was read from the modules is not what they compute."""


@dataclass(frozen=True)
class _Call:
    """A module that ran in the short forward, and its arguments."""

    module: Any  # with buffers named `inv_freq`
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return *self.arguments, *self.keywords.values()

    @property
    def layer_type(self) -> str | None:
        """The kind of layer that it was called for."""
        return next((v for v in self.values if isinstance(v, str)), None)

    @property
    def has_positions(self) -> bool:
        return any(isinstance(v, Tensor) and not v.is_floating_point() for v in self.values)

    def at(self, positions: Tensor) -> Any:
        """Call the module at `positions`, int64 [P], with other inputs in float32."""

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value.float()
            return positions.to(value.device, value.dtype).expand(*value.shape[:-1], len(positions))

        keywords = {name: changed(value) for name, value in self.keywords.items()}
        return self.module(*map(changed, self.arguments), **keywords)


@torch.no_grad()
def read_positions(model: Any, length: int) -> Positions:
    """Read positions and final norm of a target; a failed proof is part of the result.

    Args:
        model: a causal LM in evaluation mode, with the longrope factors of the capture.
        length: tokens of the longest document.
    """
    positions = Positions(norm=read_norm(model))
    limit = getattr(text_config(model.config), "max_position_embeddings", None) or 0
    count = max(length, int(limit))
    try:
        calls, without, learned = _calls(model)
    except Exception as error:  # a family whose forward needs more than token ids
        reason = f"a forward of {_TOKENS} tokens failed ({type(error).__name__}: {error})"
        return replace(positions, reason=reason)
    if not calls and not without:
        if learned:
            return replace(positions, kind=LEARNED, proven=True)
        return replace(positions, reason="no module with inverse frequencies ran")
    positions = replace(positions, kind=ROPE)
    if not calls:
        reason = f"{without[0]} has inverse frequencies, but is called without positions"
        return replace(positions, reason=reason)
    worst, tables = 0.0, dict[str, RopeTable]()
    try:
        for call in calls:
            name = call.layer_type or FULL
            table, difference = _proven_table(call, count)
            if name in tables and not tables[name].equals(table):
                raise _NotProvenError(f"two modules for {name} have different frequencies")
            tables[name], worst = table, max(worst, difference)
    except _NotProvenError as error:
        return replace(positions, reason=str(error))
    except Exception as error:
        reason = f"a rotary module cannot be called with sampled positions ({error})"
        return replace(positions, reason=reason)
    return replace(positions, proven=True, proven_to=count, difference=worst, tables=tables)


def _calls(model: Any) -> tuple[list[_Call], list[str], bool]:
    """Run a few tokens, and watch modules with inverse frequencies and embeddings.

    Returns:
        The calls of rotary modules with positions, the names of rotary modules that were called
        without, and whether an embedding of positions ran.
    """
    calls: list[_Call] = []
    without: list[str] = []
    learned, handles = [], []
    words = model.get_input_embeddings()
    plain = torch.arange(_TOKENS, device=device_of(words))

    def keep(module: nn.Module, arguments: tuple, keywords: dict) -> None:
        call = _Call(module, arguments, keywords)
        if not call.has_positions:
            without.append(type(module).__name__)
        elif (module, call.layer_type) not in [(c.module, c.layer_type) for c in calls]:
            calls.append(call)

    def keep_learned(_module: nn.Module, arguments: tuple) -> None:
        ids = arguments[0] if arguments else None
        if isinstance(ids, Tensor) and ids.shape[-1:] == plain.shape:
            learned.append(bool((ids.diff() == 1).all()))

    for module in model.modules():
        if any(name.endswith(_FREQUENCIES) for name, _ in module.named_buffers(recurse=False)):
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        elif isinstance(module, nn.Embedding) and module is not words:
            handles.append(module.register_forward_pre_hook(keep_learned))
    try:
        # ids that do not ascend: no embedding of them is one of positions
        ids = plain.flip(0)[None] % text_config(model.config).vocab_size
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    # copies: a rotary module may change its frequencies when it is called with long positions
    copies = [replace(call, module=copy.deepcopy(call.module)) for call in calls]
    return copies, without, any(learned)


def sampled_positions(count: int) -> Tensor:
    """Return positions below `count`: the first ones, powers of two and even steps, int64 [P]."""
    powers = [2**k + step for k in range(count.bit_length()) for step in (-1, 0)]
    steps = [i * (count - 1) // _EVENLY for i in range(_EVENLY + 1)]
    return torch.tensor(sorted({p for p in (*range(16), *powers, *steps) if p < count}))


def _proven_table(call: _Call, count: int) -> tuple[RopeTable, float]:
    """Return the table of a rotary module, and the largest difference of a cosine or sine.

    A module with longrope takes the short or the long frequencies by the largest position of a
    call, unless the capture has fixed the choice: then the live ones are those.
    """
    module, prefix = call.module, f"{call.layer_type}_" if call.layer_type else ""
    name = prefix + _FREQUENCIES if hasattr(module, prefix + _FREQUENCIES) else _FREQUENCIES
    live = getattr(module, name).detach().float().cpu().clone()  # calls may change it
    factor = float(getattr(module, prefix + "attention_scaling", 1.0))
    sample, kind = sampled_positions(count), getattr(module, "rope_type", None)
    worst = _difference(call, sample, live, factor) if kind != _LONGROPE[0] else 0.0
    if kind not in _LONGROPE:
        return RopeTable(inv_freq=live, factor=factor), worst
    limit = int(module.config.rope_parameters["original_max_position_embeddings"])
    module.rope_type = _LONGROPE[0]
    short, both = sample[sample < limit], []
    for positions in (short, torch.cat([short, torch.tensor([limit])])):
        call.at(positions)
        both.append(module.inv_freq.detach().float().cpu().clone())
        worst = max(worst, _difference(call, positions, both[-1], factor))
    fixed = [n for n, f in zip((SHORT, LONG), both, strict=True) if torch.equal(f, live)]
    if kind == _LONGROPE[1] and not fixed:
        raise _NotProvenError("the frequencies of the capture are neither short nor long ones")
    factors = fixed[0] if kind == _LONGROPE[1] else None
    table = RopeTable(
        inv_freq=both[0], factor=factor, long_inv_freq=both[1], limit=limit, factors=factors
    )
    return table, worst


def _difference(call: _Call, positions: Tensor, inv_freq: Tensor, factor: float) -> float:
    """Return the largest difference of a module from its frequencies [r/2] at `positions` [P]."""
    angles = positions.float()[:, None] * inv_freq  # [P, r/2]
    # float32 rounds an angle once, and some families compute it in another order
    allowed = 4 * torch.finfo(torch.float32).eps * (1 + angles.abs()) * max(1.0, abs(factor))
    expected = (angles.cos() * factor, angles.sin() * factor)
    worst = 0.0
    for actual, value in zip(_halves(call.at(positions), len(inv_freq)), expected, strict=True):
        gap = (actual.float().cpu() - value).abs()
        if bool((gap > allowed).any()) or not bool(torch.isfinite(gap).all()):
            row, column = divmod(int((gap / allowed).nan_to_num(torch.inf).argmax()), gap.shape[1])
            raise _NotProvenError(
                f"at position {int(positions[row])}, dimension {column}, cos or sin of the rotary "
                f"module differ by {float(gap[row, column]):.1e} from those of its inverse "
                "frequencies"
            )
        worst = max(worst, float(gap.max()))
    return worst


def _halves(result: Any, size: int) -> list[Tensor]:
    """Return cos and sin, one column per frequency, [P, r/2] each, of what a module returned.

    Families return every angle once, twice side by side, or twice in turn; or complex numbers.
    """
    if isinstance(result, Tensor) and result.is_complex():
        result = (result.real, result.imag)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise _NotProvenError(f"its rotary module returns {type(result).__name__}, no cos and sin")
    halves = []
    for part in result:
        rows = part.reshape(-1, *part.shape[-2:])  # of a batch, or of mrope
        value = rows[0]  # [P, r/2] or [P, r]
        if not bool((rows == value).all()):
            raise _NotProvenError("its rotary module returns other values for equal positions")
        forms = (value,)
        if value.shape[-1] == 2 * size:
            pairs = (value[:, :size], value[:, size:]), (value[:, ::2], value[:, 1::2])
            forms = tuple(first for first, second in pairs if torch.equal(first, second))
        if not forms or forms[0].shape[-1] != size:
            raise _NotProvenError(f"its rotary module returns {value.shape[-1]} columns")
        halves.append(forms[0])
    return halves
