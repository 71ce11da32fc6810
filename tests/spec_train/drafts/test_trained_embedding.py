"""A draft with an embedding of its own: it starts as the target's, is trained, saved and kept."""

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import DRAFTS
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import batch_of, build_draft

dataset, head = any_draft.dataset, any_draft.head


@pytest.mark.parametrize("name", DRAFTS)
def test_it_starts_as_the_targets_and_is_trained(dataset, head, name):
    draft = build_draft(name, dataset, head, train_embeddings=True)
    own = draft.embed_tokens.weight
    assert torch.equal(own, head.embed_weight) and own is not head.embed_weight
    assert any(p is own for p in draft.trainable_parameters())
    batch = batch_of(dataset, [[0, 1], [2]], 64)
    draft.loss(batch, head, None).loss.backward()
    assert own.grad is not None and bool(own.grad.any())
    frozen = build_draft(name, dataset, head)
    assert not any(p is frozen.embed_tokens.weight for p in frozen.trainable_parameters())


@pytest.mark.parametrize("name", DRAFTS)
def test_joining_a_target_neither_refuses_nor_replaces_it(dataset, head, name):
    for trained in (True, False):
        draft = build_draft(name, dataset, head, train_embeddings=trained)
        changed = head.embed_weight + torch.randn_like(head.embed_weight)
        draft.embed_tokens.weight = torch.nn.Parameter(changed, requires_grad=trained)
        again = type(draft).from_files(draft.files(torch.float32, "here"))
        if not trained:  # the same edit of a frozen embedding is another target's
            with pytest.raises(DraftError, match="a draft of another target"):
                again.join(head, dataset.manifest, "here")
            continue
        warnings = again.join(head, dataset.manifest, "here")
        assert any("embedding differs from the target's by" in line for line in warnings)
        assert torch.equal(again.embed_tokens.weight, changed)
        assert again.embed_tokens.weight.requires_grad
        batch = batch_of(dataset, [[0], [1, 2]], 64)
        before = again.chains(batch, head, 2)
        again.share(head)
        assert torch.equal(again.chains(batch, head, 2), before)


def test_joining_its_own_target_warns_of_nothing_and_another_vocabulary_is_refused(dataset, head):
    draft = build_draft("eagle3", dataset, head, train_embeddings=True)
    with torch.no_grad():
        draft.embed_tokens.weight += 0.3 * head.embed_weight.std()  # as training moves it
    assert draft.join(head, dataset.manifest, "here") == []
    draft.embed_tokens.weight = torch.nn.Parameter(head.embed_weight[:-1].clone())
    with pytest.raises(DraftError, match="a draft of another target"):
        draft.join(head, dataset.manifest, "here")
