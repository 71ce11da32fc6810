"""Several processes: their optimizer step equals the step of one process."""

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spec_data.models.accelerate_settings import check_accelerate
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.splits import make_splits
from spec_train.options.kinds import draft_options
from spec_train.options.training import Training
from spec_train.training import ranks
from spec_train.training.fit import fit
from spec_train.training.ranks import Ranks
from spec_train.training.run_cost import dry_run
from spec_train.training.run_directory import read_checkpoint
from spec_train.training.trainer import Trainer
from spec_train.training.validation import Validation
from tests.factory import tiny_dataset
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.training import ranks_tools
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.ranks_tools import (
    LIMIT_SECONDS,
    Ended,
    fit_on_ranks,
    fit_well,
    on_ranks,
    run_draft,
)
from tests.spec_train.training.tools import (
    assert_close_runs,
    change,
    command,
    environment,
    make_noisy,
    masters,
    metrics,
    run,
)

data, config = trainer_tools.data, trainer_tools.config
patience = ranks_tools.patience


@pytest.fixture
def gentle(config):
    """A low learning rate, so that rounding differences do not grow."""
    return change(config, batch_size=4, accumulation=1, lr=1e-4, steps=10, split_seed=1)


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """A function that returns the directory of a run in this process; do not change it."""

    @functools.cache
    def trained(draft: str, config: Training) -> Path:
        out = tmp_path_factory.mktemp("alone") / "run"
        run_draft(draft, change(config, out=str(out)))
        return out

    return lambda draft, config: trained(draft, change(config, out=""))


@pytest.mark.parametrize(
    "world,size,count,sharding,draft",
    [
        (2, 1, 2, "ddp", "eagle3"),
        pytest.param(3, 1, 1, "ddp", "eagle3", marks=pytest.mark.long),
        (2, 1, 2, "fsdp2", "dspark"),
        pytest.param(2, 2, 1, "fsdp2", "peagle", marks=pytest.mark.long),
        pytest.param(4, 1, 1, "fsdp2", "domino", marks=pytest.mark.long),
        pytest.param(2, 1, 1, "fsdp2", "xpress", marks=pytest.mark.long),
        pytest.param(2, 1, 2, "fsdp2", "lilicorr", marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_and_micro_batches_is_one_batch(
    gentle, on_one, world, size, count, sharding, draft
):
    """Crosses the end of an epoch, whose last batch has no micro-batch for some ranks. Metrics of
    training and validation equal those of one process."""
    packs = world * size * count
    splits = make_splits(HiddenStatesDataset(gentle.data), gentle)
    assert len(splits.train.batches(0)) < gentle.steps
    assert len(splits.train.batches(0)[-1]) < 4
    alone = change(gentle, batch_size=packs)
    if draft == "peagle":  # draws elements per micro-batch
        alone = change(alone, batch_size=size, accumulation=world * count)
    many = change(gentle, batch_size=size, accumulation=count, sharding=sharding)
    said = fit_well(many, world, draft=draft)
    assert_close_runs(on_one(draft, alone), many.out)
    assert [bool(end.text) for end in said] == [True] + [False] * (world - 1), (
        "rank 0 alone reports"
    )


@pytest.mark.parametrize(
    ("sharding", "draft"),
    [
        pytest.param("ddp", "eagle3", marks=pytest.mark.long),
        ("fsdp2", "eagle3"),
        pytest.param("ddp", "domino", marks=pytest.mark.long),
        pytest.param("ddp", "xpress", marks=pytest.mark.long),
        pytest.param("fsdp2", "dspark", marks=pytest.mark.long),
        pytest.param("fsdp2", "dflash2", marks=pytest.mark.long),
        pytest.param("ddp", "lilicorr", marks=pytest.mark.long),
        ("ddp", "mtp"),
        pytest.param("fsdp2", "peagle", marks=pytest.mark.long),
    ],
)
def test_a_rank_without_a_batch_takes_part(tmp_path, config, sharding, draft):
    """Each epoch has one pack, and so has validation: rank 1 never has a micro-batch."""
    data = tiny_dataset(tmp_path / "few", n_docs=2, seed=3, mtp=True)
    few = change(config, data=str(data), steps=4, batch_size=1, accumulation=1, seq_len=96)
    few = change(few, validation=0.5, lr=1e-4)
    fit_well(change(few, out=str(tmp_path / "many"), sharding=sharding), draft=draft)
    alone = change(few, out=str(tmp_path / "alone"), batch_size=2)
    run_draft(draft, alone)
    assert_close_runs(alone.out, tmp_path / "many")


def gathered(config, tmp_path, draft: str, owner: type, method: str) -> list:
    """What two ranks send in every call of a method: gather or reduce, its bytes, and the bytes of
    trained weights that are complete on the rank then, with what it gathers."""
    functions = {"gather": "all_gather_single", "reduce": "reduce_scatter_single"}
    if not hasattr(dist, "all_gather_single"):  # older releases of torch
        functions = {"gather": "all_gather_into_tensor", "reduce": "reduce_scatter_tensor"}
    original = getattr(owner, method)

    def prepare(rank: int) -> None:
        calls: list[list] = []
        watched: list = []

        def note(kind: str, send):
            def sent(*given, **options):
                tensors = [t for t in (*given, *options.values()) if isinstance(t, torch.Tensor)]
                moved = max(t.nbytes for t in tensors)
                for draft in watched:
                    trained = [p for p in draft.parameters() if p.requires_grad]
                    whole = sum(p.nbytes for p in trained if not hasattr(p, "full_tensor"))
                    calls[-1].append((kind, moved, whole + moved))
                return send(*given, **options)

            return sent

        def call(self, *given):
            watched.append(self.draft)
            calls.append([])
            result = original(self, *given)
            watched.clear()
            (tmp_path / f"{rank}.json").write_text(json.dumps(calls))
            return result

        setattr(owner, method, call)
        for kind, name in functions.items():
            setattr(dist, name, note(kind, getattr(dist, name)))

    fit_well(config, 2, prepare, draft)
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == two, "every rank sends the same in the same order"
    return one


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "count"),
    [
        ("dspark", 1),
        ("dspark", 2),
        ("peagle", 1),
    ],
)
def test_a_step_gathers_layer_by_layer(config, tmp_path, monkeypatch, draft, count):
    """Each twice, the next one while one computes; never the whole draft. Before the last of
    several micro-batches nothing is freed, and no gradient is sent."""
    monkeypatch.setitem(SMALL, draft, SMALL[draft] | {"num_layers": 4})
    config = change(config, sharding="fsdp2", steps=3, accumulation=count)
    steps = gathered(config, tmp_path, draft, Trainer, "_train_step")
    assert len(steps) == 3
    for step in steps:
        gathers = [moved for kind, moved, _ in step if kind == "gather"]
        rest, *layers = gathers[:5]
        assert gathers[5:] == layers[::-1]
        assert [kind for kind, *_ in step[5:]] == ["gather", *["gather", "reduce"] * 3] + [
            "reduce"
        ] * 2
        reduced = [moved for kind, moved, _ in step if kind == "reduce"]
        assert sorted(reduced) == sorted([rest, *layers]) and reduced[:3] == layers[:0:-1]
        most = max(whole for kind, _, whole in step if kind == "gather")
        assert count > 1 or most <= rest + sum(sorted(layers)[-2:]) < rest + sum(layers)


@pytest.mark.long
def test_a_validation_gathers_everything_once(config, tmp_path):
    """Then ranks may draft from more slots, or fewer, than others."""
    config = change(config, sharding="fsdp2", steps=4, batch_size=1, validation=0.5)
    for sent in gathered(config, tmp_path, "dspark", Validation, "measure"):
        assert [kind for kind, *_ in sent] == ["gather"] * 3


@pytest.mark.long
def test_bf16_is_the_arithmetic_on_every_rank(gentle, tmp_path):
    """The same micro-batches, so the same rounding; weights and moments stay fp32."""
    gentle = change(gentle, batch_size=2, dtype="bfloat16", steps=5)
    alone = change(gentle, out=str(tmp_path / "alone"), accumulation=2)
    run(alone)
    fit_well(change(gentle, sharding="fsdp2"))
    assert_close_runs(alone.out, gentle.out)
    assert {t.dtype for t in masters(gentle.out).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("draft", "sharding", "dtype"),
    [
        ("eagle3", "ddp", "float32"),
        pytest.param("eagle3", "fsdp2", "bfloat16", marks=pytest.mark.long),
        pytest.param("peagle", "fsdp2", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_gradients_are_exchanged_in_bf16_where_asked(gentle, tmp_path, draft, sharding, dtype):
    """A step differs from an exact one by the roundings of its gradients, and does differ."""
    gentle = change(gentle, batch_size=2, steps=1, sharding=sharding, dtype=dtype, clip=0.0)
    options = draft_options(draft)(**SMALL[draft])
    for exchange in ("fp32", "bf16"):
        config = change(gentle, out=str(tmp_path / exchange), exchange=exchange)
        ended = on_ranks(lambda rank, config=config: fit(draft, config, options))
        assert [end.code for end in ended] == [0, 0], ended
    saved = [read_checkpoint((tmp_path / n / "last").resolve()).tensors for n in ("fp32", "bf16")]
    exact, rounded = (
        torch.cat([v.flatten() for n, v in sorted(t.items()) if n.startswith("optimizer.exp_avg.")])
        for t in saved
    )
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 16 * torch.finfo(torch.bfloat16).eps, error
    weights = [v for t in saved for n, v in t.items() if n.startswith("master.")]
    assert {v.dtype for v in weights} == {torch.float32}


def stop_at(step: int, rank: int):
    """Send SIGUSR1 to one rank in the middle of a step, as a scheduler does."""
    original = Trainer._train_step

    def prepare(own: int) -> None:
        def signalled(self, of):
            if own == rank and self.step == step:
                os.kill(os.getpid(), signal.SIGUSR1)
            original(self, of)

        Trainer._train_step = signalled  # in the forked process alone

    return prepare


@pytest.mark.parametrize(
    "before,after", [pytest.param("fsdp2", 1, marks=pytest.mark.long), ("ddp", "fsdp2")]
)
def test_a_run_goes_on_with_another_number_of_ranks(gentle, on_one, before, after):
    """The signal reaches only one rank, between two lines of metrics."""
    ended = fit_on_ranks(change(gentle, batch_size=2, sharding=before), 2, stop_at(6, 1))
    assert [end.code for end in ended] == [0, 0], ended
    assert (Path(gentle.out) / "last").resolve().name == "checkpoint-00000007"
    if after == 1:
        fit_well(gentle, 1)
    else:
        fit_well(change(gentle, batch_size=2, sharding=after))
    assert_close_runs(on_one("eagle3", gentle), gentle.out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sharding", "draft"),
    [
        ("ddp", "eagle3"),
        ("fsdp2", "eagle3"),
        ("fsdp2", "dspark"),
    ],
)
def test_on_the_same_ranks_it_goes_on_bit_for_bit(config, tmp_path, sharding, draft, monkeypatch):
    make_noisy(monkeypatch)
    config = change(config, steps=8, batch_size=1, sharding=sharding, save_every=3, keep=9)
    whole_run = change(config, out=str(tmp_path / "whole"))
    fit_well(whole_run, draft=draft)
    fit_on_ranks(config, 2, stop_at(5, 1), draft)
    assert not (Path(config.out) / "checkpoint-00000008").exists()
    fit_well(config, draft=draft)
    a, b = masters(whole_run.out), masters(config.out)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert metrics(whole_run.out)[-1] == metrics(config.out)[-1]


def test_another_number_of_packs_is_refused_on_all_ranks(gentle):
    run(change(gentle, steps=1))
    ended = fit_on_ranks(change(gentle, steps=1))
    for end in ended:
        assert end.code in (1, 2) and "packs_per_step: 4 -> 8" in end.text


@pytest.mark.long
def test_torchrun_runs_it_and_its_sigterm_saves(config, tmp_path):
    """With the real launcher; one process resumes the run and equals the uninterrupted run."""
    config = change(config, steps=60, lr=1e-4, save_every=10, eval_every=30, log_every=7)
    whole_run = change(config, out=str(tmp_path / "whole"), batch_size=4, accumulation=1)
    run(whole_run)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "spec_train"]
    half = change(config, accumulation=1)
    process = subprocess.Popen(
        [*launcher, *command(half)[3:]], env=environment(), stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(Path(config.out).glob("checkpoint-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0 and "stopped and saved at step" in said, said
    saved = int((Path(config.out) / "last").resolve().name.removeprefix("checkpoint-"))
    assert 10 <= saved < 60
    run(config)
    assert_close_runs(whole_run.out, config.out)


@pytest.mark.long
def test_two_machines_train_as_one(config, tmp_path):
    """Two launchers that find each other by the address of the first; the second has its own."""
    config = change(config, steps=8, lr=1e-4, batch_size=2, accumulation=1)
    alone = change(config, out=str(tmp_path / "alone"), batch_size=4)
    run(alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = []
    for node in range(2):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        words += ["--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
        words += ["--master-port", str(port), "--local-addr", f"127.0.0.{node + 1}"]
        words += ["-m", "spec_train", *command(config)[3:], "-v"]
        env = environment() | {"GLOO_SOCKET_IFNAME": "lo"}
        machines.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
    said = [machine.communicate(timeout=LIMIT_SECONDS)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    assert "in 2 processes (ddp)" in said[0] + said[1]
    assert_close_runs(alone.out, config.out)


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_the_rank_that_holds_the_store_leaves_last(failing):
    """The store lives in rank 0 if the launcher has no agent."""

    def body(rank):
        with Ranks() as own:
            own.gather(rank)
            if rank == failing:
                raise RunError("damaged")

    ended = on_ranks(body, 3, agent=False)
    if failing is None:
        assert all(end.code == 0 for end in ended), "\n".join(end.text for end in ended)
        return
    told = Ended(1, f"error: rank {failing}: damaged\n")
    own = Ended(1, "error: damaged\n")
    assert ended == [own if rank == failing else told for rank in range(3)]


@pytest.mark.parametrize("failing", [None, 1])
def test_no_thread_is_in_the_store_when_python_ends(failing, monkeypatch):
    """A thread that comes back from the store then would abort a run that had ended well."""
    watch = Ranks._watch

    def late(self, store):
        watch(self, store)
        time.sleep(1)  # as if its last answer were on the way

    monkeypatch.setattr(Ranks, "_watch", late)

    def body(rank):
        try:
            with Ranks() as own:
                own.gather(rank)
                if rank == failing:
                    raise RunError("damaged")
        finally:
            left = [thread.name for thread in threading.enumerate() if thread.name == "watch"]
            print("left:", left)

    for end in on_ranks(body):
        assert "left: []" in end.text, end.text


def test_a_second_run_in_the_same_processes_is_a_run_of_its_own():
    """torchrun's store still has the messages and the ends of the first."""

    def body(rank):
        for number in range(3):
            with Ranks() as own:
                assert own.gather([number, rank]) == [[number, 0], [number, 1]]
                assert own.sum(torch.tensor([1.0 + number])) == 2.0 + 2 * number

    assert [end.code for end in on_ranks(body, 2)] == [0, 0]


def test_a_launcher_that_does_not_say_the_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK or MASTER_ADDR is not set"):
        Ranks()


def test_a_rank_without_a_world_and_what_is_no_number_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="RANK is 1, but WORLD_SIZE is 1"):
        Ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two': expected a number"):
        Ranks()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("USE_FSDP", "true", "enables FSDP.*pass --sharding"),
        ("USE_DEEPSPEED", "true", "enables DEEPSPEED"),
        ("USE_MEGATRON_LM", "true", "enables MEGATRON_LM"),
        ("MIXED_PRECISION", "fp16", "mixed_precision is fp16, and this run computes in float32"),
        ("MIXED_PRECISION", "bf16", "pass --dtype bfloat16"),
        ("GRADIENT_ACCUMULATION_STEPS", "8", "pass --accumulation 8"),
        ("DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend is inductor"),
    ],
)
def test_what_accelerate_is_asked_for_and_a_run_does_not_is_refused(
    name, value, said, config, monkeypatch
):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(ConfigError, match=said):
        run(config)
    with pytest.raises(ConfigError, match=said):
        dry_run("eagle3", config, trainer_tools.OPTIONS)


def test_what_accelerate_says_and_a_run_does_is_welcome(monkeypatch):
    plain = {"MIXED_PRECISION": "no", "DYNAMO_BACKEND": "NO", "USE_CPU": "False"}
    for settings in (
        plain | {"GRADIENT_ACCUMULATION_STEPS": "1"},
        {"MIXED_PRECISION": "bf16", "GRADIENT_ACCUMULATION_STEPS": "4", "USE_CPU": "true"},
    ):
        for name, value in settings.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        check_accelerate("bfloat16", "cpu", "--sharding fsdp2", 4)
    with pytest.raises(ConfigError, match="asks for CPUs"):
        check_accelerate("bfloat16", "cuda:0", "--sharding fsdp2", 4)


class PretendedGpus:
    """What NCCL and CUDA would be asked by rank 0 of 4, whose launcher shows it `visible` GPUs."""

    def __init__(self, monkeypatch, visible: int, others: list[str], local: int = 3) -> None:
        self.used: list[torch.device] = []
        self.group: dict = {}
        names = {"RANK": 0, "LOCAL_RANK": local, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost"}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        store = dist.HashStore()
        for rank, uuid in enumerate(others, 1):
            gpu = f"GPU {uuid} of {socket.gethostname()}"
            store.set(f"run 0/messages/1/{rank}", json.dumps(gpu))
        monkeypatch.setattr(ranks, "_RUNS", itertools.count())
        monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(store, 0, 4)]))
        monkeypatch.setattr(dist, "init_process_group", self._init)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", self.used.append)
        properties = SimpleNamespace(uuid="d")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(Ranks, "_watch", lambda *_: None)

    def _init(self, backend: str, **options) -> None:
        self.group = {"backend": backend, **options}


@pytest.mark.parametrize(("visible", "used"), [(1, 0), (4, 3)])
def test_each_process_uses_its_own_gpu_even_if_it_sees_no_other(monkeypatch, visible, used):
    """As with SLURM's --gpus-per-task, where every process calls its GPU number 0."""
    gpus = PretendedGpus(monkeypatch, visible, ["a", "b", "c"])
    assert Ranks("cuda").device == torch.device("cuda", used)
    assert gpus.used == [torch.device("cuda", used)]
    assert gpus.group["device_id"] == torch.device("cuda", used)
    assert gpus.group["timeout"].total_seconds() == ranks.WAIT_SECONDS
    assert gpus.group["backend"] == "nccl"
    gpus = PretendedGpus(monkeypatch, visible, ["a", "b", "c"])
    Ranks("cuda", follow=True)  # one of them may wait for data that the others do not need
    assert gpus.group["timeout"].total_seconds() > 24 * Training.follow_timeout


def test_two_processes_on_one_gpu_are_refused(monkeypatch):
    """Each sees one GPU, but it is the same one: NCCL would say so less clearly, or hang."""
    gpus = PretendedGpus(monkeypatch, 1, ["a", "d", "c"])
    with pytest.raises(
        ConfigError, match=r"ranks 0 and 2 share GPU d of .*: start one process per"
    ):
        Ranks("cuda")
    assert not gpus.group


def test_more_processes_than_gpus_are_refused(monkeypatch):
    PretendedGpus(monkeypatch, 2, ["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 3 .*, but only 2 GPUs are visible"):
        Ranks("cuda")
