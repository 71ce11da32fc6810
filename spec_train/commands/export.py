"""`spec-train export`: a draft in the form of an engine or trainer, or a report on all of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import Parameter
from msgspec import Meta

from spec_data.terminal.command import command
from spec_data.terminal.rules import Needs, OneOf, ruled
from spec_data.terminal.types import Dataset, Directory, Draft, Positive, Target, more

if TYPE_CHECKING:
    from spec_train.evaluation.exporting import ExportResult

Form = Literal["vllm", "sglang", "speculators", "deepspec", "transformers", "target", "hf"]
_SMALLER = more("a smaller vocabulary")
_Part = Annotated[float, Meta(gt=0, le=1), Parameter(metavar="SHARE")]


_SIZES = ("draft_vocab_size", "draft_vocab_coverage")


@command
@ruled(
    Needs("out", "format", f"--out {{out}} needs --format: {', '.join(get_args(Form))}"),
    OneOf(_SIZES, "{given}: each of them chooses the draft vocabulary; give one"),
    *(
        Needs(
            name,
            "data",
            "a size or share does not say which tokens to keep: add --data DIR, in which they are "
            "counted",
        )
        for name in _SIZES
    ),
    Needs(
        "data", _SIZES, "--data has no effect without --draft-vocab-size or --draft-vocab-coverage"
    ),
)
def export(
    draft: Draft,
    out: Directory | None = None,
    format: Form | None = None,
    target: Target | None = None,
    *,
    draft_vocab_size: Annotated[Positive | None, _SMALLER] = None,
    draft_vocab_coverage: Annotated[_Part | None, _SMALLER] = None,
    data: Annotated[Dataset | None, _SMALLER] = None,
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
        draft_vocab_size: write a smaller draft that can propose only this many tokens, those of its
            own that are most frequent in --data. Rows of its head are kept or dropped, not changed.
        draft_vocab_coverage: the same with the fewest tokens that hold this share of the supervised
            tokens of --data, such as 0.99.
        data: dataset in which tokens are counted, and what a smaller vocabulary costs is measured.
        accept_edited: read a draft that is not as it was sealed, with a warning.

    Raises:
        ConfigError: `out` without `format`, or one that exists; options that do not fit together.
        DraftError: a draft that cannot be read, or that the format or its engines cannot hold.
        MissingError, TargetError: no such target, or a damaged one.
    """
    from spec_train.evaluation.exporting import export_draft
    from spec_train.evaluation.pruning import SmallerVocabulary

    return export_draft(
        str(draft),
        None if out is None else Path(out),
        format,
        None if target is None else str(target),
        vocabulary=None
        if data is None
        else SmallerVocabulary(str(data), draft_vocab_size, draft_vocab_coverage),
        accept_edited=accept_edited,
    )
