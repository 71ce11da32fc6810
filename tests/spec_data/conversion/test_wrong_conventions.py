"""Every wrong convention is planted in what a tool stored, and refused with the one that fits."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_data.conversion.evidence import (
    SHIFTS,
    HeadFigures,
    OwnStates,
    fits_of,
    head_figures,
    head_warning,
)
from spec_data.conversion.layouts import opened, to_generate
from spec_data.conversion.proof import prove_samples
from spec_data.conversion.sample_plan import check_frame, in_token_frame, runs_by_offset
from spec_data.conversion.stored_samples import AFTER, BEFORE, Conventions, SampleStates
from spec_data.generation.setup import set_up
from spec_data.options.conversion_options import ConvertConfig
from spec_data.shards.errors import ConfigError, CorpusError, RunError
from tests.spec_data.conversion import layouts as write
from tests.spec_data.conversion.layouts import Sample
from tests.spec_data.runs import save_target

pytestmark = pytest.mark.usefixtures("cached_walk")

_SETUPS: dict = {}  # identifying a target takes longer than proving a layout


def prove(target, root, tool, **changes):
    """Prove what a tool stored, as `convert` does before it writes."""
    config = ConvertConfig(
        **{
            "data": str(root),
            "from_tool": tool,
            "target": str(target),
            "out": str(root) + "-out",
            "device": "cpu",
        }
        | changes
    )
    layout, blocks = opened(config)
    key = (target, *sorted(layout.conventions.layers))
    if key not in _SETUPS:
        _SETUPS[key] = set_up(to_generate(config, layout))
    return prove_samples(config, layout, _SETUPS[key], blocks)


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


# name: (tool, writer of samples, options, what the refusal names)
WRONG = {
    "speculators, one too low": (
        *("speculators", lambda r, s: write.speculators(r, s)),
        {"stored_layers": "1,2,4"},
        "--stored-layers 2,3,5 .as speculators counts: inputs of blocks. --final-norm before",
    ),
    "speculators, another order": (
        *("speculators", lambda r, s: write.speculators(r, s)),
        {"stored_layers": "5,3,2"},
        "--stored-layers 2,3,5 ",
    ),
    "speculators, last state after the norm": (
        *("speculators", lambda r, s: write.speculators(r, s, last="after")),
        {"stored_layers": "2,3,5"},
        "--stored-layers 2,3,5 .* --final-norm after",
    ),
    "specforge, one too high": (
        *("specforge", lambda r, s: write.specforge(r, s)),
        {"stored_layers": "2,3,5"},
        "--stored-layers 1,2,4 .as SpecForge counts: outputs of blocks. --final-norm after",
    ),
    "specforge, inputs of blocks": (
        *("specforge", lambda r, s: write.specforge(r, s, layers=(0, 1, 3))),
        {"stored_layers": "1,2,4"},
        "--stored-layers 0,1,3 ",
    ),
    "specforge, last state before the norm": (
        *("specforge", lambda r, s: write.specforge(r, s, last="before")),
        {"stored_layers": "1,2,4"},
        "--final-norm before",
    ),
    "deepspec, one too high": (
        *("deepspec", lambda r, s: write.deepspec(r, s)),
        {"stored_layers": "2,3,5"},
        "--stored-layers 1,2,4 .as DeepSpec",
    ),
    "automodel, another order": (
        *("automodel", lambda r, s: write.automodel(r, s)),
        {"stored_layers": "4,1,2"},
        "--stored-layers 1,2,4 .as AutoModel",
    ),
    "modelopt, one too low": (
        *("modelopt", lambda r, s: write.modelopt(r, s, layers=(1, 2, 4))),
        {"stored_layers": "0,1,3"},
        "--stored-layers 1,2,4 .as Model-Optimizer",
    ),
    "torchspec, the wrong flag": (
        *("torchspec", lambda r, s: write.torchspec(r, s, layers=(1, 2, 4), before=True)),
        {"stored_layers": "1,2,4", "final_norm": "after"},
        "--stored-layers 1,2,4 .* --final-norm before",
    ),
    "states of the next token": (
        *("specforge", lambda r, s: write.specforge(r, shifted(s, 1))),
        {"stored_layers": "1,2,4"},
        "of the next token.*shifted against the token ids",
    ),
    "states of the previous token": (
        *("deepspec", lambda r, s: write.deepspec(r, shifted(s, -1))),
        {},
        "of the previous token.*shifted against the token ids",
    ),
    "a layer stored twice": (
        *("specforge", lambda r, s: write.specforge(r, s, layers=(1, 1, 4))),
        {"stored_layers": "1,2,4"},
        "No order of layers fits",
    ),
    "states of another target": (
        *(
            "specforge",
            lambda r, s: write.specforge(
                r,
                [
                    replace(x, layers={k: torch.randn_like(v) for k, v in x.layers.items()})
                    for x in s
                ],
            ),
        ),
        {"stored_layers": "1,2,4"},
        "no state of this target",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_convention_is_refused_with_the_one_that_fits(name, tmp_path, target, samples):
    tool, writer, options, words = WRONG[name]
    root = writer(tmp_path / "src", samples)
    with pytest.raises(RunError, match=f"(?s){words}.*Nothing was written"):
        prove(target, root, tool, **options)
    assert not (tmp_path / "src-out").exists()


def test_the_suggestion_is_accepted(tmp_path, target, samples):
    root = write.specforge(tmp_path / "src", samples, layers=(4, 0, 2), last="before")
    found = prove(target, root, "specforge", stored_layers="4,0,2", final_norm="before")
    assert found["differences"].keys() == {"layer 4", "layer 0", "layer 2", "final"}
    assert max(found["differences"].values()) < 5e-3
    assert found["head"]["before norm, shift 0"]["tokens"] == 124
    assert "12 of 12 supervised runs" in found["masks"]


@pytest.mark.parametrize(
    ("by", "frame", "words"),
    [
        (-1, "token", "one token too early.*--mask-frame next"),
        (0, "next", "one token too late.*--mask-frame token"),
        (1, "token", "one token too late"),
    ],
)
def test_shifted_masks_are_refused(by, frame, words, tmp_path, target, samples):
    root = write.specforge(tmp_path / "src", masks_shifted(samples, by))
    with pytest.raises(ConfigError, match=f"{words}.*Nothing was written"):
        prove(target, root, "specforge", stored_layers="1,2,4", mask_frame=frame)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_other_families_are_proven(family, tmp_path):
    """A scaled embedding and a norm with an offset; learned positions, LayerNorm, a tied head."""
    target = save_target(tmp_path / "target", family)
    samples = write.make_samples(target, 4)
    found = prove(
        target,
        write.speculators(tmp_path / "src", samples),
        "speculators",
        stored_layers="2,3,5",
    )
    assert max(found["differences"].values()) < 5e-3
    root = write.specforge(tmp_path / "other", samples)
    with pytest.raises(RunError, match="--stored-layers 1,2,4 "):
        prove(target, root, "specforge", stored_layers="2,3,5")


def test_the_head_names_a_likelier_convention():
    def figures(nll, share):
        return HeadFigures(tokens=100, first_choice=share, nll=nll)

    table = {(norm, shift): figures(5.0, 0.1) for norm in ("after", "before") for shift in SHIFTS}
    assert head_warning(table, "after") is None
    table["after", 1] = figures(1.0, 0.7)
    found = head_warning(table, "after")
    assert found is not None and "each row taken for the next token, 1.00 and 70%" in found
    table["after", 0] = figures(1.2, 0.7)
    assert head_warning(table, "after") is None


def test_a_norm_of_ones_fits_on_both_sides(tmp_path):
    """Both sides are accepted, and the advice keeps the declared one."""
    target = save_target(tmp_path / "ones")
    root = write.specforge(tmp_path / "src", write.make_samples(target, 4))
    for norm in ("after", "before"):
        prove(target, root, "specforge", stored_layers="1,2,4", final_norm=norm)
        with pytest.raises(RunError, match=f"--stored-layers 1,2,4 .* --final-norm {norm}"):
            prove(target, root, "specforge", stored_layers="0,1,3", final_norm=norm)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.25])
@pytest.mark.parametrize("weights", [0.0, 0.4])
@pytest.mark.parametrize("norm", [AFTER, BEFORE])
def test_a_codec_s_error_does_not_decide_which_side_of_a_norm_of_ones_it_is(norm, weights, noise):
    """A state with an error has another length, which is not what the norm's weights would do."""
    torch.manual_seed(0)
    blocks, weight = 4, 1 + weights * torch.randn(64)

    def normed(x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    layers = {k: 3 * torch.randn(200, 64) for k in range(-1, blocks)}
    own = OwnStates(layers=layers, final=normed(layers[blocks - 1]))
    last = own.final if norm == AFTER else layers[blocks - 1]
    error = torch.randn(200, 64)
    last = last + noise * last.norm(dim=-1, keepdim=True) * error / error.norm(dim=-1, keepdim=True)
    stored = SampleStates(aux=layers[1][:, None], last=last)
    for declared in (AFTER, BEFORE):
        conventions = Conventions(counting="outputs", stored_layers=(1,), final_norm=declared)
        fit = fits_of(conventions, [stored], [normed(last)], [own], blocks)[-1]
        alike = norm == AFTER and not weights  # to norm again what a norm of ones made: no change
        assert fit.fits == (declared == norm or alike), fit


def test_the_next_layer_is_refused_even_if_the_noise_is_larger_than_its_difference():
    """Layers of a large target differ by a few per cent, and an engine's noise may be as large."""
    torch.manual_seed(0)
    states = [torch.randn(200, 64)]
    for _ in range(5):
        states.append(states[-1] + 0.06 * torch.randn(200, 64))
    own = OwnStates(layers={k - 1: s for k, s in enumerate(states[:-1])}, final=states[-1])
    noisy = own.layers[1] + 0.1 * torch.randn(200, 64)
    stored = SampleStates(aux=noisy[:, None], last=own.final)
    for layer in (0, 1, 2):
        declared = Conventions(counting="outputs", stored_layers=(layer,), final_norm=AFTER)
        fit = fits_of(declared, [stored], [own.final], [own], 4)[0]
        assert fit.nearest == (1, 0) and fit.fits == (layer == 1)


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
    prove(target, root, "specforge", stored_layers="1,2,4")
    assert "such as another fine-tune" in caplog.text


def test_the_head_reads_each_shift():
    """The slow way: state t says token t + 1, so it is likely under the shift it was moved by."""
    ids, mask = torch.randint(0, 50, (20,)), torch.tensor([0] * 8 + [1] * 12)
    said = torch.nn.functional.one_hot(torch.roll(ids, -1), 50).float()
    for by in SHIFTS:
        moved = torch.roll(said, -by, 0)  # row t has the state of token t + by
        for shift in SHIFTS:
            found = head_figures([(ids, mask)], [moved], lambda s: 30 * s, shift)
            pairs = [(t, t - 1 - shift) for t in range(8, 20) if t - 1 - shift < 20]
            hits = [moved[row].argmax() == ids[t] for t, row in pairs]
            assert found.tokens == len(pairs)
            assert found.first_choice == pytest.approx(sum(map(float, hits)) / len(pairs))
            assert (found.first_choice > 0.9) == (found.nll < 1) == (shift == by)


def test_a_mask_of_labels_is_read_with_its_frame(tmp_path, target, samples):
    root = write.specforge(tmp_path / "src", masks_shifted(samples, -1))
    found = prove(target, root, "specforge", stored_layers="1,2,4", mask_frame="next")
    assert "12 of 12" in found["masks"] and found["mask_frame"] == "next"


def test_a_mask_without_a_known_prompt_is_said_to_be_unchecked():
    ids, mask = torch.arange(10), torch.tensor([0] * 5 + [1] * 5)
    assert runs_by_offset([(ids, mask)], [3, 4]) == {0: 1, 1: 0, -1: 0}
    assert "not checked" in check_frame(runs_by_offset([(ids, mask)], [8, 9]), "token")
    assert in_token_frame(torch.tensor([0, 1, 1]), "next").tolist() == [0, 0, 1]


def test_token_ids_of_a_larger_vocabulary(tmp_path, target, samples):
    other = [replace(s, ids=s.ids + 10_000) for s in samples]
    root = write.specforge(tmp_path / "src", other)
    with pytest.raises(CorpusError, match=r"no usable sample.*is it the one that was captured"):
        prove(target, root, "specforge", stored_layers="1,2,4")
