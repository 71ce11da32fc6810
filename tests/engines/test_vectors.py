"""Real engines pass the conformance vectors that they load, and fail every mistake that a file has.

`docs/vectors.md` has the result. What an engine drafts is noted by a hook beside its own code.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import spec_train
from tests.engines.engine_tools import needs, run_program
from tests.spec_train.conformance.own_decoder import expected, write_log
from tests.spec_train.formats.tools import export

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

VLLM = {"eagle": "eagle", "eagle3": "eagle3", "eagle3-full": "eagle3", "eagle31": "eagle3"}
VLLM |= {"peagle": "eagle3", "dflash": "dflash"}
"""By vector, the method; DSpark needs a GPU, DFlash of several layers is wrong in vLLM 0.32's CPU
kernel, and it knows neither windows that are not causal nor Domino and LiLiCorr."""

MTP = {"mtp-mimo": "final-norm", "mtp-qwen3_5": ""}
"""By vector of a target's own block, the mistake that vLLM makes. It hands MiMo's the state before
the target's final norm; its GLM-4.5 needs experts, and its latent attention on a CPU is wrong."""

LLAMA = {"eagle3": "EAGLE3", "eagle3-full": "EAGLE3", "dspark": "DSPARK", "dspark-mask": "DSPARK"}
LLAMA |= {"dflash": "DFLASH", "dflash-deep": "DFLASH", "dflash-window": "DFLASH"}
"""By vector, llama.cpp's type of draft."""
NOT_READ = {("dflash-window", "window-causal")}
NOT_READ |= {(name, "carried-norm-output") for name in ("eagle3", "eagle3-full")}
"""Mistakes that llama.cpp cannot make, because it does not read what they change."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vectors that some engine loads."""
    folder = tmp_path_factory.mktemp("engines") / "vectors"
    spec_train.vectors(folder, only=[*{**VLLM, **LLAMA}])
    return folder


def check(root: Path, lines: list[dict[str, Any]], mistake: str = "") -> None:
    """The log of an engine passes, or fails by the named mistake."""
    log = write_log(root / "engine.jsonl", lines)
    found = spec_train.vectors(root, log).of(lines[0]["vector"])
    assert (found.state, found.mistakes) == (("FAIL", (mistake,)) if mistake else ("pass", ()))


@pytest.mark.parametrize("vector", VLLM)
@needs("vllm")[2]
def test_vllm(root, vector, monkeypatch):
    """Every drafted token and accept count, with the vLLM and the speculators form."""
    monkeypatch.chdir(root)  # the speculators form names its target relative to it
    numbers = expected(root, vector)
    wrong = {one["draft"]: name for name, one in numbers["wrong"].items() if one["draft"]}
    runs = []
    right = [d for form, d in numbers["drafts"].items() if form in ("vllm", "speculators")]
    for draft in [*right, *wrong]:
        how = {"method": VLLM[vector], "model": draft}
        how |= {"num_speculative_tokens": numbers["draft_tokens"]}
        how |= {"parallel_drafting": True} if vector == "peagle" else {}
        run = {"run": draft, "vector": vector, "tokens": numbers["output_tokens"]}
        run |= {"prompts": [one["prompt"] for one in numbers["prompts"]]}
        run |= {"model": numbers["target"], "speculative_config": how}
        if draft.endswith("speculators"):
            run |= {"model": draft, "speculative_config": None}
        runs.append(run)
    for done in run_program("vectors_vllm.py", runs):
        check(root, done["lines"], wrong.get(done["run"], ""))


@pytest.mark.parametrize("vector", MTP)
@needs("vllm")[2]
def test_vllm_mtp(vector, tmp_path):
    """The block in the files of its target: what is right, or, of MiMo, one mistake alone."""
    if vector == "mtp-qwen3_5":
        pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 imports it")
    root = tmp_path / "vectors"
    spec_train.vectors(root, only=vector)
    numbers = expected(root, vector)
    wrong = {one["draft"]: name for name, one in numbers["wrong"].items() if one["draft"]}
    right, runs = numbers["drafts"]["target"], []
    for model in [right, *([] if MTP[vector] else wrong)]:
        how = {"method": "mtp", "num_speculative_tokens": numbers["draft_tokens"]}
        run = {"run": model, "vector": vector, "tokens": numbers["output_tokens"]}
        run |= {"prompts": [one["prompt"] for one in numbers["prompts"]]}
        runs.append(run | {"model": str(root / model), "speculative_config": how})
    for done in run_program("vectors_vllm.py", runs):
        check(root, done["lines"], wrong.get(done["run"], MTP[vector]))


@pytest.mark.parametrize("vector", LLAMA)
@needs("xllamacpp")[2]
def test_llama_cpp(root, vector):
    """Every drafted token and accept count."""
    numbers, wrong = expected(root, vector), {}
    for name, one in numbers["wrong"].items():
        if one["draft"] and (vector, name) not in NOT_READ:
            wrong[str(root / one["draft"])] = name
    task = {"model": str(root / numbers["target"]), "type": LLAMA[vector], "vector": vector}
    task |= {"depth": numbers["draft_tokens"], "tokens": numbers["output_tokens"]}
    task |= {"prompts": [one["prompt"] for one in numbers["prompts"]]}
    drafts = [str(root / numbers["drafts"]["vllm"]), *wrong]
    for done in run_program("vectors_llama.py", [task | {"draft": draft} for draft in drafts]):
        check(root, done["lines"], wrong.get(done["run"], ""))


@pytest.mark.parametrize("vector", ["dflash", "dflash-deep"])
@pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason=f"transformers {transformers.__version__} has no DFlash assistant (5.23 has)",
)
def test_transformers(root, vector, monkeypatch, tmp_path):
    numbers, drafted = expected(root, vector), []
    target = root / numbers["target"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    plain = generator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, input_ids, *args, **kwargs)
        drafted.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(generator, "get_candidates", noted)
    folders = {root / numbers["drafts"]["transformers"]: ""}
    for name, one in numbers["wrong"].items():
        if one["draft"]:
            export(root / one["draft"], "transformers", tmp_path / name, target)
            folders[tmp_path / name] = name
    for folder, mistake in folders.items():
        assistant = transformers.MuseGlimmerAssistantModel.from_pretrained(folder).eval().float()
        lines = []
        for i, given in enumerate(numbers["prompts"]):
            drafted.clear()
            answer = model.generate(
                torch.tensor([given["prompt"]]),
                assistant_model=assistant,
                speculation_type="dflash",
                max_new_tokens=numbers["output_tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(given["prompt"]) :].tolist()
            rounds = [one for one in drafted if one]
            lines.append({"vector": vector, "prompt": i, "output": answer, "drafted": rounds})
        check(root, lines, mistake)
