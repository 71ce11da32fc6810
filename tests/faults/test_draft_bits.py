"""Campaign of damage in drafts, exports, checkpoints and the files of a run.

Every damage is refused in words, or changes nothing that decides: the draft that is read, and the
keys that engines read, are equal bit for bit. A damaged checkpoint is left out, and the run that
resumes from the one before it has the weights of the undamaged run.
"""

import collections
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spec_data.shards.errors import DraftError, RunError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS, load_draft
from spec_train.evaluation.run_record import read_run
from spec_train.formats.draft_files import read_files
from spec_train.formats.draft_seal import same_value
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.run_directory import read_checkpoint, read_run_json
from tests.factory import tiny_dataset
from tests.faults.tools import count, report, trials
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import export
from tests.spec_train.training.tools import run

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SMALL = {"num_layers": 1, "block_size": 4, "mask_token_id": 5}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 40}, ("vllm",)),
    "peagle": ("peagle", {"num_layers": 1, "depths": 3, "mask_token_id": 5}, ("speculators",)),
    "dspark": ("dspark", {**SMALL, "markov_rank": 4}, ("sglang", "deepspec")),
    "dflash2": ("dflash2", {**SMALL, "selector_top_k": 4}, ("vllm", "speculators")),
    "domino": ("domino", SMALL, ("sglang",)),
    "xpress": ("xpress", SMALL, ("vllm",)),
    "lilicorr": ("lilicorr", SMALL, ("sglang",)),
    "mtp": ("mtp", {"depth": 2}, ()),
}
PLACES = [*KINDS, *(f"{kind}-{form}" for kind, (_, _, forms) in KINDS.items() for form in forms)]
target = own_draft.target
Read = tuple[Any, Any, dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("faults") / "data", n_docs=24)


@pytest.fixture(scope="module")
def facts(data: Path) -> TargetFacts:
    """Forms without an embedding use the target's."""
    head = TargetHead.from_dataset(data)
    return TargetFacts(num_layers=4, embedding=head.embed_weight, head=head.head_weight)


def written(data: Path, kind: str, folder: Path, seed: int) -> Path:
    """Write a draft of `kind` with random weights."""
    name, options, _ = KINDS[kind]
    dataset, head = HiddenStatesDataset(data), TargetHead.from_dataset(data)
    torch.manual_seed(seed)
    draft = DRAFTS[name].build(
        DRAFT_OPTIONS[name](**options),
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size),
        target_dir=dataset.target_dir,
    )
    draft.save_pretrained(folder)
    return folder


@pytest.fixture
def place(request: Any, data: Path, target: Path, tmp_path: Path) -> Path:
    """Return the directory of a draft, or of an export of it, that the test may damage."""
    kind, _, form = request.param.partition("-")
    own = written(data, kind, tmp_path / "own", 1)
    return export(own, form, tmp_path / form, target) if form else own


def read(folder: Path, facts: TargetFacts) -> Read:
    """Return all that decides: what our commands use, and what engines find in the files."""
    files = read_files(folder)
    draft: Any = load_draft(folder, facts)
    state = {**draft.state_dict(), "ids": draft.draft_ids} if "d2t" in files.tensors else {}
    return draft.config, draft.options, state or draft.state_dict(), files.config, files.tensors


def equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def outcome(folder: Path, facts: TargetFacts, whole: Read) -> str:
    """Return what became of a damage: "refused" or "decides nothing"; fail for anything else."""
    try:
        config, options, state, raw, tensors = read(folder, facts)
    except SpecDataError as error:
        assert str(folder) in str(error), error
        return "refused"
    assert (config, options) == whole[:2] and same_value(raw, whole[3])
    assert equal_tensors(state, whole[2]) and equal_tensors(tensors, whole[4])
    return "decides nothing"


def regions(file: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first byte, end) of the parts of a file: its header and every tensor."""
    content = file.read_bytes()
    if file.suffix != ".safetensors":
        yield "text", 0, len(content)
        return
    length = 8 + int.from_bytes(content[:8], "little")
    yield "header", 0, length
    for name, entry in json.loads(content[8:length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, length + start, length + end


def flip(content: bytes, start: int, end: int, rng: np.random.Generator) -> bytes:
    """Return the content with one bit of bytes start..end changed."""
    damaged = bytearray(content)
    damaged[rng.integers(start, end)] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def per_region(name: str) -> int:
    return {"text": 30, "header": 15}.get(name, 1)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_flipped_bit_of_a_draft_is_refused_or_decides_nothing(
    place: Path, facts: TargetFacts, request: Any
) -> None:
    name = f"bits of {request.node.callspec.id}"
    whole, outcomes = read(place, facts), collections.Counter()
    for file in (place / CONFIG, place / WEIGHTS):
        content = file.read_bytes()
        for region, start, end in regions(file):
            for _, rng in trials(f"{name} {region}", per_region(region)):
                file.write_bytes(flip(content, start, end, rng))
                found = outcome(place, facts, whole)
                assert found == "refused" or region in ("text", "header"), region
                outcomes[f"{file.name} {found}"] += 1
        file.write_bytes(content)
    report(name, outcomes)
    assert outcome(place, facts, whole) == "decides nothing"
    refused = sum(n for what, n in outcomes.items() if what.endswith("refused"))
    assert refused > 0.5 * sum(outcomes.values())


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_missing_cut_and_mixed_files_are_refused(
    place: Path, facts: TargetFacts, data: Path, target: Path, request: Any, tmp_path: Path
) -> None:
    name = f"files of {request.node.callspec.id}"
    kind, _, form = request.node.callspec.id.partition("-")
    whole, outcomes = read(place, facts), collections.Counter()
    other = written(data, kind, tmp_path / "second", 2)
    other = export(other, form, tmp_path / f"second-{form}", target) if form else other
    for file in (place / CONFIG, place / WEIGHTS):
        content, theirs = file.read_bytes(), (other / file.name).read_bytes()
        file.unlink()
        outcomes[f"deleted: {outcome(place, facts, whole)}"] += 1
        cuts = [content[: rng.integers(len(content) - 1)] for _, rng in trials(f"{name} cut", 4)]
        for damaged in (*cuts, content + b"\0", theirs):
            if damaged != content:  # equal configs of two drafts differ too
                file.write_bytes(damaged)
                outcomes[f"changed: {outcome(place, facts, whole)}"] += 1
        file.write_bytes(content)
    report(name, outcomes)
    assert outcomes and all(what.endswith(": refused") for what in outcomes)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run of 6 steps with a checkpoint every 2."""
    config = Training(
        data=str(data), out=str(tmp_path_factory.mktemp("run") / "run"), steps=6, batch_size=2,
        seq_len=48, lr=1e-3, validation=0.15, log_every=2, eval_every=3, save_every=2, keep=9,
    )  # fmt: skip
    assert run(config).finished
    return config


def test_a_flipped_bit_of_a_checkpoint_is_damage_or_decides_nothing(
    finished: Training, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint-00000006"
    shutil.copytree(Path(finished.out) / place.name, place)
    whole, outcomes = read_checkpoint(place), collections.Counter()
    for file in sorted(place.iterdir()):
        content = file.read_bytes()
        for region, start, end in regions(file):
            number = 120 if file.name == "training_state.json" else per_region(region)
            for _, rng in trials(f"bits of a checkpoint {file.name} {region}", number):
                file.write_bytes(flip(content, start, end, rng))
                try:
                    saved = read_checkpoint(place)
                except DraftError as error:  # then the checkpoint before it is used
                    assert place.name in str(error)
                    outcomes[f"{file.name} refused"] += 1
                    continue
                assert file.name == "training_state.json"
                assert (saved.step, saved.state) == (whole.step, whole.state)
                assert equal_tensors(saved.tensors, whole.tensors)
                outcomes[f"{file.name} decides nothing"] += 1
        file.write_bytes(content)
    report("bits of a checkpoint", outcomes)
    assert read_checkpoint(place).state == whole.state


def test_a_flipped_bit_of_a_runs_settings_is_refused_or_decides_nothing(
    finished: Training, tmp_path: Path
) -> None:
    """run.json decides how a run resumes, and with fit.json which documents eval measures."""
    place = tmp_path / "run"
    place.mkdir()
    names = ("run.json", "fit.json")
    for name in names:
        shutil.copy(Path(finished.out) / name, place / name)
    whole, facts, outcomes = read_run_json(place), read_run(place, place), collections.Counter()
    assert facts is not None
    for name in names:
        content = (place / name).read_bytes()
        for _, rng in trials(f"bits of {name}", 150):
            (place / name).write_bytes(flip(content, 0, len(content), rng))
            try:
                assert read_run_json(place) == whole
                found = read_run(place, place)
            except (RunError, SpecDataError) as error:
                assert str(place) in str(error)
                outcomes[f"{name} refused"] += 1
                continue
            assert found is not None
            # of where the data was; logged if it is not there
            free = ("data", "sources", "identity", "ids", "parts")
            now, then = vars(found), vars(facts)
            changed = {k: now[k] for k in then if k not in free and now[k] != then[k]}
            assert not changed
            outcomes[f"{name} decides nothing"] += 1
        (place / name).write_bytes(content)
    report("bits of settings", outcomes)
    assert outcomes["run.json refused"] > count(150) / 2
