"""Options: flags, files and errors."""

import argparse
from dataclasses import dataclass

import pytest

from spec_data.config import add_options, differing_fields, from_dict, option, resolve, to_dict
from spec_data.options import GenerateConfig, parse_size
from spec_data.shards.errors import ConfigError, MissingError


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
        ({"count": 1}, "missing option --name"),
        ({"name": "n", "count": "3"}, "count = '3' in here: expected int"),
        ({"name": "n", "flag": 1}, "expected bool"),
        ({"name": "n", "count": True}, "expected int"),
        ({"name": "n", "kind": "c"}, "choose from a, b"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Sample, values, "here")


def test_files_that_are_not_configs(tmp_path):
    with pytest.raises(MissingError, match="no such file"):
        parsed("--config", str(tmp_path / "none.toml"))
    file = tmp_path / "broken.toml"
    file.write_text("name = ")
    with pytest.raises(ConfigError, match="not valid"):
        parsed("--config", str(file))


def test_differences_are_named():
    old, new = {"a": 1, "b": [1]}, {"a": 1, "b": [2], "c": None}
    assert differing_fields(old, new) == ["b: [1] -> [2]", "c: '(absent)' -> None"]


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
        {"max_length": 100, "pack_length": 50},
        {"chat_template_kwargs": "[]"},
        {"chat_template_kwargs": "{"},
    ],
)
def test_contradictions_are_refused(change):
    with pytest.raises(ConfigError):
        GenerateConfig(**{"target": "t", "corpus": ("c",), "out": "o"} | change)
