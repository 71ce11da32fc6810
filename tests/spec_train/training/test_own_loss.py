"""`fit` with a loss of one's own and with callbacks."""

import json
from dataclasses import replace

import pytest
from torch.nn import functional as F
from transformers import TrainerCallback

import spec_train
from spec_data.shards.errors import ConfigError
from spec_train.evaluation.run_record import read_run
from spec_train.options.loss_function import loss_function, named_loss
from tests.factory import tiny_dataset

OPTIONS = spec_train.Eagle3Options(ttt_steps=2, draft_vocab_size=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("own") / "data", n_docs=16)


def run(data, out, **options):
    given = {"steps": 4, "batch_size": 1, "seq_len": 64, "validation": 0.25, "log_every": 1}
    given |= {"eval_every": 2, "save_every": 2, "device": "cpu"} | options
    return spec_train.Training(data=str(data), out=str(out), **given)


def soft(logits, teacher, weights):
    return -(weights * (teacher.p * logits.log_softmax(-1)).sum(-1)).sum()


def half(logits, teacher, weights):
    return 0.5 * weights * F.cross_entropy(logits, teacher.label, reduction="none")


def test_fit_trains_on_it_and_a_run_with_another_one_does_not_resume(data, tmp_path):
    usual = spec_train.fit(run(data, tmp_path / "usual"), OPTIONS)
    mine = spec_train.fit(run(data, tmp_path / "mine", loss_fn=soft), OPTIONS)
    for one, other in zip(mine.history, usual.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    told = json.loads((tmp_path / "mine" / "fit.json").read_text())["loss_fn"]
    assert told.startswith(f"{__name__}:soft#") and len(told.rpartition("#")[2]) == 16
    assert "loss_fn" not in json.loads((tmp_path / "usual" / "fit.json").read_text())
    longer = run(data, tmp_path / "mine", loss_fn=half)
    with pytest.raises(ConfigError, match=r"loss_fn: 'soft#\w+' -> 'half#\w+'"):
        spec_train.fit(longer, OPTIONS)
    with pytest.raises(ConfigError, match="loss_fn: 'soft"):
        spec_train.fit(run(data, tmp_path / "mine"), OPTIONS)
    spec_train.fit(run(data, tmp_path / "mine", loss_fn=soft), OPTIONS)  # it is done already
    other = spec_train.fit(run(data, tmp_path / "other", loss_fn=half), OPTIONS)
    assert other.history[0]["loss"] < usual.history[0]["loss"]


def test_both_losses_are_not_given(data, tmp_path):
    options = replace(OPTIONS, loss="kl")
    with pytest.raises(ConfigError, match="--loss kl and --loss-fn"):
        spec_train.fit(run(data, tmp_path / "run", loss_fn=soft), options)


def test_a_loss_in_a_file_is_named_on_the_command_line(data, tmp_path, monkeypatch, capsys):
    file = tmp_path / "losses.py"
    file.write_text(
        "def mine(logits, teacher, weights):\n    return (weights * logits[:, 0]).sum()\n"
    )
    out = tmp_path / "run"
    words = ["eagle3", "--data", data, "--out", out, "--steps", 1, "--device", "cpu"]
    words += ["--seq-len", 64, "--ttt-steps", 1, "--validation", 0, "--batch-size", 1]
    words += ["--draft-vocab-size", 0, "--loss-fn", f"{file}:mine"]
    from spec_train.cli import main

    assert main(["fit", *map(str, words)]) == 0
    whole = (out / "fit.json").read_text()
    text = json.loads(whole)["loss_fn"]
    assert text.startswith(f"{file}:mine#")
    assert named_loss(text) == text and loss_function(text).__name__ == "mine"
    assert read_run(out, out / "last").seq_len == 64  # eval called it damaged
    (out / "fit.json").write_text(json.dumps(json.loads(whole) | {"loss_fn": f"{file}:other#1"}))
    with pytest.raises(ConfigError, match="loss_fn: 'mine#"):
        read_run(out, out / "last")
    (out / "fit.json").write_text(whole)
    file.write_text(file.read_text() + "\n# another\n")
    capsys.readouterr()
    assert main(["fit", *map(str, words)]) == 2
    assert "loss_fn: 'mine#" in capsys.readouterr().err


def test_what_a_name_does_not_lead_to_is_said(tmp_path):
    ok = "x = 1\nclass C: pass\ndef g2(a, b): pass\ndef f(a, b, c): pass\n"
    (tmp_path / "l.py").write_text(ok)
    (tmp_path / "b.py").write_text("def f(a, b, c): pass\n1 / 0\n")
    (tmp_path / "s.py").write_text("def f(a, b, c: pass\n")
    for text, said in {
        "mine": "expected FILE.py:NAME",
        f"{tmp_path}/m.py:f": "there is no file",
        f"{tmp_path}/l.py:g": "there is no g",
        f"{tmp_path}/l.py:x": "x is an int, not a function",
        f"{tmp_path}/l.py:C": "C is a class",
        f"{tmp_path}/l.py:g2": "called with logits, teacher and weights",
        f"{tmp_path}/b.py:f": "fails while it is loaded: ZeroDivisionError",
        f"{tmp_path}/s.py:f": "fails while it is loaded: SyntaxError",
        "os:getcwd": "called with logits, teacher and weights",
        "math:sqrt": "called with logits, teacher and weights",  # a module without a source
        "no_such_module:f": "No module named",
        f"{tmp_path}/l.py:f#0123456789abcdef": "has changed since",
    }.items():
        with pytest.raises(ConfigError, match=said):
            named_loss(text)


def test_what_a_function_holds_is_part_of_its_name():
    def made(gamma):
        return lambda logits, teacher, weights: gamma * soft(logits, teacher, weights)

    assert named_loss(made(1.0)) != named_loss(made(2.0))
    assert named_loss(made(1.0)) == named_loss(made(1.0))


# --- callbacks ------------------------------------------------------------------------------------


class Log:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def note(self, name, args, state, control, **more):
        assert args.data and more.pop("model").name == "eagle3"
        self.told.append((name, state.global_step, sorted(more)))

    def on_train_begin(self, *given, **more):
        self.note("begin", *given, **more)

    def on_step_end(self, *given, **more):
        self.note("step", *given, **more)

    def on_log(self, *given, logs, **more):
        assert logs["split"] == "train" and logs["loss"] > 0
        self.note("log", *given, **more)

    def on_evaluate(self, *given, metrics, **more):
        assert metrics["split"] == "validation"
        self.note("evaluate", *given, **more)

    def on_save(self, *given, **more):
        self.note("save", *given, **more)

    def on_train_end(self, *given, **more):
        self.note("end", *given, **more)


class Stop(TrainerCallback):
    """Stops after a step, as one of transformers."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step >= self.after
        return control


def test_callbacks_are_told_what_happens_in_its_order(data, tmp_path):
    log = Log()
    plain = spec_train.fit(run(data, tmp_path / "plain"), OPTIONS)
    told = spec_train.fit(run(data, tmp_path / "run"), OPTIONS, callbacks=[log])
    assert [line["loss"] for line in told.history] == [line["loss"] for line in plain.history]
    names = [(name, step) for name, step, _ in log.told]
    expected = [("begin", 0), ("evaluate", 0)]
    for step in range(1, 5):
        expected += [("step", step), ("log", step)]
        expected += [("evaluate", step), ("save", step)] * (step % 2 == 0)
    assert names == [*expected, ("end", 4)]


def test_one_that_stops_early_leaves_a_run_that_goes_on(data, tmp_path):
    whole = spec_train.fit(run(data, tmp_path / "whole"), OPTIONS)
    stopped = spec_train.fit(run(data, tmp_path / "run"), OPTIONS, callbacks=[Stop(3)])
    assert stopped.step == 3 and not stopped.finished and stopped.stopped_by is None
    assert stopped.validation[-1]["step"] == 3 and stopped.best is not None
    resumed = spec_train.fit(run(data, tmp_path / "run"), OPTIONS)
    assert resumed.finished
    assert resumed.training[-1]["loss"] == whole.training[-1]["loss"]


def test_what_a_callback_asks_for_is_done_once(data, tmp_path):
    class Ask:
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 1:
                control.should_evaluate = control.should_save = True

    log = Log()
    spec_train.fit(run(data, tmp_path / "run"), OPTIONS, callbacks=(Ask(), log))
    names = [(name, step) for name, step, _ in log.told]
    assert [pair for pair in names if pair[0] in ("evaluate", "save")] == [
        *(("evaluate", 0), ("evaluate", 1), ("save", 1)),
        *(("evaluate", 2), ("save", 2), ("evaluate", 4), ("save", 4)),
    ]


class Typo:
    def on_step_ended(self, *given, **more):
        pass


class Never(TrainerCallback):
    def on_prediction_step(self, *given, **more):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Typo(), "on_step_ended, which fit never calls"),
        (Never(), "on_prediction_step, which fit never calls"),
        (object(), "has none of on_train_begin"),
        (Log, "Log is a class"),
    ],
)
def test_a_callback_that_would_never_be_called_is_refused(data, tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        spec_train.fit(run(data, tmp_path / "run"), OPTIONS, callbacks=[given])
