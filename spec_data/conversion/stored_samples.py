"""What every layout offers: samples with token ids, a loss mask and states, and its conventions.

Shapes: T tokens of a sample, n stored layers, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import ConfigError, TargetError
from spec_data.shards.layer_ids import as_block_inputs, from_block_inputs

OUTPUTS, INPUTS = "outputs", "inputs"
"""What the layer ids of a tool name: the output or the input of a block."""

AFTER, BEFORE = "after", "before"
"""Whether the last stored state is the one after or before the final norm."""


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """What a layout must know of the target: blocks, and the width of a state."""

    blocks: int
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How a tool stores states.

    Attributes:
        counting: what its layer ids name, `OUTPUTS` or `INPUTS`.
        stored_layers: its ids of the stored layers, in the order in which they are stored.
        final_norm: whether the last state is `AFTER` or `BEFORE` the final norm.
    """

    counting: str
    stored_layers: tuple[int, ...]
    final_norm: str

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer ids of this project (outputs of blocks), in the stored order."""
        if self.counting == INPUTS:
            return tuple(from_block_inputs(self.stored_layers))
        return self.stored_layers

    def in_their_counting(self, layers: Sequence[int]) -> list[int]:
        """Return ids of this project as the tool counts them."""
        return as_block_inputs(layers) if self.counting == INPUTS else list(layers)


@dataclass(frozen=True, kw_only=True)
class SampleTokens:
    """Token ids int64 [T] of a sample, and its loss mask uint8 [T], if it has one."""

    ids: Tensor
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SampleStates:
    """The states of a sample: `aux` [T, n, H] in the stored order, and `last` [T, H]."""

    aux: Tensor
    last: Tensor


class Layout(Protocol):
    """A directory that a tool wrote, opened. Reading a sample raises BadRow if it is malformed."""

    tool: str
    conventions: Conventions

    def __len__(self) -> int:
        """The number of samples."""

    def where(self, number: int) -> str:
        """Return the place of a sample, for messages: its file below the directory."""

    def files(self) -> Iterator[Path]:
        """Yield the files that hold the samples, in a fixed order."""

    def tokens(self, number: int) -> SampleTokens:
        """Read ids and mask of a sample, and check the shapes of its states.

        Raises:
            BadRow: the sample is malformed.
        """

    def states(self, number: int) -> SampleStates:
        """Read the states of a sample.

        Raises:
            BadRow: the sample is malformed.
        """


def chosen_layers(
    given: Sequence[int] | None, usual: Sequence[int], blocks: int, counting: str, tool: str
) -> tuple[int, ...]:
    """Return the ids of the stored layers: those of --stored-layers, else the usual ones.

    Args:
        given: ids of --stored-layers, in the counting of the tool; None: not given.
        usual: what the directory records, or the default of the tool.
        blocks: blocks of the target.
        counting: of the tool.
        tool: its name, for messages.

    Raises:
        ConfigError: an id is named twice, or the usual ones do not exist.
        TargetError: the target has no such layer.
    """
    ids = tuple(given if given is not None else usual)
    named = ",".join(map(str, ids))
    first = 0 if counting == INPUTS else -1
    last = first + blocks  # of the ids that mean the embedding to the output of the last block
    wrong = [k for k in ids if not first <= k <= last]
    if given is None and (wrong or not ids or len(set(ids)) != len(ids)):
        raise ConfigError(
            f"the usual layers of {tool} are {named or 'none'} for a target of {blocks} blocks, "
            "which cannot be; name them with --stored-layers, as they were given to the tool"
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"--stored-layers {named}: a layer is named twice")
    if wrong:
        raise TargetError(
            f"layer {wrong[0]} in the counting of {tool} (ids name the {counting} of blocks, "
            f"{first} to {last}): the target has {blocks} blocks; name the layers with "
            "--stored-layers, or give the target that was captured"
        )
    return ids


def _dense(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise BadRow(f"{name}: missing, or no dense tensor")
    return value


def one_row(value: object, name: str) -> Tensor:
    """Return a tensor [T] that may be stored as [1, T].

    Raises:
        BadRow: it is no tensor of one row, or not of integers.
    """
    value = _dense(value, name)
    if value.ndim == 2 and value.shape[0] == 1:
        value = value[0]
    if value.ndim != 1 or not len(value):
        raise BadRow(f"{name} has shape {list(value.shape)}, expected [T]")
    if value.is_floating_point() or value.is_complex():
        raise BadRow(f"{name} has dtype {value.dtype}, expected integers")
    return value


def sample_tokens(ids: object, mask: object) -> SampleTokens:
    """Check ids and mask (None: there is none) of a sample.

    Raises:
        BadRow: a wrong shape, or lengths that differ.
    """
    tokens = one_row(ids, "input_ids").long()
    if mask is None:
        return SampleTokens(ids=tokens, mask=None)
    kept = one_row(mask, "loss_mask")
    if len(kept) != len(tokens):
        raise BadRow(f"loss_mask has {len(kept)} entries for {len(tokens)} tokens")
    return SampleTokens(ids=tokens, mask=kept.to(torch.int64))


def joined_states(aux: object, last: object, tokens: int, layers: int, hidden: int) -> SampleStates:
    """Check states that are stored as [T, n * H] (or [1, T, n * H]) and [T, H]; return views.

    Raises:
        BadRow: a wrong shape or dtype.
    """
    joined = _state(aux, "the aux states", tokens, layers * hidden)
    return SampleStates(
        aux=joined.unflatten(-1, (layers, hidden)),
        last=_state(last, "the last state", tokens, hidden),
    )


def _state(value: object, name: str, tokens: int, width: int) -> Tensor:
    value = _dense(value, name)
    if value.ndim == 3 and value.shape[0] == 1:
        value = value[0]
    if tuple(value.shape) != (tokens, width):
        raise BadRow(
            f"{name}: shape {list(value.shape)}, expected [{tokens}, {width}] for {tokens} tokens"
        )
    if not value.is_floating_point():
        raise BadRow(f"{name}: dtype {value.dtype}, expected floating point")
    return value
