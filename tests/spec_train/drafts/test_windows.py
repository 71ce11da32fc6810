"""Sliding windows end to end: what a pack drafts is what decoding drafts, for every draft.

The documents are longer than the windows, so that a path that ignored one would differ.
"""

from typing import Any

import pytest
import torch

from spec_train.decoding.trees import TreeDrafter, TreeShape
from spec_train.losses.sampling import Greedy
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, batch_of, draft_for, head_of

target = tools.target
WINDOW, DEPTH = 4, 3
MIXED = "full_attention,sliding_attention"
DRAFTS_OF: dict[str, dict[str, Any]] = {
    "eagle": {"num_layers": 2, "depth": DEPTH},
    "eagle3": {"num_layers": 2, "ttt_steps": DEPTH},
    "peagle": {"depths": DEPTH, "num_layers": 2},
    "dspark": {"num_layers": 2, "block_size": DEPTH, "markov_rank": 4},
    "dflash": {"num_layers": 2, "block_size": DEPTH + 1, "layout": "mask"},
    "dflash2": {"num_layers": 2, "block_size": DEPTH + 1, "selector_top_k": 4},
    "lilicorr": {"num_layers": 2, "block_size": DEPTH + 1, "lilicorr_candidate_topk": 4},
    "domino": {"num_layers": 2, "block_size": DEPTH, "gru_hidden_dim": 5},
    "xpress": {"num_layers": 2, "block_size": DEPTH + 1, "xpress_rank": 5},
}
BLOCKS = ("dspark", "dflash", "dflash2", "domino", "lilicorr", "xpress")
CASES = [
    *((kind, "auto", False) for kind in DRAFTS_OF),
    *((kind, MIXED, False) for kind in DRAFTS_OF),
    *((kind, "auto", True) for kind in BLOCKS),
]


def make(kind: str, model: Any, **changes: Any) -> Any:
    """Return a float64 draft with large weights, so that every position that is seen matters."""
    draft = draft_for(kind, model, **DRAFTS_OF[kind] | changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.requires_grad and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return draft.double().eval()


@pytest.fixture(scope="module")
def documents() -> list[tuple[list[int], list[int]]]:
    """Two documents of random tokens, several windows long."""
    generator = torch.Generator().manual_seed(3)
    lengths = [WINDOW * 4, WINDOW * 3 + 1]
    return [(torch.randint(8, VOCAB, (n,), generator=generator).tolist(), [1] * n) for n in lengths]


def decoded(draft: Any, head: Any, batch: Any, first: int, length: int) -> list[list[int]]:
    """Chains of a document's slots, one position verified per round, as decoding does it."""
    drafter = draft.drafter(head)
    part = slice(first, first + length)
    ids = batch.input_ids[0, part].tolist()
    states = [batch.hidden[name][:, part] for name in draft.state_columns]
    aux = torch.cat(states, dim=-1)
    found = []
    with torch.no_grad():
        for t in range(length - 1):
            tokens, _ = drafter.propose(ids[t + 1 : t + 2], aux[:, t : t + 1], DEPTH, Greedy())
            found.append(tokens.tolist())
    return found


@pytest.mark.parametrize("kind, types, non_causal", CASES)
def test_chains_of_a_pack_are_those_of_decoding_beyond_the_window(
    kind, types, non_causal, target, documents
):
    changes = {"sliding_window_non_causal": True} if non_causal else {}
    draft = make(kind, target, sliding_window=WINDOW, layer_types=types, **changes)
    head, batch = head_of(target), batch_of(target, documents)
    with torch.no_grad():
        chains = draft.chains(batch, head, DEPTH)
    first = 0
    for ids, _ in documents:
        wanted = decoded(draft, head, batch, first, len(ids))
        assert chains[0, first : first + len(ids) - 1].tolist() == wanted
        first += len(ids)
    # the planted failure: without the window, some of these chains are others
    full = make(kind, target)
    full.load_state_dict(draft.state_dict())
    with torch.no_grad():
        others = full.chains(batch, head, DEPTH)
    assert torch.equal(others[0, :2], chains[0, :2]) or kind in BLOCKS
    assert not torch.equal(others, chains)


@pytest.mark.parametrize("kind", DRAFTS_OF)
def test_a_window_longer_than_the_documents_is_no_window_bit_for_bit(kind, target, documents):
    """In training: the loss and every gradient."""
    head, batch = head_of(target), batch_of(target, documents)
    results = []
    long = {"sliding_window": 100}
    if kind in BLOCKS:
        long["sliding_window_non_causal"] = True
    for changes in ({}, long):
        draft = make(kind, target, **changes).train()
        torch.manual_seed(5)
        loss = draft.loss(batch, head, None).loss
        loss.backward()
        gradients = [p.grad for p in draft.trainable_parameters()]
        results.append([loss.detach(), *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["peagle", "dspark"])
def test_slots_that_are_drafted_a_few_at_a_time_draft_the_same(
    kind: str, target: Any, documents: list[tuple[list[int], list[int]]], monkeypatch: Any
) -> None:
    draft, head, batch = make(kind, target), head_of(target), batch_of(target, documents)
    with torch.no_grad():
        whole = draft.chains(batch, head, DEPTH)
        monkeypatch.setattr("spec_train.drafts.peagle.draft.CHUNK_ROWS", 5)
        monkeypatch.setattr("spec_train.drafts.block.draft._CHUNK_ELEMENTS", 1)
        assert torch.equal(draft.chains(batch, head, DEPTH), whole)
        assert torch.equal(draft.chains(batch, head, 1), whole[..., :1])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_tree_of_one_branch_is_the_chain(kind, target, documents):
    draft = make(kind, target, sliding_window=WINDOW)
    head, batch = head_of(target), batch_of(target, documents)
    length = len(documents[0][0])
    wanted = decoded(draft, head, batch, 0, length)
    tree = TreeDrafter.of(draft, head, TreeShape(nodes=DEPTH, topk=1))
    ids = documents[0][0]
    aux = torch.cat([batch.hidden[name] for name in draft.state_columns], dim=-1)
    with torch.no_grad():
        for t in range(length - 1):
            grown = tree.propose(ids[t + 1 : t + 2], aux[:, t : t + 1], DEPTH)
            assert grown.tokens == wanted[t]
