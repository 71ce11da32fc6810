"""`DIR@FINGERPRINT` is that dataset or an error, in every command that takes a dataset."""

import json
import re
import shutil
from pathlib import Path

import pytest

import spec_data
from spec_data import cli
from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.files import MANIFEST
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.pins import split_pin
from spec_data.shards.reader import HiddenStatesDataset, open_dataset
from spec_data.shards.schema import Manifest
from spec_train.cli import main as train
from spec_train.options.data_option import parse_sources
from tests.factory import tiny_dataset
from tests.faults.datasets import INDEX, index_table, set_column, stream_of, trace_file
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards.integrity_tools import write_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("pins") / "set")


@pytest.fixture
def data(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "data"))


def pin_of(data: Path) -> str:
    return Manifest.read(data / MANIFEST).fingerprint


def resealed(data: Path) -> None:
    """What a stranger does: another fact, and every checksum computed again."""
    raw = json.loads((data / MANIFEST).read_text())
    raw["policy"] = "on-policy" if raw["policy"] == "off-policy" else "off-policy"
    write_manifest(data, raw)


@pytest.mark.parametrize("digits", [16, 40, 64])
def test_the_dataset_with_the_pinned_fingerprint_is_opened(data, digits):
    pin = pin_of(data)[:digits]
    dataset = open_dataset(f"{data}@{pin}")
    assert dataset.path == data and dataset.location == str(data) and dataset.pin == pin
    assert open_dataset(f"{data}@{pin.upper()}").pin == pin
    assert open_dataset(f"{data}/@{pin}/").pin == pin
    assert dataset[0].keys() == open_dataset(data)[0].keys()


def test_another_dataset_and_one_that_was_sealed_again_are_refused_by_name(data):
    pin = pin_of(data)
    resealed(data)
    assert len(open_dataset(data))  # without a pin it is a dataset as any
    for digits in (16, 64):
        with pytest.raises(DatasetError, match=rf"data: its fingerprint is .*{pin[:digits]}: "):
            open_dataset(f"{data}@{pin[:digits]}")


def test_a_small_file_of_the_same_xxh3_is_found(data, monkeypatch):
    """Anybody can make one: with a pin, the SHA-256 is compared."""
    pin = pin_of(data)
    table = index_table(data)
    content = stream_of(set_column(table, "checksum", lambda v: v.__setitem__(0, 1)))
    assert len(content) == (data / INDEX).stat().st_size
    (data / INDEX).write_bytes(content)
    xxh3 = Manifest.read(data / MANIFEST).files[INDEX].xxh3
    monkeypatch.setattr("spec_data.shards.reader.xxh3_file", lambda file: xxh3)
    assert len(open_dataset(data).index)
    with pytest.raises(DatasetError, match=r"index\.arrow: changed or damaged"):
        _ = open_dataset(f"{data}@{pin}").index


# -- which texts have a pin -----------------------------------------------------------------------


def test_a_path_that_holds_an_at_goes_on_working(whole, tmp_path):
    pin = pin_of(whole)
    for name in ("a@b", f"set@{pin}", "set@0123456789abcdef", "@", "x@"):
        odd = Path(shutil.copytree(whole, tmp_path / name))
        assert open_dataset(odd).path == odd and not open_dataset(odd).pin
        assert open_dataset(f"{odd}@{pin[:16]}").pin == pin[:16]
        with pytest.raises(DatasetError, match="expected 0000000000000000"):
            open_dataset(f"{odd}@{'0' * 16}")


@pytest.mark.parametrize("digits", ["0", "0123456789abcde", "0" * 65])
def test_too_few_or_too_many_digits_are_refused(data, digits):
    with pytest.raises(ConfigError, match="expected 16 to 64 hexadecimal digits"):
        open_dataset(f"{data}@{digits}")


@pytest.mark.parametrize("end", ["", "main", "0123456789abcdeg", "{pin}0"])
def test_what_is_no_pin_is_a_path_that_does_not_exist(data, end):
    with pytest.raises((MissingError, ConfigError), match=r"no such dataset|expected 16 to 64"):
        open_dataset(f"{data}@{end}".format(pin=pin_of(data)))


def test_urls():
    sha1, pin = "a" * 40, "b" * 64
    for text, where, digits in [
        (f"s3://bucket/set@{pin}", "s3://bucket/set", pin),
        (f"https://host:80/set@{pin[:16]}", "https://host:80/set", pin[:16]),
        (f"hf://datasets/me/set@{sha1}", f"hf://datasets/me/set@{sha1}", ""),
        (f"hf://datasets/me/set@{pin[:16]}", f"hf://datasets/me/set@{pin[:16]}", ""),
        (f"hf://datasets/me/set@{pin}", "hf://datasets/me/set", pin),
        (f"hf://datasets/me/set@main@{pin}", "hf://datasets/me/set@main", pin),
        ("hf://datasets/me/set@main", "hf://datasets/me/set@main", ""),
        (f"nowhere@{pin}", f"nowhere@{pin}", ""),
    ]:
        assert split_pin(text) == (where, digits)


def test_a_remote_dataset_is_pinned(data, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    put_in_memory(data, "memory://bucket/set")
    try:
        assert cli.main(["inspect", f"memory://bucket/set@{pin_of(data)}"]) == 0
        assert cli.main(["inspect", f"memory://bucket/set@{'0' * 16}"]) == 2
        assert open_dataset(f"memory://bucket/set@{pin_of(data)}").location == "memory://bucket/set"
    finally:
        forget_memory()


def test_weights_and_pins_go_together(data):
    pin = pin_of(data)
    (source,) = parse_sources(f"{data}@{pin}:0.5")
    assert (source.place, str(source)) == (str(data), f"{data}@{pin}:0.5")
    with pytest.raises(ConfigError, match="given twice"):
        parse_sources([str(data), f"{data}@{pin}"])


def test_a_dataset_that_is_still_generated_has_no_fingerprint(tmp_path):
    (tmp_path / "data" / ".generate").mkdir(parents=True)
    with pytest.raises(ConfigError, match="that of a finished dataset, and this one is not"):
        FollowedDataset(f"{tmp_path / 'data'}@{'0' * 16}")


def test_a_followed_dataset_is_compared(data):
    with pytest.raises(DatasetError, match="expected 0000000000000000"):
        FollowedDataset(f"{data}@{'0' * 16}")


# -- every command --------------------------------------------------------------------------------

FIT = ("fit", "eagle3", "--steps", "2", "--device", "cpu", "--seq-len", "64", "--out", "{run}")
COMMANDS = {
    "inspect": (cli.main, ["inspect", "{data}"]),
    "verify": (cli.main, ["verify", "{data}", "--device", "cpu"]),
    "select": (cli.main, ["select", "{data}", "{out}", "--sample", "3"]),
    "merge": (cli.main, ["merge", "{data}", "{other}", "--out", "{out}"]),
    "copy": (cli.main, ["copy", "{data}", "{out}"]),
    "recode": (cli.main, ["recode", "{data}", "{out}", "--codec", "default"]),
    "export": (cli.main, ["export", "{data}", "--to", "specforge", "--out", "{out}"]),
    "push": (cli.main, ["push", "{data}", "me/set", "--dry-run"]),
    "fit": (train, [*FIT, "--data", "{data}"]),
    "weighted": (train, [*FIT, "--data", "{data}:2"]),
    "search": (
        train,
        ["search", "--data", "{data}", "--out", "{run}", "--space", "lr=1e-3,2e-3", "--dry-run"],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_a_pin_and_refuses_another_dataset(data, tmp_path, name, capsys):
    program, words = COMMANDS[name]
    other = Path(tiny_dataset(tmp_path / "other", seed=0, n_docs=6)) if name == "merge" else data
    places = {n: str(tmp_path / n) for n in ("out", "run")}
    places |= {"page": str(tmp_path / "page.html"), "other": str(other)}
    wrong = [w.format(data=f"{data}@{'0' * 16}", **places) for w in words]
    assert program(wrong) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"its fingerprint is [0-9a-f]{16}, expected 0{16}", said), said
    right = [w.format(data=f"{data}@{pin_of(data)[:16]}", **places) for w in words]
    assert program(right) == 0, capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} <= {
        "data",
        "other",
        "out",
        "run",
        "page.html",
        "out.log",
        "run.log",
    }


def test_verify_names_a_fingerprint_that_is_not_the_expected_one(data, capsys):
    pin = pin_of(data)
    assert spec_data.verify(data, fingerprint=pin[:20], running=ON_CPU).ok
    for report in (
        spec_data.verify(data, fingerprint=pin, running=ON_CPU),
        spec_data.verify(f"{data}@{pin}", running=ON_CPU),
    ):
        assert report.ok and "the fingerprint is the expected one" in report.proven
    assert cli.main(["verify", str(data), "--fingerprint", "0" * 16]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected 0000000000000000" in said and "captures again" not in said  # nothing is lost
    assert cli.main(["verify", f"{data}@{'0' * 16}"]) == 2
    assert "captures again" not in capsys.readouterr().err
    resealed(data)
    assert spec_data.verify(data, running=ON_CPU).ok  # every checksum agrees
    report = spec_data.verify(data, fingerprint=pin, running=ON_CPU)
    assert not report.ok and f"expected {pin}" in report.failures[0]
    with pytest.raises(ConfigError, match="--fingerprint 0123: expected 16 to 64"):
        spec_data.verify(data, fingerprint="0123", running=ON_CPU)


def test_another_process_opens_a_pinned_dataset(data):
    import pickle

    dataset = HiddenStatesDataset(f"{data}@{pin_of(data)}")
    assert pickle.loads(pickle.dumps(dataset)).location == str(data)
    trace_file(data, "target/config.json", b"{}")
    with pytest.raises(DatasetError, match="replaced by another dataset"):
        pickle.loads(pickle.dumps(dataset))
