"""The options of the spec-data commands on a dataset directory (see config.py)."""

from dataclasses import dataclass

from spec_data.options.option_values import CHECKS, REQUIRED, RUNNING, at_least
from spec_data.options.placement_options import (
    Spread,
    backend_option,
    device_map_option,
    max_memory_option,
    offload_dir_option,
    spread_of,
    tp_plan_option,
    vllm_memory_option,
    vllm_tensor_parallel_option,
)
from spec_data.options.row_options import read_data_option
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


@dataclass(frozen=True, kw_only=True)
class SealConfig:
    """Options of `seal`."""

    out: str = option(
        help="the dataset directory whose workers are all done",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.UNFINISHED,
    )


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Options of `status`."""

    data: str = option(
        help="the dataset directory; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.UNFINISHED,
    )
    watch: bool = option(
        False,
        help="print the status again every two seconds, until the dataset is sealed or Ctrl-C; "
        "with --json one JSON object per line",
        group="what is shown",
    )


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Options of `inspect`."""

    data: str = read_data_option()
    doc: int | None = option(
        None,
        help="print the text of this document with its supervised tokens marked; counted from 0",
        group="what is shown",
        metavar="N",
    )
    color: str = option(
        "auto",
        help="mark the tokens of --doc by colour. auto: on a terminal, unless NO_COLOR is set",
        group="what is shown",
        choices=("auto", "always", "never"),
    )

    def __post_init__(self) -> None:
        if self.doc is not None:
            at_least(0, doc=self.doc)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Options of `verify`."""

    data: str = read_data_option()
    target: str | None = option(
        None,
        help="also run this target on the sampled documents and compare every stored column: the "
        "strongest check, and the only one that loads a model",
        group=CHECKS,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    samples: int = option(
        16,
        help="documents whose logits, and with --target whose states, are computed again. Raise it "
        "for more certainty",
        group=CHECKS,
        metavar="N",
    )
    seed: int = option(0, help="decides which documents are sampled", group=CHECKS, metavar="N")
    backend: str = backend_option()
    device: str = option(
        "auto", help="device to compute on: auto, cpu, cuda, cuda:1, ...", group=RUNNING
    )
    device_map: str | None = device_map_option()
    max_memory: str | None = max_memory_option()
    offload_dir: str | None = offload_dir_option()
    tp_plan: str | None = tp_plan_option()
    vllm_tensor_parallel: int = vllm_tensor_parallel_option()
    vllm_memory: float = vllm_memory_option()
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the model; only for authors you trust",
        group=RUNNING,
    )

    def __post_init__(self) -> None:
        at_least(1, samples=self.samples)  # nothing re-derived is nothing verified
        at_least(0, seed=self.seed)
        _ = self.spread

    @property
    def spread(self) -> Spread:
        """How the target is spread over devices."""
        return spread_of(self)
