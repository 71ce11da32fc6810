"""The options of `spec-data add-layers` (see config.py)."""

from dataclasses import dataclass

from spec_data.options.option_values import (
    CAPTURE,
    REQUIRED,
    RUNNING,
    parse_batch_tokens,
    parse_drafts,
)
from spec_data.options.placement_options import (
    Spread,
    device_map_option,
    max_memory_option,
    offload_dir_option,
    spread_of,
    tp_plan_option,
)
from spec_data.options.view_options import dry_run_option
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


@dataclass(frozen=True, kw_only=True)
class AddLayersConfig:
    """Options of `add-layers`."""

    data: str = option(
        help="the dataset directory; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DATASET,
    )
    target: str = option(
        help="the target that the dataset was captured with: a local directory or a Hugging Face "
        "Hub id. Another one, also a fine-tuned or quantised one, is refused",
        group=REQUIRED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    layers: str | None = option(
        None,
        help="layer ids to add, such as 7,9. Id k is the output of decoder block k, counted from "
        "0; -1 is the embedding output",
        group=CAPTURE,
        metavar="IDS",
    )
    for_drafts: str | None = option(
        None,
        flag="for",
        help="instead of --layers: add what these drafts read and the dataset lacks, such as "
        "dspark,peagle. `spec-train fit` then takes the layers of its draft",
        group=CAPTURE,
        metavar="DRAFTS",
    )
    out: str | None = option(
        None,
        help="write a new dataset here, whose other files are hard links. Not given: the dataset "
        "itself gets the layers. The same command resumes an interrupted run",
        group=CAPTURE,
        metavar="DIR",
    )
    batch_tokens: str = option(
        "auto",
        help="tokens per forward of the target; auto as in `generate`",
        group=RUNNING,
        metavar="N",
        numbers=True,
    )
    device: str = option(
        "auto",
        help="device of the target: auto (a GPU where there is one), cpu, cuda, cuda:1, ...",
        group=RUNNING,
    )
    device_map: str | None = device_map_option()
    max_memory: str | None = max_memory_option()
    offload_dir: str | None = offload_dir_option()
    tp_plan: str | None = tp_plan_option()
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the model; only for authors you trust",
        group=RUNNING,
    )
    dry_run: bool = dry_run_option(
        ". Every token that escapes the codec adds 2 H + 4 bytes per layer"
    )

    backend = "hf"  # not options here; what `spread_of` reads
    vllm_tensor_parallel = 1
    vllm_memory = 0.8

    def __post_init__(self) -> None:
        if (self.layers is None) == (self.for_drafts is None):
            raise ConfigError("pass --layers or --for: which layers are added")
        _ = self.forward_tokens, self.drafts, self.spread

    @property
    def forward_tokens(self) -> int | None:
        """The tokens per forward of --batch-tokens; None for auto."""
        return parse_batch_tokens(self.batch_tokens)

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts of --for, in the order given; empty without it."""
        return parse_drafts(self.for_drafts) if self.for_drafts else ()

    @property
    def spread(self) -> Spread:
        """How the target is spread over devices."""
        return spread_of(self)
