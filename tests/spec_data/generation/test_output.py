"""generate --out URL: byte for byte the local directory, also after kills and from two machines."""

import hashlib
from pathlib import Path

import fsspec
import pytest

from spec_data.generation.output import RemoteOutput, open_output
from spec_data.shards import storage
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.storage import Storage
from tests.remote_tools import forget_memory
from tests.spec_data.runs import digests, run

URL = "memory://bucket/made"
LOSSY = {"max_shard_size": "24KB", "codec": "default"}


class Killed(BaseException):
    """Ends a command as a kill does: nothing handles it."""


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    run(*source, out, **LOSSY)
    return digests(out)


@pytest.fixture(autouse=True)
def empty_store(monkeypatch):
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    forget_memory()
    yield
    forget_memory()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Call it to go on as another machine: with an empty cache."""
    count = iter(range(100))

    def other() -> Path:
        place = tmp_path / f"machine{next(count)}"
        monkeypatch.setenv("SPEC_DATA_CACHE", str(place))
        return place

    other()
    return other


def remote_digests() -> dict[str, str]:
    system = fsspec.filesystem("memory")
    found = system.find("/bucket/made")
    return {
        name.removeprefix("/bucket/made/"): hashlib.sha256(system.cat_file(name)).hexdigest()
        for name in found
    }


def test_it_is_the_local_directory_and_nothing_stays_on_the_disk(source, whole, machine):
    place = machine()
    manifest = run(*source, URL, **LOSSY)
    assert manifest.totals.documents == 30 and len(manifest.shards) > 2
    assert remote_digests() == whole
    assert not [p for p in (place / "staging").rglob("*") if p.is_file() and p.suffix != ".lock"]
    machine()
    assert run(*source, URL, **LOSSY).fingerprint == manifest.fingerprint  # nothing to do
    with pytest.raises(ConfigError, match=r"memory://bucket/made was begun with other settings"):
        run(*source, URL, **LOSSY | {"layers": "0,2"})
    assert remote_digests() == whole


@pytest.mark.parametrize(
    "lost",
    [
        ["shards/unit-00001.arrow"],
        ["shards/unit-00000.arrow", "codec.safetensors", "state.json"],
        ["target/config.json", "target/tokenizer.json", "README.md"],
    ],
)
def test_lost_objects_of_a_finished_dataset_come_back_alone(source, whole, machine, lost):
    run(*source, URL, **LOSSY)
    store = fsspec.filesystem("memory")
    for name in lost:
        store.rm_file(f"/bucket/made/{name}")
    store.pipe_file("/bucket/made/shards/unit-00002.arrow", b"cut")
    machine()
    run(*source, URL, **LOSSY)
    assert remote_digests() == whole


def test_a_lost_index_of_a_remote_dataset_is_said_to_need_the_shards(source, whole, machine):
    run(*source, URL, **LOSSY)
    fsspec.filesystem("memory").rm_file("/bucket/made/index.arrow")
    with pytest.raises(RunError, match=r"index\.arrow: made again from all shards in a local"):
        run(*source, URL, **LOSSY)


LAST = [".generate/begun.json", "shards/unit-00001.arrow", "index.arrow"]


@pytest.mark.parametrize("last", LAST)
def test_killed_after_a_write_and_resumed_on_another_machine(
    source, whole, machine, monkeypatch, last
):
    """The next write after that of `last` does not happen."""
    wrote: list[str] = []

    def until(function):
        def call(self, name, *args, **more):
            if last in wrote:
                raise Killed
            wrote.append(name)
            return function(self, name, *args, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", until(Storage.write))
        with pytest.raises(Killed):
            run(*source, URL, **LOSSY)
    assert last in wrote and "manifest.json" not in remote_digests()
    machine()
    run(*source, URL, **LOSSY)
    assert remote_digests() == whole


def test_two_workers_on_two_machines(source, whole, machine, caplog, monkeypatch):
    caplog.set_level("INFO")
    assert run(*source, URL, workers="0/2", **LOSSY) is None
    assert "units are left for other workers" in caplog.text
    assert "manifest.json" not in remote_digests()
    machine()
    write, wrote = Storage.write, list[str]()
    monkeypatch.setattr(Storage, "write", lambda *a, **k: wrote.append(a[1]) or write(*a, **k))
    assert run(*source, URL, workers="1/2", **LOSSY) is not None
    assert remote_digests() == whole
    assert wrote and not [name for name in wrote if "/blobs/" in name]  # the target's files


def test_a_damaged_part_of_the_index_is_refused(source, whole, machine):
    run(*source, URL, workers="0/2", **LOSSY)
    store = Storage(URL, write=True)
    name = min(n for n in store.sizes(".generate") if n.endswith(".index"))
    text = store.read(name)
    store.write(name, text[:-1] + bytes([text[-1] ^ 1]))
    machine()
    with pytest.raises(DatasetError, match=r"unit-\d+.index: missing or damaged; delete "):
        run(*source, URL, workers="1/2", **LOSSY)
    assert "manifest.json" not in remote_digests()
    store.write(name, text)
    machine()
    run(*source, URL, workers="1/2", **LOSSY)
    assert remote_digests() == whole


def test_a_bucket_that_is_not_there_is_named(machine, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("The specified bucket does not exist")

    store = Storage(URL, write=True)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", missing)
    with pytest.raises(ConfigError, match=r"memory://.*bucket does not exist; create it first"):
        store.write("x", b"1")


def test_answers_that_are_lost_and_lists_that_are_late(source, whole, machine, monkeypatch):
    """Every first write succeeds and is reported as failed; lists never show records or shards."""
    seen: set[str] = set()
    memory = type(fsspec.filesystem("memory"))

    def unanswered(function, place):
        def call(self, *arguments, **more):
            function(self, *arguments, **more)
            if arguments[place] not in seen:
                seen.add(arguments[place])
                raise OSError("no answer")

        return call

    monkeypatch.setattr(memory, "pipe_file", unanswered(memory.pipe_file, 0))
    monkeypatch.setattr(memory, "put_file", unanswered(memory.put_file, 1))
    sizes = Storage.sizes

    def late(self, folder=""):
        return {n: s for n, s in sizes(self, folder).items() if "unit-" not in n}

    monkeypatch.setattr(Storage, "sizes", late)
    assert run(*source, URL, **LOSSY) is not None and len(seen) > 20
    found = remote_digests()
    assert {n: d for n, d in found.items() if not n.startswith(".generate/unit-")} == whole


def test_the_first_worker_decides_and_nobody_overwrites_it(machine):
    with open_output(URL, "0/2") as first, open_output(URL, "1/2") as second:
        for remote, text in ((first, "one"), (second, "two")):
            (remote.directory / "x").write_text(text)
        assert first.publish("proven", ["x"]) and first.publish("proven", ["x"])
        assert not second.publish("proven", ["x"])
        assert (second.directory / "x").read_text() == "one"
        digest = hashlib.sha256(b"one").hexdigest()
        second.storage.write(f".generate/blobs/{digest}", b"other")
        with pytest.raises(DatasetError, match=r"\(x\): damaged"):
            second.fetch("proven")
    with open_output(URL, "0/2"), pytest.raises(RunError, match="is running worker 0/2"):
        open_output(URL, "0/2").__enter__()


def test_other_bytes_of_a_unit_are_refused(source, whole, machine):
    store = Storage(URL, write=True)
    store.write("shards/unit-00001.arrow", b"of another machine")
    with pytest.raises(RunError, match=r"unit-00001.arrow: .* has written other bytes"):
        run(*source, URL, **LOSSY)
    store.delete("shards/unit-00001.arrow")
    machine()
    run(*source, URL, **LOSSY)
    assert remote_digests() == whole


def test_a_folder_with_other_files_is_left_alone(source, machine):
    Storage(URL, write=True).write("notes.txt", b"mine")
    with pytest.raises(DatasetError, match=r"holds files that are not of .* notes.txt"):
        run(*source, URL, **LOSSY)
    assert list(remote_digests()) == ["notes.txt"]


def test_a_dataset_that_another_worker_seals_meanwhile_is_finished(
    machine, source, whole, monkeypatch
):
    """It had no manifest when this worker looked, and no plan any more when it looked for that."""
    run(*source, URL, **LOSSY)
    machine()
    looks = []

    def late(self):
        looks.append(1)
        return None if len(looks) == 1 else manifest(self)

    manifest = RemoteOutput.manifest
    monkeypatch.setattr(RemoteOutput, "manifest", late)
    assert run(*source, URL, **LOSSY) is not None and len(looks) > 1
    assert remote_digests() == whole


def test_a_plan_with_other_settings_is_refused(machine, source, monkeypatch):
    def fails(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RemoteOutput, "share_proof", fails)
        with pytest.raises(Killed):
            run(*source, URL, **LOSSY)
    machine()
    with pytest.raises(ConfigError, match=r"memory://bucket/made was begun with .*\n.*layers"):
        run(*source, URL, **LOSSY | {"layers": "0,2"})
