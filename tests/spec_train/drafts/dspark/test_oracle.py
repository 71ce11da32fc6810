"""transformers' DFlash decoding drafts the same tokens from our DFlash checkpoints.

An independent serving code reads the checkpoint's tensors (its names differ in two places) and its
config, and drafts with its own cache, positions and noise block.
"""

from typing import Any

import pytest
import torch

from spec_train.decoding.chains import TargetSession
from spec_train.drafts.block.draft import BlockDrafter
from spec_train.losses.sampling import Greedy
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import COLUMNS, draft_for, head_of

modeling = pytest.importorskip(
    "transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant"
)
candidates = pytest.importorskip("transformers.generation.candidate_generator")
if not hasattr(candidates, "DFlashTokenCandidateGenerator"):
    pytest.skip("a release of transformers without DFlash", allow_module_level=True)

target, prompts = evaluate_tools.target, evaluate_tools.prompts
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant_of(draft: Any) -> Any:
    """Return transformers' model of a draft, made only from its saved config and tensors."""
    raw = draft.config.to_json(draft.options)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "layer_types")
    names += ("max_position_embeddings", "block_size", "mask_token_id", "target_layer_ids")
    config = modeling.MuseGlimmerAssistantConfig(**{name: raw[name] for name in names})
    model = modeling.MuseGlimmerAssistantModel(config).eval()
    tensors = draft.checkpoint_tensors(torch.float32)
    del tensors["embed_tokens.weight"]
    model.load_state_dict({RENAMED.get(name, name): value for name, value in tensors.items()})
    return model


def test_transformers_drafts_the_same_tokens(target, prompts) -> None:
    draft = draft_for("dflash", target, num_layers=2, block_size=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.trainable_parameters():  # far from the trivial start
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    draft.eval().requires_grad_(False)
    assistant, seen = assistant_of(draft), 0
    for prompt in prompts[:5]:
        theirs: list[list[int]] = []
        original = candidates.DFlashTokenCandidateGenerator.get_candidates

        def kept(self, input_ids, *args, theirs=theirs, original=original, **kwargs):
            ids, logits = original(self, input_ids, *args, **kwargs)
            if logits is not None:  # before the target's first token, and at the limit
                theirs.append(ids[0].tolist())
            return ids, logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates.DFlashTokenCandidateGenerator, "get_candidates", kept)
            output = target.generate(
                torch.tensor([prompt]),
                assistant_model=assistant,
                speculation_type="dflash",
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        session = TargetSession(target, COLUMNS)
        drafter, fed = BlockDrafter(draft, head_of(target), 0.0), 0
        with torch.inference_mode():
            _, states = session.forward(output)
        for ids in theirs:
            anchor = len(ids) - draft.depth - 1  # the known token, then the drafts
            assert ids[: anchor + 1] == output[: anchor + 1] and anchor > fed
            drafted, _ = drafter.propose(
                output[fed + 1 : anchor + 1], states[:, fed:anchor], draft.depth, Greedy()
            )
            assert drafted.tolist() == ids[anchor + 1 :]
            fed, seen = anchor, seen + len(drafted)
    assert seen > 100
