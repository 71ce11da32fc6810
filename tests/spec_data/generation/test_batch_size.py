"""Out of memory: found before the first shard, and survived in the middle, on a pretended GPU.

The pretended GPU holds a number of slots of a batch. Its forwards raise what PyTorch raises, and
its peak grows with the slots.
"""

import json
import weakref
from pathlib import Path

import pytest
import torch

import spec_data.generation.run as generation_run
from spec_data.capture.backend import States
from spec_data.capture.mask_forms import ROWS
from spec_data.capture.model import Target
from spec_data.generation import capture
from spec_data.generation.proof import SAFE, choose_batch_tokens, largest_batch, load_target
from spec_data.generation.setup import make_plan
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.schema import Manifest
from tests.spec_data.runs import digests, generate_with, inputs_of, options, write_corpus

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"
WEIGHTS = 0.2  # share of the pretended memory


class PretendedGPU(Target):
    """A backend of which the device holds `room` slots beside the weights."""

    room = 1 << 30
    measures = True

    def capture(self, batch, form, *, full_logits=False) -> States:
        slots = batch.input_ids.numel()
        self.most = max(getattr(self, "most", 0), slots)
        if slots > self.room:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return super().capture(batch, form, full_logits=full_logits)

    def peak_memory(self, run):
        if not self.measures:
            return None
        self.most = 0
        run()
        return WEIGHTS + (1 - WEIGHTS) * self.most / self.room


def pretended(setup, plan) -> PretendedGPU:
    plain = load_target(setup, plan)
    return PretendedGPU(plain.model, plain.layers)


@pytest.fixture(scope="module")
def files(target, tmp_path_factory) -> tuple[Path, Path]:
    return target, write_corpus(tmp_path_factory.mktemp("files") / "corpus.jsonl", 24)


@pytest.fixture
def gpu(monkeypatch):
    """Let every loaded target be a pretended GPU."""

    def load(setup, plan):
        return pretended(setup, plan)

    monkeypatch.setattr(generation_run, "load_target", load)
    monkeypatch.setattr(PretendedGPU, "room", 1 << 30)
    monkeypatch.setattr(PretendedGPU, "measures", True)
    return PretendedGPU


@pytest.fixture
def planned(files, tmp_path):
    corpus, setup = inputs_of(**options(*files, tmp_path / "out"))
    return setup, make_plan(corpus, setup)


@pytest.mark.parametrize("room", [150, 1000, 5000])
def test_the_largest_safe_size_is_chosen(room, planned, gpu, monkeypatch):
    setup, plan = planned
    target = pretended(setup, plan)
    monkeypatch.setattr(gpu, "room", room)
    chosen = choose_batch_tokens(target, plan, ROWS, setup.columns, None)
    slots = largest_batch(plan, ROWS, chosen).input_ids.numel()
    assert WEIGHTS + (1 - WEIGHTS) * slots / room <= SAFE
    larger = largest_batch(plan, ROWS, 2 * chosen).input_ids.numel()
    assert WEIGHTS + (1 - WEIGHTS) * 2 * slots / room > SAFE or larger == slots


def test_what_waits_to_be_stored_is_in_memory_while_the_next_forward_is_measured(
    planned, gpu, monkeypatch
):
    """`capture_units` starts a forward before it stores the last one."""
    setup, plan = planned
    kept, alive = [], []
    real = gpu.capture

    def capture_noting(self, *arguments, **options):
        alive.append([state() is not None for state in kept])
        states = real(self, *arguments, **options)
        kept[:] = [weakref.ref(state) for state in states.layers.values()]
        return states

    monkeypatch.setattr(gpu, "capture", capture_noting)
    choose_batch_tokens(pretended(setup, plan), plan, ROWS, setup.columns, 512)
    assert alive[1] and all(alive[1])


def test_a_document_that_does_not_fit_is_refused(planned, gpu, monkeypatch):
    setup, plan = planned
    monkeypatch.setattr(gpu, "room", int(plan.lengths.max()) - 10)
    with pytest.raises(RunError, match=r"the longest document has.*--max-length.*--tp-plan auto"):
        choose_batch_tokens(pretended(setup, plan), plan, ROWS, setup.columns, None)


def test_an_explicit_size_that_does_not_fit_is_refused_before_the_first_shard(
    files, tmp_path, gpu, monkeypatch
):
    given = options(*files, tmp_path / "out", packing="rows", batch_tokens=4096)
    real = gpu.prove

    def proving(self, *arguments):
        proof = real(self, *arguments)
        monkeypatch.setattr(gpu, "room", 500)  # the proof has small batches of its own
        return proof

    monkeypatch.setattr(gpu, "prove", proving)
    with pytest.raises(RunError, match=r"--batch-tokens 4096: .*the largest safe size here is \d"):
        generate_with(**given)
    assert not list((tmp_path / "out/shards").iterdir())
    # the plan stays usable with another size: the number of tokens per forward decides no data
    monkeypatch.setattr(gpu, "room", 1 << 30)
    monkeypatch.setattr(gpu, "prove", real)
    assert generate_with(**given | {"batch_tokens": 256}) is not None


def test_out_of_memory_in_the_middle_ends_the_run_and_keeps_finished_shards(
    files, tmp_path, gpu, monkeypatch
):
    given = options(*files, tmp_path / "out", packing="rows", batch_tokens=512)
    monkeypatch.setattr(gpu, "measures", False)
    forwards = capture.unit_forwards

    def fails_later(plan, unit, *rest):  # as if another process had taken memory
        monkeypatch.setattr(gpu, "room", 1 << 30 if unit == 0 else 300)
        return forwards(plan, unit, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "unit_forwards", fails_later)
        said = r"out of device memory .*in a forward of \d+ x \d+ tokens, unit 1\).*--batch-tokens"
        with pytest.raises(RunError, match=said):
            generate_with(**given)
    kept = digests(tmp_path / "out" / "shards")
    assert "unit-00000.arrow" in kept
    assert generate_with(**given | {"batch_tokens": 256}) is not None  # as the error says
    assert kept.items() <= digests(tmp_path / "out" / "shards").items()


def interrupted(given: dict, monkeypatch) -> None:
    """Run generate until its first unit is finished."""
    forwards = capture.unit_forwards

    def stops(plan, unit, *rest):
        if unit:
            raise KeyboardInterrupt
        return forwards(plan, unit, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(capture, "unit_forwards", stops)
        generate_with(**given)


def test_a_run_resumes_with_another_size_device_or_release(files, tmp_path, monkeypatch, caplog):
    given = options(*files, tmp_path / "out", batch_tokens=512)
    interrupted(given, monkeypatch)
    work = tmp_path / "out" / ".generate"
    saved = json.loads((work / "plan.json").read_text())
    patch_release = ".".join([*torch.__version__.split("+")[0].split(".")[:2], "99"])
    saved["settings"]["versions"]["torch"] = patch_release
    saved["settings"]["device"] = "cuda"
    (work / "plan.json").write_text(json.dumps(saved))
    manifest = generate_with(**given | {"batch_tokens": 256})
    assert isinstance(manifest, Manifest)
    (other,) = manifest.also_captured_with
    assert 0 <= other["difference"] <= manifest.packing.tolerance
    assert (other["batch_tokens"], manifest.captured_with["batch_tokens"]) == (256, 512)
    assert "batch_tokens 512, now 256" in caplog.text


def test_a_run_whose_states_differ_by_more_is_refused(files, tmp_path, monkeypatch):
    """The planted failure: another device computes other states."""
    given = options(*files, tmp_path / "out", batch_tokens=512)
    interrupted(given, monkeypatch)
    before = digests(tmp_path / "out" / "shards")
    capture = Target.capture

    def wrong(self, batch, form, *, full_logits=False):
        states = capture(self, batch, form, full_logits=full_logits)
        return States(layers={k: 1.01 * v for k, v in states.layers.items()}, final=states.final)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="more than rounding"):
        patch.setattr(Target, "capture", wrong)
        generate_with(**given | {"batch_tokens": 256})
    assert digests(tmp_path / "out" / "shards") == before  # nothing was written
    with pytest.raises(ConfigError, match="layers"):  # what decides the data is refused as ever
        generate_with(**given | {"layers": "0,1"})
    assert generate_with(**given) is not None
