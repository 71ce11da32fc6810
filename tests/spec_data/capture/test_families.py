"""Every family: states as in the plain forward; head and masks are proven."""

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spec_data.capture.model import Target
from spec_data.capture.proofs import proof_text, prove_isolation
from tests.current_families import COMMON, CURRENT, NESTED, ONE_PER_ROW, VOCAB, WINDOW
from tests.families import FAMILIES, tiny_model
from tests.tolerance import LAYER, tolerance

CHOSEN = (0, 1, 2)
LENGTHS = (5, 30, 11, 3, 17, 26, 9)


def test_text_model_is_a_name_of_the_decoder_too() -> None:
    """In Idefics3 and SmolVLM, which are not registered."""
    text = COMMON | {"model_type": "llama"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = CONFIG_MAPPING["idefics3"](
        text_config=text, vision_config=vision | {"num_attention_heads": 2}, pad_token_id=0
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    ids = torch.arange(3, 20)[None]
    layout = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
    states = Target(model, CHOSEN).forward(ids, *layout, None)
    for layer in CHOSEN:
        expected = model(ids, output_hidden_states=True, use_cache=False).hidden_states[layer + 1]
        assert torch.equal(states.layers[layer], expected)


@pytest.mark.parametrize("family", (*FAMILIES, *CURRENT, *NESTED))
def test_capture_is_exact_and_proven(family: str) -> None:
    """States equal `output_hidden_states`; the head is the model's; packs are kept apart."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]
    model = tiny_model(family)
    target = Target(model, CHOSEN)
    ids = documents[1][None]
    plain = model(ids, output_hidden_states=True, use_cache=False)
    assert target.num_layers == len(plain.hidden_states) - 1
    layout = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
    captured = target.forward(ids, *layout, None, full_logits=True)
    light = target.forward(ids, *layout, None)  # skipping the head changes no state
    for layer in CHOSEN:
        assert torch.equal(captured.layers[layer], plain.hidden_states[layer + 1]), layer
        assert torch.equal(light.layers[layer], captured.layers[layer])
    assert torch.equal(captured.final, plain.hidden_states[-1])
    assert torch.equal(captured.final, light.final) and light.logits is None
    assert torch.equal(captured.logits, plain.logits)
    assert target.prove_head(documents[3:5]) < tolerance(torch.float32, LAYER)

    proof = prove_isolation(target, documents, 48)
    assert proof.longest > WINDOW, "the proof must see documents longer than the window"
    assert (proof.form == "rows") == (family in ONE_PER_ROW) and proof.form != "single"
    if family in ONE_PER_ROW:
        assert "one document per row" in proof_text(proof)
        leaks = [v for k, v in proof.differences.items() if k != "rows" and isinstance(v, float)]
        assert min(leaks, default=1) > 10 * proof.tolerance, "the leak was measured, not assumed"
