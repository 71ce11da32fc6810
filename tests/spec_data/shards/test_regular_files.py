"""Pipes, devices, sockets, folders and endless texts where a file is expected: refused at once."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from spec_data.models.identify import identify_files, read_target
from spec_data.models.weight_files import weight_files
from spec_data.shards.errors import ConfigError, CorpusError, SpecDataError
from spec_data.shards.file_heads import instead
from spec_data.shards.path_kinds import Kind, what_is
from spec_data.shards.regular_files import NoTextError, open_regular, read_bounded, special_kind
from spec_data.terminal.config import read_config_file
from spec_train.formats.draft_files import read_files
from spec_train.formats.target_facts import read_target as read_facts
from spec_train.reports.results import read_json
from tests.spec_data.corpus.reading import read

KINDS = ("pipe", "device", "socket", "folder")


@pytest.fixture(autouse=True)
def _in_time():
    """A test that waits for a pipe, or reads a device to its end, fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path, kind: str) -> None:
    """Put something that is no file at a path."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's whole path has at most 100 bytes
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_named_and_never_read(tmp_path, kind):
    path = tmp_path / "a.json"
    assert special_kind(path) is None
    put(path, kind)
    said = f"a {kind}" if kind != "folder" else "a directory"
    assert special_kind(path) == said
    with pytest.raises(NoTextError, match=f"this is {said}, not a file"):
        read_bounded(path)
    assert instead(path, "other") == f"this is {said}, not a file"
    if kind != "folder":
        assert what_is(path) is Kind.SPECIAL
    with pytest.raises(SpecDataError, match=r"a\.json"):
        read_config_file(path)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_json(path)


def test_a_text_ends_at_its_bound(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 100)
    assert read_bounded(path, 100) == b"x" * 100
    with pytest.raises(NoTextError, match="more than 99 bytes"):
        read_bounded(path, 99)
    with path.open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 40)  # of which the disk has next to none
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        read_config_file(path)
    with open_regular(path) as file:
        assert file.read(3) == b"x\0\0"


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "sparse"])
@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "model.safetensors"])
def test_a_target_with_such_a_file_is_refused(target, tmp_path, kind, name):
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    if kind == "sparse":
        if name == "model.safetensors":
            return  # may be large
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)
    else:
        put(folder / name, kind)
    said = rf"{name}: (this is a {kind}, not a file|.* bytes, which no such file has)"
    for reading in (
        lambda: read_target(str(folder), None, {}, False, True),
        lambda: read_facts(folder),
    ):
        with pytest.raises(SpecDataError, match=said):
            reading()
    if name == "model.safetensors":
        with pytest.raises(SpecDataError, match=said):
            weight_files(folder)
    assert identify_files(folder)[1]
    what_is(folder)
    with pytest.raises(SpecDataError, match=said):
        read_files(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "a.jsonl"
    put(path, kind)
    with pytest.raises((CorpusError, SpecDataError), match=r"a\.jsonl"):
        read(path)
