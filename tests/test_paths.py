"""Paths that cannot be used are refused in words, by every command, and nothing is created."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import spec_data
import spec_data.cli
import spec_train.cli
from spec_data.models.families import TARGETS
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind, what_is
from spec_data.terminal.paths import (
    check_directory_to_write,
    check_file_to_write,
    check_value,
    make_directory,
)
from spec_train.formats.kind_files import every_kind
from spec_train.training.run_directory import RunDirectory
from tests.spec_data.runs import save_target, write_corpus

REMOTE = "s3://bucket/data"
ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; relative paths of the tests would be created here."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 12)


def refused(program, words, capsys):
    """Run a command that must end with exit code 2; return what it wrote to stderr."""
    code = program.cli.main(list(map(str, words)))
    assert code == 2, words
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words", "flag"),
    [
        (spec_data, "generate --target t --out o --corpus", "--corpus"),
        (spec_data, "estimate --target t --corpus c --out o --json", "--json"),
        (spec_train, "fit eagle3 --data d --out", "--out"),
        (spec_train, "fit eagle3 --data d --out o --config", "--config"),
        (spec_train, "eval --data d --draft", "--draft"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_remote_storage_is_refused_by_every_path_option(here, capsys, program, words, flag):
    """`--out s3://...` once created a local directory named `s3:` and exited 0."""
    said = refused(program, [*words.split(), REMOTE], capsys)
    assert f"{flag} s3:/" in said and "s3:// is not supported" in said
    assert not list(here.iterdir())


def test_options_of_datasets_accept_some_urls(here, capsys):
    """Storage that cannot be read is refused by name; the rest is read (docs/remote.md)."""
    said = refused(spec_data, ["inspect", "ftp://host/data"], capsys)
    assert "--data ftp://host/data: ftp:// is not supported; use one of s3://" in said
    said = refused(spec_data, ["inspect", "memory://nothing/here"], capsys)
    assert "memory://nothing/here: no manifest.json there" in said
    assert not list(here.iterdir())


def test_python_and_config_files_refuse_remote_storage(here, target, corpus):
    for out in ("ftp://b/x", Path("ftp://b/x"), "https://b/x", "hf://datasets/a/b"):
        with pytest.raises(ConfigError, match=r"is not supported; use one of|is read-only here"):
            spec_data.generate(target, corpus, out)  # a Path has lost one slash
    with pytest.raises(ConfigError, match="estimate says whether a disk has room"):
        spec_data.estimate(target, corpus, REMOTE)
    with pytest.raises(ConfigError, match="replicas share a directory"):
        spec_data.generate(target, corpus, REMOTE, engine="ray")
    with pytest.raises(ConfigError, match="s3:// is not supported"):
        RunDirectory(REMOTE)  # of a config that was built by hand
    (here / "g.json").write_text(json.dumps({"target": "t", "corpus": ["c", REMOTE], "out": "o"}))
    assert spec_data.cli.main(["generate", "--config", "g.json"]) == 2
    assert [p.name for p in here.iterdir()] == ["g.json"]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("hf://datasets/org/name", "such as org/name"),
        ("abfss://c@a.dfs.core.windows.net/x", "local path, such as that of a mount"),
        ("", "is a shell variable not set"),
        ("a\0b", "expected a value"),
    ],
)
def test_other_values_that_name_no_path(text, advice):
    with pytest.raises(ConfigError, match=advice):
        check_value("--corpus", text)


def test_hub_ids_weights_and_local_paths_stay_fine(here):
    (here / "s3:").mkdir()
    for text in ("org/name:config", "name@split", "C:/x", "d/e:0.5", "-1,3", "s3:/x"):
        check_value("--corpus", text)


def places(tmp_path):
    """(path, what is said) of directories that cannot be written."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return [
        (tmp_path / "file", "this is a file"),
        (tmp_path / "file" / "below" / "it", f"{tmp_path / 'file'} is a file"),
        (tmp_path / "gone", "this is a link to .*nothing, which does not exist"),
        (tmp_path / "gone" / "below", "gone is a link to"),
        (tmp_path / "loop", "this is a link to"),
        (tmp_path / ("n" * 300), "cannot be used: File name too long"),
        (tmp_path / os.fsdecode(b"caf\xe9"), "not UTF-8"),
        (Path("/proc/no-such-place"), "cannot be created|read-only"),
    ]


def test_directories_that_cannot_be_written_are_refused(tmp_path):
    for path, said in places(tmp_path):
        with pytest.raises(ConfigError, match=f"--out .*({said})"):
            make_directory("--out", path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "gone", "loop"]
    check_directory_to_write("--out", tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists(), "a check creates nothing"


def test_every_command_that_writes_refuses_them_before_any_work(
    tmp_path, capsys, target, corpus, kinds
):
    made = ["--target", target, "--corpus", corpus, "--out"]
    for path, _ in places(tmp_path)[1:4:2]:
        for program, words in (
            (spec_data, ["generate", *made, path]),
            (spec_data, ["estimate", *made, path]),
            (spec_train, ["fit", "eagle3", "--data", kinds["dataset"], "--out", path]),
            (spec_train, ["export", "--draft", kinds["run"], "--format", "vllm", "--out", path]),
        ):
            said = refused(program, words, capsys)
            assert f"--out {path}: " in said and "pass a directory that can be written" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "gone", "loop"]


@pytest.mark.parametrize("kind", ["pipe", "device", "/dev/x", "/proc/self/fd/1"])
def test_no_file_is_written_in_the_place_of_a_device_or_a_pipe(tmp_path, capsys, kind):
    """A file is renamed to its name: `--json /dev/null` of root replaced the device."""
    place = tmp_path / "out.json"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/null")
    else:
        place = Path(kind)
    for flag in ("--json", "--out"):
        with pytest.raises(ConfigError, match=rf"{flag} {place}: this is .*; pass the name of a"):
            check_file_to_write(flag, place)
    if place.parent == tmp_path:
        before = place.lstat().st_ino
        assert spec_data.cli.main(["inspect", str(tmp_path), "--json", str(place)]) == 2
        assert place.lstat().st_ino == before and "--json" in capsys.readouterr().err


def test_a_read_only_directory_is_refused():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "fixed").mkdir(mode=0o555)
        root = os.geteuid() == 0  # who may write everywhere: ask as another user
        try:
            if root:
                os.seteuid(65534)
            for path in (folder / "fixed", folder / "fixed" / "new" / "deep"):
                with pytest.raises(
                    ConfigError, match=r"fixed: this is read-only|fixed is read-only"
                ):
                    check_directory_to_write("--out", path)
        finally:
            if root:
                os.seteuid(0)


def test_a_complete_dataset_may_be_read_only(tmp_path, target, corpus, monkeypatch):
    options = spec_data.CaptureOptions(layers="0,2,4", codec="bf16", device="cpu")
    spec_data.generate(target, corpus, tmp_path / "data", options)

    def read_only(*_, **__):
        return False

    monkeypatch.setattr(os, "access", read_only)
    again = spec_data.generate(target, corpus, tmp_path / "data", options)
    assert again.sealed
    with pytest.raises(ConfigError, match="read-only for this user"):
        spec_data.generate(target, corpus, tmp_path / "other", options)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, target, corpus):
    """A path of each kind; what tells them apart is in names and in config.json."""
    root = tmp_path_factory.mktemp("kinds")
    found = {"target": target, "corpus": corpus, "nothing": root / "nothing"}
    for name, file, text in (
        ("dataset", "manifest.json", "{}"),
        ("unfinished", ".generate/plan.json", "{}"),
        ("draft", "config.json", '{"spec_train": {}, "architectures": ["LlamaForCausalLM"]}'),
        ("export", "config.json", '{"architectures": ["LlamaForCausalLMEagle3"]}'),
        ("run", "fit.json", "{}"),
        ("adapter", "adapter_config.json", "{}"),
        ("mistral", "params.json", "{}"),
        ("mistral", "consolidated.safetensors", ""),
        ("meta", "params.json", "{}"),
        ("meta", "consolidated.00.pth", ""),
        ("gguf", "model-Q4_K_M.gguf", "GGUF"),
        ("torch", "__0_0.distcp", ""),
        ("deepspeed", "zero_to_fp32.py", ""),
        ("megatron", "latest_checkpointed_iteration.txt", "10"),
        ("trainer", "checkpoint-500/config.json", "{}"),
        ("headless", "model.safetensors", ""),  # and without its config.json
        ("headless", "generation_config.json", "{}"),
        ("tokenizer", "tokenizer_config.json", "{}"),
        ("diffusers", "model_index.json", "{}"),
        ("pard", "config.json", '{"pard_token": 1, "architectures": ["LlamaForCausalLM"]}'),
        ("empty", "", ""),
    ):
        found[name] = root / name
        (found[name] / file).parent.mkdir(parents=True, exist_ok=True)
        found[name].mkdir(exist_ok=True)
        if file:
            (found[name] / file).write_text(text)
    return found


WRONG = [
    (spec_train, "fit eagle3 --out o --data {corpus}:2", "a corpus", "spec-data generate"),
    (spec_train, "fit eagle3 --out o --data {run}", "a run", "check the path"),
    (spec_train, "fit eagle3 --out o --data {unfinished}", "not sealed", "spec-data generate"),
    (spec_train, "fit eagle3 --out o --data {empty}", "an empty directory", "check the path"),
    (spec_train, "fit eagle3 --out o --data {nothing}", "no such dataset", "check the path"),
    (spec_train, "fit eagle3 --out o --follow --data {corpus}", "a corpus", "spec-data generate"),
    (spec_train, "eval --draft {run} --data {export}", "a draft", "check the path"),
    (spec_train, "eval --draft {run} --target {target} --prompts {nothing}", "no such file", "pa"),
    (spec_train, "report {run} {nothing}", "no such file or run", "check the path"),
    (spec_train, "doctor --draft {target}", "a target", "check the path"),
    (spec_train, "doctor --draft org/name", "no such draft", "hf download org/name --local-dir"),
    (spec_train, "export --draft {dataset}", "a dataset", "check the path"),
    (spec_data, "generate --out o --corpus {corpus} --target {draft}", "a draft", "check the path"),
    (spec_data, "generate --out o --corpus {corpus} --target {adapter}", "an adapter", "merge it"),
    *(
        (program, words + name, kind, advice)
        for program, words in (
            (spec_data, "generate --out o --corpus {corpus} --target "),
            (spec_train, "export --draft "),
        )
        for name, kind, advice in (
            ("{mistral}", "a model in its makers' own form", "the same repository"),
            ("{meta}", "a model in its makers' own form", "the same repository"),
            ("{gguf}", "a GGUF model", "of which the GGUF was made"),
            ("{gguf}/model-Q4_K_M.gguf", "a GGUF model", "of which the GGUF was made"),
            ("{target}/model.safetensors", "one file of a model", "pass its directory"),
            ("{target}/config.json", "one file of a model", "pass its directory"),
            ("{torch}", "a checkpoint in parts", "accelerate merge-weights"),
            ("{deepspeed}", "a checkpoint in parts", "zero_to_fp32.py"),
            ("{megatron}", "a checkpoint in parts", "Megatron's converter"),
            ("{trainer}", "another trainer's checkpoints", "pass one of them"),
            ("{diffusers}", "a pipeline of diffusers", "needs a language model"),
        )
    ),
    (spec_data, "generate --out o --corpus {corpus} --target {headless}", "no config.json", "ch"),
    (spec_data, "generate --out o --corpus {corpus} --target {tokenizer}", "no config.json", "ch"),
    (spec_data, "generate --out o --corpus {corpus} --target {pard}", "a draft", "check the path"),
    (spec_data, "generate --out o --corpus {nothing} --target {target}", "no such file", "check"),
    (spec_data, "select {dataset} --out o --not-in {corpus}", "a corpus", "spec-data generate"),
    (spec_data, "status {corpus}", "a corpus", "check the path"),
]


@pytest.mark.parametrize(
    ("program", "words", "kind", "advice"), WRONG, ids=lambda v: getattr(v, "__name__", v)[:60]
)
def test_a_path_of_the_wrong_kind_is_named_for_what_it_is(
    here, kinds, capsys, program, words, kind, advice
):
    said = refused(program, words.format_map(kinds).split(), capsys)
    assert f"{kind}" in said and advice in said and "next:" not in said
    assert not list(here.iterdir())


def test_a_wrong_path_is_found_before_anything_heavy_is_imported(here, kinds):
    """A mistyped path once cost six seconds of CPU, nearly all of them imports."""
    rows = [(program.__name__, words.format_map(kinds)) for program, words, *_ in WRONG]
    program = (
        "import json, sys, spec_data.cli, spec_train.cli\n"
        "for package, words in json.loads(sys.argv[1]):\n"
        "    assert sys.modules[package + '.cli'].main(words.split()) == 2, words\n"
        "    found = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "    assert not found, (words, found)\n"
    )
    subprocess.run([sys.executable, "-c", program, json.dumps(rows)], check=True, cwd=ROOT)


def test_every_known_class_is_a_draft_or_a_target(tmp_path):
    kinds = every_kind().values()
    drafts = {name for one in kinds for name in one.classes} - set(TARGETS)
    others = {name for one in kinds for name in one.others}
    targets = {*TARGETS, "Eagle2_5_VLForConditionalGeneration"}
    for names, shown in (
        (drafts, {Kind.DRAFT}),
        (targets, {Kind.TARGET}),
        (others, {Kind.DRAFT, Kind.MODEL}),  # its reader says what it is
    ):
        for name in names:
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
            assert what_is(tmp_path) in shown, name
