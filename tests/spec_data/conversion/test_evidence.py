"""Every state that a dataset cannot be made of is planted in what a tool stored, and refused."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_data.capture.evidence import AFTER, BEFORE, FINAL_STATE, matches
from spec_data.capture.hooks import States
from spec_data.conversion.conventions import mask_frame
from spec_data.conversion.run import set_up_conversion
from spec_data.conversion.samples import NEXT, TOKEN, Samples, SampleStates
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import CorpusError, RunError
from tests.spec_data.conversion import layouts as write
from tests.spec_data.conversion.layouts import Sample
from tests.spec_data.runs import save_target

pytestmark = pytest.mark.usefixtures("computed_once")


def find(target, root, tool):
    """Find what a tool stored, as `convert` does before it writes."""
    return set_up_conversion(
        *(tool, str(target), root.with_name("out"), str(root), CaptureOptions(device="cpu"))
    )[-1]


def shifted(samples: list[Sample], by: int) -> list[Sample]:
    """Samples whose row t has the states of token t + by."""

    def moved(x):
        return torch.roll(x, -by, 0)

    return [
        replace(s, layers={k: moved(v) for k, v in s.layers.items()}, final=moved(s.final))
        for s in samples
    ]


def masks_shifted(samples: list[Sample], by: int) -> list[Sample]:
    return [replace(s, mask=torch.roll(s.mask, by)) for s in samples]


@pytest.mark.parametrize(
    ("tool", "given", "layers", "norm"),
    [
        ("speculators", {}, [1, 2, 4], BEFORE),
        ("speculators", {"layers": (4, 1, 2), "last": "after"}, [4, 1, 2], AFTER),
        ("specforge", {"layers": (4, 0, 2), "last": "before"}, [4, 0, 2], BEFORE),
        ("specforge", {"layers": (-1, 5)}, [-1, 5], AFTER),
        ("modelopt", {"layers": (2, 1)}, [2, 1], AFTER),
        ("torchspec", {"layers": (0, 3), "before": True}, [0, 3], BEFORE),
        ("deepspec", {}, [1, 2, 4], AFTER),
        ("automodel", {}, [1, 2, 4], AFTER),
    ],
)
def test_layers_order_and_norm_are_found(tool, given, layers, norm, tmp_path, target, samples):
    found = find(target, getattr(write, tool)(tmp_path / "src", samples, **given), tool)
    assert (found.stored_layers, found.final_norm, found.mask_frame) == (layers, norm, TOKEN)
    assert found.differences.keys() == {*(f"layer {k}" for k in layers), "final"}
    assert max(found.differences.values()) < 5e-3
    assert "12 of 12 supervised runs" in found.masks


def changed(samples, change):
    """Samples whose layers are what a function makes of one of them."""
    return [replace(s, layers=s.layers | change(s)) for s in samples]


def recorded_as(samples, layers):
    """Samples whose layers 1, 2 and 4 have other ids."""
    return changed(samples, lambda s: {k: s.layers[(1, 2, 4)[i]] for i, k in enumerate(layers)})


# tool, how its samples are spoilt, how they are written, what the refusal says
WRONG = [
    ("deepspec", lambda s: recorded_as(s, (2, 3, 5)), {"layers": (2, 3, 5)},
     "DeepSpec recorded the layers 2,3,5, and these are 1,2,4"),
    ("automodel", lambda s: recorded_as(s, (4, 1, 2)), {"layers": (4, 1, 2)},
     "AutoModel recorded the layers 4,1,2, and these are 1,2,4"),
    ("specforge", lambda s: shifted(s, 1), {}, "of the next token.*shifted against the token ids"),
    ("deepspec", lambda s: shifted(s, -1), {}, "of the previous token.*shifted against the token"),
    ("specforge", list, {"layers": (1, 1, 4)}, "stored twice"),
    ("specforge", lambda s: changed(s, lambda x: {4: x.final}), {"layers": (1, 4)},
     "after the final norm"),
    ("specforge", lambda s: [replace(x, final=x.layers[3]) for x in s], {},
     "that of another block"),
    ("specforge", lambda s: changed(s, lambda x: {2: torch.randn_like(x.layers[2])}), {},
     "no state of this target"),  # of another target
    ("specforge", lambda s: [*changed(s[:1], lambda x: {1: x.layers[1].flip(0)}), *s[1:]], {},
     "no state of this target"),  # one of the compared samples has states of other tokens
    ("specforge", lambda s: masks_shifted(s, 1), {}, "one token too late"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "spoil", "given", "words"), WRONG)
def test_what_cannot_be_a_dataset_is_refused(tool, spoil, given, words, tmp_path, target, samples):
    root = getattr(write, tool)(tmp_path / "src", spoil(samples), **given)
    with pytest.raises(RunError, match=f"(?s){words}.*Nothing was written"):
        find(target, root, tool)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_other_families_are_proven(family, tmp_path):
    """A scaled embedding and a norm with an offset; learned positions, LayerNorm, a tied head."""
    target = save_target(tmp_path / "target", family)
    samples = write.make_samples(target, 4)
    found = find(target, write.speculators(tmp_path / "src", samples), "speculators")
    assert found.stored_layers == [1, 2, 4] and max(found.differences.values()) < 5e-3


@pytest.mark.parametrize("noise", [0.0, 0.25])
@pytest.mark.parametrize("weights", [0.0, 0.4])
@pytest.mark.parametrize("norm", [AFTER, BEFORE])
def test_a_codec_s_error_does_not_decide_which_side_of_a_norm_of_ones_it_is(norm, weights, noise):
    """A state with an error has another length, which is not what the norm's weights would do."""
    torch.manual_seed(0)
    blocks, weight = 4, 1 + weights * torch.randn(64)

    def normed(x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    layers = {k: 3 * torch.randn(200, 64) for k in range(-1, blocks)}
    computed = States(layers=layers, final=normed(layers[blocks - 1]))
    last = computed.final if norm == AFTER else layers[blocks - 1]
    error = torch.randn(200, 64)
    last = last + noise * last.norm(dim=-1, keepdim=True) * error / error.norm(dim=-1, keepdim=True)
    stored = SampleStates(layers[1][:, None], last)
    match = matches([stored], [normed(last)], [computed], blocks)[-1]
    assert match.convention == (FINAL_STATE if norm == AFTER else blocks - 1, 0), match


def test_the_layer_is_found_even_if_the_noise_is_larger_than_its_difference_from_the_next():
    """Layers of a large target differ by a few per cent, and an engine's noise may be as large."""
    torch.manual_seed(0)
    states = [torch.randn(200, 64)]
    for _ in range(5):
        states.append(states[-1] + 0.06 * torch.randn(200, 64))
    computed = States(layers={k - 1: s for k, s in enumerate(states[:-1])}, final=states[-1])
    for layer in (0, 1, 2):
        noisy = computed.layers[layer] + 0.1 * torch.randn(200, 64)
        stored = SampleStates(noisy[:, None], computed.final)
        assert matches([stored], [computed.final], [computed], 4)[0].convention == (layer, 0)


def test_a_target_of_slightly_different_weights_is_warned_of(tmp_path, target, caplog):
    other = tmp_path / "tuned"
    shutil.copytree(target, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.03 * torch.randn_like(weight))
    model.save_pretrained(other)
    root = write.specforge(tmp_path / "src", write.make_samples(other, 4))
    find(target, root, "specforge")
    assert "warning[converted-states]" in caplog.text
    assert "such as another fine-tune" in caplog.text


def test_a_sample_that_is_not_finite_says_nothing_about_the_others(tmp_path, target, samples):
    def broken(sample: Sample, value: float) -> Sample:
        return replace(sample, final=torch.full_like(sample.final, value))

    some = [broken(s, torch.inf) if n == 3 else s for n, s in enumerate(samples)]
    found = find(target, write.specforge(tmp_path / "src", some), "specforge")
    assert max(found.differences.values()) < 5e-3
    with pytest.raises(CorpusError, match="not finite"):
        every = [broken(s, torch.nan) for s in samples]
        find(target, write.specforge(tmp_path / "none", every), "specforge")


def test_a_mask_of_labels_is_read_with_its_frame(tmp_path, target, samples):
    root = write.specforge(tmp_path / "src", masks_shifted(samples, -1))
    found = find(target, root, "specforge")
    assert "12 of 12" in found.masks and found.mask_frame == NEXT
    stored = Samples("specforge", root, 32)
    stored.frame = NEXT
    assert torch.equal(stored.tokens(2)[1], samples[2].mask)


def test_a_mask_without_a_known_prompt_is_said_to_be_unchecked():
    ids, mask = torch.arange(10), torch.tensor([0] * 5 + [1] * 5)
    for prompt in ([3, 4], [8, 9], []):  # too few runs; none
        frame, text = mask_frame([(ids, mask)], prompt, {9})
        assert frame == TOKEN and "not checked" in text
    assert mask_frame([(ids, mask)] * 4, [3, 4], {9})[0] == TOKEN
    assert mask_frame([(ids, mask)] * 4, [4, 5], {7})[0] == NEXT


def test_a_mask_that_has_the_last_token_of_the_prompt_too_is_not_shifted():
    """The prompt ends with <think>, and trainers learn it with the answer."""
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 9, 8])
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0])
    frame, text = mask_frame([(ids, mask)] * 4, [3, 4], {9})
    assert frame == TOKEN and "4 of 4" in text and "end of the turn" in text
    assert mask_frame([(ids, mask)] * 4, [3, 4], {8})[0] == NEXT


def test_token_ids_of_a_larger_vocabulary(tmp_path, target, samples):
    other = [replace(s, ids=s.ids + 10_000) for s in samples]
    root = write.specforge(tmp_path / "src", other)
    with pytest.raises(CorpusError, match="is it the one that was captured"):
        find(target, root, "specforge")
