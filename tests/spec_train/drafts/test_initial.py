"""How the random matrices of a new draft start."""

import pytest
import torch
from torch import nn

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from tests.factory import tiny_dataset, tiny_llama

SMALL = {
    "eagle": {},
    "eagle3": {"draft_vocab_size": 32},
    "peagle": {"draft_vocab_size": 32, "num_layers": 2},
    "dspark": {"num_layers": 1, "markov_rank": 8, "markov_head_type": "gated"},
    "dflash": {"num_layers": 1},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("initial") / "data"
    return tiny_dataset(folder, model=tiny_llama(hidden=128))


def fresh(dataset, name: str, **options) -> nn.Module:
    data = HiddenStatesDataset(dataset)
    head = TargetHead.from_dataset(dataset)
    torch.manual_seed(0)
    return DRAFTS[name].build(
        DRAFT_OPTIONS[name](**SMALL[name], **options),
        target_config=data.target_config(),
        manifest=data.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size),
    )


@pytest.mark.parametrize("name", DRAFT_OPTIONS)
def test_matrices_have_the_asked_deviation_and_nothing_else_changes(dataset, name):
    """Frozen weights, norms, embedding tables and the rows from the target stay as they are."""
    drawn, plain = fresh(dataset, name, initializer_range=0.3), fresh(dataset, name)
    for module_name, module in drawn.named_modules():
        for part, value in module.named_parameters(recurse=False):
            before = plain.get_parameter(f"{module_name}.{part}".removeprefix("."))
            matrix = isinstance(module, nn.Linear) and value.requires_grad
            if not matrix or (name, module_name) in {("eagle3", "lm_head"), ("peagle", "lm_head")}:
                assert part == "bias" or "mask_hidden" in part or torch.equal(value, before)
            elif part == "bias":
                assert not value.any()
            elif value.numel() > 1000:  # the sample's own deviation is off by 0.3 / sqrt(2 n)
                assert abs(value.std() - 0.3) < 5 * 0.3 / (2 * value.numel()) ** 0.5
                assert abs(value.mean()) < 5 * 0.3 / value.numel() ** 0.5


def test_zero_leaves_the_weights_as_torch_makes_them(dataset):
    draft = fresh(dataset, "dspark", initializer_range=0.0)
    bound = draft.fc.in_features**-0.5  # uniform in (-bound, bound)
    assert 0.95 * bound < draft.fc.weight.abs().max() <= bound


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_deviation_outside_its_range_is_refused(value):
    with pytest.raises(DraftError, match="initializer_range"):
        DRAFT_OPTIONS["eagle"](initializer_range=value)
