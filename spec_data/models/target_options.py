"""How a target is loaded and run: the options that several commands share. No torch here."""

import json
import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter
from msgspec import Meta

from spec_data.shards.errors import ConfigError
from spec_data.terminal.given import Options
from spec_data.terminal.rules import Excludes, Needs, Rule
from spec_data.terminal.types import Directory, Holds, JsonObject, Positive, more

RUNNING = more("how the target runs")
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
_SPREADING = {
    "context_parallel": "--context-parallel",
    "tp_plan": "--tp-plan",
    "device_map": "--device-map",
}
_POLICIES = ("auto", "balanced", "sequential")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a target is spread over devices; without any of these, it lies on --device."""

    # A policy of accelerate, or a device by module name ("cpu" and "disk" offload).
    device_map: str | dict[str, Any] | None = None
    # What each device may hold of the weights, by GPU number or "cpu".
    max_memory: dict[int | str, Any] | None = None
    tensor_parallel: bool = False  # every layer is split over the processes of torchrun
    context_parallel: int = 1  # processes of torchrun that share the tokens of each row

    @property
    def over_processes(self) -> tuple[str | None, int | None]:
        """The option that needs several processes, None: none does; and how many it asks for."""
        if self.context_parallel > 1:
            return "--context-parallel", self.context_parallel
        return ("--tp-plan" if self.tensor_parallel else None), None

    @property
    def is_one_device(self) -> bool:
        """Whether the whole target lies on one device."""
        return self.device_map is None and self.over_processes[0] is None


def processes() -> int:
    """Return the number of processes that torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """Where a target runs."""

    device: str = "auto"
    """Device of the target: auto (a GPU where there is one), cpu, cuda, cuda:1, ..."""
    trust_remote_code: Annotated[bool, RUNNING] = False
    """Run Python code that comes with the model; only for authors you trust."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions(DeviceOptions):
    """Which weights of a target are loaded."""

    dtype: Annotated[Dtype, RUNNING] = "auto"
    """Dtype in which the target runs; auto is the checkpoint's own. Take the one that the target is
    served in."""
    revision: Annotated[str | None, RUNNING] = None
    """Branch, tag or commit of a target on the Hub; not given: its main branch."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """What runs a target, and on how many devices."""

    backend: Annotated[Literal["hf", "vllm", "served"], RUNNING] = "hf"
    """What runs the target: hf is transformers; vllm is vLLM in this process, for targets that it
    serves (pip install vllm); served is a vLLM that runs elsewhere and hands over hidden states
    (docs/large-targets.md), not for `verify`."""
    server: Annotated[str | None, Holds(urls=True), RUNNING] = None
    """With --backend served: the URL of the server, such as http://localhost:8000."""
    states_dir: Annotated[Directory | None, RUNNING] = None
    """With --backend served: the directory of a shared disk into which the server writes files of
    states, if it has vLLM's own connector or one of hs-connectors. They are deleted once they are
    read; a file elsewhere is neither read nor deleted."""
    device_map: Annotated[str | None, RUNNING] = None
    """Spread the target over the GPUs of this machine, and what does not fit over memory and disk:
    auto, balanced or sequential, or a JSON object that names a device per module, such as
    {"model": 0, "lm_head": "cpu"}."""
    max_memory: Annotated[JsonObject | None, RUNNING] = None
    """With --device-map: a JSON object of what each GPU and the CPU may hold of the weights, such
    as {"0": "60GiB", "cpu": "200GiB"}."""
    tp_plan: Annotated[Literal["auto"] | None, RUNNING] = None
    """Auto splits every layer of the target over the processes that torchrun starts; the first
    process writes what there is to write."""
    context_parallel: Annotated[Positive, RUNNING] = 1
    """Split the tokens of each forward over N processes that torchrun starts, for documents that
    are too long for one GPU; each process holds all weights."""
    vllm_tensor_parallel: Annotated[Positive, RUNNING] = 1
    """With --backend vllm: GPUs that share every layer."""
    vllm_memory: Annotated[float, Meta(gt=0, lt=1), RUNNING] = 0.8
    """With --backend vllm: share of each GPU's memory for weights and the cache of keys and values.
    States, logits and a second head need the rest."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Needs("max_memory", "device_map", "--max-memory goes with --device-map; add it"),
        Excludes(
            "tp_plan", "device_map", "--tp-plan and --device-map exclude each other; choose one"
        ),
        Excludes(
            "context_parallel",
            ("device_map", "tp_plan"),
            "--context-parallel holds the whole target in each process: leave --device-map and "
            "--tp-plan out",
            idle=1,
        ),
        *(
            Excludes(
                "device",
                name,
                f"{flag} chooses the devices; leave --device {{device}} out",
                idle="auto",
            )
            for name, flag in _SPREADING.items()
        ),
        Needs(
            "vllm_tensor_parallel",
            "backend=vllm",
            "--vllm-tensor-parallel goes with --backend vllm; add it",
            idle=1,
        ),
        Needs("vllm_memory", "backend=vllm", "--vllm-memory goes with --backend vllm; add it"),
        Needs(
            "backend=served",
            "server",
            "--backend served and --server URL go together; give both or none",
        ),
        Needs(
            "server",
            "backend=served",
            "--backend served and --server URL go together; give both or none",
        ),
        Needs(
            "states_dir",
            "backend=served",
            "--states-dir goes with --backend served; add it, or leave it out",
        ),
        *(
            Needs(
                name,
                "backend=hf",
                "--device-map, --tp-plan and --context-parallel are for --backend hf; vLLM spreads "
                "a target over GPUs with --vllm-tensor-parallel N",
                idle=1,
            )
            for name in _SPREADING
        ),
    )

    @property
    def spread(self) -> Spread:
        """How the target lies on devices; ConfigError if the options do not say it."""
        table: Any = self.device_map
        if table not in (None, *_POLICIES):
            try:
                table = json.loads(table)
            except ValueError:
                table = None
            if not isinstance(table, dict):
                raise ConfigError(
                    f"--device-map {self.device_map}: expected {', '.join(_POLICIES)} or a JSON "
                    'object such as {"model": 0, "lm_head": "cpu"}; for one device, use --device'
                )
        memory = {int(k) if k.isdigit() else k: v for k, v in (self.max_memory or {}).items()}
        return Spread(
            device_map=table,
            max_memory=memory or None,
            tensor_parallel=self.tp_plan is not None,
            context_parallel=self.context_parallel,
        )

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other, or do not say a spread."""
        self.check_rules()
        _ = self.spread
