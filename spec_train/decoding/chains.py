"""Speculative decoding with a real target: one sequence, up to K drafted tokens, KV caches.

Input: an HF causal LM, a draft's drafter, prompt ids. Output: the response and the result of each
round. The response is the target's own for every draft: greedy decoding equals decoding without a
draft token for token, and sampling has exactly the target's distribution (see sampling.py).

Counting. A round is one verification forward of the target; the prefill and its token are not a
round. A round emits its accepted drafts and the token that the target adds. Tokens after the end of
the response (stop token or limit) are not emitted. So tokens = 1 + sum of emitted, and the
acceptance length, emitted / rounds, counts only tokens of the response.

Shapes: n prompt tokens, K drafts of a round, V / Vd target / draft vocabulary, A captured layers
times the target's hidden size. The target's cache keeps every layer at full length, layers with a
sliding window too: a cache that already dropped old keys cannot be rolled back. This costs memory
beyond the window and changes no result. Models with a recurrent state are refused.
"""

import contextlib
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
from spec_train.drafts.drafting import Drafter
from spec_train.losses.sampling import Sampler

# -- stopwatch -------------------------------------------------------------------------------------
# How long decoding takes, and what the time is spent on.


def clock(device: torch.device) -> float:
    """Return a time in seconds, after all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Measures a response and what its time is spent on: prefill, drafting, and verification."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._device = device
        self._seconds = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        self._started = self._last = clock(device)

    def begin(self) -> None:
        """Leave what was done since the last call out of the parts."""
        self._last = clock(self._device)

    def add(self, part: str) -> None:
        """Count the time since the last call to a part."""
        now = clock(self._device)
        self._seconds[part] += now - self._last
        self._last = now

    def parts(self) -> dict[str, Any]:
        """Return the seconds of all of it and of each part, as `Generation` has them."""
        found = {f"{part}_seconds": value for part, value in self._seconds.items()}
        return found | {"seconds": clock(self._device) - self._started}


# -- chains ----------------------------------------------------------------------------------------


_CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}


def decoder_config(model: Any) -> Any:
    """Return the configuration of an HF model's decoder (multimodal models nest it)."""
    return model.config.get_text_config(decoder=True)


def num_target_layers(model: Any) -> int:
    """Return the number of decoder blocks of an HF model."""
    return int(decoder_config(model).num_hidden_layers)


def check_target(model: Any, layers: Iterable[int]) -> None:
    """Refuse a target whose cache cannot be rolled back, and layers that HF does not return.

    Raises:
        TargetError: the model keeps a recurrent state.
        DraftError: the draft reads the target's last layer, or a layer that the target lacks.
    """
    kinds = set(getattr(decoder_config(model), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= _CROPPABLE:
        strange = ", ".join(sorted(kinds - _CROPPABLE)) or "a recurrent state"
        raise TargetError(
            f"{type(model).__name__} has layers with {strange}: rejected drafts cannot be removed "
            "from its cache. Evaluate on the dataset instead (--data)"
        )
    last = num_target_layers(model) - 1
    for layer in layers:
        if layer == last:
            raise DraftError(
                f"the draft reads layer id {layer}, the last of the target's {last + 1} decoder "
                "blocks. Transformers returns that layer's states only after the final norm, and "
                f"serving engines differ here; fit a draft on layers below {last}"
            )
        if not -1 <= layer < last:
            raise DraftError(
                f"the draft reads layer id {layer}; the target has 0 to {last}: use its own target"
            )


class TargetSession:
    """One sequence in the target: `forward` appends to its cache, `rollback` removes tokens."""

    def __init__(self, model: Any, columns: Sequence[str] = ()) -> None:
        """Start empty. With `columns` (dataset names), `forward` also returns their states."""
        self._model = model
        blocks = num_target_layers(model)
        # HF's states[k] is the input of block k, so the output of block k is states[k + 1]; the
        # last entry is the input of the head
        place = {layer_column(k): k + 1 for k in range(-1, blocks - 1)} | {FINAL: blocks}
        self._places = [place[name] for name in columns]
        self._unproven = FINAL in columns  # that the last state enters the head, until a forward
        # a prompt's logits are [n, V]; where the model can, it computes only the last position
        known = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # without a config each layer's cache has full length (see the module's docstring); the
        # model still masks with its own windows
        self._cache = DynamicCache()

    def forward(
        self, tokens: Sequence[int] | Tensor, last_only: bool = False, **layout: Any
    ) -> tuple[Tensor, Any]:
        """Append t tokens (ids, int64 [t]) to the cache.

        Args:
            tokens: token ids.
            last_only: the logits may cover the last token only, [1, V].
            layout: arguments of the model for tokens that form a tree (see tree_masks).

        Returns:
            Logits [t, V] and states [1, t, A], both in the model's dtype; the states are None
            without columns.
        """
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self._model.device)[None]
        logits, states = self._run(ids, self._last_only if last_only else {}, layout)
        return logits[0], states

    def _run(self, ids: Tensor, wanted: dict[str, Any], layout: dict[str, Any]) -> tuple[Any, Any]:
        """Append ids, int64 [B, t]; return logits [B, t, V] and states [B, t, A] or None."""
        entered: list[Tensor] = []
        watch = contextlib.ExitStack()
        if self._unproven:
            head = self._model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
            watch.callback(hook.remove)
        with watch:
            output = self._model(
                input_ids=ids,
                past_key_values=self._cache,
                use_cache=True,
                output_hidden_states=bool(self._places),
                **wanted,
                **layout,
            )
        if not self._places:
            return output.logits, None
        states = output.hidden_states
        if len(states) != num_target_layers(self._model) + 1:
            raise TargetError(
                f"{type(self._model).__name__} returns {len(states)} hidden states for "
                f"{num_target_layers(self._model)} decoder blocks, so its layers cannot be "
                "identified; evaluate on the dataset instead (--data)"
            )
        if entered:
            self._require_head_input(entered[0], states[-1])
        return output.logits, torch.cat([states[k] for k in self._places], dim=-1)

    def _require_head_input(self, entered: Tensor, last: Tensor) -> None:
        """Refuse a model whose head reads other states than its last ones.

        Args:
            entered: input of the head [B, k, H]: the last k tokens.
            last: the last states that the model returns [B, t, H].
        """
        if not torch.equal(entered, last[:, -entered.shape[1] :]):
            raise TargetError(
                f"{type(self._model).__name__} changes its last hidden states before its head, so "
                "this draft would read other states than it was trained on; evaluate on the "
                "dataset instead (--data)"
            )
        self._unproven = False

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens from the cache."""
        if count:
            self._cache.crop(-count)  # negative: the number to remove, in every version


@dataclass(frozen=True)
class Request:
    """A prompt and the end of its response: after `limit` tokens, or with a token of `stop`."""

    prompt: Sequence[int]  # n token ids
    sampler: Sampler  # chooses the target's tokens, and the draft's
    limit: int
    stop: Collection[int] = ()


@dataclass(frozen=True, kw_only=True)
class VerificationStep:
    """One verification. `accepted` of the `drafted` tokens were emitted; `tried` is the number of
    depths with a result: the accepted ones, plus one if the next draft was rejected. `tokens` are
    the drafted ids; of a tree only those of the accepted path."""

    drafted: int
    tried: int
    accepted: int
    emitted: int
    tokens: tuple[int, ...] = field(default=(), compare=False)


@dataclass(kw_only=True)
class Generation:
    """A response, stop token included. `rounds` stays empty in plain decoding."""

    tokens: list[int]
    rounds: list[VerificationStep] = field(default_factory=list)
    draft_passes: int = 0  # forwards of the draft
    seconds: float = 0.0  # all of it; the next three are parts
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    stopped: bool = False  # whether a stop token ended it, not the limit


class GrowingResponse:
    """What decoding knows of one sequence between two rounds.

    Attributes:
        tokens: the response so far.
        known, states: what the drafter has not read: `known[i]` is the token one position after
            `states[:, i]`, the target's states [1, n, A] or None.
    """

    def __init__(self, request: Request, logits: Tensor, states: Any) -> None:
        """Start with the target's logits [t, V] and states [1, n, A] of the prompt's n tokens."""
        self.request = request
        self.tokens = [request.sampler.first(logits[-1])]
        self.known = [*request.prompt[1:], self.tokens[0]]
        self.states = states
        self._rounds: list[VerificationStep] = []

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self.tokens[-1] in self.request.stop or len(self.tokens) >= self.request.limit

    def wanted(self, draft_tokens: int) -> int:
        """Return how many tokens the next round drafts: no more than can still be emitted."""
        return min(draft_tokens, self.request.limit - len(self.tokens) - 1)

    def verify(self, drafted: Tensor, q: list[Any], logits: Tensor, states: Any) -> int:
        """Count a round; return how many of its 1 + k tokens stay in the target's cache.

        Args:
            drafted: ids, int64 [k]. q: their distributions (see `Drafter.propose`).
            logits: the target's [1 + k, V] after the last known token and the drafted ones.
            states: the target's [1, at least 1 + k, A] at the same tokens, or None.
        """
        proposed, accepted, chosen = self.request.sampler.verify(drafted, q, logits)
        self.known = [*proposed[:accepted], chosen]
        self.states = None if states is None else states[:, : accepted + 1]
        emitted = until_stop(self.known, self.request.stop)
        self._rounds.append(
            VerificationStep(
                drafted=len(proposed),
                tried=min(accepted + 1, len(proposed), len(emitted)),
                accepted=min(accepted, len(emitted)),
                emitted=len(emitted),
                tokens=tuple(proposed),
            )
        )
        self.tokens.extend(emitted)
        return accepted + 1

    def generation(self, draft_passes: int, times: Stopwatch | None = None) -> Generation:
        """Return the response and its rounds."""
        return Generation(
            tokens=self.tokens,
            rounds=self._rounds,
            draft_passes=draft_passes,
            stopped=self.tokens[-1] in self.request.stop,
            **(times.parts() if times else {}),
        )


@torch.inference_mode()
def decode_plain(model: Any, request: Request) -> Generation:
    """Decode with the target alone, one forward per token."""
    sampler, stop = request.sampler, request.stop
    times = Stopwatch(model.device)
    session = TargetSession(model)
    logits, _ = session.forward(request.prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    times.add("prefill")
    while tokens[-1] not in stop and len(tokens) < request.limit:
        logits, _ = session.forward(tokens[-1:])
        tokens.append(sampler.first(logits[-1]))
    return Generation(tokens=tokens, stopped=tokens[-1] in stop, **times.parts())


@torch.inference_mode()
def decode_speculative(
    model: Any, drafter: Drafter, columns: Sequence[str], request: Request, draft_tokens: int
) -> Generation:
    """Decode with up to `draft_tokens` drafts per round.

    `drafter` must be new; `columns` are the states it reads, the draft's `state_columns`. Near the
    limit a round drafts no more than can still be emitted, which does not change the output.
    """
    times = Stopwatch(model.device)
    session = TargetSession(model, columns)
    logits, states = session.forward(request.prompt, last_only=True)
    response = GrowingResponse(request, logits, states)
    times.add("prefill")
    while not response.ended:
        times.begin()
        count = response.wanted(draft_tokens)
        drafted = torch.empty(0, dtype=torch.long, device=model.device)
        q: list[Any] = []
        if count:
            known, states = response.known, response.states
            drafted, q = drafter.propose(known, states, count, request.sampler)
        times.add("draft")
        last = torch.tensor(response.tokens[-1:], device=model.device)
        logits, states = session.forward(torch.cat([last, drafted]))
        kept = response.verify(drafted, q, logits, states)
        session.rollback(1 + len(drafted) - kept)
        times.add("verify")
    return response.generation(drafter.passes, times)


def until_stop(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position where two greedy responses differ, and the target's logits there."""

    index: int
    plain: int
    speculative: int
    gap: float  # logit of `plain` minus logit of `speculative`, decoding token by token
    noise: float  # largest difference of any logit between two plain forwards of other shapes
    tolerance: float  # largest gap that counts as a tie

    @property
    def is_tie(self) -> bool:
        """Whether rounding in the model's dtype explains the difference."""
        return abs(self.gap) <= self.tolerance


@torch.inference_mode()
def examine_difference(
    model: Any, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Return the first difference of two greedy responses; None if they are equal.

    The noise is measured without a draft: the same position is computed token by token and in one
    forward. The tolerance is a few times the noise, and at most 64 rounding units at the size of
    the logits, so that the error of a wrong cache never counts as noise.
    """
    if list(plain) == list(speculative):
        return None
    shared = zip(plain, speculative, strict=False)
    index = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    if index is None:  # one is a prefix of the other: rounding cannot explain that
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
