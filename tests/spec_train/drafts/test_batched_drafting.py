"""Drafters of several sequences propose together what each of them proposes alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from spec_train.decoding.batches import propose_all
from spec_train.drafts.drafting import Drafter, DraftRequest
from spec_train.losses.sampling import make_sampler
from tests.spec_train.drafts.dspark import cases as dspark
from tests.spec_train.drafts.eagle import cases as eagle
from tests.spec_train.drafts.eagle3 import cases as eagle3
from tests.spec_train.drafts.peagle import cases as peagle
from tests.tolerance import close, network

MIXED = "sliding_attention,full_attention"
LONGROPE = (
    ("rope_type", "longrope"),
    ("rope_theta", 100.0),
    ("short_factor", [1.0] * 3),
    ("long_factor", [2.0, 3.0, 4.0]),
    ("factor", 4.0),
    ("original_max_position_embeddings", 12),
)

CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "eagle3": lambda: (eagle3.make_draft(eagle3.Case()), dspark.make_head()),
    "eagle3 window": lambda: (eagle3.make_draft(eagle3.Case(window=3)), dspark.make_head()),
    "eagle3 longrope": lambda: (eagle3.make_draft(eagle3.Case(rope=LONGROPE)), dspark.make_head()),
    "eagle": lambda: with_head(eagle.Case(layers=2, kv_heads=1, softcap=3.0)),
    "eagle windows": lambda: with_head(eagle.Case(layers=2, window=2, types=MIXED)),
    "peagle": lambda: (peagle.make_draft(peagle.Case()), dspark.make_head()),
    "peagle windows": lambda: (
        peagle.make_draft(peagle.Case(layers=2, window=3, types=MIXED)),
        dspark.make_head(),
    ),
    "dspark": lambda: (dspark.make_draft(dspark.Case()), dspark.make_head()),
    "dspark rnn, mask": lambda: (
        dspark.make_draft(dspark.Case(kind="rnn", layout="mask", reduced=True)),
        dspark.make_head(),
    ),
    "dspark windows": lambda: (
        dspark.make_draft(dspark.Case(window=5, block_size=5, types=MIXED)),
        dspark.make_head(),
    ),
    "dflash window": lambda: (
        dspark.make_draft(dspark.Case(window=6, non_causal=True, dflash=True, layout="mask")),
        dspark.make_head(),
    ),
}


def with_head(case: eagle.Case) -> tuple[Any, Any]:
    return eagle.make_draft(case), eagle.make_head(case)


def asked(
    width: int, rows: int, round_: int, counts: Sequence[int], t: float
) -> list[DraftRequest]:
    """What a round asks: of new sequences a prompt, of others 1 to 5 tokens."""
    found = []
    for row in range(rows):
        generator = torch.Generator().manual_seed(100 * round_ + row)
        prompt = row >= 3 * round_ - 1  # some sequences begin in round 0, others later
        length = 4 + 3 * row if prompt else int(torch.randint(1, 6, (), generator=generator))
        tokens = torch.randint(10, (length,), generator=generator).tolist()
        states = torch.randn(1, length, width, generator=generator, dtype=torch.float64)
        found.append(DraftRequest(tokens, states, counts[row % len(counts)], make_sampler(t, row)))
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_together_is_alone(name: str, temperature: float) -> None:
    """Four rounds; sequences join in the second, and one leaves after the third."""
    draft, head = CASES[name]()
    draft.eval()
    if name == "dspark":
        draft.stop_below(0.45)
    width = len(draft.state_columns) * draft.config.target_hidden_size
    alone: list[Drafter] = [draft.drafter(head) for _ in range(5)]
    together: list[Drafter] = [draft.drafter(head) for _ in range(5)]
    lengths = set()
    for number, rows in enumerate(([0, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 2, 4])):
        counts = [4, 2, 1] if number == 3 else [4]
        asks = {}
        for kind in (alone, together):
            all_asks = asked(width, 5, number, counts, temperature)
            asks[id(kind)] = [all_asks[row] for row in rows]
        expected = [
            alone[row].propose(a.tokens, a.states, a.count, a.sampler)
            for row, a in zip(rows, asks[id(alone)], strict=True)
        ]
        found = propose_all([together[row] for row in rows], asks[id(together)])
        for (ids, q), (want, p) in zip(found, expected, strict=True):
            assert ids.tolist() == want.tolist()
            lengths.add(len(want))
            for a, b in zip(q, p, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    close(a, b, terms=network(4), dtype=torch.float64)
        assert [d.passes for d in together] == [d.passes for d in alone]
    assert len(lengths) > 1
