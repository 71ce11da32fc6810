"""Speculative decoding: the output is the target's own for every draft; counts are correct."""

import itertools
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.schema import FINAL, layer_column
from spec_train.decoding.chains import (
    Difference,
    Generation,
    Request,
    TargetSession,
    check_target,
    decode_plain,
    decode_speculative,
    examine_difference,
)
from spec_train.drafts.drafting import ChainDrafter, KVCache
from spec_train.losses.sampling import Greedy, accept_probability, pick, reject_sampled, residual
from tests.factory import tiny_llama
from tests.families import FAMILIES, VOCAB, WINDOW, tiny_model
from tests.marks import long_but
from tests.spec_train.evaluation.tools import decode_without_ties
from tests.tolerance import close, network

LAYERS = (0, 2)
COLUMNS = tuple(layer_column(k) for k in LAYERS)
FORWARD = {"terms": network(6), "dtype": torch.float32}  # the six layers of the tiny targets
# The others differ from llama inside of their forward alone, which rollbacks and branches compare.
DECODED = [name for name in FAMILIES if name not in ("qwen3", "phi3", "granite", "cohere")]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def append_rows(cache: KVCache, count: int) -> None:
    """The cache of a draft without attention only counts positions."""
    cache.append(torch.zeros(1, 1, count, 1), torch.zeros(1, 1, count, 1))


class ScriptedDraft:
    """Proposes `script` with errors, and checks every row it is given."""

    def __init__(self, script: list[int], aux: torch.Tensor, error_rate: float, seed: int) -> None:
        self.script, self.aux = script, aux  # prompt and response; [T, A]
        generator = torch.Generator().manual_seed(seed)
        self.wrong = torch.rand(len(script) + 64, generator=generator) < error_rate
        self.draft_ids = torch.arange(VOCAB)
        self.verified_rows = 0

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def step(self, token_ids, carried, position_ids, caches) -> torch.Tensor:
        first, count = caches[0].length, token_ids.shape[1]
        positions = list(range(first, first + count))
        assert position_ids.tolist() == [positions]
        if carried.shape[-1] == self.aux.shape[-1]:
            close(carried[0], self.aux[positions], **FORWARD)
            assert token_ids[0].tolist() == [self.script[p + 1] for p in positions]
            self.verified_rows += count
        else:
            assert carried.argmax(-1).tolist() == token_ids.tolist()
        append_rows(caches[0], count)
        proposals = [self._propose(p) for p in positions]
        return torch.nn.functional.one_hot(torch.tensor([proposals]), VOCAB).float() * 9

    def _propose(self, position: int) -> int:
        true = self.script[position + 2] if position + 2 < len(self.script) else 0
        return (true + 1) % VOCAB if self.wrong[position] else true

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class TableDraft:
    """An untrained draft: fixed random logits per token over a part of the vocabulary."""

    def __init__(self, vocab_size: int, draft_ids: list[int], seed: int = 0, scale: float = 2.0):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, len(draft_ids), generator=generator) * scale
        self.draft_ids = torch.tensor(draft_ids)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def step(self, token_ids, carried, position_ids, caches) -> torch.Tensor:
        assert caches[0].length == int(position_ids[0, 0])
        append_rows(caches[0], token_ids.shape[1])
        return token_ids[..., None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[..., 0].long()]


@torch.no_grad()
def states(model: Any, ids: list[int]) -> torch.Tensor:
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[k + 1][0] for k in LAYERS], -1)


def speculate(model: Any, draft: Any, prompt: list[int], **changes: Any) -> Generation:
    settings: dict[str, Any] = (
        dict(sampler=Greedy(), limit=40, draft_tokens=5, columns=COLUMNS) | changes
    )
    drafter = ChainDrafter(draft, VOCAB)
    columns, draft_tokens = settings.pop("columns"), settings.pop("draft_tokens")
    return decode_speculative(model, drafter, columns, Request(prompt, **settings), draft_tokens)


def check_counts(generation: Generation, depth: int, limit: int = 40, trees: bool = False) -> None:
    """Check the counts of any decoding, greedy or sampled."""
    so_far = 1
    for number, r in enumerate(generation.steps):
        last = number == len(generation.steps) - 1
        assert 0 <= r.accepted <= r.tried <= depth
        assert r.tried - r.accepted in (0, 1)
        assert r.emitted == r.accepted + 1 or (last and r.emitted == r.accepted)
        assert trees or r.tried <= r.drafted == min(depth, limit - so_far - 1)
        so_far += r.emitted
    assert len(generation.tokens) == so_far <= limit


@pytest.mark.parametrize("family", long_but(["llama", "gemma3", "gpt_oss", "gpt2"], DECODED))
def test_greedy_is_plain_greedy_with_rollbacks_of_every_length(family):
    """Prompt and response pass the window of the sliding families several times over."""
    model = tiny_model(family)
    check_target(model, LAYERS)
    prompt = prompt_of(2 * WINDOW + 3, seed=7)
    plain = decode_without_ties(model, prompt, 40)
    assert plain is not None
    script = [*prompt, *plain]
    lengths = set()
    for seed, error_rate in enumerate((0.0, 0.15, 0.5, 1.0)):
        draft = ScriptedDraft(script, states(model, script), error_rate, seed)
        got = speculate(model, draft, prompt)
        assert got.tokens == plain
        check_counts(got, 5)
        lengths |= {r.accepted for r in got.steps}
        # What the target has verified is drafted from its states once, and never again.
        assert draft.verified_rows <= len(script) - 1
    assert lengths == {0, 1, 2, 3, 4, 5}
    random_draft = TableDraft(VOCAB, list(range(0, VOCAB, 3)))
    assert speculate(model, random_draft, prompt, draft_tokens=3).tokens == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_leaves_no_trace(family):
    """Logits after a rollback equal those of the remaining sequence, far beyond the window."""
    model = tiny_model(family)
    sequence = prompt_of(3 * WINDOW)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
        session = TargetSession(model, COLUMNS)
        session.forward(sequence[:WINDOW])
        at = WINDOW
        for rejected in (1, 6, 2 * WINDOW, 3):
            session.forward([*sequence[at : at + 2], *prompt_of(rejected, seed=rejected)])
            session.rollback(rejected)
            at += 2
        logits, aux = session.forward(sequence[at:])
    close(logits, expected[at:], **FORWARD)
    close(aux[0], states(model, sequence)[at:], **FORWARD)


def test_a_stop_token_or_the_limit_ends_the_response_wherever_the_step_puts_it():
    model = tiny_model("llama")
    prompt = prompt_of(5)
    full = decode_plain(model, Request(prompt, Greedy(), 40)).tokens
    script = [*prompt, *full]
    aux = states(model, script)
    for stop in dict.fromkeys(full):
        want = full[: full.index(stop) + 1]
        assert decode_plain(model, Request(prompt, Greedy(), 40, {stop})).tokens == want
        for error_rate in (0.0, 0.3, 1.0):
            draft = ScriptedDraft(script, aux, error_rate, seed=stop)
            got = speculate(model, draft, prompt, stop={stop})
            assert got.tokens == want and got.stopped, (stop, error_rate)
            check_counts(got, 5)
    for limit, error_rate in itertools.product(range(1, 21, 3), (0.0, 0.3, 1.0)):
        draft = ScriptedDraft(script, aux, error_rate, seed=limit)
        got = speculate(model, draft, prompt, limit=limit)
        assert got.tokens == full[:limit] and not got.stopped, (limit, error_rate)
        check_counts(got, 5, limit)


def test_the_last_layer_and_a_missing_layer_are_refused():
    model = tiny_model("llama")
    with pytest.raises(DraftError, match=r"layer id 5, the last .* after the final norm.* engines"):
        check_target(model, (0, 5))
    with pytest.raises(DraftError, match="layer id 7; the target has 0 to 5"):
        check_target(model, (7,))


def test_rejection_sampling_gives_the_targets_distribution_exactly():
    """Enumerated, no sampling: sum_x q(x) a(x) [kept] + P(rejected) residual = p, for any q."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.softmax(torch.randn(2, 200, 9, generator=generator, dtype=torch.float64) * 2, -1)
    q[:60, 3:] = 0  # a draft vocabulary
    q[:60] /= q[:60].sum(-1, keepdim=True)
    p[30:90, :2] = 0  # tokens the target never says
    p[30:90] /= p[30:90].sum(-1, keepdim=True)
    q[190:] = p[190:]
    kept = q * accept_probability(p, q)
    rejected = 1 - kept.sum(-1, keepdim=True)
    close(kept + rejected * residual(p, q), p, terms=4 * p.shape[-1])


def test_a_round_of_drafts_has_the_targets_distribution_exactly():
    """reject_sampled itself, over every combination of draws and of a grid of uniform numbers."""
    p = torch.tensor([[6, 3, 3], [1, 2, 9], [4, 4, 4]], dtype=torch.float64) / 12
    q = torch.tensor([[3, 9, 0], [4, 4, 4]], dtype=torch.float64) / 12
    # Acceptance of 1/3, 1/4 ... and residuals are multiples of 1/12 for these numbers.
    grid = [(i + 0.5) / 12 for i in range(12)]
    seen = torch.zeros(3, 4, 4, dtype=torch.float64)  # first token, second, third (3 = not drawn)
    for first, second in itertools.product(range(3), range(3)):
        weight = float(q[0, first] * q[1, second])
        for u in itertools.product(grid, repeat=3) if weight else ():
            accepted, chosen = reject_sampled([first, second], q, p.__getitem__, u)
            out = [*[first, second][:accepted], chosen, 3, 3][:3]
            seen[out[0], out[1], out[2]] += weight / 12**3
    terms = 12**6  # equal terms round in equal ways: 12**3 roundings add up, without a root
    close(seen.sum((1, 2)), p[0], terms=terms)
    for first in range(3):  # whatever goes on, goes on as the target would
        second = seen[first, :3].sum(-1)
        if second.sum() > 0:
            close(second / second.sum(), p[1], terms=terms)
            third = seen[first, :3, :3].sum(0)
            close(third / third.sum(), p[2], terms=terms)


def test_pick_inverts_the_distribution_and_never_gives_the_impossible():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    assert [int(pick(weights, u)) for u in (0.0, 0.2499, 0.25, 0.9999999, 1 - 2**-53)] == [
        1, 1, 3, 3, 3,
    ]  # fmt: skip
    assert int(pick(weights / 3, 1 - 2**-53)) == 3


def exact_distribution(model: Any, prompt: list[int], limit: int, stop: int, temperature: float):
    """Probability of every possible response, by walking the tree of the target's own forwards."""
    found: dict[tuple[int, ...], float] = {}
    pending = [((), 1.0)]
    while pending:
        response, weight = pending.pop()
        if len(response) == limit or (response and response[-1] == stop):
            found[response] = weight
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, -1]
        for token, p in enumerate(torch.softmax(logits.double() / temperature, -1).tolist()):
            pending.append(((*response, token), weight * p))
    return found


def test_a_difference_is_a_tie_only_within_the_targets_own_noise():
    model = tiny_model("llama")
    prompt = prompt_of(6)
    plain = decode_plain(model, Request(prompt, Greedy(), 12)).tokens
    assert examine_difference(model, prompt, plain, plain) is None
    wrong = [*plain[:5], (plain[5] + 1) % VOCAB, *plain[6:]]
    found = examine_difference(model, prompt, plain, wrong)
    assert found is not None
    assert (found.index, found.plain, found.speculative) == (5, plain[5], wrong[5])
    assert found.gap > found.tolerance > 0
    assert not found.is_tie
    short = examine_difference(model, prompt, plain, plain[:-1])
    assert short is not None and short.index == 11 and not short.is_tie
    with torch.no_grad():  # two tokens with one row of the head are tied by construction
        head = model.get_output_embeddings().weight
        head[wrong[5]] = head[plain[5]]
    tied = examine_difference(model, prompt, plain, wrong)
    assert isinstance(tied, Difference) and tied.is_tie


def test_a_head_that_reads_other_states_than_the_last_ones_is_refused():
    """A draft over final states would silently read states that it was not trained on."""
    model = tiny_llama()  # which changes its last states before the head, as MiniCPM3 does
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0.5,))
    session = TargetSession(model, (FINAL,))
    with pytest.raises(TargetError, match="changes its last hidden states before its head"):
        session.forward([1, 2, 3], last_only=True)
    layers = TargetSession(model, (layer_column(1),))
    assert layers.forward([1, 2, 3])[1].shape == (1, 3, 32)
    plain = TargetSession(tiny_llama(), (FINAL,))
    assert plain.forward([1, 2, 3])[1].shape == (1, 3, 32)
    assert not plain._model.lm_head._forward_pre_hooks, "the hook stays"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_last_states_of_a_family_enter_its_head(family):
    """Nothing that can be decoded is refused, with all logits or only the last ones."""
    for last_only in (False, True):
        session = TargetSession(tiny_model(family), (FINAL,))
        assert session.forward([1, 2, 3], last_only=last_only)[1].shape[:2] == (1, 3)
