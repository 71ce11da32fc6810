"""Which worker a process is, by the variables of its launcher; contradictions are refused."""

import pytest

from spec_data.commands.generate import check_engine
from spec_data.generation.workers import Worker, device_of, launched_worker, this_worker
from spec_data.shards.errors import ConfigError

RUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
ARRAY = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
OMPI = {f"OMPI_COMM_WORLD_{n}": v for n, v in (("RANK", "3"), ("SIZE", "8"), ("LOCAL_RANK", "1"))}
JOB = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}
ALONE = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # every batch script of SLURM sets these


def array(task: int, first: int, last: int, count: int, step: int | None = None) -> dict[str, str]:
    """The environment of a task of an array, as SLURM sets it."""
    facts = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{n}": str(v) for n, v in facts.items() if v is not None}


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize(
    ("tasks", "count"),
    [(range(0, 15, 2), 8), (range(1, 9), 8), ((1, 5, 9), 3), (range(3, 4), 1), (range(16), 16)],
)
def test_the_tasks_of_an_array_are_all_workers_from_0(tasks, count, step):
    distance = tasks[1] - tasks[0] if count > 1 else 1
    told = [array(t, tasks[0], tasks[-1], count, distance if step else None) for t in tasks]
    workers = [str(launched_worker("auto", environ | ALONE)) for environ in told]
    assert workers == [f"{i}/{count}" for i in range(count)]


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
        (OMPI, "auto", "3/8", 1, "OMPI_COMM_WORLD_RANK=3"),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "8"}, "auto", "3/8", 3, "SLURM_PROCID=3"),
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
        # --array=1,2,9: the places of 2 and of the others are not told
        (array(2, 1, 9, 3, 1), "auto", "ID=2 of 3 tasks from 1 to 9"),
        (array(9, 1, 9, 3, 1), "auto", "ID=9 of 3 tasks from 1 to 9"),
        (array(2, 1, 9, 3), "auto", "tasks at equal distances"),
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
    for name in (*STEP, *ARRAY, *JOB, *OMPI):
        monkeypatch.delenv(name, raising=False)
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    worker = this_worker("auto", "auto")
    assert (str(worker), worker.device) == ("5/16", "cuda:1")
    assert "worker 5/16 on device cuda:1: RANK=5 and WORLD_SIZE=16" in caplog.text
    with pytest.raises(ConfigError, match="torchrun are one worker"):
        check_engine("local", "auto", "out", "--tp-plan")
    with pytest.raises(ConfigError, match="spread its target over all GPUs"):
        this_worker("auto", "auto", one_device=False)
    assert str(this_worker("0/2", "auto")) == "0/2"  # what the user says, without auto
    for wrong in ("auto/0", "3/3"):
        with pytest.raises(ConfigError, match="or auto"):
            this_worker(wrong, "auto")
