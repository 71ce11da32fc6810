"""Targets whose cache cannot be rolled back verify token by token; what comes out is the same."""

import pytest
import torch

from spec_data.models.streams import streams_of
from spec_data.shards.errors import TargetError
from spec_data.shards.schema import FINAL, layer_column
from spec_train.decoding.chains import (
    Request,
    TargetSession,
    decode_plain,
    decode_speculative,
    decoder_config,
    prove_stepwise,
    why_stepwise,
)
from spec_train.decoding.trees import TreeMasks
from spec_train.drafts.drafting import ChainDrafter
from spec_train.losses.sampling import Greedy, Sampled
from tests.current_families import CONTRACTED, NOT_DECODED, VOCAB
from tests.families import LEAKY, tiny_model
from tests.marks import long_but
from tests.spec_train.decoding.test_chains import (
    ScriptedDraft,
    TableDraft,
    check_counts,
    prompt_of,
)

LAYERS = (0, 2)
COLUMNS = tuple(map(layer_column, LAYERS))
WRONG = {"bamba", "jamba", "glm5_next-nested"}  # in transformers 5.23
FAMILIES = sorted({*NOT_DECODED, *CONTRACTED, *LEAKY} - WRONG)


def states(model, ids: list[int]) -> torch.Tensor:
    """The states of one forward without a cache, [T, A]."""
    found = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    contract = streams_of(decoder_config(model)).contract
    return torch.cat([contract(found.hidden_states[k + 1])[0] for k in LAYERS], -1)


def plain_without_cache(model, prompt: list[int], count: int) -> list[int]:
    """The obvious greedy decoding: a whole forward for each token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("family", long_but(["qwen3_5", "lfm2", "deepseek_v4"], FAMILIES))
def test_greedy_is_plain_greedy_for_rejections_at_every_place(family: str) -> None:
    model = tiny_model(family)
    assert why_stepwise(model) is not None
    prove_stepwise(model)
    prompt = prompt_of(19, seed=7)
    plain = decode_plain(model, Request(prompt, Greedy(), 16)).tokens
    assert plain == plain_without_cache(model, prompt, 16)
    script = [*prompt, *plain]
    lengths = set()
    for seed, error_rate in enumerate((0.0, 0.3, 1.0)):
        draft = ScriptedDraft(script, states(model, script), error_rate, seed)
        drafter = ChainDrafter(draft, VOCAB)
        got = decode_speculative(model, drafter, COLUMNS, Request(prompt, Greedy(), 16), 4)
        assert got.tokens == plain
        check_counts(got, 4, 16)
        lengths |= {r.accepted for r in got.steps}
    assert {0, 4} <= lengths


@torch.no_grad()
@pytest.mark.parametrize("sampler", [Greedy, lambda: Sampled(1.0, 3)])
def test_verifying_step_by_step_decides_as_at_once(sampler) -> None:
    """Same numbers, same decisions, and no row is asked for behind a rejected token."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        logits = 2 * torch.randn(5, 9, generator=generator)
        q = torch.softmax(torch.randn(4, 9, generator=generator, dtype=torch.float64), -1)
        drafted = logits[:4].argmax(-1) if trial % 2 else torch.multinomial(q, 1)[:, 0]
        asked: list[int] = []

        def row(j: int, logits=logits, asked=asked) -> torch.Tensor:
            asked.append(j)
            return logits[j]

        at_once = sampler().verify(drafted, list(q), logits)
        stepwise = sampler().verify_stepwise(drafted, list(q), row)
        assert stepwise == at_once
        assert asked == list(range(at_once[1] + 1))


@torch.no_grad()
def test_sampling_has_the_targets_distribution() -> None:
    """The second token of many responses, against the softmax of a whole forward."""
    model, prompt = tiny_model("qwen3_5"), prompt_of(7, seed=3)
    model.get_output_embeddings().weight *= 0.2  # a flat distribution
    draft = TableDraft(VOCAB, list(range(VOCAB)))
    counts, tries = torch.zeros(VOCAB, dtype=torch.float64), 120
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    for seed in range(tries):
        request = Request(prompt, Sampled(1.0, seed), 2)
        got = decode_speculative(model, ChainDrafter(draft, VOCAB), (), request, 1).tokens
        logits = model(input_ids=torch.tensor([[*prompt, got[0]]]), use_cache=False).logits[0, -1]
        expected += torch.softmax(logits.double(), -1)
        counts[got[1]] += 1
    large = expected > 4
    rest = ~large
    seen = torch.cat([counts[large], counts[rest].sum()[None]])
    hoped = torch.cat([expected[large], expected[rest].sum()[None]])
    chi = float(((seen - hoped) ** 2 / hoped.clamp_min(1e-9)).sum())
    freedom = int(large.sum()) + 1
    assert chi < freedom + 6 * (2 * freedom) ** 0.5


def test_a_cache_that_loses_its_state_is_refused(monkeypatch) -> None:
    """Three families of transformers 5.23 decode so; and one is planted here."""
    for family in WRONG:
        with pytest.raises(TargetError, match=r"tokens one by one give other|cannot decode"):
            prove_stepwise(tiny_model(family))
    model = tiny_model("qwen3_5")
    prove_stepwise(model)
    plain = TargetSession.forward

    def forgetful(self, tokens, last_only=False, **layout):
        if len(tokens) == 1:
            self._named_cache = {}
        return plain(self, tokens, last_only, **layout)

    monkeypatch.setattr(TargetSession, "forward", forgetful)
    with pytest.raises(TargetError, match="tokens one by one give other logits"):
        prove_stepwise(model)


def test_trees_need_a_cache_that_forgets() -> None:
    with pytest.raises(TargetError, match="rejected branches cannot be removed"):
        TreeMasks(tiny_model("qwen3_5"))


def test_the_final_states_are_those_of_the_head() -> None:
    model = tiny_model("deepseek_v4")
    session = TargetSession(model, (FINAL,))
    with torch.inference_mode():
        logits, final = session.forward(prompt_of(9))
    torch.testing.assert_close(model.get_output_embeddings()(final)[0], logits)
