"""The weights of D-PACE, against numbers that the speculators library 0.9.0 computed."""

import pytest
import torch

from spec_train.drafts.block.blocks import pace_weights
from tests.tolerance import close

WEIGHTS = {  # `dpace_loss_decay` of blocks with the cross-entropies 0.1, 2, 0.5 and 1, 0.3
    0.5: [
        *(1.9273672103881836, 0.974948525428772, 0.4342912435531616),
        *(1.2792470455169678, 0.5953073501586914),
    ],
    0.2: [
        *(1.4038214683532715, 0.47995153069496155, 0.19515177607536316),
        *(0.886115550994873, 0.3918119966983795),
    ],
}


@pytest.mark.parametrize("smoothing", WEIGHTS)
def test_the_weights_of_dpace_are_those_of_speculators(smoothing):
    drafted = torch.tensor([[[True, True, True], [True, True, False]]])
    order = torch.tensor([3, 0, 4, 1, 2])  # as the teachers' slots may order them
    entropy = torch.tensor([0.1, 2.0, 0.5, 1.0, 0.3], requires_grad=True)
    rows, trained = drafted.flatten().nonzero()[:, 0][order], torch.ones(5, dtype=torch.bool)
    found = pace_weights(entropy[order], trained, drafted, rows, smoothing)
    wanted = torch.tensor(WEIGHTS[smoothing], dtype=torch.float64)[order]
    close(found, wanted, terms=16, dtype=torch.float32)
    assert not found.requires_grad
    trained = rows != 1  # a draft without a cross-entropy: as if it were none
    found = pace_weights(entropy[order], trained, drafted, rows, 1.0)
    assert found[rows.argsort()].tolist() == [2, 1, 1, 2, 1]
