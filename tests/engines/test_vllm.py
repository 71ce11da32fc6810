"""Real vLLM on a CPU drafts and accepts, prompt for prompt, what our own decoder does.

Greedy, float32. A wrong layer, norm, position or vocabulary map would change what is drafted, and
with it how much is accepted; the answers themselves prove nothing, verification repairs them.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engines.engine_tools import (
    fitted,
    make_dataset,
    make_prompts,
    make_target,
    our_counts,
    run_program,
    serve,
)
from tests.spec_train.formats.tools import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: bash scripts/engines_env.sh",
    ),
]

PROMPTS = 6


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a target and a dataset of its answers."""
    found = {}
    for family in ("llama", "qwen3"):
        folder = tmp_path_factory.mktemp(family)
        model = make_target(family, folder / "target")
        make_dataset(model, make_prompts(), folder / "data")
        found[family] = folder
    return found


def assert_same_counts(place: Path, draft: Path, depth: int, answers: Any) -> None:
    """vLLM's answers and counts are our decoder's, and tell a good draft from a bad one."""
    model = AutoModelForCausalLM.from_pretrained(place / "target").float().eval()
    accepted = 0
    for prompt, answer in zip(make_prompts()[:PROMPTS], answers, strict=True):
        assert answer == our_counts(model, draft, prompt, depth)
        accepted += answer["accepted"]
    drafted = sum(answer["drafted"] for answer in answers)
    assert 0.05 * drafted < accepted < 0.95 * drafted


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        ("llama", "vllm", {"draft_vocab_size": 128}),
        ("qwen3", "vllm", {"draft_vocab_size": 0, "layers": "1,4", "fc_norm": True}),
        ("qwen3", "speculators", {"draft_vocab_size": 128, "norm_output": True}),
    ],
)
def test_eagle3(places, tmp_path, family, form, options):
    place, depth = places[family], 4
    draft = fitted("eagle3", place / "data", tmp_path / "run", ttt_steps=depth, **options)
    out = export(draft, form, tmp_path / "my-eagle3", place / "target")
    served, how = str(out), None
    if form == "vllm":
        served = str(place / "target")
        how = {"method": "eagle3", "model": str(out), "num_speculative_tokens": depth}
    answers = serve(served, how, make_prompts()[:PROMPTS])
    assert_same_counts(place, draft, depth, answers)


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        ("llama", "vllm", {"draft_vocab_size": 128}),
        ("qwen3", "speculators", {"draft_vocab_size": 0, "layers": "1,4", "fc_norm": True}),
    ],
)
def test_peagle(places, tmp_path, family, form, options):
    place, depth = places[family], 4
    options = {"depths": depth, "num_layers": 2, "mask_token_id": 2} | options
    draft = fitted("peagle", place / "data", tmp_path / "run", **options)
    out = export(draft, form, tmp_path / "parallel", place / "target")
    served, how = str(out), None
    if form == "vllm":
        served = str(place / "target")
        how = {
            "method": "eagle3",
            "model": str(out),
            "num_speculative_tokens": depth,
            "parallel_drafting": True,
        }
    answers = serve(served, how, make_prompts()[:PROMPTS])
    assert_same_counts(place, draft, depth, answers)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eagle(places, tmp_path, family):
    place, depth = places[family], 3
    draft = fitted("eagle", place / "data", tmp_path / "run", depth=depth)
    out = export(draft, "vllm", tmp_path / "my-eagle", place / "target")
    how = {"method": "eagle", "model": str(out), "num_speculative_tokens": depth}
    answers = serve(str(place / "target"), how, make_prompts()[:PROMPTS])
    assert_same_counts(place, draft, depth, answers)


PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def block_draft(place: Path, folder: Path, **options: Any) -> Path:
    """A DSpark draft of a few steps."""
    sizes = {"block_size": 4, "num_layers": 2, "mask_token_id": 2, "num_anchors": 4}
    return fitted("dspark", place / "data", folder, 2, **sizes, **options)


def loaded(place: Path, out: Path) -> Any:
    """What vLLM's class holds of a draft."""
    how = {"method": "dspark", "model": str(out), "num_speculative_tokens": 3}
    task = {"model": str(place / "target"), "speculative_config": how}
    return run_program("load_vllm.py", task)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 128, "layout": "mask"}, {"markov_rank": 0}],
    ids=["full", "reduced", "no Markov head"],
)
def test_dspark_loads(places, tmp_path, form, options):
    """Its runner needs a GPU; its class, its loader and its reading of the config do not."""
    place = places["qwen3"]
    draft = block_draft(place, tmp_path / "run", **{"markov_rank": 8} | options)
    out = export(draft, form, tmp_path / "my-dspark", place / "target")
    found, file = loaded(place, out), load_file(out / "model.safetensors")
    assert found["class"] == "Qwen3DSparkForCausalLM"
    anchor = options.get("layout") != "mask"
    assert found["config"]["target_layer_ids"] == [1, 2, 4]
    assert found["config"]["sample_from_anchor"] is anchor and found["config"]["mask_token_id"] == 2
    skipped = {"model.mask_embedding", "model.embed_tokens.weight"}
    skipped |= {"lm_head.weight"} - file.keys()  # shared with the target later
    for name, total in found["sums"].items():
        own = name.removeprefix("model.")
        fused = next((part for part in PARTS if part in own), "")
        names = [own.replace(fused, part) for part in PARTS[fused]] if fused else [own]
        if name in skipped:
            continue
        if options.get("markov_rank") == 0 and "markov" in own:
            continue  # tables without columns
        assert total == pytest.approx(sum(float(file[n].double().sum()) for n in names), abs=1e-4)


def test_dflash(places, tmp_path):
    """One layer: with more, vLLM's CPU kernel norms the context keys of all with layer 0's."""
    place, block = places["qwen3"], 4
    sizes = {"block_size": block, "num_layers": 1, "mask_token_id": 2, "num_anchors": 16}
    draft = fitted("dflash", place / "data", tmp_path / "run", **sizes)
    out = export(draft, "vllm", tmp_path / "my-dflash", place / "target")
    how = {"method": "dflash", "model": str(out), "num_speculative_tokens": block - 1}
    answers = serve(str(place / "target"), how, make_prompts()[:PROMPTS])
    assert_same_counts(place, draft, block - 1, answers)
