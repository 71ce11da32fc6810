"""transformers' own DFlash (`MuseGlimmerAssistantModel`), written and run by transformers."""

from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from spec_train.drafts.block.files import of_transformers
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, SIZE
from tests.spec_train.formats.published.tiny import EPS, GROUPS, HEADS, INNER, THETA, D, H, V

FULL, SLIDING = "full_attention", "sliding_attention"


def made(types: list[str] | None, window: int) -> Any:
    """Return a model with random weights, in float64."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=H,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=D,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=256,
        sliding_window=window,
        layer_types=types,
        block_size=SIZE,
        mask_token_id=MASK,
        target_layer_ids=IDS,
        vocab_size=V,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = MuseGlimmerAssistantModel(config).double().eval()
    for name, parameter in model.named_parameters():
        value = tiny.gain(len(parameter)) if parameter.ndim == 1 else tiny.noise(*parameter.shape)
        parameter.data.copy_(value)
        assert name
    return model


@pytest.mark.parametrize("types", [[FULL] * LAYERS, [SLIDING, FULL], None])
def test_it_is_read_as_transformers_runs_it(tmp_path, types):
    facts, window = tiny.target(), 5
    model = made(types, window)
    model.save_pretrained(tmp_path)
    draft = blocks.read_block(tmp_path, facts)
    assert draft.name == "dflash" and not draft.config.sample_from_anchor
    aux = torch.randn(9, len(IDS) * H, dtype=torch.float64)
    ids = torch.tensor([7, *[MASK] * (SIZE - 1)])
    with torch.no_grad():
        ours = draft.drafter(blocks.head_of(facts))
        recorder = blocks.Recorder()
        ours.propose([*range(1, 9), 7], aux[None], SIZE, recorder)
        cache = DFlashCache(config=model.config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(len(aux))
        theirs = model(
            noise_embeds=facts.embedding[ids][None],
            context_hidden_states=aux[None],
            past_key_values=cache,
        ).last_hidden_state[0, 1:]
    found, expected = torch.stack(recorder.logits), theirs @ facts.head.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # its norms are in float32
    state = {
        name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): value
        for name, value in model.state_dict().items()
    }
    # it lets a position see those up to `sliding_window` before it
    windows = tuple(window + 1 if kind == SLIDING else None for kind in types or [SLIDING] * LAYERS)
    how = {"sample_from_anchor": False, "windows": windows, "non_causal": True}
    blocks.compare(draft, facts, state, blocks.reference_config(facts, state, **how))


def test_absent_keys_have_the_defaults_of_the_class():
    theirs, found = MuseGlimmerAssistantConfig(), of_transformers({})
    assert found["rope_theta"] == theirs.rope_parameters["rope_theta"]
    for name in ("rms_norm_eps", "max_position_embeddings"):
        assert found[name] == getattr(theirs, name)
