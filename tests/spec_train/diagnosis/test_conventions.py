"""Sound drafts of every kind have no finding, and each planted convention is found by its name."""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spec_data
from spec_data.models.streams import MEAN, Streams
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL
from spec_train.cli import main
from spec_train.commands.doctor import doctor
from spec_train.data.mixture import count_dataset
from spec_train.diagnosis import conventions
from spec_train.diagnosis.checks import CHECKS, FINDING, OK, UNDECIDED, Diagnosis
from spec_train.diagnosis.sample import _with_target_states, read_sample
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.layers import RMSNorm
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import read_run
from spec_train.formats.kind_files import files_of
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.marks import long_but
from tests.spec_train.diagnosis.trained import OPTIONS, VOCAB, make_data, train_draft


def examine(draft: Path, **options: Any) -> Diagnosis:
    return doctor(draft, **{"device": "cpu", "documents": 13} | options)


def planted(draft: Any, folder: Path, change) -> Path:
    """Change a copy of a draft, and save it sealed."""
    other = copy.deepcopy(draft)
    with torch.no_grad():
        change(other)
    other.save_pretrained(folder / "planted", torch.float32)
    return folder / "planted"


def found(diagnosis: Diagnosis) -> set[str]:
    return {check.name for check in diagnosis.findings}


# Second stages have the backbone of DFlash, and learn this chain nearly as well without any state.
KINDS = [kind for kind in DRAFT_OPTIONS if not files_of(kind).keys]


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS))
def test_a_sound_draft_has_no_finding(sound_dir, data, kind):
    diagnosis = examine(sound_dir(kind), data=data)
    assert not diagnosis.findings, str(diagnosis)
    assert diagnosis.acceptance_length > 1.5, "the fixture must be a draft that works"
    assert diagnosis.named("trained").state == OK
    assert diagnosis.named("state-shift").state == OK
    assert not any(tried.better for tried in diagnosis.tried)


# --- how the states are read ---


def test_layers_that_the_dataset_lacks_are_compared_with_a_control(
    sound, narrow, target_dir, tmp_path
):
    draft = planted(sound("eagle3"), tmp_path, lambda d: d.update_config(layers=(2, 4)))
    alone = examine(draft, data=narrow)
    assert found(alone) == {"layer-ids"}
    assert "states of other tokens" in alone.named("layer-ids").evidence[0]
    assert alone.acceptance_length is None
    whole = examine(draft, data=narrow, target=target_dir)
    assert found(whole) >= {"layer-ids"} and whole.acceptance_length > 1
    assert "as declared" in whole.named("layer-ids").evidence[0]


def test_neighbours_that_the_dataset_lacks_are_named(sound_dir, narrow):
    diagnosis = examine(sound_dir("eagle3"), data=narrow)
    assert not diagnosis.findings
    check = diagnosis.named("layer-ids")
    assert check.state == UNDECIDED
    assert "hidden.L2" in check.text and "--target" in check.text


@pytest.mark.parametrize(
    "step, word", [(1, "previous"), pytest.param(-1, "next", marks=pytest.mark.long)]
)
def test_states_of_a_neighbouring_token(sound_dir, target, tmp_path, step, word):
    shifted = make_data(target, tmp_path / "shifted", shift=step)
    diagnosis = examine(sound_dir("eagle3"), data=shifted)
    assert "state-shift" in found(diagnosis), str(diagnosis)
    assert word in diagnosis.named("state-shift").text


def test_a_draft_trained_on_the_sum_of_the_streams(sound, data, tmp_path, monkeypatch):
    """As if its target had eight streams, of which engines take the mean."""
    monkeypatch.setattr(conventions, "streams_of", lambda _config: Streams(8, MEAN))

    def summed(draft: Any) -> None:
        draft.fc.weight /= 8

    diagnosis = examine(planted(sound("eagle3"), tmp_path, summed), data=data)
    assert "streams" in found(diagnosis), str(diagnosis)
    assert "the sum of the streams" in diagnosis.named("streams").text
    whole = examine(planted(sound("eagle3"), tmp_path / "sound", lambda draft: None), data=data)
    assert not whole.findings and whole.named("streams").state == OK


def test_a_draft_that_passes_its_final_state_on_is_not_shifted(sound, data, tmp_path):
    """The next state names the token to be drafted: it helps a draft that was trained with its own.

    A draft that was trained with the next one drafts nothing from its own: that is the finding.
    """

    def passing(share: float) -> Diagnosis:
        def change(draft: Any) -> None:
            width = len(draft.fc.weight)
            draft.fc.weight[:, width:] += share * torch.eye(width)

        return examine(planted(sound("eagle"), tmp_path / str(share), change), data=data)

    def following(diagnosis: Diagnosis) -> Any:
        return next(t for t in diagnosis.tried if t.check == "state-shift" and "next" in t.text)

    tried = [passing(share) for share in (0.5, 0.6, 0.7)]
    helped = [d for d in tried if following(d).length > following(d).before > 1.5]
    assert helped, "the fixture must gain"
    assert not any("state-shift" in found(diagnosis) for diagnosis in helped)
    assert "state-shift" in found(passing(2.0))


# --- what the draft computes ---


def with_norm(draft: Any, flag: str) -> None:
    """Set a flag, with the module of ones that a draft with it has."""
    config = draft.config
    widths, eps = [config.target_hidden_size] * len(getattr(config, "layers", ())), 1e-6
    if flag == "norm_before_fc":
        draft.input_norm = RMSNorm(sum(widths), eps)
    elif flag == "fc_norm":
        draft.fc_norm = torch.nn.ModuleList(RMSNorm(width, eps) for width in widths)
    elif flag == "use_last_layernorm":
        draft.norm = RMSNorm(config.hidden_size, eps)
    elif flag == "use_input_layernorm_in_first_layer":
        draft.layers[0].input_layernorm = RMSNorm(config.hidden_size, eps)
    draft.update_config(**{flag: True})


def exchange_fc(draft: Any) -> None:
    draft.fc.weight.copy_(draft.fc.weight.roll(draft.fc.weight.shape[1] // 2, dims=1))


def exchange_inputs(draft: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(draft.midlayer.self_attn, name).weight
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def other_slot(draft: Any) -> None:
    draft.update_config(sample_from_anchor=not draft.config.sample_from_anchor)


def first_tokens(draft: Any) -> None:
    assert draft.config.draft_vocab_size < VOCAB
    draft.set_vocabulary(torch.arange(draft.config.draft_vocab_size))


def random_head(draft: Any) -> None:
    draft.lm_head.weight.normal_(0, 0.02)


def random_embedding(draft: Any) -> None:
    rows = torch.randn_like(draft.embed_tokens.weight)
    draft.embed_tokens.weight = torch.nn.Parameter(rows, requires_grad=False)


def other_states(draft: Any) -> None:
    torch.manual_seed(3)
    size = draft.fc.weight.shape[1]
    draft.fc.weight.copy_(draft.fc.weight @ torch.linalg.qr(torch.randn(size, size))[0])


def changed(**config: Any) -> Any:
    return lambda draft: draft.update_config(**config)


def with_rope(**changes: Any) -> Any:
    return lambda draft: draft.update_config(rope_parameters=draft.config.rope_parameters | changes)


WINDOW: dict[str, Any] = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4}
MASKED = "mask_token_id = 0 instead of 2"
TARGETS = "the rope of the target"
# name: (kind of draft, what is changed in it, the check that finds it, what the check says fits)
PLANTED: dict[str, tuple[str, Any, str, str]] = {
    "layers one too high": ("eagle3", changed(layers=(2, 4)), "layer-ids", "layers 1, 3"),
    "parts of fc": ("eagle3", exchange_fc, "layer-order", "3, 1"),
    "parts of fc, dspark": ("dspark", exchange_fc, "layer-order", "3, 1"),
    "theta": ("dspark", with_rope(rope_theta=1e6), "rope", TARGETS),
    "factor": ("eagle3", with_rope(partial_rotary_factor=0.5), "rope", TARGETS),
    "scaling": ("peagle", with_rope(rope_type="linear", factor=4.0), "rope", "no rope scaling"),
    "lost factor": (
        *("peagle", with_rope(partial_rotary_factor=1.0), "rope"),
        "partial_rotary_factor = 0.5",
    ),
    "mask, peagle": ("peagle", changed(mask_token_id=2), "mask-token", MASKED),
    "mask, dflash": ("dflash", changed(mask_token_id=2), "mask-token", MASKED),
    "window, peagle": ("peagle", changed(**WINDOW), "window", "no window"),
    "window, dflash": ("dflash", changed(**WINDOW), "window", "no window"),
    "map": ("eagle3", first_tokens, "vocabulary-map", ""),
    "head": ("eagle3", random_head, "head", ""),
    "embedding": ("eagle3", random_embedding, "embedding", ""),
    "token and state": ("eagle3", exchange_inputs, "input-order", ""),
    "token and state, eagle": ("eagle", exchange_fc, "input-order", ""),
    "token and state, mtp": ("mtp", exchange_fc, "input-order", "states before tokens"),
    "norm, mtp": ("mtp", changed(norm_output=False), "carried-norm", "norm_output = true"),
    "slot, dspark": ("dspark", other_slot, "slot-layout", "drafts first"),
    "other states": ("eagle3", other_states, "trained", "another target"),
} | {
    flag: ("eagle3", lambda d, flag=flag: with_norm(d, flag), "carried-norm", f"{flag} = false")
    for flag in ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
}
ALSO = {"head": {"trained"}, "other states": set(CHECKS)}  # what may be found beside it


ONE_PER_CHECK = {
    check: name for name, (kind, _, check, _) in reversed(PLANTED.items()) if kind == "eagle3"
}.values()


@pytest.mark.parametrize("name", long_but(ONE_PER_CHECK, PLANTED))
def test_a_planted_convention_is_found(name, sound, data, tmp_path):
    kind, change, wanted, text = PLANTED[name]
    diagnosis = examine(planted(sound(kind), tmp_path, change), data=data)
    check = diagnosis.named(wanted)
    assert wanted in found(diagnosis) <= {wanted} | ALSO.get(name, set()), str(diagnosis)
    assert text in check.text and check.fix
    assert any("acceptance length" in line for line in check.evidence)


def test_final_states_that_a_dataset_lacks_are_computed(sound, data, target_dir):
    given: Any = {"run": None, "documents": 13, "target": None}
    full = read_sample(sound("eagle3"), HiddenStatesDataset(data), **given)
    lacking = [
        dataclasses.replace(b, hidden={n: v for n, v in b.hidden.items() if n != FINAL})
        for b in full.batches
    ]
    found = _with_target_states(lacking, target_dir, full.blocks or 0, False)
    for ours, stored in zip(found, full.batches, strict=True):
        # the stored ones are rounded to bf16
        torch.testing.assert_close(ours.hidden[FINAL], stored.hidden[FINAL], rtol=2e-2, atol=2e-2)
        assert ours.hidden[FINAL].abs().max() > 1


def test_the_rope_of_a_target_that_nests_its_decoder_is_tried():
    config = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    text = {"rope_parameters": {"rope_theta": 1e7}, "max_position_embeddings": 64}
    dataset = SimpleNamespace(target_config=lambda: {"text_config": text})
    draft: Any = SimpleNamespace(name="dspark", config=config)
    setting: Any = SimpleNamespace(draft=draft, dataset=dataset)
    first = next(iter(conventions._rope(setting)))
    assert first.text.startswith(TARGETS) and first.config["rope_parameters"]["rope_theta"] == 1e7


@pytest.mark.long
@pytest.mark.parametrize("non_causal", [True, False])
def test_slots_that_see_others_of_their_block_in_a_window(data, tmp_path, monkeypatch, non_causal):
    window = {"layer_types": ",".join(WINDOW["layer_types"]), "sliding_window": 6}
    options = OPTIONS["dflash"] | window | {"sliding_window_non_causal": non_causal}
    monkeypatch.setitem(OPTIONS, "dflash", options)
    draft = train_draft("dflash", data)
    assert not found(examine(planted(draft, tmp_path / "sound", lambda d: None), data=data))
    other = changed(sliding_window_non_causal=not non_causal)
    diagnosis = examine(planted(draft, tmp_path / "other", other), data=data)
    assert found(diagnosis) == {"window"}, str(diagnosis)
    said = f"sliding_window_non_causal = {str(non_causal).lower()}"
    assert said in diagnosis.named("window").text


@pytest.mark.long
def test_a_norm_that_the_file_lost(sound, data, tmp_path):
    """The draft expects states of length 1, as the norm before `fc` made them."""

    def normed(draft):
        draft.fc.weight *= 5  # about the length of the states

    diagnosis = examine(planted(sound("eagle3"), tmp_path, normed), data=data)
    check = diagnosis.named("carried-norm")
    assert found(diagnosis) == {"carried-norm"}, str(diagnosis)
    said = " ".join((check.text, *check.evidence))
    assert "norm_before_fc = true" in said and "fits about as well" in said


def small_stream(draft: Any, factor: float = 0.1) -> None:
    """Scale everything that the layer adds, as if a norm after it were to undo that."""
    layer = draft.layers[0]
    for module in (draft.fc, layer.self_attn.o_proj, layer.mlp.down_proj):
        module.weight *= factor
    for name in ("q_proj", "k_proj", "v_proj"):  # they read the stream as it is
        getattr(layer.self_attn, name).weight /= factor


def test_norms_of_an_eagle_draft(sound, data, tmp_path):
    def lost(draft):
        small_stream(draft)

    def sound_with_norm(draft):
        small_stream(draft)
        with_norm(draft, "use_last_layernorm")

    def too_many(draft):
        sound_with_norm(draft)
        with_norm(draft, "use_input_layernorm_in_first_layer")

    assert not found(examine(planted(sound("eagle"), tmp_path / "a", sound_with_norm), data=data))
    for change, text in (
        (lost, "use_last_layernorm = true"),
        (too_many, "use_input_layernorm_in_first_layer = false"),
    ):
        diagnosis = examine(planted(sound("eagle"), tmp_path / text, change), data=data)
        assert found(diagnosis) == {"carried-norm"}, str(diagnosis)
        assert text in diagnosis.named("carried-norm").text


@pytest.mark.long
def test_the_mask_token_of_a_trained_embedding(sound, data, tmp_path):
    """Its row is no longer the target's, and tells which token training masked with."""
    dataset = HiddenStatesDataset(data)
    counts = count_dataset(dataset)
    unseen = [token for token in range(3, VOCAB - 1) if not counts[token]]

    def moved(draft):
        rows = draft.embed_tokens.weight.detach().clone()
        rows[unseen[0]], rows[0] = 3 * rows[0], rows[5]  # the layer norms the length away
        draft.embed_tokens = torch.nn.Embedding.from_pretrained(rows, freeze=False)
        draft.update_config(train_embeddings=True, mask_token_id=2)

    diagnosis = examine(planted(sound("peagle"), tmp_path, moved), data=data)
    assert found(diagnosis) == {"mask-token"}, str(diagnosis)
    wanted = f"mask_token_id = {unseen[0]} instead of 2: of the tokens"
    assert wanted in diagnosis.named("mask-token").text


@pytest.mark.long
def test_a_mask_token_that_is_not_read(sound, data, tmp_path):
    def shallow(draft):
        draft.use_options(dataclasses.replace(draft.options, depths=1))

    diagnosis = examine(planted(sound("peagle"), tmp_path, shallow), data=data)
    assert not diagnosis.findings and diagnosis.named("mask-token") is None, str(diagnosis)


# --- drafts that learned nothing of this target ---


def test_an_untrained_draft(data, tmp_path):
    train_draft("eagle3", data, steps=0).save_pretrained(tmp_path / "fresh", torch.float32)
    diagnosis = examine(tmp_path / "fresh", data=data)
    assert found(diagnosis) == {"trained"}, str(diagnosis)
    assert diagnosis.named("trained").text.startswith("untrained")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_that_learned_nothing_has_no_wrong_convention(data, tmp_path, kind):
    """By luck, another order or layer fits random weights better than what is declared."""
    for seed in range(8):
        draft = train_draft(kind, data, steps=0)
        torch.manual_seed(seed)
        for weight in draft.trainable_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            else:
                torch.nn.init.constant_(weight, 1.01)  # a norm that was trained
        draft.save_pretrained(tmp_path / str(seed), torch.float32)
        assert found(examine(tmp_path / str(seed), data=data)) <= {"trained"}


def test_documents_are_tried_that_a_run_trained_on_where_none_is_held_out(data, tmp_path):
    config = Training(data=str(data), out=str(tmp_path / "run"), steps=1, seq_len=64, device="cpu")
    fit("eagle3", config, Eagle3Options(ttt_steps=1, layers="1,3"))
    dataset = HiddenStatesDataset(data)
    run = read_run(tmp_path / "run", tmp_path / "run" / "last")
    trained, _ = choose_documents(dataset, "train", run, 20)
    ids = ", ".join(f"'{dataset.doc_ids[number]}'" for number in trained)
    spec_data.select(data, tmp_path / "view", where=f"doc_id in ({ids})")
    assert examine(tmp_path / "run", data=tmp_path / "view").documents >= 12


def test_too_few_documents_decide_nothing(sound_dir, target, tmp_path, capsys):
    few = make_data(target, tmp_path / "few", count=11)
    diagnosis = examine(sound_dir("eagle3"), data=few)
    assert diagnosis.named("conventions").state == UNDECIDED
    assert not diagnosis.tried and not diagnosis.findings
    assert FINDING not in {check.state for check in diagnosis.checks}
    assert main(["doctor", "--draft", str(sound_dir("eagle3")), "--documents", "11"]) == 2
    assert "--documents 11" in capsys.readouterr().err


@pytest.mark.long
def test_documents_that_a_run_held_out_are_tried_and_others_where_these_are_too_few(data, tmp_path):
    for validation, documents, tried in ((0.05, 15, {15}), (0.5, 50, set(range(12, 50)))):
        out = tmp_path / str(validation)
        config = Training(
            data=str(data), out=str(out), steps=1, seq_len=64, device="cpu", validation=validation
        )
        fit("eagle3", config, Eagle3Options(ttt_steps=1, layers="1,3"))
        assert examine(out, data=data, documents=documents).documents in tried


def test_final_states_on_the_other_side_of_the_norm(sound_dir, target, target_dir, tmp_path):
    """The draft was trained with normed states; this dataset holds those before the norm."""
    unnormed = make_data(target, tmp_path / "unnormed", final_before_norm=True)
    diagnosis = examine(sound_dir("eagle"), data=unnormed)
    assert "data" in found(diagnosis), "the head gives other logits than the stored ones"
    both = make_data(target, tmp_path / "both", final_before_norm=True, layers=(1, 3, 5))
    diagnosis = examine(sound_dir("eagle"), data=both)  # layer 5 of the factory is normed
    assert "final-norm" in found(diagnosis), str(diagnosis)
