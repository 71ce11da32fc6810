"""`spec_train.testing`: every draft keeps the laws, and a draft that breaks one is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.drafts import DRAFTS, depth_loss
from spec_train.drafts.kinds import kind_named
from spec_train.testing import LAWS, LawError, check_draft
from tests.marks import long_but

MEDUSA = f"{Path(__file__).parents[2] / 'docs' / 'examples' / 'medusa.py'}:Medusa"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"num_layers": 2, "sliding_window": 3}),
    ("eagle3", {"draft_vocab_size": 0, "fc_norm": True, "num_layers": 2}),
    ("peagle", {"segments": 3, "gradient_checkpointing": True}),
    ("dspark", {"markov_head_type": "rnn", "layout": "mask"}),
    ("dflash", {"layout": "anchor", "draft_vocab_size": 40}),
    ("domino", {"layout": "mask", "pure_draft_prefix_len": 0}),
]


def test_medusa_keeps_them() -> None:
    assert len(check_draft(MEDUSA)) == len(LAWS)


@pytest.mark.parametrize("name", long_but(["eagle", "lilicorr"], DRAFTS))
def test_every_draft_keeps_them(name: str) -> None:
    check_draft(name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_with_other_options_too(name: str, options: dict[str, Any]) -> None:
    kind = kind_named(name).options
    check_draft(name, kind(**{**kind.example, **options}))


# -- drafts that break one -------------------------------------------------------------------------


def next_state(draft: Any, states: Tensor) -> Any:
    """Read the state after the slot."""
    return type(draft).__mro__[1].at_depth(draft, torch.cat([states[1:], states[:1]]))


def state_of_the_document_before(draft: Any, states: Tensor) -> Any:
    """Read also the slot before, which may be of another document."""
    before = torch.cat([states[:1], states[:-1]])
    return type(draft).__mro__[1].at_depth(draft, states + before)


def mean_of_a_batch(draft: Any, batch: Any, head: Any, counts: Any) -> Any:
    """Divide by the slots of the batch instead of those of the whole step."""
    return type(draft).__mro__[1].batch_loss(draft, batch, head, draft.slot_counts(batch))


def read_the_answer(draft: Any, batch: Any, head: Any, counts: Any) -> Any:
    """Add the drafted token to the state that its head reads, in the loss alone."""
    drafted = shift_left(shift_left(batch.input_ids, batch.document_ids), batch.document_ids)
    other = batch.hidden[FINAL] + draft.embed_tokens(drafted).detach()
    inputs = draft.at_depth(other.flatten(0, 1))
    return depth_loss(draft, batch, head, counts, inputs, draft.shares)


def other_drafts(draft: Any, batch: Any, head: Any, depth: int, scored_only: bool = False) -> Any:
    """Draft the second best token of stored documents."""
    found = type(draft).__mro__[1].chains(draft, batch, head, depth, scored_only=scored_only)
    return (found + 1) % draft.config.vocab_size


def no_graph(draft: Any) -> Tensor:
    return torch.zeros((), requires_grad=True)


def rounded(draft: Any, dtype: torch.dtype) -> Any:
    tensors = type(draft).__mro__[1].checkpoint_tensors(draft, dtype)
    return {n: v.bfloat16().to(dtype) if "blocks" in n else v for n, v in tensors.items()}


def with_a_dead_weight(draft: Any, config: Any, options: Any = None) -> None:
    type(draft).__mro__[1].__init__(draft, config, options)
    draft.gate = torch.nn.Linear(4, 4)


def noisy(draft: Any, states: Tensor) -> Any:
    """Draw numbers from a generator that nobody seeds."""
    other = states + torch.randn(states.shape, generator=NUMBERS).to(states) * draft.training
    return type(draft).__mro__[1].at_depth(draft, other)


NUMBERS = torch.Generator().manual_seed(0)
BROKEN: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a state too late": ("at_depth", next_state, "change the draft"),
    "another document": ("at_depth", state_of_the_document_before, "is .*, expected"),
    "the answer": ("batch_loss", read_the_answer, "the loss of token"),
    "a mean": ("batch_loss", mean_of_a_batch, "the loss is .*, expected"),
    "two programs": ("chains", other_drafts, "the drafter proposes"),
    "no graph": ("zero_loss", no_graph, "gradient of .* is none"),
    "rounded files": ("checkpoint_tensors", rounded, "has other values after"),
    "a dead weight": ("__init__", with_a_dead_weight, "gate.weight is trainable, and has no"),
    "own numbers": ("at_depth", noisy, "the loss"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_draft_that_breaks_one_is_named(case: str) -> None:
    name, broken, said = BROKEN[case]
    medusa = kind_named(MEDUSA).draft_class()
    draft = type("Broken", (medusa,), {name: broken})
    with pytest.raises(LawError, match=said) as caught:
        check_draft(draft)
    assert "while this law was tried" in caught.value.__notes__[0]
