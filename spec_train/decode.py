"""Speculative decoding with a real target: one sequence, chains of K drafted tokens, KV caches.

In: an HF causal LM, a draft that drafts chains, prompt ids. Out: the response and what happened in
every round. The output is the target's own, whatever the draft proposes: greedy decoding is equal
token for token to decoding without a draft, and sampling has the target's distribution exactly
(see sampling.py). Semantics are those of the serving engines: the draft's row at position P sees
(token[P+1], target states[P]); after a verification its rows for the chain are dropped and the
accepted positions computed again from the target's states.

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
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from spec_data.shards.errors import DraftError, TargetError
from spec_train.drafts.eagle3_model import DraftCache
from spec_train.sampling import Sampler

_CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class ChainDraft(Protocol):
    """What decoding needs of a draft; Eagle3Draft has it."""

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd] ascending."""

    def project(self, aux: Tensor) -> Tensor:
        """Features [B, T, H] of aux states [B, T, A]."""

    def step(
        self, token_ids: Tensor, carried: Tensor, position_ids: Tensor, cache: DraftCache
    ) -> Tensor:
        """Append rows [B, T] to the cache and give their states [B, T, H], which are fed back."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., Vd] of states [..., H]."""


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

    def __init__(self, model: Any, layers: Sequence[int] = ()) -> None:
        """Start empty. With `layers`, forward also gives their states (the aux states)."""
        self._model = model
        self._layers = tuple(layers)
        # A prompt's logits fill [n, V]; models that can give the last row alone are asked to.
        known = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # Without a config, every layer's cache is full length (see the module's docstring); the
        # model still masks by its own windows.
        self._cache = DynamicCache()

    def forward(
        self, tokens: Sequence[int] | Tensor, last_only: bool = False
    ) -> tuple[Tensor, Any]:
        """Append t tokens: logits [t, V] and aux states [1, t, A] (None without layers).

        With `last_only` the logits may be those of the last token alone, [1, V].
        """
        device = self._model.device
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        output = self._model(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(self._layers),
            **(self._last_only if last_only else {}),
        )
        if not self._layers:
            return output.logits[0], None
        states = output.hidden_states  # states[k] enters block k, so block k's output is k + 1
        if len(states) != num_target_layers(self._model) + 1:
            raise TargetError(
                f"{type(self._model).__name__} gives {len(states)} hidden states for "
                f"{num_target_layers(self._model)} blocks: its layers cannot be told apart"
            )
        return output.logits[0], torch.cat([states[k + 1] for k in self._layers], dim=-1)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count:
            self._cache.crop(-count)  # negative: the number to remove, in every version


class Drafter:
    """One sequence in the draft: extend with verified positions, then propose a chain."""

    def __init__(self, draft: ChainDraft, vocab_size: int) -> None:
        """Start empty. `vocab_size` is the target's."""
        self._draft = draft
        self._vocab_size = vocab_size
        self._cache = DraftCache()
        self._rows = 0  # rows computed from the target's own states

    def propose(
        self, tokens: Sequence[int], aux: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified rows and draft a chain from the last of them.

        Args:
            tokens: t known tokens; the i-th stands one position after aux[:, i].
            aux: the target's states at the t positions that follow the rows so far, [1, t, A].
            count: drafts wanted, at least 1.

        Returns:
            Drafted target ids int64 [count] and, when sampling, their distributions.
        """
        device = aux.device
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        positions = torch.arange(self._rows, self._rows + len(tokens), device=device)[None]
        self._cache.crop(self._rows)  # the last chain's rows held the draft's own states
        state = self._draft.step(ids, self._draft.project(aux), positions, self._cache)[:, -1:]
        self._rows += len(tokens)
        drafted: list[Tensor] = []
        distributions: list[Any] = []
        for depth in range(count):
            if depth:
                position = positions[:, -1:] + depth
                state = self._draft.step(drafted[-1].view(1, 1), state, position, self._cache)
            token, q = sampler.draft(
                self._draft.logits(state)[0, 0], self._draft.draft_ids, self._vocab_size
            )
            drafted.append(token)
            distributions.append(q)
        return torch.stack(drafted), distributions


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
    seconds: float = 0.0
    stopped: bool = False  # by a stop token, not by the limit


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def decode_plain(
    model: Any, prompt: Sequence[int], sampler: Sampler, limit: int, stop: Collection[int] = ()
) -> Generation:
    """Decode up to `limit` tokens with the target alone, one forward each."""
    started = _clock(model.device)
    session = TargetSession(model)
    logits, _ = session.forward(prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    while tokens[-1] not in stop and len(tokens) < limit:
        logits, _ = session.forward(tokens[-1:])
        tokens.append(sampler.first(logits[-1]))
    seconds = _clock(model.device) - started
    return Generation(tokens=tokens, seconds=seconds, stopped=tokens[-1] in stop)


@torch.inference_mode()
def decode_speculative(
    model: Any,
    draft: ChainDraft,
    layers: Sequence[int],
    prompt: Sequence[int],
    sampler: Sampler,
    limit: int,
    draft_tokens: int,
    stop: Collection[int] = (),
) -> Generation:
    """Decode up to `limit` tokens with chains of `draft_tokens` drafts.

    `layers` are the layer ids of the draft's aux states, ascending. A round near the limit drafts
    no more than could still be emitted, which changes no output.
    """
    started = _clock(model.device)
    session = TargetSession(model, layers)
    logits, aux = session.forward(prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    drafter = Drafter(draft, logits.shape[-1])
    known = [*prompt[1:], tokens[0]]  # tokens one position after each of the aux states
    rounds: list[Round] = []
    while tokens[-1] not in stop and len(tokens) < limit:
        count = min(draft_tokens, limit - len(tokens) - 1)
        drafted = torch.empty(0, dtype=torch.long, device=model.device)
        q: list[Any] = []
        if count:
            drafted, q = drafter.propose(known, aux, count, sampler)
        last = torch.tensor(tokens[-1:], device=model.device)
        logits, aux = session.forward(torch.cat([last, drafted]))
        proposed, accepted, chosen = sampler.verify(drafted, q, logits)
        session.rollback(count - accepted)
        known, aux = [*proposed[:accepted], chosen], aux[:, : accepted + 1]
        emitted = _until(known, stop)
        rounds.append(
            Round(
                drafted=count,
                tried=min(accepted + 1, count, len(emitted)),
                accepted=min(accepted, len(emitted)),
                emitted=len(emitted),
            )
        )
        tokens.extend(emitted)
    seconds = _clock(model.device) - started
    stopped = tokens[-1] in stop
    return Generation(tokens=tokens, rounds=rounds, seconds=seconds, stopped=stopped)


def _until(tokens: list[int], stop: Collection[int]) -> list[int]:
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
