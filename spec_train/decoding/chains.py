"""Speculative decoding with a real target: one sequence, up to K drafted tokens, KV caches.

In: an HF causal LM, a draft's drafter, prompt ids. Out: the response and what happened in every
round. The output is the target's own, whatever the draft proposes: greedy decoding is equal
token for token to decoding without a draft, and sampling has the target's distribution exactly
(see sampling.py).

Counting. A round is one verification forward of the target; the prefill and the token it gives are
not rounds. A round emits its accepted drafts and the token the target itself adds; what the end of
the response (stop token or limit) cuts off is not emitted. So tokens = 1 + sum of emitted, and the
acceptance length, emitted / rounds, is never flattered by tokens that nobody received.

Shapes: n prompt tokens, K drafts of a round, V / Vd target / draft vocabulary, A captured layers
times the target's hidden size. The target's cache keeps every layer at full length, sliding ones
too: a sliding cache that already dropped old keys cannot be rolled back. That costs memory beyond
the window and nothing else; models with a running state are refused.
"""

import inspect
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.schema import FINAL, layer_column
from spec_train.drafts.protocol import Drafter
from spec_train.sampling import Sampler

_CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}


def num_target_layers(model: Any) -> int:
    """Decoder blocks of an HF model."""
    return int(model.config.get_text_config().num_hidden_layers)


def check_target(model: Any, layers: Iterable[int]) -> None:
    """Refuse targets whose cache cannot be rolled back and layers whose states HF cannot give.

    Raises:
        TargetError: the model keeps a running state.
        DraftError: the draft reads a layer that the target lacks, or its last one.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= _CROPPABLE:
        strange = ", ".join(sorted(kinds - _CROPPABLE)) or "a recurrent state"
        raise TargetError(
            f"{type(model).__name__} has layers with {strange}: rejected drafts cannot be taken "
            "back out of its cache here. Evaluate against the dataset instead (--data)"
        )
    last = num_target_layers(model) - 1
    for layer in layers:
        if layer == last:
            raise DraftError(
                f"the draft reads layer id {layer}, the last of the target's {last + 1} blocks. "
                "Transformers gives that layer's states only after the final norm, and serving "
                f"engines disagree about it too; fit a draft on layers below {last}"
            )
        if not -1 <= layer < last:
            raise DraftError(f"the draft reads layer id {layer}; the target has 0 to {last}")


class TargetSession:
    """One sequence in the target: forward appends to its cache, rollback takes tokens back."""

    def __init__(self, model: Any, columns: Sequence[str] = ()) -> None:
        """Start empty. With `columns` (as datasets name them), forward also gives their states."""
        self._model = model
        blocks = num_target_layers(model)
        # states[k] enters block k, so block k's output is k + 1; the last ones enter the head
        place = {layer_column(k): k + 1 for k in range(-1, blocks - 1)} | {FINAL: blocks}
        self._places = [place[name] for name in columns]
        # A prompt's logits fill [n, V]; models that can give the last row alone are asked to.
        known = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # Without a config, every layer's cache is full length (see the module's docstring); the
        # model still masks by its own windows.
        self._cache = DynamicCache()

    def forward(
        self, tokens: Sequence[int] | Tensor, last_only: bool = False, **layout: Any
    ) -> tuple[Tensor, Any]:
        """Append t tokens: logits [t, V] and states [1, t, A] (None without columns).

        With `last_only` the logits may be those of the last token alone, [1, V]. `layout`: the
        model's arguments for tokens that are no sequence (see tree_masks).
        """
        device = self._model.device
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        output = self._model(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(self._places),
            **(self._last_only if last_only else {}),
            **layout,
        )
        if not self._places:
            return output.logits[0], None
        states = output.hidden_states
        if len(states) != num_target_layers(self._model) + 1:
            raise TargetError(
                f"{type(self._model).__name__} gives {len(states)} hidden states for "
                f"{num_target_layers(self._model)} blocks: its layers cannot be told apart"
            )
        return output.logits[0], torch.cat([states[k] for k in self._places], dim=-1)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count:
            self._cache.crop(-count)  # negative: the number to remove, in every version


@dataclass(frozen=True, kw_only=True)
class Round:
    """One verification. `accepted` of the `drafted` tokens were emitted; `tried` is the number of
    depths whose outcome counted: accepted, plus one when the next draft was rejected."""

    drafted: int
    tried: int
    accepted: int
    emitted: int


@dataclass(kw_only=True)
class Generation:
    """A response, stop token included. `rounds` stays empty in plain decoding."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    draft_passes: int = 0  # forwards of the draft
    seconds: float = 0.0
    stopped: bool = False  # by a stop token, not by the limit


def clock(device: torch.device) -> float:
    """Seconds, when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def decode_plain(
    model: Any, prompt: Sequence[int], sampler: Sampler, limit: int, stop: Collection[int] = ()
) -> Generation:
    """Decode up to `limit` tokens with the target alone, one forward each."""
    started = clock(model.device)
    session = TargetSession(model)
    logits, _ = session.forward(prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    while tokens[-1] not in stop and len(tokens) < limit:
        logits, _ = session.forward(tokens[-1:])
        tokens.append(sampler.first(logits[-1]))
    seconds = clock(model.device) - started
    return Generation(tokens=tokens, seconds=seconds, stopped=tokens[-1] in stop)


@torch.inference_mode()
def decode_speculative(
    model: Any,
    drafter: Drafter,
    columns: Sequence[str],
    prompt: Sequence[int],
    sampler: Sampler,
    limit: int,
    draft_tokens: int,
    stop: Collection[int] = (),
) -> Generation:
    """Decode up to `limit` tokens with up to `draft_tokens` drafts a round.

    `drafter` is fresh; `columns` are the states it reads, the draft's `state_columns`. A round near
    the limit drafts no more than could still be emitted, which changes no output.
    """
    started = clock(model.device)
    session = TargetSession(model, columns)
    logits, states = session.forward(prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    known = [*prompt[1:], tokens[0]]  # tokens one position after each of the states
    rounds: list[Round] = []
    while tokens[-1] not in stop and len(tokens) < limit:
        count = min(draft_tokens, limit - len(tokens) - 1)
        drafted = torch.empty(0, dtype=torch.long, device=model.device)
        q: list[Any] = []
        if count:
            drafted, q = drafter.propose(known, states, count, sampler)
            count = len(drafted)
        last = torch.tensor(tokens[-1:], device=model.device)
        logits, states = session.forward(torch.cat([last, drafted]))
        proposed, accepted, chosen = sampler.verify(drafted, q, logits)
        session.rollback(count - accepted)
        known, states = [*proposed[:accepted], chosen], states[:, : accepted + 1]
        emitted = until_stop(known, stop)
        rounds.append(
            Round(
                drafted=count,
                tried=min(accepted + 1, count, len(emitted)),
                accepted=min(accepted, len(emitted)),
                emitted=len(emitted),
            )
        )
        tokens.extend(emitted)
    seconds = clock(model.device) - started
    return Generation(
        tokens=tokens,
        rounds=rounds,
        draft_passes=drafter.passes,
        seconds=seconds,
        stopped=tokens[-1] in stop,
    )


def until_stop(tokens: list[int], stop: Collection[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position at which two greedy responses differ, and what the target says there."""

    index: int
    plain: int
    speculative: int
    gap: float  # logit of `plain` minus logit of `speculative`, decoding token by token
    noise: float  # largest change of any logit between two shapes of the same plain forward
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """Whether the dtype's own noise explains the difference."""
        return abs(self.gap) <= self.tolerance


@torch.inference_mode()
def examine_difference(
    model: Any, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Give the first difference of two greedy responses; None when they are equal.

    The noise is measured without any draft: the same position computed token by token and in one
    forward. The tolerance is a few times that, and never more than 64 units of rounding at the
    size of the logits, so that a wrong cache cannot pass for noise.
    """
    if list(plain) == list(speculative):
        return None
    shared = zip(plain, speculative, strict=False)
    index = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    if index is None:  # one is the beginning of the other: no arithmetic explains that
        index = min(len(plain), len(speculative))
        ends = [list(t[index : index + 1]) or [-1] for t in (plain, speculative)]
        return Difference(
            index=index,
            plain=ends[0][0],
            speculative=ends[1][0],
            gap=float("inf"),
            noise=0.0,
            tolerance=0.0,
        )
    session = TargetSession(model)
    logits, _ = session.forward(prompt, last_only=True)
    for token in plain[:index]:
        logits, _ = session.forward([token])
    stepwise = logits[-1].double()
    at_once, _ = TargetSession(model).forward([*prompt, *plain[:index]], last_only=True)
    noise = float((stepwise - at_once[-1].double()).abs().max())
    rounding = torch.finfo(logits.dtype).eps * float(stepwise.abs().max())
    return Difference(
        index=index,
        plain=plain[index],
        speculative=speculative[index],
        gap=float(stepwise[plain[index]] - stepwise[speculative[index]]),
        noise=noise,
        tolerance=min(4 * noise + 2 * rounding, 64 * rounding),
    )
