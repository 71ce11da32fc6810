"""Other shapes than the target's: written, read, or refused."""

import pytest

from spec_data.shards.errors import ConfigError, DraftError
from spec_train.drafts.eagle3 import Eagle3Config
from spec_train.options.draft_options import Eagle3Options
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.drafts.cases import small_target

dataset, head = any_draft.dataset, any_draft.head


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, "head_dim = 7: rotary positions need an even size"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
        ({"hidden_act": "swilu"}, "no such activation; did you mean"),
        ({"hidden_act": "xielu"}, "activation with weights"),
        ({"intermediate_size": -1}, "--intermediate-size -1: expected"),
        ({"layer_types": "sliding_attention"}, "--sliding-window N is needed"),
        ({"layer_types": "slides"}, "layer_types: slides unknown"),
        ({"sliding_window": 4, "layer_types": "full_attention"}, "no layer of layer_types"),
        (
            {"sliding_window": 4, "layer_types": "sliding_attention,full_attention"},
            "layer_types has 2 entries; the draft has 1 layers",
        ),
    ],
)
def test_an_impossible_shape_is_refused(dataset, head, options, message):
    with pytest.raises((ConfigError, DraftError), match=message):
        build_draft("eagle3", dataset, head, **options)


def test_longrope_has_no_factors_for_another_head_size() -> None:
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32},
        **{"short_factor": [1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0]},
    }
    sizes = {"layers": (1,), "vocab_size": 8, "draft_vocab_size": 8}
    target = small_target(12, 4, 2, rope)  # heads of size 6
    assert Eagle3Config.from_target(target, options=Eagle3Options(), **sizes).head_dim == 6
    with pytest.raises(DraftError, match=r"head_dim = 4: .* has 3 numbers in short_factor"):
        Eagle3Config.from_target(target, options=Eagle3Options(head_dim=4), **sizes)
