"""Options that would do nothing beside others are refused by a new run, not dropped."""

from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import ConfigError, DraftError
from spec_train.cli import main
from spec_train.commands.fit import settled
from spec_train.drafts.kinds import kind_named
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from spec_train.training.search_space import make_arms
from spec_train.training.settings import repeatable
from tests import factory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    place: Path = tmp_path_factory.mktemp("needless") / "data"
    return str(factory.tiny_dataset(place, n_docs=4))


def _new(data: str, kind: str, **values: Any) -> None:
    settled(Training(data=data, out="x"), kind_named(kind).options(**values))


@pytest.mark.parametrize(
    ("kind", "switch", "needless"),
    [
        ("eagle3", {"ttt_steps": 1}, {"step_decay": 0.5}),
        ("eagle3", {"ttt_steps": 1}, {"position_weights": "0.5"}),
        ("peagle", {"depths": 1}, {"cod_ratio": 0.5}),
        ("mtp", {"depth": 1}, {"step_decay": 0.9}),
        ("lilicorr", {"conv_kernel_size": 0}, {"conv_group_size": 8}),
        ("domino", {"base_weight": 0}, {"base_decay": 0.5}),
        ("dspark", {"markov_rank": 0}, {"markov_head_type": "gated"}),
        ("dspark", {"markov_rank": 0}, {"confidence_head_with_markov": False}),
        ("dspark", {"confidence_weight": 0}, {"confidence_head_with_markov": False}),
        ("dflash", {}, {"sliding_window_non_causal": True}),
        ("xpress", {}, {"sliding_window_non_causal": True}),
    ],
    ids=str,
)
def test_a_new_run_refuses_what_does_nothing(data, kind, switch, needless):
    (name,) = needless
    with pytest.raises(DraftError, match=name.replace("_", "[-_]")):
        _new(data, kind, **switch, **needless)
    _new(data, kind, **switch)
    useful = {"sliding_window": 8} if name == "sliding_window_non_causal" else {}
    _new(data, kind, **needless, **useful)
    kind_named(kind).options(**switch, **needless)  # as a saved draft has them all


def test_a_preset_may_make_an_option_needless(data):
    """The value that counts is that after the preset."""
    training = Training(data=data, out="x", preset="smoke")
    options = kind_named("eagle3").options(step_decay=0.5, ttt_steps=1)
    with pytest.raises(DraftError, match="step_decay"):
        settled(training, options)
    settled(training, kind_named("eagle3").options(step_decay=0.5))  # two unroll steps


@pytest.mark.parametrize(
    "needless",
    [
        {"validation": 0, "validation_documents": 5},
        {"validation": 0, "split_seed": 3},
        {"validation": 0.0, "eval_every": 7},
        {"accept_edited": True},
    ],
    ids=str,
)
def test_so_does_the_trainer(needless):
    (*_, name) = needless
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        Training(data="d", out="x", **needless)
    other = {"init_from": "draft"} if name == "accept_edited" else {"validation": 0.1}
    Training(data="d", out="x", **{**needless, **other})


@pytest.mark.parametrize("name", DRAFT_OPTIONS)
def test_what_a_run_writes_is_not_needless(data, name):
    """fit.json states every option; as --config it repeats the run."""
    training = Training(data=data, out="x", validation=0)
    options = kind_named(name).options()
    table = {k: v for k, v in repeatable(training, options).items() if v is not None}
    own = {k: table.pop(k) for k in options.values() if k in table}
    settled(Training(**table), kind_named(name).options(**own))


def test_the_command_says_which(data, tmp_path, capsys):
    words = ["--markov-rank", "0", "--markov-head-type", "gated", "--data", data, "--dry-run"]
    assert main(["fit", "dspark", *words, "--out", str(tmp_path / "x")]) == 2
    assert "--markov-rank 0 leaves the Markov head out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        (
            {"markov_rank": ["0", "8"], "markov_head_type": ["vanilla", "gated"]},
            ["markov_rank=0 markov_head_type=vanilla", "markov_rank=8 markov_head_type=vanilla",
             "markov_rank=8 markov_head_type=gated"],
        ),
        (
            {"markov_rank": ["0", "8"], "markov_head_type": ["rnn", "gated"]},
            ["markov_rank=0", "markov_rank=8 markov_head_type=rnn",
             "markov_rank=8 markov_head_type=gated"],
        ),
    ],
    ids=["with the default", "without"],
)  # fmt: skip
def test_a_search_tries_no_draft_twice(axes, names, data):
    """What `search` prints as the command of its best draft is accepted by `fit`."""
    arms = make_arms({"draft": ["dspark"], **axes}, (0, 1, 2), {})
    assert [arm.name.removeprefix("dspark ") for arm in arms] == names
    for arm in arms:
        settled(Training(data=data, out="x"), arm.options)


@pytest.mark.parametrize(
    ("kind", "weights", "other"),
    [
        ("dflash2", {"selector_weight": 0}, {"selector_weight": 0.1}),
        ("lilicorr", {"lattice_weight": 0, "penalty_weight": 0}, {"lattice_weight": 0}),
    ],
)
def test_what_nothing_trains_is_not_drafted_with(data, tmp_path, kind, weights, other):
    """A head that chooses the drafts would choose by its random weights."""
    options, name = kind_named(kind).options, kind_named(kind).name
    small = {**options.example, "layers": "0"}
    training = Training(data=data, out=str(tmp_path / "x"), steps=1, seq_len=48, device="cpu")
    with pytest.raises(DraftError, match="would choose by random weights"):
        fit(name, training, options(**small, **weights))
    assert not options(**small, **other).untrained
    assert not options().untrained


def test_a_shape_may_make_an_option_needless(data, tmp_path):
    """What --shape-of fills in counts as what is typed does."""
    shape = tmp_path / "config.json"
    shape.write_text(
        '{"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "block_size": 3,'
        ' "num_hidden_layers": 1}'
    )
    given = dict(data=data, out=str(tmp_path / "x"), steps=1, seq_len=48, device="cpu")
    training = Training(**given, shape_of=str(shape))
    options = kind_named("dspark").options(markov_head_type="gated", draft_vocab_size=0)
    with pytest.raises(DraftError, match="--markov-rank 0 leaves the Markov head out"):
        fit("dspark", training, options)


def test_what_one_process_cannot_use_is_named(data, tmp_path, caplog):
    given = dict(data=data, out=str(tmp_path / "x"), steps=1, seq_len=48, device="cpu")
    options = kind_named("eagle3").options(draft_vocab_size=0, ttt_steps=2)
    with caplog.at_level("INFO"):
        fit("eagle3", Training(**given, sharding="fsdp2", exchange="bf16"), options)
    assert "--sharding fsdp2: there is one process" in caplog.text
    assert "--exchange bf16: there is one process" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        fit("eagle3", Training(**{**given, "out": str(tmp_path / "y")}), options)
    assert "there is one process" not in caplog.text
