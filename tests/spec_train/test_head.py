"""The target's head out of a dataset, and the choice of a draft vocabulary."""

from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import HeadSpec
from spec_train.drafts.vocabulary import choose_draft_vocabulary
from spec_train.losses.head import TargetHead
from tests.factory import tiny_dataset, tiny_llama
from tests.tolerance import LAYER, close, same_choice


def _head(tied: bool = False, **changes: object) -> TargetHead:
    torch.manual_seed(0)
    spec = HeadSpec(vocab_size=7, hidden_size=4, tied=tied, **changes)  # type: ignore[arg-type]
    embed = torch.randn(7, 4)
    bias = torch.randn(7) if spec.has_bias else None
    return TargetHead(spec, embed, embed if tied else torch.randn(7, 4), bias)


def test_logits_of_stored_states_are_the_targets(tmp_path: Path) -> None:
    model = tiny_llama()
    path = tiny_dataset(tmp_path / "data", n_docs=3, model=model)
    head = TargetHead.from_dataset(path)
    row = HiddenStatesDataset(path)[1]
    logits = head.logits(row["hidden.final"])
    assert logits.dtype == torch.float32
    # States are stored in bfloat16. A logsumexp averages over the errors of its 64 logits, a logit
    # over those of its 32 products.
    same_choice(logits, row["target_argmax"], terms=1 / 32, dtype=torch.bfloat16)
    assert (logits.argmax(-1) == row["target_argmax"]).double().mean() > 0.9
    close(logits.logsumexp(-1), row["target_logsumexp"], terms=1 / 64, dtype=torch.bfloat16)
    assert torch.equal(head.embed_weight, model.get_input_embeddings().weight)


def test_a_dataset_without_head_is_refused(tmp_path: Path) -> None:
    path = tiny_dataset(tmp_path / "data", n_docs=2)
    (path / "target" / "head.safetensors").unlink()
    with pytest.raises(MissingError, match=r"head\.safetensors"):
        TargetHead.from_dataset(path)


@pytest.mark.parametrize("changes", [{}, {"has_bias": True}, {"scale": 0.3, "softcap": 2.0}])
def test_selected_logits_are_columns_of_all_logits(changes: dict[str, object]) -> None:
    head, states = _head(**changes), torch.randn(2, 3, 4)
    ids = torch.tensor([0, 2, 5])
    whole = head.logits(states)
    for _ in range(2):
        close(head.logits(states, ids), whole[..., ids], terms=LAYER)
    ids[1] = 3  # the very tensor, changed: the kept selection must not be used
    close(head.logits(states, ids), whole[..., ids], terms=LAYER)


def test_the_head_is_frozen_and_stays_one_tensor_when_tied() -> None:
    head = _head(tied=True)
    ids = torch.tensor([1, 2])
    head.logits(torch.randn(1, 4), ids)
    head.to(torch.bfloat16)
    assert head.head_weight is head.embed_weight
    logits = head.logits(torch.randn(1, 4, requires_grad=True), ids)
    assert logits.dtype == torch.float32 and not logits.requires_grad
    assert list(head.parameters()) == [] and head.state_dict() == {}


def test_the_vocabulary_is_special_tokens_then_the_most_frequent_sorted() -> None:
    counts = torch.tensor([0, 5, 1, 5, 9, 5, 0, 0])
    assert choose_draft_vocabulary(counts, 3).tolist() == [1, 3, 4]  # ties go to the lower id
    assert choose_draft_vocabulary(counts, 3, [7, 7, 99]).tolist() == [1, 4, 7]
    assert choose_draft_vocabulary(counts, 8).tolist() == list(range(8))


@pytest.mark.parametrize("size, special", [(0, []), (9, []), (2, [0, 1, 2])])
def test_impossible_vocabularies_are_refused(size: int, special: list[int]) -> None:
    with pytest.raises(DraftError, match="draft vocabulary"):
        choose_draft_vocabulary(torch.ones(8, dtype=torch.long), size, special)
