"""`spec-data verify`: is a dataset intact, and does its target still produce it?"""

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from spec_data.terminal.command import command
from spec_data.terminal.types import Dataset, JsonObject, Positive, Target, more

if TYPE_CHECKING:
    from spec_data.verification.findings import VerifyReport

_RUNNING = more("how the target runs")


@command
def verify(
    data: Dataset,
    target: Target | None = None,
    *,
    samples: Positive = 16,
    device: str = "auto",
    backend: Annotated[Literal["hf", "vllm"], _RUNNING] = "hf",
    device_map: Annotated[str | None, _RUNNING] = None,
    max_memory: Annotated[JsonObject | None, _RUNNING] = None,
    tp_plan: Annotated[Literal["auto"] | None, _RUNNING] = None,
    vllm_tensor_parallel: Annotated[Positive, _RUNNING] = 1,
    vllm_memory: Annotated[float, Meta(gt=0, lt=1), _RUNNING] = 0.8,
    trust_remote_code: Annotated[bool, _RUNNING] = False,
) -> "VerifyReport":
    """Prove a dataset, from the checksums up to a fresh forward of its target.

    Checks every file and every stored chunk against its checksum, every state for broken values,
    and logits of sampled documents against the stored head. With --target, what the dataset says of
    its target is compared fact by fact, and sampled documents are computed again. The exit code is
    1 if anything failed.

    Examples:
        spec-data verify DIR
        spec-data verify DIR --target MODEL --samples 32

    Args:
        data: the dataset: a directory or a URL.
        target: also run this target on the sampled documents and compare every stored column: the
            strongest check, and the only one that loads a model.
        samples: documents whose logits, and with --target whose states, are computed again. Raise
            it for more certainty.
        device: device to compute on: auto, cpu, cuda, cuda:1, ...
        backend: what runs the target: hf is transformers, vllm is vLLM in this process.
        device_map: spread the target over the GPUs of this machine: auto, balanced or sequential,
            or a JSON object that names a device per module.
        max_memory: with --device-map: a JSON object of what each GPU and the CPU may hold of the
            weights, such as {"0": "60GiB", "cpu": "200GiB"}.
        tp_plan: auto splits every layer of the target over the processes that torchrun starts.
        vllm_tensor_parallel: with --backend vllm: GPUs that share every layer.
        vllm_memory: with --backend vllm: share of each GPU's memory for weights and the cache of
            keys and values.
        trust_remote_code: run Python code that comes with the model; only for authors you trust.

    Returns:
        What was proven and what failed; `ok` is True if nothing failed.

    Raises:
        SpecDataError: the dataset cannot be opened, or `target` is no model. Damage inside a
            dataset is no error: it is in `failures`.

    >>> report = spec_data.verify("data", target="target", samples=4)
    >>> report.ok, report.failures
    (True, [])
    """
    from spec_data.capture.tensor_parallel import leading
    from spec_data.generation.options import CaptureOptions
    from spec_data.report import draft_to_fit
    from spec_data.verification.run import examine

    options = CaptureOptions(
        backend=backend,
        device=device,
        device_map=device_map,
        max_memory=max_memory,
        tp_plan=tp_plan,
        vllm_tensor_parallel=vllm_tensor_parallel,
    )
    options.check()
    with leading(options.spread):  # of the processes of --tp-plan, only the first comes here
        report = examine(
            str(data),
            None if target is None else str(target),
            samples=samples,
            backend=backend,
            device=device,
            spread=options.spread,
            tensor_parallel=vllm_tensor_parallel,
            engine_memory=vllm_memory,
            trust=trust_remote_code,
        )
    if report.ok:
        draft, run = draft_to_fit(str(data))
        report.next_command = ("spec-train", "fit", draft, "--data", str(data), "--out", run)
    return report
