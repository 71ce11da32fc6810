"""Options: flags, files and errors."""

import argparse
from dataclasses import dataclass

import pytest

import spec_data
from spec_data import cli
from spec_data.options.option_values import parse_size
from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.config import (
    add_options,
    from_dict,
    join_values,
    option,
    resolve,
    to_dict,
)
from tests.spec_data.runs import prepared


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A config with every kind of option."""

    name: str = option(help="a name")
    many: tuple[str, ...] = option((), help="several")
    count: int = option(3, help="a number, 50 % of it")
    rate: float | None = option(None, help="a rate")
    flag: bool = option(False, help="a switch")
    on: bool = option(True, help="on by default")
    kind: str = option("a", help="a choice", choices=("a", "b"))


def parsed(*arguments: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_options(parser, Sample)
    parser.format_help()
    return resolve(Sample, parser.parse_args(arguments))


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('name = "file"\ncount = 9\nmany = ["x", "y"]\nrate = 1\n')
    config = parsed("--config", str(file), "--count", "5", "--no-on", "--flag")
    assert config == Sample(
        name="file", many=("x", "y"), count=5, rate=1.0, flag=True, on=False, kind="a"
    )
    assert parsed("--name", "n", "--many", "a", "b", "--many", "c").many == ("a", "b", "c")


def test_a_saved_config_is_the_same_config(tmp_path):
    config = parsed("--name", "n", "--many", "a", "--rate", "0.5")
    assert from_dict(Sample, to_dict(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "n", "typo": 1}, "unknown option typo"),
        ({"count": 1}, "missing option name in here"),
        ({"name": "n", "count": "3"}, "count = '3' in here: expected int"),
        ({"name": "n", "flag": 1}, "expected bool"),
        ({"name": "n", "count": True}, "expected int"),
        ({"name": "n", "kind": "c"}, "choose from a, b"),
        ({"name": [1, 3]}, 'name = \\[1, 3\\] in here: expected the text "1,3"'),
        ({"name": None}, "name = null in here: expected str"),
        ({"name": "n", "count": None}, "count = null in here: expected int"),
        ({"name": "n", "many": None}, "many = null in here"),
        ({"name": "n", "many": ["a", None]}, "many = None in here"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Sample, values, "here")


def test_only_options_that_may_be_unset_take_null():
    assert from_dict(Sample, {"name": "n", "rate": None}).rate is None


def test_values_that_begin_with_a_dash_belong_to_their_option():
    line = ["--layers", "-1,3,5", "-1,2", "--samples", "-3", "--corpus=a", "-2,1", "--", "--x"]
    assert join_values([*line, "-1,4"]) == ["--layers=-1,3,5", *line[2:], "-1,4"]


def test_files_that_are_not_configs(tmp_path):
    with pytest.raises(MissingError, match="no such file"):
        parsed("--config", str(tmp_path / "none.toml"))
    file = tmp_path / "broken.toml"
    file.write_text("name = ")
    with pytest.raises(ConfigError, match="not valid"):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'name = "n"\nmany = ["x", "y"]\nrate = 1e-4\nflag = true'),
        ("run.json", '{"name": "n", "many": ["x", "y"], "rate": 1e-4, "flag": true}'),
        ("run.yaml", "name: n\nmany: [x, y]\nrate: 1e-4\nflag: true"),
        ("run.yml", "name: n\nmany:\n  - x\n  - y\nrate: 0.0001\nflag: yes"),
    ],
)
def test_config_files_of_every_format_say_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    expected = Sample(name="n", many=("x", "y"), rate=1e-4, flag=True)
    assert parsed("--config", str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.ini", "name = n", r"must end in .toml, .json, .yaml, .yml; found .ini"),
        ("run", "name = n", "found no suffix"),
        ("run.yaml", "name: [", "not valid YAML"),
        ("run.yaml", "name: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("run.yaml", "- a\n- b", r"expected a table of options \(key: value\), found a list"),
        ("run.json", "{", "not valid JSON"),
        ("run.toml", 'name = "n"\ncuont = 1', "unknown option cuont in .*did you mean count?"),
    ],
)
def test_config_files_that_cannot_be_used_say_why(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        parsed("--config", str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("2 GB", 2 * 10**9), ("1.5k", 1500), ("7", 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "change",
    [
        {"max_shard_size": "big"},
        {"workers": "3/3"},
        {"workers": "1"},
        {"supervision": "topk"},
        {"supervision": "topk:0"},
        {"max_length": 1},
        {"chat_template_kwargs": "[]"},
        {"max_shard_size": "0MB"},
        {"batch_tokens": 0},
        {"batch_tokens": -5},
        {"limit": -1},
    ],
)
def test_contradictions_are_refused(change):
    name = next(iter(change)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name}|expected something like 500MB"):
        prepared(**{"target": "t", "corpus": ("c",), "out": "o"} | change)


def test_errors_name_an_option_as_it_was_given(tmp_path, capsys):
    words = {"target": "t", "corpus": "c", "out": "o", "max_length": 0}
    with pytest.raises(ConfigError) as caught:
        spec_data.generate(**words)
    assert "max_length 0" in str(caught.value) and "--" not in str(caught.value)
    with pytest.raises(MissingError) as gone:  # of the work, after the options were read
        spec_data.generate(**words | {"max_length": 9, "target": "/nowhere"})
    assert "target /nowhere" in str(gone.value) and "--" not in str(gone.value)
    file = tmp_path / "run.yaml"
    file.write_text("max-length: 0\n")
    typed = ["generate", "--config", str(file), "--target", "t", "--corpus", "c", "--out", "o"]
    for more, named in (((), "--max-length 0"), (("--max-length", "1"), "--max-length 1")):
        assert cli.main([*typed, *more]) == 2
        assert f"error: {named}" in capsys.readouterr().err
    file.write_text("max-lenght: 0\n")
    assert cli.main(typed) == 2
    assert "did you mean --max-length?" in capsys.readouterr().err
