"""Every registered family: the target's rotary frequencies, and a run from generate to eval."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from spec_data.models.rope_settings import RopeSettings
from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.layer_ids import capturable_layer_ids
from spec_train.drafts import DRAFTS
from spec_train.drafts.config import target_shape
from spec_train.drafts.layers import Rotary
from spec_train.formats.target_facts import read_target
from spec_train.training.setup import fit
from tests.families import FAMILIES, LAYERS, MORE_FAMILIES, tiny_model
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.evaluation.tools import run_eval
from tests.tolerance import close

ROTARY = sorted(set(FAMILIES | MORE_FAMILIES) - {"gpt2"})  # which has learned positions
SMALL = {
    "eagle3": {"ttt_steps": 3, "draft_vocab_size": 64},
    "peagle": {"draft_vocab_size": 64},
    "dspark": {"markov_rank": 8},
}


@pytest.mark.parametrize("nested", [False, True])
def test_a_target_that_lists_its_blocks_has_their_number(nested: bool, tmp_path: Path) -> None:
    """Such as Nemotron-H: published drafts without layer ids need the number."""
    text = {"layers_block_type": ["mamba", "attention", "moe", "mamba"]}
    config = {"text_config": text} if nested else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_target(tmp_path).num_layers == 4


@pytest.mark.parametrize(
    "names", [["T5ForConditionalGeneration"], ["Qwen2VLForConditionalGeneration"], ["MambaLM"], []]
)
def test_others_are_refused_with_what_is_supported(names: list[str]) -> None:
    with pytest.raises(DraftError, match=r"GptOssForCausalLM, .*encoder-decoders") as caught:
        target_shape("eagle3", {"architectures": names}, None)
    assert str(names) in str(caught.value)


def test_layer_ids_are_spread_over_the_depth() -> None:
    for blocks in range(2, 80):
        for count in range(1, blocks):
            ids = capturable_layer_ids(blocks + 1, count)
            assert len(ids) == count and ids[-1] == blocks - 1
            assert count == 1 or ids[0] == 1
            gaps = [b - a for a, b in itertools.pairwise(ids)]
            assert min(gaps, default=1) >= 1
            assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert capturable_layer_ids(36, 5) == [1, 9, 18, 26, 34]


@pytest.mark.parametrize(("blocks", "count"), [(5, 0), (5, 4), (2, 1)])
def test_more_layers_than_blocks_are_refused(blocks: int, count: int) -> None:
    with pytest.raises(TargetError, match=rf"{count} layers cannot be spread"):
        capturable_layer_ids(blocks, count)


@pytest.mark.parametrize("family", ROTARY)
def test_the_drafts_rope_is_the_targets(family: str) -> None:
    model = tiny_model(family)
    ours = Rotary(RopeSettings.of(target_shape("eagle3", model.config.to_dict(), None)))
    (theirs,) = [m for n, m in model.named_modules() if n.endswith("rotary_emb")]
    prefix = "full_attention_" if hasattr(theirs, "full_attention_inv_freq") else ""
    torch.testing.assert_close(ours.inv_freq, getattr(theirs, prefix + "inv_freq"), rtol=0, atol=0)
    assert ours.factor == pytest.approx(getattr(theirs, prefix + "attention_scaling"))
    positions = torch.arange(40)[None]
    kind = {"layer_type": "full_attention"} if prefix else {}
    expected = theirs(torch.zeros(1), positions, **kind)
    for own, other in zip(ours(positions), expected, strict=True):
        # some families return the angles once, others twice side by side
        half = other if other.shape[-1] == own.shape[-1] else torch.cat([other, other], -1)
        same = half if family != "cohere" else torch.cat([other[..., ::2]] * 2, -1)
        close(own, same, terms=4)  # cosines and sines of equal angles, times a factor


@pytest.mark.long
@pytest.mark.parametrize("draft", sorted(DRAFTS))
@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES))
def test_generate_fit_and_eval(family: str, draft: str, tmp_path_factory, workplaces) -> None:
    """Fit and evaluate drafts of every family, without the target and then with it."""
    place = workplaces(family)
    out = tmp_path_factory.mktemp("run") / draft
    options = {"steps": 1, "batch_size": 1, "device": "cpu", **SMALL.get(draft, {})}
    joined = flat.split(draft, data=str(place / "data"), out=str(out), **options)
    assert fit(draft, *joined).finished
    settings = {"data": str(place / "data"), "target": str(place / "target"), "max_new_tokens": 4}
    prompts = {"prompts": str(place / "chats.jsonl"), "limit": 2, "device": "cpu"}
    report = run_eval(dict(draft=str(out), **settings, **prompts))
    assert report["identical"] + report["ties"] == report["responses"] == 2
    assert report["acceptance_length"] >= 1


@pytest.fixture(scope="module")
def workplaces(tmp_path_factory):
    """Make once per family: a target on disk, a corpus, and one dataset for all drafts."""
    places: dict[str, Path] = {}

    def place(family: str) -> Path:
        if family not in places:
            folder = tmp_path_factory.mktemp(family)
            save_target(folder / "target", family)
            write_corpus(folder / "chats.jsonl", 8)
            layers = ",".join(map(str, capturable_layer_ids(LAYERS, 3)))
            run(folder / "target", folder / "chats.jsonl", folder / "data", layers=layers)
            stored = json.loads((folder / "data" / "target" / "config.json").read_text())
            assert stored["architectures"]
            places[family] = folder
        return places[family]

    return place
