"""Config files and tables of options: what is read, and what is refused by name."""

import pytest

import spec_data
from spec_data import cli
from spec_data.shards.errors import ConfigError, MissingError, SpecDataError
from spec_data.shards.files import parse_size
from spec_data.terminal.config import from_dict, options_text, read_config_file, to_dict
from spec_train.drafts.eagle3.options import Eagle3Options
from tests.spec_data.runs import prepared


def test_a_saved_table_is_the_same_options():
    options = Eagle3Options(ttt_steps=3, fc_norm=True)
    assert from_dict(Eagle3Options, to_dict(options)) == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"typo": 1}, "here: no option 'typo'"),
        ({"ttt_step": 3}, "here: no option 'ttt_step'; did you mean ttt_steps"),
        ({"ttt_steps": "x"}, "here: --ttt-steps 'x': expected int"),
        ({"ttt_steps": True}, "expected int"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(SpecDataError, match=message):
        from_dict(Eagle3Options, values, "here")


def test_null_is_not_given_by_a_user_and_damage_in_a_record():
    assert from_dict(Eagle3Options, {"layers": None}, "here") == Eagle3Options()
    with pytest.raises(SpecDataError, match="here: --layers None: expected str"):
        from_dict(Eagle3Options, {"layers": None}, "here", given=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'name = "n"\nmany = ["x", "y"]\nrate = 1e-4\nflag = true'),
        ("run.json", '{"name": "n", "many": ["x", "y"], "rate": 1e-4, "flag": true}'),
        ("run.yaml", "name: n\nmany: [x, y]\nrate: 0.0001\nflag: true"),
        ("run.yml", "name: n\nmany:\n  - x\n  - y\nrate: 0.0001\nflag: yes"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])  # as editors on Windows begin a file
def test_config_files_of_every_format_say_the_same(tmp_path, name, text, mark):
    (tmp_path / name).write_text(mark + text, "utf-8")
    assert read_config_file(tmp_path / name) == {
        "name": "n", "many": ["x", "y"], "rate": 1e-4, "flag": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.ini", "name = n", r"must end in .toml, .json, .yaml, .yml"),
        ("run.yaml", "name: [", "not a YAML table"),
        ("run.yaml", "name: !!python/object/apply:os.system [ls]", "not a YAML table"),
        ("run.yaml", "- a\n- b", "not a YAML table of options: Expected `object`, got `array`"),
        ("run.json", "{", "not a JSON table"),
        ("run.json", '{"a": 1, "a": 1}', "the key 'a' is there twice"),
        ("run.json", '{"t": {"a": 1, "a": 2}}', "the key 'a' is there twice"),
        ("run.yaml", "a: 1\nb: 2\na: 3", "the key 'a' is there twice"),
        ("run.yml", "t: [{a: 1, a: 2}]", "the key 'a' is there twice"),
        ("run.toml", "a = 1\na = 2", "not a TOML table"),
        ("run.yaml", "max-length: 1\nmax_length: 2", "the key 'max-length' is there twice"),
    ],
)
def test_config_files_that_cannot_be_used_say_why(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path / name)
    with pytest.raises(MissingError, match="no such file"):
        read_config_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("2 GB", 2 * 10**9), ("1.5k", 1500), ("7", 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


VLLM, HF = {"backend": "vllm"}, {"backend": "hf"}
FOR = {"for_": "eagle,dspark"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_shard_size": "big"}, "expected something like 500MB"),
        ({"workers": "3/3"}, "workers"),
        ({"supervision": "topk"}, "supervision"),
        ({"chat_template_kwargs": "[]"}, "chat-template-kwargs"),
        ({"batch_tokens": "many"}, "batch-tokens"),
        ({"codec": "aux=fine,other=bf16"}, "codec"),
        ({"codec": "final=fine", "supervision": "logits"}, "codec"),
        ({"final": "supervised", "supervision": "topk:4"}, "final"),
        ({"sampling_temperature": 1.0}, "add that flag"),
        ({"device_map": "everywhere"}, "--device-map everywhere: expected auto"),
        ({"max_memory": '{"0": "1GB"}'}, "goes with --device-map"),
        ({"device_map": "auto", "device": "cpu"}, "leave --device cpu out"),
        ({"tp_plan": "auto", "device_map": "auto"}, "exclude each other"),
        ({"tp_plan": "auto", "workers": "auto"}, "are one worker"),
        ({"context_parallel": 2, "workers": "auto"}, "--context-parallel: .* are one worker"),
        ({"context_parallel": 2, "device_map": "auto"}, "--context-parallel holds the whole"),
        ({"context_parallel": 2, "tp_plan": "auto"}, "--context-parallel holds the whole"),
        ({"context_parallel": 2, "device": "cpu"}, "--context-parallel chooses the devices"),
        (VLLM | {"attn": "sdpa"}, "vLLM has attention of its own"),
        (VLLM | {"packing": "block-causal"}, "packs requests itself"),
        (VLLM | {"device_map": "auto"}, "--vllm-tensor-parallel N"),
        (HF | {"vllm_tensor_parallel": 2}, "goes with --backend vllm"),
        (HF | {"packing": "requests"}, "goes with --backend vllm"),
        (FOR | {"layers": "1,2"}, "--layers 1,2 and --for eagle,dspark"),
        (FOR | {"final": "supervised"}, "--for eagle with --final supervised"),
        (FOR | {"supervision": "topk:4"}, "--for eagle with --supervision topk:4"),
        ({"for_": "dsparkle"}, "no draft 'dsparkle'.*did you mean dspark"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        prepared(**{"target": "t", "corpus": ("c",), "out": "o"} | change)


def test_errors_name_the_option(tmp_path, capsys):
    with pytest.raises(MissingError, match="--target /nowhere"):
        spec_data.generate("/nowhere", "c", "o")
    file = tmp_path / "run.yaml"
    file.write_text("max-length: 0\n")
    typed = ["generate", "--config", str(file), "--target", "t", "--corpus", "c", "--out", "o"]
    for more, named in (((), "--max-length 0"), (("--max-length", "1"), "--max-length 1")):
        assert cli.main([*typed, *more]) == 2
        assert f"error: {named}" in capsys.readouterr().err
    file.write_text("max-lenght: 0\n")
    assert cli.main(typed) == 2
    assert "Did you mean --max-length?" in capsys.readouterr().err
    for text in ("generate:\n  max-length: 9\n", "copy: true\n"):
        file.write_text(text)
        assert cli.main(typed) == 2
        assert "is a command, and no option of this one" in capsys.readouterr().err
    file.write_text("chat-template-kwargs: {date_string: 2024-07-26}\n")  # a date, in YAML
    assert cli.main(typed) == 2
    assert "--target t" in capsys.readouterr().err


DEEP = "a: " + "[" * 5000 + "]" * 5000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("deep.yaml", DEEP, "more than 50 brackets in one another"),
        ("deeper.yaml", DEEP * 20, "more than 50 brackets in one another"),
        ("laughs.yaml", LAUGHS, "more than 100,000 values, with its aliases"),
        ("loop.yaml", "a: &a [1, *a]", r"\*a stands inside of what it repeats"),
        ("merged.yaml", "a: &a {b: 1}\nc: {<<: *d}", "undefined alias"),
        ("deep.json", '{"a": ' + "[" * 5000 + "]" * 5000 + "}", "not a JSON table"),
        ("deep.toml", "a = " + "[" * 5000 + "]" * 5000, "not a TOML table"),
        ("dots.toml", "a" + ".b" * 50000 + " = 1", "a key of more than 50 parts"),
        ("headers.toml", "[a" + " . 'b'" * 51 + "]", "a key of more than 50 parts"),
        ("hex.yaml", "limit: 0x" + "f" * 9999, "a whole number of more than 64 bits"),
        ("hex.toml", "a.b = [[0x" + "f" * 9999 + "]]", "a whole number of more than 64 bits"),
        ("huge.yaml", "a: " + "x" * (1 << 20), "more than 1,048,576 bytes"),
    ],
)
def test_config_files_without_a_bound_are_refused(tmp_path, name, text, message):
    """Readers wrote aliases out to all memory, and failed at depth without a word."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path / name)


def test_aliases_of_config_files_are_what_they_repeat(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: &a [1, 2]\nb: *a\nc: &c x\nd: [*c, *c]\ne: &e {f: 1}\ng: {<<: *e, h: 2}")
    table = read_config_file(file)
    assert (table["b"], table["d"], table["g"]) == ([1, 2], ["x", "x"], {"f": 1, "h": 2})


def test_a_deep_json_option_is_refused(target, corpus, tmp_path):
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    out = str(tmp_path / "out")
    options = ["--target", str(target), "--corpus", str(corpus), "--out", out]
    assert cli.main(["generate", *options, "--chat-template-kwargs", deep]) == 2


def test_options_are_shown_as_they_are_typed():
    values = {"epochs": 5, "layers": [1, 3], "qk_norm": False, "train_head": True, "for_": ["a"]}
    assert options_text(values) == "--epochs 5 --layers 1,3 --no-qk-norm --train-head --for a"
