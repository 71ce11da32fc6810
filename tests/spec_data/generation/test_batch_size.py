"""Out of memory: found before the first shard, and survived in the middle, on a pretended GPU.

The pretended GPU holds a number of slots of a batch. Its forwards raise what PyTorch raises, and
its peak grows with the slots.
"""

import json
import re
import weakref
from pathlib import Path

import pytest
import torch

import spec_data.generation.run as generation_run
from spec_data.capture.backend import States
from spec_data.capture.mask_forms import ROWS
from spec_data.capture.model import Target
from spec_data.generation import capture, proof
from spec_data.generation.batch_size import SAFE, choose_batch_tokens, largest_batch
from spec_data.generation.proof import load_target
from spec_data.generation.setup import make_plan
from spec_data.generation.status import ProgressFile
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.reader import open_dataset
from spec_data.shards.schema import Manifest
from tests.gpu.late_device import LateDevice
from tests.spec_data.runs import digests, generate_with, inputs_of, options, write_corpus
from tests.tolerance import close, network

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"
CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
)
WEIGHTS = 0.2  # share of the pretended memory


class PretendedGPU(Target):
    """A backend of which the device holds `room` slots beside the weights."""

    room = 1 << 30
    measures = True
    says: RuntimeError = torch.OutOfMemoryError(OUT_OF_MEMORY)

    def capture(self, batch, form, *, full_logits=False) -> States:
        slots = batch.input_ids.numel()
        self.most = max(getattr(self, "most", 0), slots)
        if slots > self.room:
            raise type(self.says)(*self.says.args)
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


def test_a_document_that_does_not_fit_is_refused_with_the_length_that_does(
    files, tmp_path, gpu, monkeypatch
):
    given = options(*files, tmp_path / "out", packing="rows", batch_tokens="auto")
    corpus, setup = inputs_of(**given)
    plan = make_plan(corpus, setup)
    room = int(plan.lengths.max()) - 10
    target = pretended(setup, plan)
    monkeypatch.setattr(gpu, "room", room)
    with pytest.raises(RunError, match=r"the longest document has.*--tp-plan auto") as caught:
        choose_batch_tokens(target, plan, ROWS, setup.columns, None)
    fits = int(str(caught.value).split("--max-length to ")[1].split(".")[0])
    assert SAFE - 0.05 < WEIGHTS + (1 - WEIGHTS) * fits / room <= SAFE
    # what the error says works
    corpus, setup = inputs_of(**given | {"max_length": fits})
    plan = make_plan(corpus, setup)
    assert choose_batch_tokens(target, plan, ROWS, setup.columns, None) >= fits


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


def less_room(monkeypatch, gpu, later: int) -> None:
    """Let the device hold `later` slots from unit 1 on, as if another program had taken memory."""
    forwards = capture.unit_forwards

    def noticing(plan, unit, *rest):
        monkeypatch.setattr(gpu, "room", gpu.room if unit == 0 else later)
        return forwards(plan, unit, *rest)

    monkeypatch.setattr(capture, "unit_forwards", noticing)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says", [torch.OutOfMemoryError(OUT_OF_MEMORY), RuntimeError(CPU_SAYS)])
def test_out_of_memory_in_the_middle_halves_the_batches_and_loses_nothing(
    files, tmp_path, gpu, monkeypatch, caplog, says, stream
):
    """The units at hand are captured again; the states are those of a run that never failed."""
    given = options(*files, tmp_path / "plain", packing="rows", batch_tokens=512)
    monkeypatch.setattr(gpu, "measures", False)
    monkeypatch.setattr(gpu, "says", says)
    if stream:  # two units are begun at a time
        monkeypatch.setattr(proof, "copy_stream", lambda *_: LateDevice())
    plain = generate_with(**given)
    assert plain is not None and not plain.also_captured_with
    less_room(monkeypatch, gpu, 300)
    told = []
    monkeypatch.setattr(ProgressFile, "add", lambda self, tokens: told.append(tokens))
    manifest = generate_with(**given | {"out": str(tmp_path / "halved")})
    assert manifest is not None
    (other,) = manifest.also_captured_with
    assert manifest.captured_with["batch_tokens"] == 512 and other["batch_tokens"] == 256
    assert 0 <= other["difference"] <= manifest.packing.tolerance
    memory = r"warning\[memory\]: out of .*memory .*in a forward of .* have 256 tokens from now on"
    assert re.search(memory, caplog.text) and "warning[mixed-capture]" in caplog.text
    assert min(told) > 0 and sum(told) == sum(s.tokens for s in plain.shards)
    ours, theirs = (open_dataset(tmp_path / name) for name in ("halved", "plain"))
    for row, expected in zip(ours, theirs, strict=True):
        assert torch.equal(row["input_ids"], expected["input_ids"])
        for name in ("hidden.L2", "hidden.final"):
            stated = {"terms": network(6), "dtype": torch.float32, "stored": torch.bfloat16}
            close(row[name].float(), expected[name].float(), **stated)
    if not stream:  # it was written before
        first = [tmp_path / name / "shards/unit-00000.arrow" for name in ("halved", "plain")]
        assert first[0].read_bytes() == first[1].read_bytes()


def test_one_row_that_does_not_fit_ends_the_run_with_the_length_that_does(
    files, tmp_path, gpu, monkeypatch
):
    given = options(*files, tmp_path / "out", packing="rows", batch_tokens=512)
    monkeypatch.setattr(gpu, "measures", False)
    with monkeypatch.context() as patch:
        less_room(patch, gpu, 30)
        said = r"with one row of \d+ tokens .*--max-length to (\d+)\. Finished shards are kept"
        with pytest.raises(RunError, match=said) as caught:
            generate_with(**given)
    assert 28 <= int(re.search(said, str(caught.value))[1]) <= 30
    kept = digests(tmp_path / "out" / "shards")
    assert "unit-00000.arrow" in kept
    assert generate_with(**given) is not None  # where more memory is free, the same command
    assert kept.items() <= digests(tmp_path / "out" / "shards").items()


def test_out_of_memory_before_the_first_shard_halves_too(files, tmp_path, gpu, monkeypatch):
    """On a CPU, where nothing is measured: the sample of the corpus does not fit."""
    monkeypatch.setattr(gpu, "measures", False)
    monkeypatch.setattr(gpu, "room", 300)
    monkeypatch.setattr(gpu, "says", RuntimeError(CPU_SAYS))
    manifest = generate_with(**options(*files, tmp_path, packing="rows", batch_tokens=1024))
    assert manifest.captured_with["batch_tokens"] == 256 and not manifest.also_captured_with


def test_another_error_of_a_forward_is_not_tried_again(files, tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "measures", False)
    monkeypatch.setattr(gpu, "says", RuntimeError("CUDA error: an illegal memory access"))
    less_room(monkeypatch, gpu, 300)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        generate_with(**options(*files, tmp_path, packing="rows", batch_tokens=512))


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
    assert "warning[mixed-capture]" in caplog.text and "batch_tokens 512, now 256" in caplog.text


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
