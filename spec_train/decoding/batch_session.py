"""Several sequences in the target at once: one KV cache, padded on the left.

Every sequence has its own number of cached tokens, and they end at the last slot of the cache. So
slots and positions of a sequence differ by a constant, and the windows that transformers counts in
slots are right. New tokens follow, padded on the right. After a verification each sequence keeps a
number of its new tokens of its own, and the cache is aligned again.

A sequence joins after its prompt was computed alone (`TargetSession`), and leaves when it has
ended. `why_alone` compares a small batch with its sequences alone, because models do not declare
whether they support padding in their cache.

Shapes: B sequences, Q new tokens of the longest one, T slots, V vocabulary, A captured layers times
the target's hidden size.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.chains import TargetSession, decoder_config
from spec_train.drafts.together import left_padded, new_positions, real_slots

_SWITCHING = ("dynamic", "longrope")  # rope types whose frequencies depend on the longest row

_BOUND = "original_max_position_embeddings"


class BatchSession(TargetSession):
    """Sequences that are verified together; `arrange` says which, and what each one keeps."""

    def __init__(self, model: Any, columns: Sequence[str] = ()) -> None:
        """Start without sequences; see TargetSession."""
        super().__init__(model, columns)
        self._lengths: list[int] = []  # cached tokens of each sequence
        self._new = 0  # slots that the last verification added
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where ids must be."""
        return self._model.device

    def verify(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Append new tokens, at least one for each sequence: ids, int64 [1 to Q] each.

        Returns:
            Logits [B, Q, V] and states [B, Q, A], both in the model's dtype, meaningless after the
            tokens of a sequence; the states are None without columns.
        """
        device = self.device
        counts = torch.tensor([len(part) for part in tokens])
        cached = torch.tensor(self._lengths)
        self._new = int(counts.max())
        ids = torch.zeros(len(tokens), self._new, dtype=torch.long, device=device)
        for row, part in enumerate(tokens):
            ids[row, : len(part)] = part
        layout: dict[str, Any] = {}
        width = max(self._lengths)
        if min(self._lengths) < width:
            real = real_slots(cached + self._new, width + self._new)
            layout["attention_mask"] = real.long().to(device)
        if self._takes_positions:
            layout["position_ids"] = new_positions(cached, counts).to(device)
        return self._run(ids, {}, layout)

    def arrange(
        self, kept: Sequence[tuple[int, int]], added: Sequence[tuple[TargetSession, int]] = ()
    ) -> None:
        """Choose the sequences of the next verification.

        Args:
            kept: sequences of the last one, and how many of its tokens each one keeps.
            added: sessions of further sequences, and their cached tokens. They are used up.
        """
        width = max(self._lengths, default=0)
        bounds = [(row, width - self._lengths[row], width + count) for row, count in kept]
        lengths = [stop - start for _, start, stop in bounds] + [count for _, count in added]
        unchanged = (
            not added
            and [row for row, _ in kept] == list(range(len(self._lengths)))
            and all(count == self._new for _, count in kept)
        )
        if not self._lengths and added:
            own = added[0][0]._cache.layers
            self._cache = added[0][0]._cache
        else:
            own = self._cache.layers
        if not unchanged and lengths:
            others = [session._cache.layers for session, _ in added]
            for number, layer in enumerate(own):
                if not layer.is_initialized:  # in some models several layers share one cache
                    continue
                for name in ("keys", "values"):
                    parts = [getattr(layer, name)[row : row + 1, :, a:b] for row, a, b in bounds]
                    parts += [getattr(layers[number], name) for layers in others]
                    setattr(layer, name, left_padded(parts))
        self._lengths, self._new = lengths, 0


def why_alone(model: Any, longest: int | None) -> str | None:
    """Return why sequences of this target cannot share a batch; None: they can.

    Two sequences of different lengths are verified twice in a batch, keep different numbers of
    tokens, and must have the logits that they have alone. One of them is longer than a sliding
    window if any sequence of this run may be.

    Args:
        model: the loaded target.
        longest: tokens of the longest sequence, response included; None: not known.
    """
    config = decoder_config(model)
    switch = _rope_switch(model)
    if switch is not None and (longest is None or longest > switch):
        return "its rope depends on the longest sequence of a batch"
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    length = 12
    if window and (longest is None or longest > window):
        length = window + 12
    try:
        error = _difference(model, length)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as problem:
        return f"it does not accept a padded cache ({type(problem).__name__})"
    allowed = max(1e-3, 16 * torch.finfo(model.dtype).eps)
    if error <= allowed:  # not a number never is
        return None
    return (
        f"a padded cache changes its logits by {error:.1e} of their spread (allowed {allowed:.0e})"
    )


def _rope_switch(model: Any) -> int | None:
    """Return from how many tokens on a longer row changes the rope of all rows; None: never."""
    kinds: set[Any] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind}
    if not kinds & set(_SWITCHING):
        return None
    config = decoder_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    bounds = [r[_BOUND] for r in ropes if r.get(_BOUND)]
    return min(bounds or [getattr(config, "max_position_embeddings", 0)])


@torch.inference_mode()
def _difference(model: Any, length: int) -> float:
    """Return how far logits of a batch are off, as a share of their spread, root mean square.

    `length` is that of the longer prompt.
    """
    vocab = model.get_output_embeddings().weight.shape[0]
    rows = [[(7 * i + 3 * i * i) % vocab for i in range(length)], [5 % vocab, 2 % vocab, 9 % vocab]]
    rounds = [([4, 8, 1, 6], 2), ([3, 5], 2)], [([7, 2], 1), ([9, 1, 2, 6], 4)]
    batch, alone = BatchSession(model), [TargetSession(model) for _ in rows]
    started = [TargetSession(model) for _ in rows]
    for ids, *sessions in zip(rows, alone, started, strict=True):
        for session in sessions:
            session.forward(ids, last_only=True)
    batch.arrange([], [(s, len(ids)) for s, ids in zip(started, rows, strict=True)])
    worst = 0.0
    for number in range(len(rounds[0])):
        asked = [rounds[row][number] for row in range(len(rows))]
        ids = [torch.tensor([i % vocab for i in tokens]) for tokens, _ in asked]
        logits, _ = batch.verify([part.to(model.device) for part in ids])
        for row, (session, (tokens, kept)) in enumerate(zip(alone, asked, strict=True)):
            expected, _ = session.forward(ids[row])
            session.rollback(len(tokens) - kept)
            error = (logits[row, : len(tokens)].float() - expected.float()).pow(2).mean().sqrt()
            share = float(error / expected.float().std())
            worst = share if not share <= worst else worst
        batch.arrange([(row, kept) for row, (_, kept) in enumerate(asked)])
    return worst
