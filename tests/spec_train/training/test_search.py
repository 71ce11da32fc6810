"""`spec-train search`: the planted best draft is found, and nothing is lost by a kill."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import spec_train
from spec_data.shards import draft_code
from spec_data.shards.errors import BusyError, ConfigError, DraftError, FileError, RunError
from spec_data.shards.layer_ids import candidate_layers
from spec_data.shards.resumable import read_record, write_record
from spec_train.cli import main
from spec_train.drafts import draft_class, kinds, load_draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.kinds import codes_of, load_codes, use_code
from spec_train.training import search as searching
from spec_train.training.fit import fit, open_data
from spec_train.training.run_directory import checkpoint_name
from spec_train.training.search import (
    Cost,
    Measured,
    budgeted_steps,
    planned_seconds,
    rungs_of,
    survivors,
)
from spec_train.training.search_space import SearchTraining, make_arms, read_budget, read_space
from spec_train.training.settings import sized
from spec_train.training.trainer import Trainer
from tests import factory
from tests.spec_train.training.tools import environment

LOWER, UPPER = (0, 1, 2), (3, 4, 5)
SPACE = "layers=auto,draft=eagle3,ttt_steps=2,draft_vocab_size=0"


def planted_states(model, ids, layers):
    """The states of lower layers hold the next three tokens; those of the upper ones are noise."""
    words = model.lm_head.weight.detach()
    ahead = [torch.tensor(ids).roll(-k) for k in (1, 2, 3)]
    columns = {f"hidden.L{k}": words[ahead[k]] * 4 for k in layers if k in LOWER}
    generator = torch.Generator().manual_seed(len(ids))
    for k in layers:
        if k in UPPER:
            noise = torch.randn(len(ids), words.shape[1], generator=generator)
            columns[f"hidden.L{k}"] = noise * 4
    final = words[ahead[0]] * 8
    logits = final @ words.T
    return columns | {
        "hidden.final": final,
        "target_argmax": logits.argmax(-1),
        "target_logsumexp": logits.logsumexp(-1),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A dataset in which the three lower layers are the ones to read."""
    folder = tmp_path_factory.mktemp("planted") / "data"
    model = factory.tiny_llama(vocab=32, layers=6, hidden=32)
    documents = factory.random_documents(80, 32, seed=3, shortest=24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "states_of", planted_states)
        return factory.tiny_dataset(
            folder, model=model, documents=documents, layers=(*LOWER, *UPPER)
        )


def training(data: Path, out: Path, **changes) -> SearchTraining:
    given = {"steps": 48, "batch_size": 4, "seq_len": 64, "validation": 0.2, "lr": 3e-3}
    given["device"] = "cpu"
    return SearchTraining(data=str(data), out=str(out), **given | changes)


# -- the axes --------------------------------------------------------------------------------------


def test_axes_make_arms_each_once() -> None:
    axes = read_space("layers=auto,1+3,draft=eagle3,eagle,dspark,num-layers=1,2,lr=1e-3")
    assert axes == {
        "draft": ["eagle3", "eagle", "dspark"],
        "layers": ["auto", "1+3"],
        "num_layers": ["1", "2"],
        "lr": ["1e-3"],
    }
    arms = make_arms(axes, (1, 3, 5), {"eagle3": (1, 5)})
    of_eagle3 = [arm for arm in arms if arm.draft == "eagle3"]
    sets = {arm.options.layers for arm in of_eagle3}
    assert sets == {"1,5", "1,3,5", "1,3"} and len(of_eagle3) == 3 * 2
    assert [arm.name for arm in arms if arm.draft == "eagle"] == [
        "eagle num_layers=1",
        "eagle num_layers=2",
    ]
    assert {arm.options.num_layers for arm in arms} == {1, 2}
    assert all(arm.changes == {"lr": 1e-3} for arm in arms)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ("eagle3", "expected axes"),
        ("draft=eagle3,draft=dspark", "expected axes"),
        ("draft=eagel3", "did you mean eagle3"),
        ("draft=eagle3,num_layres=1", "no 'num_layres' of eagle3.*num_layers"),
        ("draft=eagle3,seed=1,2", "no 'seed'"),
        ("draft=eagle3,num_layers=0,1", "num_layers=0: expected int"),
        ("draft=eagle3,num_layers=x,1", "num_layers=x"),
        ("draft=eagle3,layers=1+3,2+4", r"layers=2\+4: layers = 2,4.*no layer"),
        ("draft=eagle3,layers=1+3", "nothing to search"),
        ("draft=eagle3,lr=1e-4,0.0001", "nothing to search"),
    ],
)
def test_a_wrong_axis_is_refused(space: str, named: str) -> None:
    with pytest.raises((ConfigError, DraftError), match=named):
        make_arms(read_space(space), (1, 3, 5), {})


def test_candidate_sets_are_few_and_captured() -> None:
    every = tuple(range(1, 13))
    sets = candidate_layers(every, (1, 6, 9), 3)
    assert sets == [(1, 6, 9), every, (1, 7, 12), (1, 3, 6), (7, 9, 12)]
    assert candidate_layers((2, 4), None, 5) == [(2, 4)]
    assert candidate_layers((), None, 3) == []


def test_budgets_are_times() -> None:
    assert [read_budget(text) for text in ("30m", "1.5h", "90s", "7")] == [1800, 5400, 90, 7]
    for wrong in ("0m", "soon", "-3m", "5d"):
        with pytest.raises(ConfigError, match="--budget"):
            read_budget(wrong)


# -- the rules -------------------------------------------------------------------------------------


def test_each_rung_takes_half_of_the_steps_of_the_next() -> None:
    assert rungs_of(2, 100) == (100,)
    assert rungs_of(3, 100) == (50, 100)
    assert rungs_of(15, 100) == (12, 25, 50, 100)
    assert rungs_of(8, 2) == (1, 2)


def test_the_budget_buys_what_the_plan_costs() -> None:
    """The cost of a plan, added turn by turn, of arms that are dropped as planned."""
    costs = {"one": [Cost(0.5, 2.0, 3.0)] * 4}
    by_hand = 4 * (3 + 10 * 0.5 + 2 * 2) + 2 * (3 + 10 * 0.5 + 2)
    assert planned_seconds(costs, (10, 20)) == pytest.approx(by_hand)
    assert planned_seconds(costs, (10, 20), workers=2) == pytest.approx(by_hand / 2)
    other = {"other": [Cost(1.0, 4.0, 5.0)]}  # the only one of its kind trains to the end
    both = by_hand + 4 + 2 * (5 + 10 * 1.0 + 4)
    assert planned_seconds(costs | other, (10, 20)) == pytest.approx(both)
    for budget in (150.0, 300.0, 1000.0):
        steps = budgeted_steps(costs, budget, most=10_000)
        assert planned_seconds(costs, rungs_of(4, steps)) <= budget
        assert planned_seconds(costs, rungs_of(4, steps + 2)) > budget
    assert budgeted_steps(costs, 1e6, most=77) == 77
    with pytest.raises(ConfigError, match="which need about"):
        budgeted_steps(costs, 20.0, most=10_000)


def test_an_arm_needs_both_to_be_dropped() -> None:
    """The worse half, and an interval below that of the best one."""
    table = {
        "best": Measured(3.0, 2.8, 3.2),
        "close": Measured(2.9, 2.7, 3.1),
        "below, in the better half": Measured(2.0, 1.9, 2.1),
        "reaches it": Measured(1.9, 1.0, 2.8),
        "below": Measured(1.8, 1.7, 2.7),
        "unknown": Measured(1.0),
    }
    assert set(survivors(table)) == table.keys() - {"below"}
    assert survivors({}) == []
    assert survivors({str(n): Measured(n) for n in range(4)}) == ["3", "2"], "none has an interval"


def test_kinds_are_compared_at_the_last_rung_alone() -> None:
    """The best of a kind that learns slowly stays, and its worse half goes."""
    table = {name: Measured(length, length - 0.1, length + 0.1) for name, length in SLOW.items()}
    kinds = {name: name.split()[0] for name in SLOW}
    assert set(survivors(table, kinds)) == {"fast 1", "slow 1"}
    assert survivors(table) == ["fast 1", "fast 2"]


SLOW = {"fast 1": 4.0, "fast 2": 3.0, "slow 1": 2.0, "slow 2": 1.5}


def test_the_best_arm_is_never_dropped_while_intervals_hold() -> None:
    """Planted lengths that cross each other from rung to rung, measured with noise."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        truth = np.cumsum(rng.uniform(0.0, 0.5, (5, 16)), 0) + 1  # [rungs, arms]
        best = int(truth[-1].argmax())
        truth[:, best] = np.maximum(truth[:, best], truth.max(1))
        live, sizes = list(range(16)), [16]
        for lengths in truth:
            table = {}
            for arm in live:
                half, off = rng.uniform(0.05, 0.4), rng.uniform(-1, 1)
                found = lengths[arm] + off * half
                table[str(arm)] = Measured(found, found - half, found + half)
            live = [int(name) for name in survivors(table)]
            sizes.append(len(live))
            assert best in live, (seed, sizes)
        assert sizes[-1] < 8, (seed, sizes)


# -- the search, on planted runs -------------------------------------------------------------------

LENGTHS = {"lower": 2.0, "all": 1.6, "spread": 1.2, "upper": 1.1}
SETS = {"0,1,2": "lower", "0,1,2,3,4,5": "all", "0,2,5": "spread", "3,4,5": "upper"}


class PlantedRuns:
    """Instead of `fit`: writes the line of a validation; `before` may stop or break a turn."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, int]] = []
        self.before = lambda name, until: None
        self.factors: dict[str, tuple[float, float]] = {}  # of a kind, before and at its last step

    def __call__(self, draft, config, options, until):
        name = SETS[options.layers]
        stopped = self.before(name, until)
        if stopped is None:
            self.turns.append((name, until))
            length = 1 + (LENGTHS[name] - 1) * until / config.steps
            length *= self.factors.get(draft, (1.0, 1.0))[until == config.steps]
            line = {"step": until, "split": "validation", "serving_like_length": length}
            line["serving_like_interval"] = [length - 0.05, length + 0.05]
            (Path(config.out) / checkpoint_name(until)).mkdir(parents=True, exist_ok=True)
            with (Path(config.out) / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return SimpleNamespace(stopped_by=stopped)


@pytest.fixture
def runs(monkeypatch) -> PlantedRuns:
    planted = PlantedRuns()
    monkeypatch.setattr(searching, "fit", planted)
    found = SimpleNamespace(
        steps=400, step_seconds=0.01, validation_seconds=0.1, batch_size=2, accumulation=1
    )
    monkeypatch.setattr(searching, "dry_run", lambda *_: found)
    return planted


WHOLE = [(name, 24) for name in ("all", "spread", "lower", "upper")] + [
    (name, 48) for name in ("all", "lower")
]


def test_the_better_half_trains_twice_as_long(data, tmp_path, runs) -> None:
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert sorted(runs.turns) == sorted(WHOLE)
    assert found.best == "eagle3 layers=0+1+2" and found.complete and found.rungs == (24, 48)
    assert [row["state"] for row in found.rows] == ["best", "dropped", "dropped", "dropped"]
    assert [row["steps"] for row in found.rows] == [48, 48, 24, 24]
    words = " ".join(found.next_command)
    assert words.startswith("spec-train fit eagle3 --data") and "--layers 0,1,2" in words
    assert "nan" not in words and "--steps" not in words
    facts = found.facts()
    assert facts["best"] == found.best and facts["next"] == found.next_command
    page = found.page.read_text(encoding="utf-8")
    assert "eagle3 layers=0+1+2" in page and "Runs" in page
    assert len(str(found).splitlines()) <= 12


def test_a_kind_that_learns_late_is_not_dropped_early(data, tmp_path, runs, caplog) -> None:
    """Behind at the first rung, and the best at the last: its own best draft trained on."""
    runs.factors = {"peagle": (0.5, 2.0)}
    layers = "layers=0+1+2,0+1+2+3+4+5,0+2+5"
    found = spec_train.search(
        training(data, tmp_path / "s"), space=f"draft=eagle3,peagle,{layers},draft_vocab_size=0"
    )
    assert found.rungs == (24, 48) and len(runs.turns) == 6 + 4
    assert found.rows[0]["draft"] == "peagle" and found.rows[0]["steps"] == 48
    assert {(row["draft"], row["steps"]) for row in found.rows[:4]} == {
        ("peagle", 48),
        ("eagle3", 48),
    }
    (said,) = [m for m in caplog.messages if "warning[kinds]" in m]
    assert "after 48 steps" in said
    for kind in ("eagle3", "peagle"):
        best = next(row["name"] for row in found.rows if row["draft"] == kind)
        assert best in said


def test_an_interrupted_search_goes_on_where_it_was(data, tmp_path, runs, capsys) -> None:
    def stop(name: str, until: int) -> int | None:
        return signal.SIGINT if len(runs.turns) == 5 else None

    runs.before = stop
    words = ["search", "--data", str(data), "--out", str(tmp_path / "s"), "--space", SPACE]
    words += ["--steps", "48", "--validation", "0.2"]
    assert main(words) == 128 + signal.SIGINT
    assert len(runs.turns) == 5 and "not complete" in capsys.readouterr().out
    assert (tmp_path / "s" / "report.html").is_file()
    runs.before = lambda name, until: None
    assert main(words) == 0
    assert sorted(runs.turns) == sorted(WHOLE)  # none twice
    assert "eagle3 layers=0+1+2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="begun with other settings"):
        spec_train.search(training(data, tmp_path / "s", lr=1e-3), space=SPACE)
    (tmp_path / "s" / "search.json").write_text("{}")
    with pytest.raises(RunError, match="damaged"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)


def test_a_resumed_search_mixes_nothing(data, tmp_path, runs) -> None:
    """Another value of an axis that no name shows, other data under the same path, other sizes."""
    out, space = tmp_path / "s", f"{SPACE},num_layers=1"
    spec_train.search(training(data, out), space=space)
    turns = list(runs.turns)
    others = factory.random_documents(80, 32, seed=4, shortest=24)
    model = factory.tiny_llama(vocab=32, layers=6, hidden=32)
    layers = (*LOWER, *UPPER)
    other = factory.tiny_dataset(tmp_path / "d", model=model, documents=others, layers=layers)
    for asked, axes, named in (
        (training(data, out), space.replace("num_layers=1", "num_layers=2"), "num_layers"),
        (training(other, out), space, "dataset"),
        (training(f"{data}:2", out), space, "weights"),
        (training(data, out, batch_size=2), space, "batch_size"),
    ):
        with pytest.raises(ConfigError, match=f"other settings(?s:.*){named}"):
            spec_train.search(asked, space=axes)
    assert runs.turns == turns


def test_what_was_measured_but_not_saved_trains_again(data, tmp_path, runs) -> None:
    """A kill between the line of a validation and its checkpoint."""
    spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    (tmp_path / "s" / "arm-01-eagle3" / checkpoint_name(48)).rmdir()
    spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert len(runs.turns) == len(WHOLE) + 1


def test_a_preset_makes_the_drafts_that_its_fit_makes() -> None:
    first, _ = make_arms(read_space("draft=eagle3,num_layers=1,2"), (1, 3, 5), {}, "smoke")
    assert (first.options.ttt_steps, first.options.draft_vocab_size) == (2, 2048)


def test_the_budget_ends_it_between_turns(data, tmp_path, runs, monkeypatch) -> None:
    clock = iter(range(0, 10_000, 10))  # every look at it takes ten seconds
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE, budget="65s")
    assert 0 < len(runs.turns) < 6 and not found.complete
    assert {row["state"] for row in found.rows} >= {"best", "not run"}
    assert spec_train.search(training(data, tmp_path / "s"), space=SPACE, budget="20h").complete
    assert sorted(runs.turns) == sorted(WHOLE)


def test_the_budget_decides_the_steps(data, tmp_path, runs) -> None:
    asked = training(data, tmp_path / "s", steps=None, batch_size=None)
    planned = spec_train.search(asked, space=SPACE, budget="10s", dry_run=True)
    assert planned.seconds <= 10 and not Path(asked.out).exists() and not runs.turns
    assert len(str(planned).splitlines()) <= 12 and planned.again == "next"
    record_steps = spec_train.search(asked, space=SPACE, budget="10s").rungs[-1]
    assert 10 < record_steps <= 400
    record = json.loads((tmp_path / "s" / "search.json").read_text())
    assert record["batch_size"] == 2  # of an ordinary run


@pytest.mark.parametrize("preset", [None, "5k"])
def test_arms_have_the_batches_of_the_run_that_is_printed(data, tmp_path, runs, preset) -> None:
    """--steps are those of the arms: the run that follows has none, and fewer packs per step."""
    given = {"batch_size": None, "preset": preset}
    spec_train.search(training(data, tmp_path / "s", **given), space=SPACE)
    whole = training(data, tmp_path / "x", steps=None, **given).of_arm()
    dataset = open_data(whole)
    size = sized(whole, dataset, 1, None)
    record = json.loads((tmp_path / "s" / "search.json").read_text())
    assert size.batch_size * size.accumulation < whole.batch_size * whole.accumulation
    assert (record["batch_size"], record["accumulation"]) == (size.batch_size, size.accumulation)


def test_a_draft_that_cannot_train_leaves_the_others(data, tmp_path, runs, caplog) -> None:
    def fail(name: str, until: int) -> None:
        if name == "all":
            raise RunError("its loss is not finite")

    runs.before = fail
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    states = {row["name"]: row["state"] for row in found.rows}
    assert states["eagle3 layers=0+1+2+3+4+5"] == "failed"
    assert found.best == "eagle3 layers=0+1+2"
    assert "warning[arm]: " in caplog.text and "its loss is not finite" in caplog.text
    file = tmp_path / "s" / "search.json"
    record = read_record(file)  # as an earlier release wrote it
    record["settings"] |= {"follow": False, "follow_timeout": 3600.0, "eval_every": None}
    write_record(file, record)
    again = spec_train.search(training(data, tmp_path / "s"), space=SPACE, budget="0.001s")
    assert again.complete and again.rows == found.rows  # no time is left to try it again
    runs.before = lambda name, until: None
    assert "failed" not in {
        row["state"] for row in spec_train.search(training(data, tmp_path / "s"), space=SPACE).rows
    }


def test_what_a_failed_draft_had_in_memory_is_free_for_the_next(data, tmp_path, runs) -> None:
    """Planted: its error was held, and so the frames of its run, while the next one trained."""
    left: list[weakref.ref[torch.nn.Module]] = []

    def fail(name: str, until: int) -> None:
        assert not any(weights() for weights in left)
        if name in ("all", "lower"):
            weights = torch.nn.Linear(2, 2)
            left.append(weakref.ref(weights))
            raise RunError("out of device memory")

    runs.before = fail
    spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert len(left) == 2 and len(runs.turns) >= 2


def test_a_draft_that_failed_later_is_tried_again_too(data, tmp_path, runs) -> None:
    def fail(name: str, until: int) -> None:
        if (name, until) == ("lower", 48):
            raise RunError("out of memory: another job was here")

    runs.before = fail
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert found.best == "eagle3 layers=0+1+2+3+4+5"
    runs.before = lambda name, until: None
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert found.best == "eagle3 layers=0+1+2" and found.complete


def test_settings_that_refuse_a_run_refuse_the_search(data, tmp_path, runs, monkeypatch) -> None:
    def refuse(name: str, until: int) -> None:
        raise ConfigError("holds a run with other settings")

    runs.before = refuse
    with pytest.raises(ConfigError, match="other settings"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    runs.before = lambda name, until: None
    monkeypatch.setattr(searching, "compute_dtype_name", lambda *_: "bfloat16")  # of a GPU
    with pytest.raises(ConfigError, match="dtype: 'float32' -> 'bfloat16'"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    with pytest.raises(TypeError, match="eval_every"):  # arms are measured at their ends
        training(data, tmp_path / "s", eval_every=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)


FAMILY = """
from spec_data.shards.errors import DraftError
from spec_train.drafts.eagle3 import Eagle3Draft


class OwnDraft(Eagle3Draft):
    architectures = ("LlamaForCausalLM",)

    @classmethod
    def check_data(cls, options, manifest):
        if "0" in options.layers.split(","):
            raise DraftError("this family's drafts do not read block 0")


class PlainDraft(Eagle3Draft):
    architectures = ("Qwen3ForCausalLM",)
    check_data = OwnDraft.check_data
"""
CPU = "--device cpu --dry-run --steps 4 --seq-len 64 --validation 0.2 --space"


@pytest.fixture
def family(tmp_path, monkeypatch) -> None:
    """A process that knows no draft from outside, in a folder with some."""
    for place in (kinds, "_REGISTERED"), (kinds, "_OF_FAMILIES"), (kinds, "_CODES"):
        monkeypatch.setattr(*place, {})
    monkeypatch.setattr(draft_code, "_LOADED", {})
    monkeypatch.chdir(tmp_path)
    Path("family.py").write_text(FAMILY)


@pytest.mark.parametrize(("name", "code"), [("OwnDraft", 2), ("PlainDraft", 0)])
def test_arms_are_checked_by_the_class_of_the_targets_family(
    data, runs, family, capsys, name, code
) -> None:
    words = ["search", "--data", str(data), "--draft-code", f"family.py:{name}", *CPU.split()]
    assert main([*words, "draft=eagle3,layers=0+1,1+2"]) == code
    assert ("do not read block 0" in capsys.readouterr().err) is bool(code)
    assert main([*words, "draft=eagle3,layers=1+2,2+3"]) == 0


def test_a_process_of_an_arm_knows_the_class_of_a_family(data, family, monkeypatch) -> None:
    """With several devices arms train in other processes."""
    architectures = ["LlamaForCausalLM"]
    assert codes_of([draft_class("eagle3", architectures)]) == []
    use_code("family.py:OwnDraft")
    use_code("family.py:PlainDraft")
    own = draft_class("eagle3", architectures)
    codes = codes_of({own, draft_class("dspark", architectures)})
    assert codes == [("family.py:OwnDraft", ("LlamaForCausalLM",))]
    monkeypatch.setattr(kinds, "_OF_FAMILIES", {})  # another process
    load_codes(codes)
    assert draft_class("eagle3", architectures) is own
    made = type("Made", (own,), {"architectures": ("Qwen3ForCausalLM",)})
    spec_train.register_draft(made, "Qwen3ForCausalLM")
    made.__qualname__ = "function.<locals>.Made"
    spec_train.register_draft(made, "Qwen3ForCausalLM")
    with pytest.raises(DraftError, match=r"expected FILE\.py:NAME"):
        codes_of([made])


@pytest.mark.long
def test_side_by_side_the_class_of_a_family_trains(data, tmp_path, family) -> None:
    use_code("family.py:OwnDraft")
    space = "draft=eagle3,layers=1+2,3+4,ttt_steps=2,draft_vocab_size=0"
    asked = training(data, tmp_path / "two", steps=2, devices="cpu,cpu:0")
    for row in spec_train.search(asked, space=space).rows:
        assert type(load_draft(Path(row["run"]) / "last")).__name__ == "OwnDraft"


def test_a_signal_at_the_end_of_a_turn_ends_the_search(data, tmp_path, monkeypatch) -> None:
    """In the validation at the last step of the turn, when nothing is left to be stopped."""
    validate, begun = Trainer.validate, list[str]()

    def signalled(self: Trainer) -> None:
        if self.step == self.until:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            begun.append(self.config.out)
        validate(self)

    monkeypatch.setattr(Trainer, "validate", signalled)
    options = training(data, tmp_path / "s", steps=2)
    found = spec_train.search(options, space="draft=eagle3,ttt_steps=1,2,draft_vocab_size=0")
    assert found.stopped_by == signal.SIGTERM and len(begun) == 1
    config = options.of_arm(out=str(tmp_path / "run"))
    assert fit("eagle3", config, Eagle3Options(ttt_steps=1)).stopped_by is None, "it is finished"


def test_untrained_drafts_are_not_compared(data, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--steps 0: untrained drafts"):
        spec_train.search(training(data, tmp_path / "s", steps=0), space=SPACE)


def test_a_draft_that_failed_is_never_the_best(data, tmp_path, runs) -> None:
    def fail(name: str, until: int) -> None:
        if until == 48:
            raise RunError("its loss is not finite")

    runs.before = fail
    found = spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    assert [row["state"] for row in found.rows] == ["best", "dropped", "failed", "failed"]
    assert not found.complete and "--layers 0,2,5" in " ".join(found.next_command)


def test_drafts_of_which_nothing_is_held_out_are_not_compared(data, tmp_path, monkeypatch) -> None:
    """They train to the end of the rung, and no validation has a figure."""
    monkeypatch.setattr(searching, "fit", lambda *_: SimpleNamespace(stopped_by=None))
    with pytest.raises(RunError, match="no held-out document has a slot"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)


def test_what_is_no_fault_of_a_draft_ends_the_search(data, tmp_path, runs) -> None:
    for wrong in ({"devices": "cpu,nowhere"}, {"device": "nowhere"}):
        with pytest.raises(ConfigError, match="nowhere: not usable"):
            spec_train.search(training(data, tmp_path / "s", **wrong), space=SPACE)

    def fail(name: str, until: int) -> None:
        if len(runs.turns) == 3:
            raise FileError("the disk is full")

    runs.before = fail
    with pytest.raises(FileError, match="full"):
        spec_train.search(training(data, tmp_path / "s"), space=SPACE)
    runs.before = lambda name, until: None
    assert spec_train.search(training(data, tmp_path / "s"), space=SPACE).complete
    assert sorted(runs.turns) == sorted(WHOLE)


def test_other_directories_are_left_alone(data, tmp_path, runs) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and not a search"):
        spec_train.search(training(data, tmp_path), space=SPACE)


# -- real runs -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_planted_best_draft_is_found_through_a_kill(data, tmp_path) -> None:
    """Killed while it trains, and resumed: what an uninterrupted search finds, line for line."""
    whole = spec_train.search(training(data, tmp_path / "whole"), space=SPACE)
    assert whole.best == "eagle3 layers=0+1+2"
    out = tmp_path / "killed"
    words = [sys.executable, "-m", "spec_train", "search", "--data", str(data), "--out", str(out)]
    words += ["--space", SPACE, "--steps", "48", "--batch-size", "4", "--seq-len", "64"]
    words += ["--validation", "0.2", "--lr", "3e-3", "--device", "cpu"]
    process = subprocess.Popen(words, env=environment())
    second = out / "arm-02-eagle3" / "metrics.jsonl"
    while process.poll() is None and not second.is_file():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (out / "arm-04-eagle3").exists()
    found = spec_train.search(training(data, out), space=SPACE)
    for one, other in zip(whole.rows, found.rows, strict=True):
        assert {**one, "run": None} == {**other, "run": None}


@pytest.mark.long
def test_arms_train_side_by_side_on_several_devices(data, tmp_path) -> None:
    alone = spec_train.search(training(data, tmp_path / "one", steps=8), space=SPACE)
    asked = training(data, tmp_path / "two", steps=8, devices="cpu,cpu:0")
    both = spec_train.search(asked, space=SPACE)
    for one, other in zip(alone.rows, both.rows, strict=True):
        assert {**one, "run": None} == {**other, "run": None}


def test_a_run_that_is_busy_is_no_fault_of_its_draft(data, tmp_path, monkeypatch) -> None:
    """A worker of an earlier search may still save."""

    def busy(*given):
        raise BusyError("another spec-train fit is running here")

    monkeypatch.setattr(searching, "fit", busy)
    with pytest.raises(BusyError):
        spec_train.search(training(data, tmp_path / "out"), space=SPACE)
    assert not json.loads((tmp_path / "out" / "search.json").read_text())["failed"]


def is_alive(process: int) -> bool:
    """A process that ended and that nobody waits for is not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
@pytest.mark.parametrize("who", ["parent", "worker"])
def test_none_trains_on_after_a_kill(data, tmp_path, who) -> None:
    """Neither do the processes of other devices where one dies."""
    out = tmp_path / "out"
    words = ["search", "--data", str(data), "--out", str(out), "--space", SPACE, "--steps", "4000"]
    words += ["--batch-size", "4", "--seq-len", "64", "--validation", "0.2"]
    words += ["--devices", "cpu,cpu:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "spec_train", *words],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    runs = [out / f"arm-0{number}-eagle3" / "metrics.jsonl" for number in (1, 2)]
    while process.poll() is None and not all(file.is_file() for file in runs):
        time.sleep(0.05)
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(number) for number in file.read_text().split()]
    workers = [n for n in children if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(process.pid if who == "parent" else workers[0], signal.SIGKILL)
    error = process.communicate()[1]
    assert who == "parent" or (process.returncode == 1 and "its process died; run again" in error)
    while any(is_alive(number) for number in workers):
        time.sleep(0.05)
    assert any(list(file.parent.glob("checkpoint-*")) for file in runs)
