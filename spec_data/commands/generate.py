"""`spec-data generate`: run a target over a corpus once and store what its drafts learn from.

out/.generate/plan.{json,arrow}     the plan: every document, cut into units
out/.generate/target.json           what was proven about the target
out/codec.safetensors               tables of lossy codecs, made once, before the first shard
out/shards/unit-00000.arrow         a shard, and its record out/.generate/unit-00000.json
out/manifest.json                   written last: it makes the directory a dataset
"""

import logging
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from spec_data.terminal.command import command
from spec_data.terminal.types import (
    Corpus,
    Count,
    JsonObject,
    Layers,
    Names,
    NewDataset,
    Positive,
    Target,
    Text,
    comma_list,
    more,
    path_list,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_data.generation.output import LocalOutput
    from spec_data.generation.plan import Plan
    from spec_data.generation.ray_engine import Replicas
    from spec_data.generation.setup import Setup
    from spec_data.generation.workers import Worker
    from spec_data.results import GenerateResult
    from spec_data.shards.schema import Manifest

logger = logging.getLogger(__name__)

_CAPTURE = more("what is captured")
_DOCUMENTS = more("documents")
_RUNNING = more("how the target runs")
_WORKERS = more("shards and workers")

Mask = Literal["assistant", "last-turn", "all"]
Packing = Literal[
    "auto", "rows", "per-document", "mask-per-layer-type", "block-causal-window", "block-causal",
    "position-ids", "requests",
]  # fmt: skip
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


@command
def generate(
    target: Target,
    corpus: Corpus,
    out: NewDataset,
    *,
    layers: Layers = "auto",
    for_: Names = "",
    codec: str = "lm4c",
    supervision: Annotated[str, _CAPTURE] = "final-hidden",
    final: Annotated[Literal["all", "supervised"], _CAPTURE] = "all",
    teacher: Annotated[Literal["supervised", "all"], _CAPTURE] = "supervised",
    max_length: Positive = 2048,
    limit: Count = 0,
    mask: Mask = "assistant",
    on_policy: bool = False,
    sampling_temperature: Annotated[Annotated[float, Meta(ge=0, le=10)] | None, _DOCUMENTS] = None,
    allow_high_nll: Annotated[bool, _DOCUMENTS] = False,
    chat_template_kwargs: Annotated[JsonObject | None, _DOCUMENTS] = None,
    max_bad_rows: Annotated[Text, _DOCUMENTS] = "auto",
    max_row_bytes: Annotated[Text, _DOCUMENTS] = "8MB",
    num_proc: Annotated[Count, _DOCUMENTS] = 0,
    device: str = "auto",
    dtype: Annotated[Dtype, _RUNNING] = "auto",
    backend: Annotated[Literal["hf", "vllm"], _RUNNING] = "hf",
    device_map: Annotated[str | None, _RUNNING] = None,
    max_memory: Annotated[JsonObject | None, _RUNNING] = None,
    tp_plan: Annotated[Literal["auto"] | None, _RUNNING] = None,
    vllm_tensor_parallel: Annotated[Positive, _RUNNING] = 1,
    vllm_memory: Annotated[float, Meta(gt=0, lt=1), _RUNNING] = 0.8,
    attn: Annotated[str, _RUNNING] = "auto",
    rope_factors: Annotated[Literal["auto", "short", "long"], _RUNNING] = "auto",
    packing: Annotated[Packing, _RUNNING] = "auto",
    batch_tokens: Annotated[Text, _RUNNING] = "auto",
    revision: Annotated[str | None, _RUNNING] = None,
    trust_remote_code: Annotated[bool, _RUNNING] = False,
    workers: str = "0/1",
    engine: Annotated[Literal["local", "torchrun", "ray"], _WORKERS] = "local",
    replicas: Annotated[Count, _WORKERS] = 0,
    max_shard_size: Annotated[Text, _WORKERS] = "auto",
) -> "GenerateResult":
    """Run a target over a corpus and write a dataset; called again, resume it.

    Stop it whenever you like: Ctrl-C, SIGTERM and a closed terminal lose at most the shard in work,
    and the same command resumes. A resumed run writes the same bytes as an uninterrupted one.

    Examples:
        spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
        srun spec-data generate --target MODEL --corpus chats.jsonl --out DIR --workers auto
        spec-data generate --config generate.yaml --limit 100

    Args:
        target: the target model: a local directory or a Hugging Face Hub id.
        corpus: the conversations: a JSONL, JSON, CSV, Parquet or text file, a directory of them, a
            directory saved by `datasets`, or a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT); several
            are read in the order given.
        out: the dataset to write: a directory, or a URL such as s3://bucket/data (docs/remote.md).
        layers: layer ids to capture, such as 1,3,5. Id k is the output of decoder block k, counted
            from 0; -1 is the embedding output. auto takes the EAGLE-3 recipe 1, L/2-1, L-4 of L
            blocks; spread:N takes N evenly spaced blocks from 1 to L-2.
        for_: drafts to capture for, such as eagle3,dspark or all, instead of --layers: the layers
            that any of their recipes reads. eagle3 and peagle read 1, L/2-1, L-4; dspark and dflash
            5 evenly spaced blocks from 1 to L-2; eagle only hidden.final.
        codec: how states are stored: bf16 (exact), int8c or fp8 (half of its bytes), lm6c (0.38),
            lm4c (0.25); or per kind, such as aux=lm4c,final=int8c. The error is measured before the
            first shard; a codec that loses too much gives way to the next finer one.
        supervision: what the teacher's distribution is rebuilt from: final-hidden (exact and
            small), topk:K (K exact logits and the logsumexp) or logits (all of them, very large).
        final: tokens at which hidden.final is stored. supervised stores it only where the next
            token is supervised: enough for EAGLE-3, not for EAGLE-1/2.
        teacher: tokens at which the head runs: those whose next token is supervised, which is all
            that served drafts learn from; or all, for a wider `fit --mask` later.
        max_length: cut documents to this many tokens, or to the target's context where that is
            shorter; cut documents are counted. Memory grows with it.
        limit: read at most this many corpus rows; 0 reads all.
        mask: supervised tokens: those of every assistant turn, of the last one, or all tokens (for
            plain text).
        on_policy: state that this very target wrote the responses. It is measured: the run stops
            early if a sample contradicts it, and the dataset is recorded as off-policy if all does.
        sampling_temperature: temperature at which the target wrote the responses of --on-policy, 0
            for greedy. Not given: at most 1, and three of four tokens must be the target's first
            choice.
        allow_high_nll: capture a corpus that the target finds less likely than random tokens, as
            token ids of another tokenizer are.
        chat_template_kwargs: JSON object of arguments for the chat template, such as
            {"enable_thinking": false}.
        max_bad_rows: stop if more rows of the corpus are bad: a count such as 5, or a share such as
            1% or 0.01. auto is 1 %; below 1,000 rows it is 10 rows, but not more than 10 %.
        max_row_bytes: a row of more bytes is a bad row, skipped without being held in memory.
            Tokenising a row takes up to 250 times its bytes.
        num_proc: processes that render the corpus; 0 takes one per core, at most 16. The result
            does not depend on it.
        device: device of the target: auto (a GPU where there is one), cpu, cuda, cuda:1, ...
        dtype: dtype in which the target runs; auto is the checkpoint's own. Take the one that the
            target is served in.
        backend: what runs the target: hf is transformers; vllm is vLLM in this process, for targets
            that it serves (pip install vllm).
        device_map: spread the target over the GPUs of this machine, and what does not fit over
            memory and disk: auto, balanced or sequential, or a JSON object that names a device per
            module, such as {"model": 0, "lm_head": "cpu"}.
        max_memory: with --device-map: a JSON object of what each GPU and the CPU may hold of the
            weights, such as {"0": "60GiB", "cpu": "200GiB"}.
        tp_plan: auto splits every layer of the target over the processes that torchrun starts; the
            first process writes the dataset.
        vllm_tensor_parallel: with --backend vllm: GPUs that share every layer.
        vllm_memory: with --backend vllm: share of each GPU's memory for weights and the cache of
            keys and values. States, logits and a second head need the rest.
        attn: attention implementation of transformers: auto, sdpa, eager, flash_attention_2.
        rope_factors: factors of a longrope target (Phi-3, Phi-4) for every document; auto takes the
            long ones if a document is longer than the short ones cover.
        packing: how documents share a row. auto proves that packed states equal unpacked ones, and
            uses one document per row where no mask passes; rows skips packing (slower); the other
            names ask for one mask and stop the run if it fails the proof.
        batch_tokens: tokens per forward of the target. auto tries the longest documents on a GPU
            before the first shard, and takes the largest number that is safe; on a CPU it is 8192.
        revision: branch, tag or commit of a target on the Hub; not given: its main branch.
        trust_remote_code: run Python code that comes with the model; only for authors you trust.
        workers: I/N makes this process worker I of N, counted from 0. Run all N, on one machine or
            on several that share the directory; the one that finishes last seals it. auto reads I
            and N from torchrun, SLURM or a Kubernetes Job, and auto/N where they name no N.
        engine: what starts the workers: local is you, or a launcher that --workers auto knows;
            torchrun takes the GPU of LOCAL_RANK; ray starts --replicas of the target on the Ray
            cluster of RAY_ADDRESS, or on this machine.
        replicas: with --engine ray: copies of the target that work side by side; 0 takes one per
            free GPU, or one per machine without GPUs or with --device-map, which spreads each copy
            over its share of the GPUs.
        max_shard_size: size of one shard: what a resumed run repeats at most, and what workers
            share out. auto is 500MB, but at most 262,144 tokens and a sixteenth of the corpus.

    Returns:
        What was written, with the documents that were dropped by reason. `sealed` is False where
        other workers are not done. A label `on_policy` that all of the data contradict is no error:
        `policy` is "off-policy".

    Raises:
        ConfigError: a bad value, or a directory that holds data made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: a failed proof, states that are not finite, or not enough disk.

    >>> made = spec_data.generate(
    ...     "target", "chats.jsonl", "data-2", layers=[0, 2, 4], codec="bf16", limit=5
    ... )
    >>> made.sealed, made.documents, made.layers
    (True, 5, (0, 2, 4))
    >>> made.dropped
    {}
    """
    from spec_data.capture.tensor_parallel import leading
    from spec_data.generation.output import open_output
    from spec_data.generation.ray_engine import connected
    from spec_data.generation.setup import (
        AnswerOptions,
        CaptureOptions,
        CorpusRows,
        RenderOptions,
        RunOptions,
        check_outside_corpus,
        set_up,
    )
    from spec_data.generation.workers import Worker, this_worker
    from spec_data.models.spread import parse_spread
    from spec_data.results import GenerateResult
    from spec_data.terminal.option_values import parse_batch_tokens, parse_drafts

    sources = tuple(path_list(corpus))
    run = RunOptions(
        backend=backend,
        dtype=dtype,
        device=device,
        spread=parse_spread(device_map, max_memory, tp_plan),
        attn=attn,
        rope_factors=rope_factors,
        packing=packing,
        batch_tokens=parse_batch_tokens(str(batch_tokens)),
        vllm_tensor_parallel=vllm_tensor_parallel,
        vllm_memory=vllm_memory,
        trust_remote_code=trust_remote_code,
    )
    prepare = partial(
        set_up,
        str(target),
        CorpusRows(
            sources=sources,
            limit=limit,
            max_bad_rows=str(max_bad_rows),
            max_row_bytes=str(max_row_bytes),
        ),
        RenderOptions(mask=mask, max_length=max_length, template_kwargs=chat_template_kwargs or {}),
        CaptureOptions(
            layers=comma_list(layers),
            drafts=parse_drafts(comma_list(for_)),
            supervision=supervision,
            codec=codec,
            final=final,
            teacher=teacher,
            max_shard_size=str(max_shard_size),
        ),
        answers=AnswerOptions(
            on_policy=on_policy, temperature=sampling_temperature, allow_high_nll=allow_high_nll
        ),
        revision=revision,
    )
    check_outside_corpus(str(out), sources)
    check_engine(engine, workers, replicas, str(out), tp_plan is not None)
    if engine == "ray":
        driver = Worker(index=0, count=1, device=device)
        with connected(replicas, run) as fleet, open_output(str(out), str(driver)) as output:
            prepare = partial(prepare, run=replace(run, device=fleet.device))
            manifest = generate_into(prepare, output, driver, num_proc, fleet)
    else:
        with leading(run.spread):  # of the processes of --tp-plan, only the first comes here
            worker = this_worker(workers, engine, device, one_device=run.spread.is_one_device)
            prepare = partial(prepare, run=replace(run, device=worker.device))
            with open_output(str(out), str(worker)) as output:
                manifest = generate_into(prepare, output, worker, num_proc)
    return GenerateResult.of(str(out), manifest, str(target))


def generate_into(
    prepare: "Callable[[], Setup]",
    output: "LocalOutput",
    worker: "Worker",
    processes: int,
    fleet: "Replicas | None" = None,
) -> "Manifest | None":
    """Plan, capture and finalize, or go on where a run was interrupted.

    Args:
        prepare: finds target and tokenizer on this machine.
        output: the directory, or the stage of a URL.
        worker: which units this process captures.
        processes: that render the corpus.
        fleet: the replicas of --engine ray; None captures in this process.

    Returns:
        The manifest of the finished dataset. None if it is not finished: other workers are not
        done.
    """
    from spec_data.generation.plan import check_still_planned
    from spec_data.generation.ray_engine import capture_on_ray
    from spec_data.generation.setup import announce_drafts, find_or_make_plan
    from spec_data.generation.target_files import other_files
    from spec_data.generation.units import (
        check_free_space,
        clear_leftovers,
        explained_failures,
        finished_unit,
    )
    from spec_data.generation.workers import worker_lock
    from spec_data.models.devices import check_devices
    from spec_data.shards.errors import SpecDataError
    from spec_data.shards.follow import WORK

    # The target: its config, its tokenizer, what identifies it. No weights yet.
    setup = prepare()
    if (manifest := output.manifest()) is not None:
        return _complete_already(setup, manifest, output.name)
    announce_drafts(setup, captures=setup.stored is None)
    if fleet is None:
        check_devices(setup.run.device, setup.run.spread.device_map)
    directory = output.directory
    try:
        # Corpus -> documents -> plan. Made once; other workers, and later runs, read it.
        find = partial(find_or_make_plan, setup, directory, processes)
        plan = output.share_plan(find, partial(_refuse_other_plan, setup, output))
        mine = worker.units(len(plan.units))
        todo = [unit for unit in mine if finished_unit(directory, unit) is None]
        if todo:
            sizes = sorted((plan.unit_bytes(u, setup.columns) for u in todo), reverse=True)
            needed = sum(sizes[: output.units_at_once or None])
            needed += sum(other_files(setup, plan).values())
            check_free_space(directory, needed, output.remote)
            with (
                worker_lock(directory, str(worker), len(plan.units)),
                explained_failures(directory),
            ):
                check_still_planned(directory / WORK, plan)
                clear_leftovers(directory, mine)
                if fleet is None:
                    _capture(setup, plan, output, worker, todo)
                else:
                    capture_on_ray(prepare, fleet, plan, directory, todo)
        # Index, card and manifest, by the worker that is done last.
        return output.finalize(checked=set(todo), others=worker.count > 1)
    except (SpecDataError, FileNotFoundError):
        if (manifest := output.manifest()) is not None:  # another worker has just finished it
            return manifest
        raise


def _capture(
    setup: "Setup", plan: "Plan", output: "LocalOutput", worker: "Worker", todo: list[int]
) -> None:
    """Load the target, prove it, and capture the units `todo`."""
    from spec_data.generation.replica import Replica, load_target
    from spec_data.generation.status import ProgressFile
    from spec_data.generation.units import capture_units

    out = output.directory
    progress_file = ProgressFile(out, plan, worker=str(worker), lock=str(worker))
    with progress_file.until_the_end(), closing(load_target(setup, plan)) as target:
        # Before the first shard: masks, head, positions, a sample of the corpus, codecs.
        replica = Replica(setup, plan, out, target, output.share_proof)
        total = plan.unit_set_tokens(worker.units(len(plan.units)))
        capture_units(replica, todo, progress_file, total=total, uploaded=output.upload)


def _complete_already(setup: "Setup", manifest: "Manifest", where: str) -> "Manifest":
    """Return the manifest of a finished dataset if these options made it and it is intact.

    Raises:
        ConfigError: other options made it. MissingError, DatasetError: it is damaged.
    """
    from spec_data.generation.setup import changed_settings, refuse_changes
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.reader import check_whole

    if manifest.provenance:
        raise ConfigError(
            f"{where} holds a dataset that `spec-data {manifest.provenance.command}` made of "
            "others; choose another --out"
        )
    refuse_changes(changed_settings(setup, manifest.settings), where)
    check_whole(where)
    logger.info("%s is complete already: nothing to do", where)
    return manifest


def _refuse_other_plan(setup: "Setup", output: "LocalOutput") -> None:
    """Refuse the settings of a setup if the shared plan was made with others."""
    from spec_data.generation.plan import read_plan_record
    from spec_data.generation.setup import changed_settings, refuse_changes
    from spec_data.shards.follow import WORK

    if (saved := read_plan_record(output.directory / WORK)) is not None:
        refuse_changes(changed_settings(setup, saved.settings), output.name)


def check_engine(engine: str, workers: str, replicas: int, out: str, tp_plan: bool) -> None:
    """Refuse --engine beside options that contradict it.

    Raises:
        ConfigError: see above.
    """
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.urls import scheme_of

    if engine != "ray" and replicas:
        raise ConfigError("--replicas goes with --engine ray; add it")
    if tp_plan and (engine == "torchrun" or workers.startswith("auto")):
        raise ConfigError(
            "--tp-plan: the processes of torchrun are one worker; leave --engine out, and give "
            "--workers I/N if there are others"
        )
    if engine != "ray":
        return
    if workers != "0/1":
        raise ConfigError(
            f"--workers {workers} with --engine ray: Ray shares out the units; give --replicas N "
            "instead"
        )
    if tp_plan:
        raise ConfigError("--tp-plan needs torchrun; with --engine ray give --device-map auto")
    if scheme_of(out):
        raise ConfigError(
            f"--engine ray --out {out}: replicas share a directory; give a local --out, or start "
            "workers with --workers i/n"
        )


def kept_units(given: Mapping[str, Any]) -> str:
    """Say how much of an interrupted run is kept; `given` are its arguments."""
    if "spec_data.generation.plan" not in sys.modules:
        return "nothing was captured yet"
    from spec_data.report import kept_text

    return kept_text(given["out"])
