"""Which worker a process is, by the variables of its launcher; contradictions are refused."""

import pytest

from spec_data.commands.generate import check_engine
from spec_data.generation.workers import Worker, device_of, launched_worker, this_worker
from spec_data.shards.errors import ConfigError

RUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
ARRAY = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
JOB = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}
ALONE = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # every batch script of SLURM sets these


@pytest.mark.parametrize(
    ("environ", "workers", "expected", "local", "named"),
    [
        (RUN, "auto", "5/16", 1, "RANK=5 and WORLD_SIZE=16"),
        (STEP, "auto", "3/8", 3, "SLURM_PROCID=3 and SLURM_NTASKS=8"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "auto", "3/4", 3, "SLURM_STEP_NUM_TASKS=4"),
        (ARRAY | ALONE, "auto", "2/3", None, "SLURM_ARRAY_TASK_COUNT=3"),
        (JOB, "auto", "2/4", None, "JOB_COMPLETIONS=4"),
        ({"JOB_COMPLETION_INDEX": "2"}, "auto/4", "2/4", None, "JOB_COMPLETION_INDEX=2"),
        (ALONE, "auto", "0/1", None, "SLURM_PROCID=0"),
        ({}, "auto", "0/1", None, "no launcher"),
        (RUN | STEP | {"GROUP_WORLD_SIZE": "8"}, "auto", "5/16", 1, "RANK=5"),
    ],
)
def test_the_launcher_says_which_worker_it_is(environ, workers, expected, local, named):
    worker = launched_worker(workers, environ)
    assert (str(worker), worker.local) == (expected, local)
    assert named in worker.reason


@pytest.mark.parametrize(
    ("environ", "workers", "message"),
    [
        ({"RANK": "0"}, "auto", "RANK is set, but WORLD_SIZE is not"),
        ({"JOB_COMPLETION_INDEX": "0"}, "auto", "JOB_COMPLETIONS is not.*auto/N"),
        (RUN | {"RANK": "16"}, "auto", "RANK=16 and WORLD_SIZE=16 contradict"),
        (RUN | {"RANK": "-1"}, "auto", "RANK='-1' is not a number"),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "3"}, "auto", "number the workers from 0"),
        (ARRAY | {"SLURM_ARRAY_TASK_MIN": "1"}, "auto", "number the workers from 0"),
        (JOB | STEP, "auto", "contradict each other"),
        (ARRAY | STEP, "auto", "contradict each other"),
        (RUN | STEP | {"GROUP_WORLD_SIZE": "1"}, "auto", "each of these 8 processes"),
        (STEP, "auto/4", "says 8 workers"),
        ({}, "auto/4", "no launcher has set a rank"),
    ],
)
def test_what_contradicts_itself_is_refused(environ, workers, message):
    with pytest.raises(ConfigError, match=message):
        launched_worker(workers, environ)


EIGHT, ALIKE = Worker(index=5, count=8, local=1), Worker(index=5, count=8)
FIRST, SECOND, THIRD = (Worker(index=i, count=8, local=i, torchrun=True) for i in range(3))


@pytest.mark.parametrize(
    ("worker", "device", "gpus", "expected"),
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
def test_a_worker_takes_the_gpu_of_its_number(worker, device, gpus, expected):
    assert device_of(worker, device, gpus) == expected
    with pytest.raises(ConfigError, match=r"number 2 on this machine.*only 2 GPUs"):
        device_of(THIRD, "auto", 2)
    with pytest.raises(ConfigError, match=r"--device cuda:1: all workers of this machine"):
        device_of(SECOND, "cuda:1", 2)


def test_the_option_is_read_with_the_environment(monkeypatch, caplog):
    caplog.set_level("INFO")
    for name in (*STEP, *ARRAY, *JOB):
        monkeypatch.delenv(name, raising=False)
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    worker = this_worker("auto", "auto")
    assert (str(worker), worker.device) == ("5/16", "cuda:1")
    assert "worker 5/16 on device cuda:1: RANK=5 and WORLD_SIZE=16" in caplog.text
    with pytest.raises(ConfigError, match="torchrun are one worker"):
        check_engine("local", "auto", 0, "out", "--tp-plan")
    with pytest.raises(ConfigError, match="spread its target over all GPUs"):
        this_worker("auto", "auto", one_device=False)
    assert str(this_worker("0/2", "auto")) == "0/2"  # what the user says, without auto
    for wrong in ("auto/0", "3/3"):
        with pytest.raises(ConfigError, match="or auto"):
            this_worker(wrong, "auto")
