"""Which worker a process is, by the variables of its launcher; contradictions are refused."""

import pytest

from spec_data.commands.generate import check_engine
from spec_data.generation.workers import WorkerRank, device_of, find_rank, this_worker
from spec_data.shards.errors import ConfigError

RUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "7",
}  # fmt: skip
JOB = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}
ALONE = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # every batch script of SLURM sets these


@pytest.mark.parametrize(
    ("environ", "workers", "expected", "local", "named"),
    [
        (RUN, "auto", "5/16", 1, "RANK=5 and WORLD_SIZE=16"),
        (STEP, "auto", "3/8", 3, "SLURM_PROCID=3 and SLURM_NTASKS=8"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "auto", "3/4", 3, "SLURM_STEP_NUM_TASKS=4"),
        (ARRAY, "auto", "2/3", None, "SLURM_ARRAY_TASK_ID=7 and SLURM_ARRAY_TASK_COUNT=3"),
        (ARRAY | STEP, "auto", "19/24", 3, "SLURM_ARRAY_TASK_COUNT=3, SLURM_PROCID=3"),
        (JOB, "auto", "2/4", None, "JOB_COMPLETION_INDEX=2 and JOB_COMPLETIONS=4"),
        ({"JOB_COMPLETION_INDEX": "2"}, "auto/4", "2/4", None, "JOB_COMPLETION_INDEX=2"),
        (JOB, "auto/4", "2/4", None, "JOB_COMPLETIONS=4"),
        (ALONE, "auto", "0/1", None, "SLURM_PROCID=0"),
        ({}, "auto", "0/1", None, "no launcher"),
        (RUN | STEP, "auto", "5/16", 1, "RANK=5"),  # torchrun on 8 nodes, two processes each
        (RUN | STEP | {"GROUP_WORLD_SIZE": "8"}, "auto", "5/16", 1, "RANK=5"),
    ],
)
def test_the_launcher_says_which_worker_it_is(environ, workers, expected, local, named):
    place = find_rank(workers, environ=environ)
    assert (str(place), place.local) == (expected, local)
    assert named in place.reason


@pytest.mark.parametrize(
    ("environ", "workers", "message"),
    [
        ({"RANK": "0"}, "auto", "RANK is set, but WORLD_SIZE is not"),
        ({"JOB_COMPLETION_INDEX": "0"}, "auto", "JOB_COMPLETIONS is not.*auto/N"),
        ({"SLURM_ARRAY_TASK_ID": "0"}, "auto", "SLURM_ARRAY_TASK_COUNT is not set"),
        (RUN | {"RANK": "16"}, "auto", "RANK=16 and WORLD_SIZE=16 contradict"),
        (RUN | {"RANK": "-1"}, "auto", "RANK='-1' is not a number"),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "5"}, "auto", "no even series; submit with --array=0-2"),
        (JOB | STEP, "auto", "contradict each other"),
        (RUN | ARRAY, "auto", "each of these 3 processes has started a torchrun of its own"),
        (RUN | STEP | {"GROUP_WORLD_SIZE": "1"}, "auto", "each of these 8 processes"),
        (RUN | STEP | {"WORLD_SIZE": "6"}, "auto", "each of these 8 processes"),
        (STEP, "auto/4", "says 8 workers"),
        ({}, "auto/4", "no launcher has set a rank"),
    ],
)
def test_what_contradicts_itself_is_refused(environ, workers, message):
    with pytest.raises(ConfigError, match=message):
        find_rank(workers, environ=environ)


EIGHT = WorkerRank(index=5, count=8, local=1, reason="")
ALIKE = WorkerRank(index=5, count=8, reason="")
FIRST, SECOND = (WorkerRank(index=i, count=8, local=i, torchrun=True, reason="") for i in range(2))


@pytest.mark.parametrize(
    ("place", "device", "gpus", "expected"),
    [
        (EIGHT, "auto", 4, "cuda:1"),
        (EIGHT, "auto", 1, "auto"),  # SLURM gave it its own
        (EIGHT, "cuda:0", 4, "cuda:0"),
        (EIGHT, "auto", 0, "auto"),
        (ALIKE, "auto", 4, "auto"),
        (FIRST, "cuda", 1, "cuda:0"),
        (SECOND, "cpu", 1, "cpu"),
    ],
)
def test_a_worker_takes_the_gpu_of_its_number(place, device, gpus, expected):
    assert device_of(place, device, gpus) == expected


def test_workers_that_would_share_a_gpu_are_refused():
    for gpus in (1, 2):
        with pytest.raises(ConfigError, match=f"number 2 on this machine.*only {gpus} GPUs"):
            device_of(WorkerRank(index=2, count=8, local=2, torchrun=True, reason=""), "auto", gpus)
    with pytest.raises(ConfigError, match="all workers of a machine would use it"):
        device_of(WorkerRank(index=2, count=8, local=2, torchrun=True, reason=""), "cuda:1", 8)


def test_torchrun_decides_alone(monkeypatch, caplog):
    caplog.set_level("INFO")
    for name in (*RUN, *STEP, *ARRAY, *JOB):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="LOCAL_RANK are not set; start the command with `torch"):
        this_worker("0/1", "torchrun", "auto")
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    worker = this_worker("0/1", "torchrun", "auto")
    assert (str(worker), worker.index, worker.device) == ("5/16", 5, "cuda:1")
    assert "worker 5/16 on device cuda:1: RANK=5 and WORLD_SIZE=16" in caplog.text
    with pytest.raises(ConfigError, match=r"--workers 0/2: RANK=5.*leave --workers out"):
        this_worker("0/2", "torchrun", "auto")
    with pytest.raises(ConfigError, match="torchrun are one worker"):
        check_engine("torchrun", "0/1", 0, "out", tp_plan=True)
    with pytest.raises(ConfigError, match="spread its target over all GPUs"):
        this_worker("0/1", "torchrun", "auto", one_device=False)
    assert str(this_worker("0/2", "local", "auto")) == "0/2"  # what the user says, without auto
    with pytest.raises(ConfigError, match="or auto"):
        this_worker("auto/0", "local", "auto")
