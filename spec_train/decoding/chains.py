"""Speculative decoding with a real target: one sequence, up to K drafted tokens, KV caches.

The response is the target's own for every draft: greedy decoding equals decoding without a draft
token for token, and sampling has exactly the target's distribution (see sampling.py).

Counting. A step is one verification forward of the target; the prefill and its token are no step. A
step emits its accepted drafts and the token that the target adds. Tokens after the end of the
response (stop token or limit) are not emitted. So tokens = 1 + sum of emitted, and the acceptance
length, emitted / steps, counts only tokens of the response.

Shapes: n prompt tokens, K drafts of a step, V / Vd target / draft vocabulary, A captured layers
times the target's hidden size. The target's cache keeps every layer at full length, layers with a
sliding window too: a cache that already dropped old keys cannot be rolled back. This costs memory
beyond the window and changes no result. A recurrent or compressed cache cannot be rolled back: such
a target verifies token by token, and stops at the first rejected one. The response and the counts
are the same; only the time is not that of an engine.
"""

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from spec_data.models.streams import streams_of
from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.schema import FINAL, layer_column
from spec_train.drafts.drafting import Drafter
from spec_train.losses.sampling import Sampler


class Stopwatch:
    """Measures a response and what its time is spent on: prefill, drafting, and verification."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._device = device
        self._seconds = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        self._started = self._last = self._now()

    def _now(self) -> float:
        """Return a time in seconds, after all queued work of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def add(self, part: str = "") -> None:
        """Count the time since the last call to a part; "": to none."""
        now = self._now()
        if part:
            self._seconds[part] += now - self._last
        self._last = now

    def parts(self) -> dict[str, Any]:
        """Return the seconds of all of it and of each part, as `Generation` has them."""
        parts = {f"{part}_seconds": value for part, value in self._seconds.items()}
        return parts | {"seconds": self._now() - self._started}


# -- the target ------------------------------------------------------------------------------------


_CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}
# Tokens that prove decoding token by token, of which the last ones are decoded so; and the most
# among which sparse attention chooses that a proof goes beyond.
_PROVEN, _STEPS, _LONGEST_PROOF = 24, 8, 4096
_STEPWISE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def decoder_config(model: Any) -> Any:
    """Return the configuration of an HF model's decoder (multimodal models nest it)."""
    return model.config.get_text_config(decoder=True)


def why_stepwise(model: Any) -> str | None:
    """Return what a target's cache holds that cannot be rolled back; None if all of it can."""
    kinds = set(getattr(decoder_config(model), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= _CROPPABLE:
        return ", ".join(sorted(kinds - _CROPPABLE)) or "a recurrent state"
    return None


def check_target(model: Any, layers: Iterable[int]) -> None:
    """Refuse layers that HF does not return.

    Raises:
        DraftError: the draft reads the target's last layer, or a layer that the target lacks.
    """
    last = decoder_config(model).num_hidden_layers - 1
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


def cache_argument(model: Any) -> str:
    """Return the name of a model's cache: that of transformers 5.24, or the one before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _own_cache(model: Any, output: Any) -> dict[str, Any]:
    """Return the cache that a model made in a forward, by the name of its argument.

    Raises:
        TargetError: it made none.
    """
    for name in (cache_argument(model), "past_key_values", "cache_params"):
        if (cache := getattr(output, name, None)) is not None:
            return {name: cache}
    raise TargetError(
        f"{type(model).__name__} returns no cache from its forward, so it cannot decode here; "
        "evaluate on the dataset instead (--data)"
    )


def _last_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [1, V] after tokens, of one forward."""
    return TargetSession(model).forward(ids, last_only=True)[0][-1:]


@torch.inference_mode()
def prove_stepwise(model: Any) -> None:
    """Compare a forward with its tokens one by one, of a target whose cache is never rolled back.

    The code of some families continues a cache with other states than those of a whole forward.

    The proof is longer than what sparse attention chooses from, unless that is very much.

    Raises:
        TargetError: they differ in most tokens by more than rounding, or the family cannot do it.
    """
    if why_stepwise(model) is None:
        return
    config, rows = decoder_config(model), model.get_input_embeddings().weight.shape[0]
    # beyond the tokens among which sparse attention chooses
    chosen = (getattr(config, "index_topk", None) or 0) * (getattr(config, "index_kpool", 1) or 1)
    length = _PROVEN + (chosen if chosen <= _LONGEST_PROOF else 0)
    ids = (torch.arange(length, device=model.device) * 7919 % rows).tolist()
    name, alone = type(model).__name__, range(length - _STEPS, length)
    try:
        whole = torch.cat([_last_logits(model, ids[: n + 1]) for n in alone]).double()  # [n, V]
        session = TargetSession(model)
        session.forward(ids[: alone[0]], last_only=True)
        stepwise = torch.cat([session.forward([ids[n]])[0][-1:] for n in alone]).double()
    except (TargetError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise TargetError(
            f"{name} cannot decode token by token here ({type(error).__name__}: {error}); "
            "evaluate on the dataset instead (--data)"
        ) from None
    errors = (stepwise - whole).norm(dim=-1) / whole.norm(dim=-1)
    allowed = _STEPWISE_TOLERANCE.get(model.dtype, 5e-2)
    if not float(errors.median()) <= allowed:
        raise TargetError(
            f"{name}: tokens one by one give other logits than in one forward (error "
            f"{float(errors.median()):.1e}, allowed {allowed:.0e}), so transformers decodes other "
            "states than were captured; evaluate on the dataset instead (--data)"
        )


class TargetSession:
    """One sequence in the target: `forward` appends to its cache, `rollback` removes tokens.

    With `stepwise` no token can be removed: forward them one by one after the prompt.
    """

    def __init__(self, model: Any, columns: Sequence[str] = ()) -> None:
        """Start empty. With `columns` (dataset names), `forward` also returns their states."""
        self._model = model
        self._blocks = blocks = decoder_config(model).num_hidden_layers
        # HF's states[k] is the input of block k, so the output of block k is states[k + 1]; the
        # last entry is the input of the head
        entry = {layer_column(k): k + 1 for k in range(-1, blocks - 1)} | {FINAL: blocks}
        self._entries = [entry[name] for name in columns]
        self._unproven = FINAL in columns  # that the last state enters the head, until a forward
        # a prompt's logits are [n, V]; where the model can, it computes only the last position
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._streams = streams_of(decoder_config(model))
        self.stepwise = why_stepwise(model) is not None
        # without a config each layer's cache has full length (see the module's docstring); the
        # model still masks with its own windows. One that is never rolled back is the model's own,
        # which it makes in its first forward
        self._cache: Any = None if self.stepwise else DynamicCache()
        self._named_cache = {} if self.stepwise else {cache_argument(model): self._cache}

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
        read_by_head: list[Tensor] = []
        watch = contextlib.ExitStack()
        if self._unproven:
            head = self._model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: read_by_head.append(inputs[0]))
            watch.callback(hook.remove)
        with watch:
            output = self._model(
                input_ids=ids,
                use_cache=True,
                output_hidden_states=bool(self._entries),
                **self._named_cache,
                **(self._last_only if last_only else {}),
                **layout,
            )
        if self.stepwise and not self._named_cache:
            self._named_cache = _own_cache(self._model, output)
        if not self._entries:
            return output.logits[0], None
        states, name = output.hidden_states, type(self._model).__name__
        if len(states) != self._blocks + 1:
            raise TargetError(
                f"{name} returns {len(states)} hidden states for {self._blocks} decoder blocks, so "
                "its layers cannot be identified; evaluate on the dataset instead (--data)"
            )
        for entered in read_by_head:  # [1, k, H] of the last k tokens
            if not torch.equal(entered, states[-1][:, -entered.shape[1] :]):
                raise TargetError(
                    f"{name} changes its last hidden states before its head, so this draft would "
                    "read other states than it was trained on; evaluate on the dataset instead "
                    "(--data)"
                )
        self._unproven = False
        chosen = [self._streams.contract(states[k]) for k in self._entries]
        return output.logits[0], torch.cat(chosen, dim=-1)

    @property
    def device(self) -> Any:
        """Where the target runs."""
        return self._model.device

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
    """A response, stop token included. `steps` stays empty in plain decoding."""

    tokens: list[int]
    steps: list[VerificationStep] = field(default_factory=list)
    draft_passes: int = 0  # forwards of the draft
    seconds: float = 0.0  # all of it; the next three are parts
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    stopped: bool = False  # whether a stop token ended it, not the limit


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


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What the target makes of drafted tokens.

    Attributes:
        accepted: drafted tokens that are kept, in order. chosen: the target's own after them.
        states: the target's at the last known token and at the accepted ones, [1, n, A] or None.
        drafted, tried, tokens: see `VerificationStep`.
    """

    accepted: list[int]
    chosen: int
    states: Any
    drafted: int
    tried: int
    tokens: Sequence[int]


@torch.inference_mode()
def decode_speculative(
    model: Any, drafter: Drafter, columns: Sequence[str], request: Request, draft_tokens: int
) -> Generation:
    """Decode with chains or blocks of up to `draft_tokens` drafted tokens per step.

    `drafter` must be new; `columns` are the states it reads, the draft's `state_columns`.
    """
    session, sampler = TargetSession(model, columns), request.sampler

    def draft(tokens: list[int], states: Any, count: int) -> tuple[Tensor, list[Any]]:
        if not count:
            return torch.empty(0, dtype=torch.long, device=model.device), []
        return drafter.propose(tokens, states, count, sampler)

    def verify_stepwise(last: int, drafted: Tensor, q: list[Any]) -> Verified:
        read = []

        def row(accepted: int) -> Tensor:
            token = int(drafted[accepted - 1]) if accepted else last
            logits, states = session.forward([token])
            read.append(states)
            return logits[-1]

        tokens, accepted, chosen = sampler.verify_stepwise(drafted, q, row)
        return Verified(
            accepted=tokens[:accepted],
            chosen=chosen,
            states=torch.cat(read, dim=1) if columns else None,
            drafted=len(tokens),
            tried=min(accepted + 1, len(tokens)),
            tokens=tokens,
        )

    def verify(last: int, proposal: tuple[Tensor, list[Any]]) -> Verified:
        drafted, q = proposal
        if session.stepwise:
            return verify_stepwise(last, drafted, q)
        first = torch.tensor([last], device=model.device)
        logits, states = session.forward(torch.cat([first, drafted]))
        tokens, accepted, chosen = sampler.verify(drafted, q, logits)
        session.rollback(len(drafted) - accepted)
        return Verified(
            accepted=tokens[:accepted],
            chosen=chosen,
            states=None if states is None else states[:, : accepted + 1],
            drafted=len(tokens),
            tried=min(accepted + 1, len(tokens)),
            tokens=tokens,
        )

    return decode_steps(session, request, draft_tokens, draft, verify, lambda: drafter.passes)


def decode_steps(
    session: TargetSession,
    request: Request,
    depth: int,
    draft: Callable[[list[int], Any, int], Any],
    verify: Callable[[int, Any], Verified],
    passes: Callable[[], int],
) -> Generation:
    """Decode step by step: draft, verify, keep what was accepted.

    Near the limit a step drafts no more than can still be emitted, which changes no output.

    Args:
        session: an empty sequence. request: the prompt, and the end of its response.
        depth: drafted tokens (levels of a tree) of a step, at most.
        draft: takes t tokens and the target's states at the t positions before them, [1, t, A],
            which it has not read before, and how many to draft, perhaps 0.
        verify: takes the last known token and what was drafted.
        passes: forwards of the draft so far.
    """
    times = Stopwatch(session.device)
    logits, states = session.forward(request.prompt, last_only=True)
    tokens = [request.sampler.first(logits[-1])]
    unread = [*request.prompt[1:], tokens[0]]
    steps: list[VerificationStep] = []
    times.add("prefill")
    while tokens[-1] not in request.stop and len(tokens) < request.limit:
        times.add()
        proposal = draft(unread, states, min(depth, request.limit - len(tokens) - 1))
        times.add("draft")
        verified = verify(tokens[-1], proposal)
        unread, states = [*verified.accepted, verified.chosen], verified.states
        stops = (i + 1 for i, token in enumerate(unread) if token in request.stop)
        emitted = next(stops, len(unread))
        steps.append(
            VerificationStep(
                drafted=verified.drafted,
                tried=min(verified.tried, emitted),
                accepted=min(len(verified.accepted), emitted),
                emitted=emitted,
                tokens=tuple(verified.tokens),
            )
        )
        tokens += unread[:emitted]
        times.add("verify")
    return Generation(
        tokens=tokens,
        steps=steps,
        draft_passes=passes(),
        stopped=tokens[-1] in request.stop,
        **times.parts(),
    )


# -- losslessness ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position where two greedy responses differ, and the target's logits there."""

    index: int
    plain: int
    speculative: int
    gap: float  # logit of `plain` minus logit of `speculative`, decoding token by token
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
        a, b = ((*t[index : index + 1], -1)[0] for t in (plain, speculative))
        return Difference(index=index, plain=a, speculative=b, gap=math.inf, tolerance=0.0)
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
        tolerance=min(4 * noise + 2 * rounding, 64 * rounding),
    )
