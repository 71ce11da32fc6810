"""Damage to every file of a dataset: `verify` names it, and it never reaches a weight.

In the first epoch, `fit` on a damaged dataset either refuses in words, or ends with the very bytes
of the fit on the whole one: then nothing that was damaged decides anything.
"""

import collections
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from spec_data.shards.errors import SpecDataError
from spec_data.verification.run import examine
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset, tiny_llama
from tests.faults.tools import report, trials
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards import codec_tools

target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed
KINDS = ("bit", "truncated", "deleted", "swapped", "duplicated", "zeros")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A dataset in bf16, three shards."""
    path = tmp_path_factory.mktemp("exact") / "data"
    return tiny_dataset(path, n_docs=24, docs_per_shard=8, model=tiny_llama(layers=3))


def files_of(data: Path) -> list[str]:
    return sorted(str(p.relative_to(data)) for p in data.rglob("*") if p.is_file())


def damage(data: Path, name: str, kind: str, rng: np.random.Generator) -> str:
    """Damage one file; return the name of another one that it changed as well, or ""."""
    file, content = data / name, (data / name).read_bytes()
    like = [n for n in files_of(data) if n != name and Path(n).suffix == file.suffix]
    place = int(rng.integers(len(content)))
    if kind == "bit":
        raw = bytearray(content)
        raw[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(raw)
    elif kind == "truncated":
        os.truncate(file, place)
    elif kind == "deleted" or not like:
        file.unlink()
    elif kind == "duplicated":
        shutil.copy(data / like[rng.integers(len(like))], file)
    elif kind == "swapped":
        other = like[rng.integers(len(like))]
        theirs = (data / other).read_bytes()
        (data / other).write_bytes(content)
        file.write_bytes(theirs)
        return other
    else:
        size = int(rng.integers(1, 4096))
        file.write_bytes(
            content[:place] + bytes(len(content[place:][:size])) + content[place + size :]
        )
    return ""


def same(name: str, a: Path, b: Path) -> bool:
    """Whether a file still says the same; the manifest may have other white space."""
    if not a.exists():
        return False
    if a.read_bytes() == b.read_bytes():
        return True
    try:
        return name == "manifest.json" and json.loads(a.read_text()) == json.loads(b.read_text())
    except ValueError:
        return False


def verified(data: Path) -> list[str]:
    """What `verify` says is wrong: failures and warnings, or why it cannot begin."""
    try:
        found = examine(data=str(data), running=ON_CPU, samples=2)
    except SpecDataError as error:
        return [str(error)]
    return found.failures + found.warnings


@pytest.mark.parametrize("source", ["exact", "mixed"])
def test_verify_names_every_damaged_file(source, request, tmp_path):
    whole = request.getfixturevalue(source)
    names, missed, outcomes = files_of(whole), [], collections.Counter()
    before = set(verified(whole))  # a random target says nothing like these answers
    assert not any(name in message for message in before for name in names)
    for trial, rng in trials(f"verify {source}", len(names)):
        data = Path(shutil.copytree(whole, tmp_path / "data"))
        name, kind = names[trial % len(names)], KINDS[rng.integers(len(KINDS))]
        other = damage(data, name, kind, rng)
        changed = [n for n in (name, other) if n and not same(n, data / n, whole / n)]
        found = " | ".join(m for m in verified(data) if m not in before)
        # a manifest that cannot be read, and shards of wrong sizes, end verify before the rest
        opened = "manifest.json" not in changed and "; copy the dataset again" not in found
        if not (all if opened else any)(n in found for n in changed or [""]):
            missed.append((trial, kind, changed, found))
        outcomes[f"{kind}" if changed else "without effect"] += 1
        shutil.rmtree(data)
    report(f"verify {source}, all named", outcomes)
    assert not missed, missed


def fitted(data: Path, out: Path) -> dict[str, bytes]:
    """Fit for an epoch; return the bytes of all weights it leaves."""
    config = Training(
        data=str(data), out=str(out), epochs=1, batch_size=2, seq_len=64, lr=1e-3, device="cpu",
        validation=0.2, eval_every=100, save_every=100,
    )  # fmt: skip
    fit("eagle3", config, Eagle3Options(ttt_steps=2, draft_vocab_size=40))
    files = sorted((out / "last").glob("*.safetensors"))
    assert len(files) == 2
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("source", ["exact", "mixed"])
def test_damage_never_reaches_a_weight(source, request, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    whole = request.getfixturevalue(source)
    names = [n for n in files_of(whole) if n.startswith("shards/")]
    names += [n for n in files_of(whole) if n not in names]
    expected, outcomes, wrong = fitted(whole, tmp_path / "run"), collections.Counter(), []
    shutil.rmtree(tmp_path / "run")
    for trial, rng in trials(f"fit {source}", 8):
        data = Path(shutil.copytree(whole, tmp_path / "data"))
        shards = trial % 4 != 3  # three of four in the shards, most of them a bit
        name = names[rng.integers(len(names))] if not shards else names[trial % 3]
        kind = "bit" if shards and trial % 2 else KINDS[rng.integers(len(KINDS))]
        damage(data, name, kind, rng)
        try:
            same_bytes = fitted(data, tmp_path / "run") == expected
            outcomes["same weights" if same_bytes else "OTHER WEIGHTS"] += 1
            if not same_bytes:
                wrong.append((trial, name, kind))
        except SpecDataError as error:
            outcomes["refused"] += 1
            assert str(data) in str(error), error
        shutil.rmtree(data)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    report(f"fit {source}", outcomes)
    assert not wrong, wrong
    assert outcomes["refused"]
