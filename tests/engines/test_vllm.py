"""Real vLLM on a CPU drafts and accepts, prompt for prompt, what our own decoder does.

Greedy, float32. A wrong layer, norm, position or vocabulary map would change what is drafted, and
with it how much is accepted; the answers themselves prove nothing, verification repairs them.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engines.engine_tools import (
    fitted,
    make_dataset,
    make_prompts,
    make_target,
    needs,
    our_counts,
    run_program,
    serve,
)
from tests.spec_train.formats.tools import export

pytestmark = [*needs("vllm"), pytest.mark.long]

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


PARALLEL = {"depths": 4, "num_layers": 2, "mask_token_id": 2}
BLOCK = {"block_size": 4, "num_layers": 1, "mask_token_id": 2, "num_anchors": 16}
"""One layer: with more, vLLM's CPU kernel norms the context keys of all with layer 0's."""
FEWER = {"draft_vocab_size": 0, "layers": "1,4", "fc_norm": True}


@pytest.mark.parametrize(
    ("kind", "family", "form", "depth", "options"),
    [
        ("eagle", "llama", "vllm", 3, {"depth": 3}),
        ("eagle", "qwen3", "vllm", 3, {"depth": 3}),
        ("eagle3", "llama", "vllm", 4, {"ttt_steps": 4, "draft_vocab_size": 128}),
        ("eagle3", "qwen3", "vllm", 4, {"ttt_steps": 4} | FEWER),
        (
            "eagle3",
            "qwen3",
            "speculators",
            4,
            {"ttt_steps": 4, "draft_vocab_size": 128, "norm_output": True},
        ),
        ("peagle", "llama", "vllm", 4, PARALLEL | {"draft_vocab_size": 128}),
        ("peagle", "qwen3", "speculators", 4, PARALLEL | FEWER),
        ("dflash", "qwen3", "vllm", 3, BLOCK),
        ("dflash", "qwen3", "vllm", 3, BLOCK | {"attention_sink_bias": True}),
    ],
    ids=str,
)
def test_answers_and_counts_are_our_decoders(places, tmp_path, kind, family, form, depth, options):
    """And the counts tell a good draft from a bad one."""
    place, prompts = places[family], make_prompts()[:PROMPTS]
    draft = fitted(kind, place / "data", tmp_path / "run", **options)
    name, method = ("parallel", "eagle3") if kind == "peagle" else (f"my-{kind}", kind)
    out = export(draft, form, tmp_path / name, place / "target")
    served, how = str(out), None
    if form == "vllm":
        served = str(place / "target")
        how = {"method": method, "model": str(out), "num_speculative_tokens": depth}
        how |= {"parallel_drafting": True} if kind == "peagle" else {}
    answers = serve(served, how, prompts)
    model = AutoModelForCausalLM.from_pretrained(place / "target").float().eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == our_counts(model, draft, prompt, depth)
    accepted, drafted = (sum(a[key] for a in answers) for key in ("accepted", "drafted"))
    assert 0.05 * drafted < accepted < 0.95 * drafted


PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 128, "layout": "mask"}, {"markov_rank": 0}],
    ids=["full", "reduced", "no Markov head"],
)
def test_dspark_loads(places, tmp_path, form, options):
    """Its runner needs a GPU; its class, its loader and its reading of the config do not."""
    place = places["qwen3"]
    sizes = {"block_size": 4, "num_layers": 2, "mask_token_id": 2, "num_anchors": 4}
    sizes |= {"markov_rank": 8} | options
    draft = fitted("dspark", place / "data", tmp_path / "run", 2, **sizes)
    out = export(draft, form, tmp_path / "my-dspark", place / "target")
    how = {"method": "dspark", "model": str(out), "num_speculative_tokens": 3}
    task = {"model": str(place / "target"), "speculative_config": how}
    found, file = run_program("load_vllm.py", task), load_file(out / "model.safetensors")
    assert found["class"] == "Qwen3DSparkForCausalLM"
    anchor = options.get("layout") != "mask"
    assert found["config"]["target_layer_ids"] == [1, 2, 4]
    assert found["config"]["sample_from_anchor"] is anchor and found["config"]["mask_token_id"] == 2
    compare_weights(found["sums"], file, options.get("markov_rank") == 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash2", {}),
        ("lilicorr", {"conv_kernel_size": 2, "lilicorr_hidden_size": 8}),
        ("lilicorr", {"conv_kernel_size": 0}),
    ],
    ids=str,
)
def test_drafts_of_candidates_load(places, tmp_path, kind, options):
    """Their runner needs Triton; class, loader and reading of the config do not."""
    place = places["qwen3"]
    sizes = {"block_size": 4, "num_layers": 2, "mask_token_id": 2, "num_anchors": 4}
    draft = fitted(kind, place / "data", tmp_path / "run", 2, **sizes, **options)
    out = export(draft, "vllm", tmp_path / "my-draft", place / "target")
    how = {"method": "dflash", "model": str(out), "num_speculative_tokens": 3}
    task = {"model": str(place / "target"), "speculative_config": how}
    found, file = run_program("load_vllm.py", task), load_file(out / "model.safetensors")
    names = {"dflash2": "DFlash2Qwen3ForCausalLM", "lilicorr": "LiLiCorrForCausalLM"}
    assert found["class"] == names[kind]
    compare_weights(found["sums"], file)
    assert len(found["sums"]) > 20


def compare_weights(sums: dict[str, float], file: dict[str, Tensor], tables: bool = False) -> None:
    """Compare the sums of parameters with those in a file; `tables`: they have no columns."""
    skipped = {"model.mask_embedding", "model.embed_tokens.weight"}
    skipped |= {"lm_head.weight"} - file.keys()  # shared with the target later
    for name, total in sums.items():
        own = name.removeprefix("model.")
        fused = next((part for part in PARTS if part in own), "")
        names = [own.replace(fused, part) for part in PARTS[fused]] if fused else [own]
        if name in skipped or (tables and "markov" in own):
            continue
        assert total == pytest.approx(sum(float(file[n].double().sum()) for n in names), abs=1e-4)
