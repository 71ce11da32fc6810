"""`spec-data generate`: run a target over a corpus once and store what its drafts learn from.

From here the corpus goes to `generation.run.write_dataset`, which tells the rest.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from spec_data.generation.options import WORKERS, CaptureOptions
from spec_data.terminal.command import command
from spec_data.terminal.rules import Excludes, Needs, ruled
from spec_data.terminal.types import Corpus, Count, LoadedTarget, NewDataset, path_list

if TYPE_CHECKING:
    from spec_data.results import WrittenDataset


@command
@ruled(
    Needs("replicas", "engine=ray", "--replicas goes with --engine ray; add it"),
    Excludes(
        "workers",
        "engine=ray",
        "--workers {workers} with --engine ray: Ray shares out the units; give --replicas N "
        "instead",
        idle="0/1",
    ),
)
def generate(
    target: LoadedTarget,
    corpus: Corpus,
    out: NewDataset,
    options: CaptureOptions = CaptureOptions(),
    *,
    workers: str = "0/1",
    engine: Annotated[Literal["local", "ray"], WORKERS] = "local",
    replicas: Annotated[Count, WORKERS] = 0,
    dry_run: Annotated[bool, WORKERS] = False,
) -> "WrittenDataset":
    """Run a target over a corpus and write a dataset; called again, resume or repair it.

    Stop it whenever you like: Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 and a closed terminal lose at most
    the shard in work, and the same command resumes. A resumed run writes the same bytes as an
    uninterrupted one. Of a finished dataset it captures again what is lost or damaged, and puts
    back what has the sealed bytes.

    Examples:
        spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
        srun spec-data generate --target MODEL --corpus chats.jsonl --out DIR --workers auto
        spec-data generate --config generate.yaml --limit 100

    Args:
        target: the target model: a local directory or a Hugging Face Hub id. In Python also a
            loaded model and its tokenizer: (model, tokenizer) (docs/own-loop.md).
        corpus: the conversations: a JSONL, JSON, CSV, Parquet or text file, a directory of them, a
            directory saved by `datasets`, or a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT); several
            are read in the order given. In Python also rows: a list of dicts, or a
            `datasets.Dataset`.
        out: the dataset to write: a directory, or a URL such as s3://bucket/data (docs/remote.md).
        options: what is captured, and how.
        workers: I/N makes this process worker I of N, counted from 0. Run all N, on one machine or
            on several that share the directory; the one that finishes last seals it. auto reads I
            and N from torchrun, SLURM or a Kubernetes Job, and auto/N where they name no N.
        engine: what starts the workers: local is you, or a launcher that --workers auto knows; ray
            starts --replicas of the target on the Ray cluster of RAY_ADDRESS, or on this machine.
        replicas: with --engine ray: copies of the target that work side by side; 0 takes one per
            free GPU, or one per machine without GPUs or with --device-map, which spreads each copy
            over its share of the GPUs.
        dry_run: say which shards would be captured, then stop. A finished dataset is compared with
            its seal.

    Returns:
        What was written, with the documents that were dropped by reason. `sealed` is False where
        other workers are not done. A label `on_policy` that all of the data contradict is no error:
        `policy` is "off-policy".

    Raises:
        ConfigError: a bad value, or a directory that holds data made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: a failed proof, states that are not finite, not enough disk, or lost files whose
            bytes are others when they are captured again.

    >>> options = spec_data.CaptureOptions(layers=[0, 2, 4], codec="bf16", limit=5)
    >>> made = spec_data.generate("target", "chats.jsonl", "data-2", options)
    >>> made.sealed, made.documents, made.layers
    (True, 5, (0, 2, 4))
    >>> made.dropped
    {}
    """
    from spec_data.capture.processes import leading
    from spec_data.generation.held_target import held_target
    from spec_data.generation.output import open_output
    from spec_data.generation.ray_engine import connected
    from spec_data.generation.run import dry_run as what_to_do
    from spec_data.generation.run import write_dataset
    from spec_data.generation.setup import (
        check_outside_corpus,
        image_files,
        open_corpus,
        set_up,
    )
    from spec_data.generation.workers import Worker, this_worker
    from spec_data.models.accelerate_settings import check_accelerate
    from spec_data.models.devices import device_type
    from spec_data.results import WrittenDataset
    from spec_data.shards.storage import scheme_of

    options.check()
    corpus, fleet = path_list(corpus), None
    check_outside_corpus(str(out), corpus)
    shared = options.spread.over_processes[0]
    check_engine(engine, workers, str(out), shared, options.pass_on is not None)
    with ExitStack() as stack:
        held = stack.enter_context(held_target(str(target), options, engine))
        options = options if held is None else held.options
        device = device_type(options.device)
        check_accelerate(options.dtype, device, "--device-map auto or --tp-plan auto")
        if engine == "ray":
            fleet = stack.enter_context(connected(str(target), replicas, options))
            worker = Worker(device=fleet.device)
        else:  # of its processes, only the first comes any further
            stack.enter_context(leading(options.spread))
            one_device = options.spread.is_one_device
            worker = this_worker(workers, options.device, one_device=one_device)
        output = stack.enter_context(open_output(str(out), str(worker)))
        # The target: its config, its tokenizer, what identifies it. No weights yet.
        options = replace(options, device=worker.device)
        setup = set_up(str(target) if held is None else held.files, corpus, options)
        remote = str(out) if scheme_of(str(out)) else ""
        elsewhere = "--engine ray" if fleet else "--pass-on" if options.pass_on else remote
        images = image_files(setup, elsewhere if held is None else "a loaded model")
        rows = open_corpus(corpus, setup.options, tokenizer=setup.tokenizer, images=images)
        if dry_run:
            text = what_to_do(rows, setup, output, worker)
            return WrittenDataset(path=str(out), sealed=False, text=text, again="next")
        load = None if held is None else held.load
        manifest = write_dataset(rows, setup, output, worker, fleet=fleet, load=load)
    name = str(target) if held is None else held.name
    return WrittenDataset.of(str(out), manifest, name, said=setup.said)


def check_engine(
    engine: str, workers: str, out: str, shared: str | None, pass_on: bool = False
) -> None:
    """Refuse --engine beside options that contradict it; `shared` is the one that needs torchrun.

    Raises:
        ConfigError: see above.
    """
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.storage import scheme_of

    problem = ""
    if shared and workers.startswith("auto"):
        problem = (
            f"{shared}: the processes of torchrun are one worker; give --workers I/N if there are "
            "others"
        )
    elif engine == "ray" and shared:
        problem = f"{shared} needs torchrun; with --engine ray give --device-map auto"
    elif engine == "ray" and scheme_of(out):
        problem = (
            f"--engine ray --out {out}: replicas share a directory; give a local --out, or start "
            "workers with --workers i/n"
        )
    elif pass_on and (engine == "ray" or scheme_of(out)):
        problem = (
            f"--pass-on with --engine {engine} --out {out}: a trainer deletes shards in a local "
            "directory; give one, and start workers with --workers i/n"
        )
    if problem:
        raise ConfigError(problem)


def kept_units(given: Mapping[str, Any]) -> str:
    """Say how much of an interrupted run is kept; `given` are its arguments."""
    if "spec_data.generation.plan" not in sys.modules:
        return "nothing was captured yet"
    from spec_data.pages.report import kept_text

    return kept_text(given["out"])
