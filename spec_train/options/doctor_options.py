"""The options of `spec-train doctor`. No torch here: `--help` is instant."""

from dataclasses import dataclass

from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option
from spec_train.options.command_options import FILES, REQUIRED, RUNNING
from spec_train.options.training import at_least

ENGINES = ("vllm", "sglang", "llama.cpp")
"""The engines whose rules the doctor can apply."""

LEAST_DOCUMENTS = 12
"""With fewer, no permutation test of some twenty conventions can be clear."""

_EXAMINED = "what it is examined with"


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Options of `spec-train doctor`: why is this draft not accepted?"""

    draft: str = option(
        help="the draft, of any trainer: a run (its best draft), a checkpoint or a draft directory",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.DRAFT,
    )
    data: str | None = option(
        None,
        help="a dataset of the draft's target: its states decide which convention the draft was "
        "trained with, and its own damage is named. A directory or a URL",
        group=_EXAMINED,
        metavar="DIR",
        dataset="read",
        holds=Kind.DATASET,
    )
    target: str | None = option(
        None,
        help="the target that serves: a directory, or a Hub id in the local cache. It is compared "
        "with the target of the draft and of the dataset, and with --data it computes the layers "
        "that the dataset lacks for a few documents",
        group=_EXAMINED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    engine: str | None = option(
        None,
        help="also apply the rules of this engine: does it load the draft, and compute what was "
        "trained?",
        group=_EXAMINED,
        choices=ENGINES,
    )
    documents: int = option(
        64,
        help="documents of --data that the draft is tried on, 12 or more. More of them find "
        "smaller differences",
        group=_EXAMINED,
        metavar="N",
    )
    split: str = option(
        "auto",
        help="documents of --data: those that the draft's run held out (validation), the others "
        "(train), or all. auto: validation on the dataset it was trained on, else all",
        group=_EXAMINED,
        choices=("auto", "validation", "train", "all"),
    )
    whole_data: bool = option(
        False,
        help="check every byte of --data, also if it is larger than 4 GB; a smaller dataset is "
        "always checked whole",
        group=_EXAMINED,
    )
    seed: int = option(0, help="seed of the resamples and of the control", group=RUNNING)
    device: str = option(
        "auto", help="device of the draft: auto, cpu, cuda, cuda:1, ...", group=RUNNING
    )
    dtype: str = option(
        "auto",
        help="dtype of the draft; auto: bf16 on a GPU, fp32 on a CPU",
        group=RUNNING,
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the target; only for authors you trust",
        group=RUNNING,
    )
    json: str | None = option(
        None, help="write every check and figure to this file", group=FILES, metavar="FILE"
    )

    def __post_init__(self) -> None:
        """Refuse counts that measure nothing."""
        at_least(self, LEAST_DOCUMENTS, "documents")
        at_least(self, 0, "seed")
