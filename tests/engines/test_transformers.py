"""transformers itself decodes our DFlash exports, and drafts what our decoder drafts.

Its one model of this kind is Muse Glimmer's assistant: the same arithmetic under other names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import read_target
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from tests.engines.engine_tools import TOKENS, fitted, make_dataset, make_prompts, make_target
from tests.spec_train.conformance.own_decoder import Recorder
from tests.spec_train.formats.tools import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # those of generate
    pytest.mark.skipif(
        not hasattr(transformers, "MuseGlimmerAssistantModel"),
        reason=f"transformers {transformers.__version__} has no DFlash assistant (5.23 has)",
    ),
]


def assistant_of(folder: Path) -> Any:
    """The export, loaded by transformers' class; every tensor must have its place."""
    model, info = transformers.MuseGlimmerAssistantModel.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval().float()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dflash(family, tmp_path, monkeypatch):
    model = make_target(family, tmp_path / "target")
    prompts = make_prompts()
    data = make_dataset(model, prompts, tmp_path / "data")
    draft = fitted(
        "dflash",
        data,
        tmp_path / "run",
        100,
        block_size=5,
        num_layers=2,
        mask_token_id=2,
        num_anchors=16,
    )
    flat = export(draft, "vllm", tmp_path / "flat", tmp_path / "target")
    assistant = assistant_of(export(draft, "transformers", tmp_path / "muse", tmp_path / "target"))
    ours = load_draft(flat, read_target(tmp_path / "target")).eval().float()

    generator = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    plain, theirs = generator.get_candidates, []

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, input_ids, *args, **kwargs)
        drafted = found[0][0, input_ids.shape[1] :].tolist()
        if drafted:
            theirs.append(drafted)
        return found

    monkeypatch.setattr(generator, "get_candidates", noted)
    accepted = rounds = 0
    for prompt in prompts[:4]:
        theirs.clear()
        answer = model.generate(
            torch.tensor([prompt]),
            assistant_model=assistant,
            speculation_type="dflash",
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        drafter = Recorder(ours.drafter(TargetHead.from_model(model)))
        request = Request(prompt, Greedy(), TOKENS + 10)
        done = decode_speculative(model, drafter, ours.state_columns, request, 4)
        assert answer == decode_plain(model, Request(prompt, Greedy(), TOKENS)).tokens
        assert len(theirs) > 5 and theirs == drafter.seen[: len(theirs)]
        accepted += sum(one.accepted for one in done.steps)
        rounds += len(done.steps)
    assert 0.05 < accepted / (4 * rounds) < 0.95
