"""`verify` names the command that made a dataset; run as it is, it brings back what is lost."""

import shlex
import shutil

import pytest
from msgspec import structs

import spec_data
from spec_data import cli
from spec_data.generation.same_command import same_command
from spec_data.shards.errors import MissingError
from spec_data.shards.files import MANIFEST
from spec_data.shards.schema import Manifest
from tests.spec_data.runs import ON_CPU, digests, run, save_target, write_corpus
from tests.spec_data.shards.integrity_tools import flip

OPTIONS = {
    "plain": {"layers": "0,2,4", "codec": "default", "max_shard_size": "auto"},
    "drafts": {"layers": "auto", "for_": "eagle", "codec": "fine", "batch_tokens": "auto"},
    "spread": {"layers": "spread:3", "codec": "fine,final=bf16,L2=0.03"},
    "mask": {"mask": "last-turn", "teacher": "all", "final": "supervised", "max_length": 40},
    "top-k": {"supervision": "topk:4", "codec": "aux=bf16", "limit": 12, "packing": "rows"},
    "arguments": {
        "max_row_bytes": "1MB",
        "attn": "eager",
        "dtype": "float32",
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    save_target(folder / "target")
    write_corpus(folder / "chats.jsonl")
    return folder


@pytest.fixture
def made(place, monkeypatch):
    """Make a dataset with some options, where target and corpus are named as the command is."""
    monkeypatch.chdir(place)

    def of(name):
        if not (place / name).exists():
            run(place / "target", place / "chats.jsonl", place / name, **OPTIONS[name])
        copy = place / "data"
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(place / name, copy)

    return of


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_that_verify_names_brings_a_shard_back(made, name, capsys):
    data = made(name)
    before = digests(data)
    flip(data / "shards/unit-00000.arrow")
    assert cli.main(["verify", "data", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    command = said[said.index("  spec-data generate --target target") :].strip()
    assert cli.main(shlex.split(command)[1:]) == 0
    assert digests(data) == before


def test_options_with_their_defaults_are_left_out(made):
    manifest = Manifest.read(made("plain") / MANIFEST)
    assert shlex.join(same_command(manifest, "data")) == (
        "spec-data generate --target target --corpus chats.jsonl --out data --layers 0,2,4 "
        "--max-length 256 --batch-tokens 512 --device cpu"
    )


def test_what_the_test_target_cannot_have_is_named_too(made):
    manifest = Manifest.read(made("plain") / MANIFEST)
    settings = manifest.settings | {
        "tokenizer": {"chat_template_kwargs": {"enable_thinking": False}},
        "target": {"code_hash": "0" * 64},
        "columns": {"prompt": "question", "answer": "reply"},
        "on_policy": True,
        "sampling_temperature": 0.7,
        "device_map": {"model": 0},
        "tensor_parallel": 2,
    }
    changed = manifest.changed(
        settings=settings,
        target=structs.replace(manifest.target, revision="abc"),
        documents=structs.replace(manifest.documents, bad_rows=3, unrendered={"x": 2}),
    )
    said = shlex.join(same_command(changed, "data"))
    for words in (
        "--chat-template-kwargs '{\"enable_thinking\": false}'",
        "--trust-remote-code",
        "--columns prompt=question,answer=reply",
        "--on-policy --sampling-temperature 0.7",
        "--device-map '{\"model\": 0}'",
        "--vllm-tensor-parallel 2",
        "--revision abc",
        "--max-bad-rows 5",
    ):
        assert words in said
    assert "--device " not in said
    assert same_command(manifest.changed(settings={"of": "another release"}), "data") == []


def test_a_missing_shard_is_named_with_the_command(made, capsys):
    data = made("plain")
    (data / "shards/unit-00000.arrow").unlink()
    assert cli.main(["verify", "data"]) == 2
    said = capsys.readouterr().err
    assert "unit-00000.arrow: shard is missing" in said
    assert "  spec-data generate --target target --corpus chats.jsonl --out data" in said
    with pytest.raises(MissingError, match="captures again what is lost, it alone"):
        spec_data.verify(data, running=ON_CPU)


def test_the_source_of_a_view_is_named_that_is_damaged(made, place):
    data = made("plain")
    whole = shutil.copytree(data, place / "whole", dirs_exist_ok=True)
    spec_data.select(data, place / "view", sample="4")
    flip(data / "shards/unit-00000.arrow")
    report = spec_data.verify(place / "view", running=ON_CPU)
    (advice,) = report.repair
    assert f"--out {data}" in advice and str(whole) not in advice
    shutil.rmtree(place / "view")


def test_a_copy_names_no_command_of_generate(made, place):
    data = made("plain")
    spec_data.copy(data, place / "copied")
    flip(place / "copied/shards/unit-00000.arrow")
    report = spec_data.verify(place / "copied", running=ON_CPU)
    assert report.failures and not report.repair
    shutil.rmtree(place / "copied")
