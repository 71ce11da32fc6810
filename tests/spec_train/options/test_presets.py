"""Laws of presets: they set what they say, flags replace them, and fit.json needs none of it."""

import json
import time

import pytest

from spec_data.options.generate_options import GenerateConfig
from spec_train.cli import _resolve_fit, build_parser, main
from spec_train.options.command_options import FitConfig, fit_config, resolve_fit
from spec_train.options.draft_options import DRAFT_OPTIONS
from spec_train.options.presets import PRESETS, as_flags_over_preset, preset_help
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.forked import Forked


def resolved(*flags: str):
    return _resolve_fit(build_parser().parse_args(["fit", "eagle3", "--out", "run", *flags]))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_nothing_else(name):
    plain = resolved("--data", "data", "--steps", "1")
    config = resolved("--data", "data", "--preset", name)
    for option in fit_config("eagle3").__dataclass_fields__:
        expected = PRESETS[name].values.get(option, getattr(plain, option))
        if option == "steps":
            expected = PRESETS[name].values.get("steps")
        assert getattr(config, option) == (name if option == "preset" else expected), option
    assert (config.steps is None) != (config.epochs is None)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("draft", ["dspark", "dflash"])
def test_block_drafts_keep_the_whole_vocabulary(name, draft):
    """SGLang serves no reduced one: the README's way to a block draft ended in a refusal."""
    given = {"data": "d", "out": "o", "preset": name}
    config = resolve_fit(draft, given)
    assert config.draft_vocab_size == fit_config(draft)(data=("d",), out="o").draft_vocab_size
    assert resolve_fit(draft, given | {"draft_vocab_size": 50}).draft_vocab_size == 50
    assert "--draft-vocab-size" not in preset_help(list(fit_config(draft).__dataclass_fields__))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_set_options_that_exist(name):
    known = set(FitConfig.__dataclass_fields__)
    known |= {o for options in DRAFT_OPTIONS.values() for o in options.__dataclass_fields__}
    assert set(PRESETS[name].values) <= known


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_what_generate_writes_by_default_is_read_without_a_cut(name):
    flags = ["--preset", name] if name else []
    generated = GenerateConfig(target="t", corpus=("c",), out="d")
    assert resolved("--data", "data", *flags).seq_len == generated.max_length
    assert generated.pack_length == 0  # as long as the longest document


def test_flags_go_over_a_preset_and_how_long_replaces_both(tmp_path):
    config = resolved("--data", "d", "--preset", "5k", "--seq-len", "128", "--steps", "7")
    assert (config.seq_len, config.steps, config.epochs) == (128, 7, None)
    assert config.accumulation == PRESETS["5k"].values["accumulation"]
    config = resolved("--data", "d", "--preset", "smoke", "--epochs", "2")
    assert (config.steps, config.epochs) == (None, 2)


def test_how_long_as_none_leaves_a_preset_alone():
    given = {"data": "d", "out": "o", "preset": "5k", "steps": None, "epochs": None}
    assert resolve_fit("eagle3", given).epochs == PRESETS["5k"].values["epochs"]
    config = resolve_fit("eagle3", given | {"steps": 7})
    assert (config.steps, config.epochs) == (7, None)


def test_a_file_goes_over_its_own_preset_and_under_one_that_is_typed(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data = "d"\npreset = "5k"\nseq-len = 99\nsteps = 3\n')
    config = resolved("--config", str(file))
    assert (config.seq_len, config.steps, config.epochs) == (99, 3, None)
    assert config.warmup_ratio == PRESETS["5k"].values["warmup_ratio"]
    own = PRESETS["500k"].values["batch_size"]
    file.write_text(file.read_text() + "batch-size = 3\n")
    assert resolved("--config", str(file)).batch_size == 3
    config = resolved("--config", str(file), "--preset", "500k")
    assert (config.batch_size, config.steps, config.epochs) == (own, None, 3)
    config = resolved("--config", str(file), "--preset", "500k", "--steps", "4")
    assert (config.batch_size, config.steps, config.epochs) == (own, 4, None)


def test_an_unknown_preset_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "eagle3", "--data", "d", "--out", "o", "--preset", "5m"])
    assert "choose from" in capsys.readouterr().err
    file = tmp_path / "run.toml"
    file.write_text('data = "d"\nout = "o"\npreset = "5m"\n')
    assert main(["fit", "eagle3", "--config", str(file)]) == 2
    assert "choose from smoke, 5k, 50k, 500k" in capsys.readouterr().err


def test_help_says_what_every_preset_sets_and_promises(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "eagle3", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for preset in PRESETS.values():
        assert preset.expect in text and f"time: {preset.time}" in text
        for option, value in preset.values.items():
            assert f"--{option.replace('_', '-')} {value}" in text


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


@pytest.mark.long
def test_smoke_is_short_on_a_cpu(tmp_path):
    """In a fork, alone on one thread, with a small part of the work that the preset's text tells
    the time of: width 256, 16,000 tokens. The limit is for machines that are busy."""
    model = tiny_llama(vocab=16000, layers=4, hidden=256)
    documents = random_documents(40, 16000, shortest=100, longest=400)
    data = tiny_dataset(tmp_path / "data", model=model, documents=documents)
    command = ["fit", "eagle3", "--preset", "smoke", "--data", str(data), "--device", "cpu"]
    started = time.perf_counter()
    fitting = Forked(lambda: main([*command, "--out", str(tmp_path / "run")]))
    _, error = fitting.communicate(timeout=300)
    assert fitting.returncode == 0, error
    print(f"{time.perf_counter() - started:.1f} s")
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "line",
    [
        "--preset 5k",
        "--preset 5k --batch-size 8",
        "--preset 5k --accumulation 1 --validation 0.02",
        "--preset 5k --steps 100",
        "--preset smoke --epochs 2",
        "--preset smoke --draft-vocab-coverage 0.9",
        "--preset smoke --draft-vocab-size 32000",
        "--epochs 2",
    ],
)
def test_the_command_after_a_dry_run_is_the_run_that_was_measured(line):
    """--accumulation 1 is the default of fit, but it replaces the preset's 4."""

    def resolved(words):
        return _resolve_fit(build_parser().parse_args(["fit", "eagle3", *words]))

    typed = ["--data", "D", "--out", "O", *line.split()]
    config = resolved(typed)
    words = as_flags_over_preset(config)
    assert resolved(words) == config
    assert sorted(words) == sorted(typed)
