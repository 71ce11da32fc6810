"""The layers of each draft's recipe, as plain arithmetic, and what has none."""

import pytest

from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.layer_ids import RECIPES, choose_layers, chosen_layers


@pytest.mark.parametrize("blocks", [8, 10, 28, 36, 61, 80])
def test_recipes_are_those_of_the_papers_and_never_the_last_block(blocks):
    layers, own = choose_layers("auto", tuple(RECIPES), blocks)
    eagle3 = (1, blocks // 2 - 1, blocks - 4)
    spread = [1 + (blocks - 3) * i / 4 for i in range(5)]  # from 1 to L-2
    block = tuple(round(at) for at in spread)
    assert own == {
        "eagle": (),
        "eagle3": eagle3,
        "peagle": eagle3,
        "dspark": block,
        "dflash": block,
        "dflash2": block,
        "domino": block,
        "lilicorr": block,
        "xpress": block,
    }
    assert layers == tuple(sorted({*eagle3, *block}))
    assert max(layers) == blocks - 2


def test_a_short_target_has_fewer_layers_for_block_drafts():
    assert choose_layers("auto", ["dspark"], 6)[0] == (1, 2, 3, 4)
    assert choose_layers("auto", ["dflash"], 3)[0] == (1,)
    assert choose_layers("auto", ["eagle"], 2) == ((), {"eagle": ()})


@pytest.mark.parametrize(
    ("drafts", "layers", "blocks", "named"),
    [
        (["eagle3"], "auto", 6, r"--for eagle3 takes blocks 1, .* which are \(1, 2, 2\)"),
        (["dspark"], "auto", 2, r"--for dspark spreads .* only L=2 blocks"),
        (["eagle3"], [1, 2], 12, "one or the other"),
        (["eagle4"], "auto", 9, "unknown drafts eagle4; known: eagle, eagle3"),
    ],
)
def test_a_target_without_the_layers_of_a_recipe_is_refused(drafts, layers, blocks, named):
    with pytest.raises(TargetError, match=named):
        choose_layers(layers, drafts, blocks)


def test_a_draft_reads_its_own_layers_before_all_others():
    assert chosen_layers("auto", (1, 3, 4), None) == (1, 3, 4)
    assert chosen_layers("auto", (1, 3, 4), (1, 4)) == (1, 4)
    assert chosen_layers("3,1", (1, 3, 4), (1, 4)) == (1, 3)
    with pytest.raises(DraftError, match=r"no captured layer, only hidden\.final"):
        chosen_layers("auto", (), None)


@pytest.mark.parametrize("blocks", [3, 5, 8, 12, 28, 36, 80])
def test_a_search_holds_every_recipe_and_an_even_spread(blocks):
    layers, own = choose_layers("search", (), blocks)
    count = min(9, blocks - 2)
    spread = {round(1 + (blocks - 3) * i / max(count - 1, 1)) for i in range(count)}
    recipes = set().union(*own.values())
    assert set(layers) == spread | recipes and len(layers) <= 12
    assert {"eagle", "dspark", "dflash2"} <= own.keys()
    assert ("eagle3" in own) == (blocks >= 7)
    for draft, ids in own.items():
        assert ids == choose_layers("auto", [draft], blocks)[0]
