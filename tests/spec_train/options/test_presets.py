"""Laws of presets: they set what they say, flags replace them, and fit.json needs none of it."""

import json
from dataclasses import replace

import pytest

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.terminal.config import DOCUMENT_LENGTH
from spec_train.cli import main
from spec_train.drafts.dflash.options import DFlashOptions
from spec_train.drafts.dspark.options import DSparkOptions
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.options.presets import PRESETS, with_preset
from spec_train.options.training import Training
from spec_train.training.search_space import SearchTraining, make_arms
from tests.factory import tiny_dataset


@pytest.fixture
def resolved(monkeypatch):
    """What the command line makes of some words: both sets of options."""
    seen = []

    def settled(training, draft):
        seen.append((training, with_preset(draft, training.preset)))
        raise ConfigError("seen")

    def resolve(*words):
        monkeypatch.setattr("spec_train.commands.fit.settled", settled)
        assert main(["fit", "eagle3", "--out", "run", *words]) == 2
        return seen.pop()

    return resolve


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_nothing_else(name, resolved):
    plain, own = resolved("--data", "data", "--steps", "1")
    training, draft = resolved("--data", "data", "--preset", name)
    values = PRESETS[name]
    changed = {"preset": name, "steps": values.get("steps")} | values
    for options, before in ((training, plain), (draft, own)):
        for option in options.values():
            assert getattr(options, option) == changed.get(option, getattr(before, option)), option
    assert (training.steps is None) != (training.epochs is None)


@pytest.mark.parametrize("kind", [DSparkOptions, DFlashOptions])
def test_block_drafts_keep_the_whole_vocabulary(kind):
    """SGLang serves no reduced one: the README's way to a block draft ended in a refusal."""
    assert with_preset(kind(), "5k").draft_vocab_size == 0
    assert with_preset(kind(draft_vocab_size=50), "5k").draft_vocab_size == 50


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_what_generate_writes_by_default_is_read_without_a_cut(name):
    assert Training(data="d", out="o", preset=name).seq_len == DOCUMENT_LENGTH


def test_options_that_are_given_stay_even_if_they_equal_a_default(resolved):
    line = "--data d --preset 5k --seq-len 128 --steps 7 --accumulation 1 --validation 0.02"
    training, _ = resolved(*line.split())
    assert (training.seq_len, training.steps, training.epochs) == (128, 7, None)
    assert (training.accumulation, training.validation) == (1, 0.02)
    assert training.warmup_ratio == PRESETS["5k"]["warmup_ratio"]
    training, draft = resolved("--data", "d", "--preset", "smoke", "--epochs", "2")
    assert (training.steps, training.epochs) == (None, 2)
    assert (draft.ttt_steps, draft.draft_vocab_size) == (2, 2048)
    line = "--data d --preset smoke --ttt-steps 7 --draft-vocab-size 32000"
    _, draft = resolved(*line.split())
    assert (draft.ttt_steps, draft.draft_vocab_size) == (7, 32000)
    axes = {"draft": ["eagle3"], "ttt_steps": [7, 3]}
    arms = make_arms(axes, (0, 1, 2), {}, "smoke")
    assert sorted(arm.options.ttt_steps for arm in arms) == [3, 7]
    for arm in arms:  # the line that is printed is the fit that was tried
        words = arm.fit_words(Training(data="d", out="o", preset="smoke"))
        assert words[words.index("--ttt-steps") + 1] == str(arm.options.ttt_steps)


def test_a_preset_replaces_no_value_of_a_file_wherever_it_stands(tmp_path, resolved):
    file = tmp_path / "run.toml"
    file.write_text('data = "d"\npreset = "5k"\nseq-len = 99\nsteps = 3\nbatch-size = 3\n')
    training, _ = resolved("--config", str(file))
    assert (training.seq_len, training.steps, training.epochs) == (99, 3, None)
    assert training.warmup_ratio == PRESETS["5k"]["warmup_ratio"]
    assert training.batch_size == 3
    for typed, (size, steps, epochs) in (
        (["--epochs=2"], (3, None, 2)),
        (["--preset", "500k"], (3, 3, None)),
        (["--preset", "500k", "--steps", "4"], (3, 4, None)),
        (["--preset", "500k", "--batch-size", "4"], (4, 3, None)),
    ):
        training, _ = resolved("--config", str(file), *typed)
        assert (training.batch_size, training.steps, training.epochs) == (size, steps, epochs)


def test_a_value_that_equals_the_presets_was_given_too(tmp_path, caplog):
    """The size of a small dataset replaces what the preset says, and never what a user says."""
    data, caught = tiny_dataset(tmp_path / "data", n_docs=30), []
    words = ["fit", "eagle3", "--data", str(data), "--seq-len", "48", "--preset", "5k"]
    words += ["--ttt-steps", "2"]
    file = tmp_path / "options.yaml"
    file.write_text("epochs: 5\nbatch-size: 2\n")
    cases = {
        "typed": ["--epochs", "5", "--batch-size", "2"],
        "file": ["--config", str(file)],
        "free": [],
    }
    for name, given in cases.items():
        caplog.clear()
        assert main([*words, *given, "--out", str(tmp_path / name), "--dry-run"]) == 0
        lines = [line for line in caplog.messages if line.startswith(("preset", "size"))]
        caught.append(lines)
    for preset, size in caught[:2]:
        assert "5k: --accumulation 4 --warmup-ratio 0.04 --validation 0.05" in preset
        assert preset.endswith("; given: --epochs 5 --batch-size 2 --ttt-steps 2")
        assert "--accumulation 1;" in size and "--epochs" not in size
    preset, size = caught[2]
    assert "5k: --epochs 5 --batch-size 2" in preset and "--epochs 20 --batch-size 1" in size


def test_a_replaced_option_is_null_in_fit_json(tmp_path):
    data, out = tiny_dataset(tmp_path / "data", n_docs=20), tmp_path / "run"
    words = ["fit", "eagle3", "--data", str(data), "--seq-len", "48", "--steps", "1"]
    words += ["--draft-vocab-coverage", "0.7", "--position-weights", "0.9", "--ttt-steps", "2"]
    assert main([*words, "--out", str(out)]) == 0
    table = json.loads((out / "fit.json").read_text())
    assert table["draft_vocab_size"] is table["step_decay"] is table["epochs"] is None
    again = ["fit", "eagle3", "--config", str(out / "fit.json"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    repeated = json.loads((tmp_path / "again" / "fit.json").read_text())
    assert repeated | {"out": 0} == table | {"out": 0}
    assert main([*again[:-1], str(tmp_path / "size"), "--draft-vocab-size", "30"]) == 0
    assert json.loads((tmp_path / "size" / "fit.json").read_text())["draft_vocab_coverage"] is None


def test_two_ways_to_say_one_thing_are_refused_even_at_their_defaults():
    for kind, given in (
        (Eagle3Options, {"draft_vocab_size": 32000, "draft_vocab_coverage": 0.9}),
        (Eagle3Options, {"position_weights": "0.9", "step_decay": 0.8}),
    ):
        with pytest.raises(DraftError):
            kind(**given)
    with pytest.raises(ConfigError, match="--steps 3 and --epochs 3"):
        Training(data="d", out="o", steps=3, epochs=3)


def test_a_replaced_object_of_options_keeps_what_was_given():
    base = Training(data="d", out="o", preset="5k", batch_size=2)
    assert (base.epochs, base.accumulation, base.given) == (
        *(5, 4),
        {"data", "out", "preset", "batch_size"},
    )
    other = replace(base, preset="500k", out="p")
    assert (other.epochs, other.batch_size, other.accumulation) == (3, 2, 8)
    plain = replace(base, preset=None)
    assert (plain.epochs, plain.batch_size, plain.validation) == (3, 2, 0.02)
    assert replace(base, steps=4).epochs is None and replace(base, epochs=3).given >= {"epochs"}


def test_arms_of_a_search_have_what_was_given():
    training = SearchTraining(data="d", preset="5k", epochs=5, validation=0.05)
    run = training.of_arm(out="arm", lr=0.1)
    assert run.given == {"data", "out", "preset", "epochs", "validation", "lr"}
    arm = make_arms({"draft": ["eagle3"], "ttt_steps": [7, 3]}, (0, 1, 2), {}, "5k")[0]
    words = " ".join(arm.fit_words(run))
    assert "--epochs 5" in words and "--validation 0.05" in words and "--ttt-steps 7" in words
    assert "--warmup-ratio" not in words and "--draft-vocab-size" not in words  # of the preset


def test_fit_json_is_resolved_and_goes_on_without_the_preset(tmp_path, capsys):
    data, out = tiny_dataset(tmp_path / "data", n_docs=30), tmp_path / "run"
    common = ["fit", "eagle3", "--data", str(data), "--seq-len", "48"]
    assert main([*common, "--out", str(out), "--preset", "smoke", "--steps", "3"]) == 0
    table = json.loads((out / "fit.json").read_text())
    assert table["preset"] == "smoke" and table["ttt_steps"] == 2 and table["steps"] == 3
    again = ["fit", "eagle3", "--config", str(out / "fit.json"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    repeated = json.loads((tmp_path / "again" / "fit.json").read_text())
    assert repeated | {"out": 0} == table | {"out": 0}
    del table["preset"]
    (tmp_path / "plain.json").write_text(json.dumps(table))
    assert main(["fit", "eagle3", "--config", str(tmp_path / "plain.json")]) == 0
