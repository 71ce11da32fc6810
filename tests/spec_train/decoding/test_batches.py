"""Decoding in batches: the tokens and the counts of decoding one by one, for targets and drafts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.decoding import batches as batch_session
from spec_train.decoding.batches import BatchSession, Drafting, decode_batch, why_alone
from spec_train.decoding.chains import (
    Generation,
    Request,
    decode_plain,
    decode_speculative,
)
from spec_train.drafts.drafting import Drafter
from spec_train.losses.sampling import Greedy, Sampler
from tests.families import VOCAB as FAMILY_VOCAB
from tests.families import WINDOW, tiny_model
from tests.tolerance import close, network

KINDS = ("llama", "mistral-sliding", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "gemma4")
FLOAT32 = ("gpt_oss", "deepseek_v3")  # kernels of experts have no float64


def prompt_of(length: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def same(a: Generation, b: Generation) -> None:
    for name in ("tokens", "rounds", "draft_passes", "stopped"):
        assert getattr(a, name) == getattr(b, name), name


class Script(Drafter):
    """Drafts a known response with errors, and checks that it reads the states of its sequence."""

    def __init__(self, script: list[int], states: Tensor, seed: int) -> None:
        self._at, self._script, self._states = 0, script, states
        self._random = torch.Generator().manual_seed(seed)

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        after = self._at + len(tokens)
        assert list(tokens) == self._script[self._at + 1 : after + 1]
        close(states[0], self._states[self._at : after], terms=network(6), dtype=torch.float32)
        self._at, self.passes = after, self.passes + 1
        wrong = torch.rand(count, generator=self._random) < 0.3
        following = [*self._script[after + 1 :], *[0] * count][:count]
        ids = [(t + 1) % FAMILY_VOCAB if w else t for t, w in zip(following, wrong, strict=True)]
        return torch.tensor(ids), [None] * count


@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_every_family_decodes_in_batches_what_it_decodes_alone(family):
    """Prompts from 2 tokens to twice the window, more prompts than rows, ragged acceptance."""
    model = tiny_model(family)
    if family not in FLOAT32:
        model = model.double()
    assert why_alone(model, 64) is None
    lengths, limits = (2 * WINDOW + 3, 2, WINDOW, 5), (9, 12, 1, 10)
    prompts = [prompt_of(n, n, FAMILY_VOCAB) for n in lengths]
    settings = [dict(sampler=Greedy(), limit=limit, stop={3}) for limit in limits]
    alone = [decode_plain(model, Request(p, **s)) for p, s in zip(prompts, settings, strict=True)]
    requests = [Request(p, **s) for p, s in zip(prompts, settings, strict=True)]
    for found, expected in zip(decode_batch(model, requests, 2), alone, strict=True):
        same(found, expected)

    def drafters() -> list[Script]:
        made = []
        for number, (prompt, plain) in enumerate(zip(prompts, alone, strict=True)):
            script = [*prompt, *plain.tokens]
            out = model(torch.tensor([script]), output_hidden_states=True, use_cache=False)
            made.append(Script(script, out.hidden_states[2][0], number))
        return made

    one_by_one = [
        decode_speculative(model, drafter, ("hidden.L1",), request, 4)
        for drafter, request in zip(drafters(), requests, strict=True)
    ]
    queue, ended = iter(drafters()), []
    drafting = Drafting(make=lambda: next(queue), columns=("hidden.L1",), draft_tokens=4)
    together = decode_batch(model, requests, 2, drafting, lambda n, _: ended.append(n))
    assert sorted(ended) == list(range(4)) and ended != sorted(ended)
    for found, expected, plain in zip(together, one_by_one, alone, strict=True):
        same(found, expected)
        assert found.tokens == plain.tokens


def test_what_cannot_share_a_batch_is_found(monkeypatch):
    """Rope that depends on the longest row; a cache that is misread, planted."""
    model = tiny_model("llama-dynamic")
    bound = model.config.max_position_embeddings
    assert why_alone(model, bound) is None
    for longest in (bound + 1, None):
        assert "its rope depends on the longest sequence" in str(why_alone(model, longest))
    sliding = tiny_model("mistral-sliding")
    honest = BatchSession.verify

    def positions_alone(self: Any, tokens: Sequence[Tensor]) -> Any:
        """As if the model ignored the mask: padding is attended to."""
        lengths, self._lengths = self._lengths, [max(self._lengths)] * len(self._lengths)
        try:
            return honest(self, tokens)
        finally:
            self._lengths = lengths

    assert why_alone(sliding, 100) is None
    monkeypatch.setattr(BatchSession, "verify", positions_alone)
    assert "a padded cache changes its logits by" in str(why_alone(sliding, 100))


def test_a_sequence_longer_than_the_window_is_proven_only_where_one_can_be(monkeypatch):
    lengths = []
    honest = batch_session._difference
    monkeypatch.setattr(
        batch_session, "_difference", lambda m, n: lengths.append(n) or honest(m, min(n, 40))
    )
    model = tiny_model("mistral-sliding")
    for longest in (WINDOW, WINDOW + 1, None):
        assert why_alone(model, longest) is None
    assert lengths == [12, WINDOW + 12, WINDOW + 12]
