"""`spec-train export`: a draft in the form of an engine or trainer, or a report on all of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from spec_data.shards.errors import ConfigError
from spec_data.terminal.command import command
from spec_data.terminal.types import Directory, Draft, Target, more

if TYPE_CHECKING:
    from spec_train.evaluation.exporting import ExportResult

Form = Literal["vllm", "sglang", "speculators", "deepspec", "transformers", "target", "hf"]


@command
def export(
    draft: Draft,
    out: Directory | None = None,
    format: Form | None = None,
    target: Target | None = None,
    *,
    accept_edited: Annotated[bool, more("what is read")] = False,
) -> "ExportResult":
    """Write a draft in the form that an engine or another trainer reads.

    It is checked before it is written (does the engine load it, and compute what was trained?) and
    read back afterwards: it must be the same draft, bit for bit. Without --out, nothing is written:
    the report says what every engine would make of the draft.

    Examples:
        spec-train export --draft RUN
            what would every engine do with it?
        spec-train export --draft RUN --format vllm --out my-eagle3 --target MODEL
        spec-train export --draft RUN --format speculators --out spec --target Qwen/Qwen3-8B
            the form that vLLM serves as a model: it names its target
        spec-train export --draft PUBLISHED --format hf --out DRAFT --target MODEL
            someone else's draft as a checkpoint of spec-train, for `eval` and `fit --init-from`

    Args:
        draft: a run (its best draft), a checkpoint or a draft directory, in any of these forms.
        out: new directory to write; not given: only report, and fail if `format` refuses the draft.
        format: vllm and sglang (also for llama.cpp's converter) are flat directories, speculators
            has its own layout, deepspec and transformers (only DFlash) their classes; target (only
            MTP) is a copy of the target, of links and the weight files that changed; hf is
            spec-train's own.
        target: the draft's target: a directory, or a Hub id in the local cache. It is compared with
            the target of the training; its name is written where a form names the target.
        accept_edited: read a draft that is not as it was sealed, with a warning.

    Raises:
        ConfigError: `out` without `format`, or one that exists.
        DraftError: a draft that cannot be read, or that the format or its engines cannot hold.
        MissingError, TargetError: no such target, or a damaged one.
    """
    if out is not None and format is None:
        raise ConfigError(f"--out {out} needs --format: {', '.join(get_args(Form))}")
    from spec_train.evaluation.exporting import export_draft

    return export_draft(
        str(draft),
        None if out is None else Path(out),
        format,
        None if target is None else str(target),
        accept_edited=accept_edited,
    )
