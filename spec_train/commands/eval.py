"""`spec-train eval` and `compare`: acceptance of a draft, and of one against another."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from msgspec import Meta

from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.shards.turn_masks import check_policy
from spec_data.terminal.command import command
from spec_data.terminal.config import flag
from spec_data.terminal.paths import check_path
from spec_data.terminal.rules import Needs, ruled
from spec_data.terminal.types import (
    JOINED,
    AnyPath,
    Columns,
    Count,
    Dataset,
    Draft,
    File,
    JsonObject,
    Positive,
    Server,
    Share,
    Targets,
    more,
    path_list,
)

if TYPE_CHECKING:
    from spec_train.evaluation.compare import ComparedDrafts
    from spec_train.results import EvalResult

log = logging.getLogger(__name__)

Prompts = Annotated[AnyPath, JOINED, Parameter(metavar="PATH[,PATH]")]
DraftTokens = Annotated[str | int, JOINED, Parameter(metavar="N[,N]")]
_RUNNING = more("where it runs, and what it reads")
_DECODING = more("real decoding")
MAX_NEW_TOKENS = 256


_ENGINE = "--draft: a server drafts what it was started with"
_ANSWERS = "it is of real answers"
_NOTHING = "nothing to evaluate on: give --data, or --target with --prompts"
_PAIR = "--target and --prompts need each other: real decoding takes both"


def _needless(options: str, other: str, needed: str, idle: Any = None) -> list[Needs]:
    """Return the rules of options that change nothing without another one."""
    words = "would change nothing without"
    return [Needs(n, other, f"{flag(n)} {words} {needed}", idle) for n in options.split()]


@command
@ruled(
    Needs("server_model", "server", "--server-model names a model of --server; add that option"),
    *(Needs(asked, "draft", "which draft? give --draft DIR") for asked in ("data", "target")),
    Needs((), ("draft", "server"), "which draft? give --draft DIR"),
    Needs(
        ("draft", "server"),
        ("data", "target"),
        "--draft beside --server needs --data or --target, which predict what the server counts; "
        "give one, or leave --draft out",
    ),
    Needs("draft", ("data", "target"), _NOTHING),
    Needs("server", "prompts", "--server needs --prompts: what it is asked"),
    Needs("target", "prompts", _PAIR),
    Needs("prompts", ("target", "server"), _PAIR),
    *_needless(
        "tree_tokens cost_ratio", "target", "--target and --prompts: it is of real decoding"
    ),
    *_needless("max_new_tokens chat_template_kwargs columns", "prompts", f"--prompts: {_ANSWERS}"),
    *_needless("draft_tokens", "draft", _ENGINE, idle="0"),
    *_needless("confidence_threshold", "draft", _ENGINE),
    *_needless("accept_edited", "draft", "--draft: it is about its files"),
    *_needless("split", "data", "--data: it chooses its documents", idle="auto"),
    *_needless("trust_remote_code", "target", "--target: it is about its code"),
    Needs("mask", "data", "--mask {mask} is about --data; give it, or leave it out"),
)
def evaluate(
    draft: Draft | None = None,
    *,
    data: Dataset | None = None,
    target: Targets | None = None,
    prompts: Prompts | None = None,
    server: Server | None = None,
    draft_tokens: DraftTokens = 0,
    limit: Count = 0,
    split: Literal["auto", "validation", "train", "all"] = "auto",
    mask: str | None = None,
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0,
    max_new_tokens: Positive = MAX_NEW_TOKENS,
    tree_tokens: Annotated[Count, _DECODING] = 0,
    cost_ratio: Annotated[float, Meta(ge=0), _DECODING] = 0.0,
    confidence_threshold: Annotated[Share, _DECODING] = 0.0,
    chat_template_kwargs: Annotated[JsonObject | None, _DECODING] = None,
    columns: Annotated[Columns, _DECODING] = "",
    server_model: Annotated[str | None, _RUNNING] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _RUNNING] = "auto",
    device: Annotated[str, _RUNNING] = "auto",
    accept_edited: Annotated[bool, _RUNNING] = False,
    trust_remote_code: Annotated[bool, _RUNNING] = False,
) -> "EvalResult":
    """Measure a draft: on stored hidden states, or by real decoding with the target.

    With --data no target is needed. With --target and --prompts, it is also checked that greedy
    output equals the target's own. With --server, a live engine counts for itself.

    Examples:
        spec-train eval --draft RUN --data DATA
        spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --json result.json
        spec-train eval --server http://localhost:8000/v1 --prompts prompts.jsonl
        spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --tree-tokens 60
            with dynamic trees instead of chains or blocks (all drafts but peagle)
        spec-train eval --draft RUN --target MODEL FINE-TUNE --prompts prompts.jsonl
            one table of several targets: does the draft still fit the second one?
        RUN stands for its best draft; name RUN/last or RUN/checkpoint-00000500 for another.

    Args:
        draft: a run (its best draft), a checkpoint or a draft directory, in any form.
        data: dataset to measure on.
        target: model to decode with for real, together with prompts: what to trust before serving.
            Several (a fine-tune, a quantised copy, a later checkpoint) make one table: each is
            compared with the first on the same prompts.
        prompts: what the target is asked: files, directories or datasets in any format of
            `spec-data generate --corpus`, with commas between them; answers are left out, and rows
            may also have prompt alone or turns. Named sets of the Hub: mt-bench, humaneval, mbpp,
            gsm8k, math-500, spec-bench, speculators, speed-bench. Every set, every part of one and
            every `category` of a file has metrics of its own.
        server: a live vLLM, SGLang or llama.cpp that decodes with the draft: it is asked the
            prompts, and its own counters are printed, beside what --data and --target predict.
            The key is that of OPENAI_API_KEY. Needs: pip install openai.
        draft_tokens: tokens drafted per verification; 0: as the server drafts, else as the draft
            was trained. Several, such as 2,4,6,8, are compared by real decoding: the report names
            the fastest.
        limit: the first N prompts of each source or part of a named set, and the first N documents
            only; 0: all.
        split: with data: documents that the run held out (validation), trained on (train), or all.
            auto: validation on the dataset that it was trained on, if it held some out, else all.
        mask: with data: supervised tokens, as --mask of fit. Not given: those of the run on its own
            data, else the stored ones.
        temperature: 0 decodes greedily; above, samples without changing the target's distribution.
        max_new_tokens: longest response, in tokens.
        tree_tokens: decode with dynamic trees (EAGLE-2) of so many drafted tokens, --draft-tokens
            deep; 0: with chains or blocks. EAGLE-2 and EAGLE-3 use 60.
        cost_ratio: time of a pass of the draft, divided by that of the target, where it will be
            served: the speed-up to expect there is modelled with it; 0: as measured here.
        confidence_threshold: end the drafted tokens before the first one whose confidence is below
            it, for drafts that forecast it (DSpark); 0: never.
        chat_template_kwargs: for the chat template, such as {"enable_thinking": false}; not given:
            as the training data was rendered, where that is known.
        columns: columns of the prompts under other names, such as prompt=query.
        server_model: the model's name on the server; not given: the first one that it lists.
        dtype: of target and draft. auto: the target's own on a GPU, else float32, in which greedy
            decoding can be proven lossless.
        device: cpu, cuda, cuda:1, ...; auto: a GPU where there is one.
        accept_edited: measure a draft that is not as it was sealed, with a warning.
        trust_remote_code: run Python code that comes with the target; only for authors you trust.

    Raises:
        SpecDataError: draft, dataset, target or prompts do not exist or do not fit together.
        RunError: greedy decoding with the draft was not what the target alone says, no prompt
            could be answered, or the server does not respond.
    """
    depths = draft_depths(str(draft_tokens))
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"--temperature {temperature}: 0 (greedy) or at least {_LEAST_TEMPERATURE}"
        )
    if temperature and prompts is None:
        raise ConfigError(f"--temperature would change nothing without --prompts: {_ANSWERS}")
    targets = [] if target is None else path_list(target)
    if len(depths) > 1 and not targets:
        raise ConfigError(
            "several --draft-tokens would change nothing without --target and --prompts: it is of "
            "real decoding"
        )
    if server is not None and len(targets) > 1:
        raise ConfigError(
            "--server has one target; of several --target, its counters tell nothing. Give one"
        )
    if mask is not None:
        check_policy(mask)
    if prompts is not None and not Path(prompts).exists():
        for part in str(prompts).split(","):
            check_path("--prompts", part.strip(), Kind.CORPUS)
    from spec_train.evaluation.evaluate import (
        Documents,
        measure,
        require_sound,
        trained_identity,
        write_eval_page,
    )
    from spec_train.evaluation.exporting import export_command
    from spec_train.evaluation.on_server import Serving, compared_with, measure_server
    from spec_train.evaluation.on_target import Decoding
    from spec_train.evaluation.several_targets import measured_over
    from spec_train.reports.results import is_run
    from spec_train.results import EvalResult

    served = None
    if server is not None:
        serving = Serving(
            server=server,
            prompts=str(prompts),
            columns=columns,
            server_model=server_model,
            chat_template_kwargs=chat_template_kwargs,
            trained={} if draft is None else trained_identity(str(draft)),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )
        served = measure_server(serving, limit, targets[0] if targets else None, trust_remote_code)
        if draft is None:
            return EvalResult.of(compared_with(None, served))
        depths = [served["draft_tokens"] or 0] if depths == [0] else depths
    assert draft is not None
    decodings = [
        Decoding(
            target=one,
            prompts=str(prompts),
            columns=columns,
            chat_template_kwargs=chat_template_kwargs,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            tree_tokens=tree_tokens,
            cost_ratio=cost_ratio,
            trust_remote_code=trust_remote_code,
        )
        for one in targets
    ]
    documents = None if data is None else Documents(data=str(data), split=split, mask=mask)

    def measured(decoding: Decoding | None, about: str = "") -> dict[str, Any]:
        return measure(
            str(draft),
            documents if decoding is None or decoding is decodings[0] else None,
            decoding,
            draft_tokens=depths,
            limit=limit,
            confidence_threshold=confidence_threshold,
            dtype=dtype,
            device=device,
            accept_edited=accept_edited,
            about=about,
        )

    try:
        if len(decodings) > 1:
            report = measured_over(decodings, measured)
        else:
            report = measured(decodings[0] if decodings else None)
    except Exception:
        if served is not None:  # minutes of answers are not lost
            log.warning(
                "warning[server]: the server alone was measured: %s",
                EvalResult.of(compared_with(None, served)),
            )
        raise
    if served is not None:
        report = compared_with(report, served)
    require_sound(report)  # else a run's page would lead with it
    page = write_eval_page(Path(draft), report) if is_run(Path(draft)) else None
    export = export_command(str(draft), targets[0] if targets else None)
    export += ["--accept-edited"] * accept_edited
    return EvalResult.of(report, next_command=export, page=page)


_LEAST_TEMPERATURE = 1e-6
"""Below this, logits divided by the temperature may overflow, and sampling is greedy anyway."""


def draft_depths(text: str) -> list[int]:
    """Return the numbers of --draft-tokens in ascending order; [0]: as the draft was trained."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"--draft-tokens {text}: expected at least 0, or several numbers such as 2,4,6,8"
        )
    depths = sorted({int(part) for part in parts})
    if len(depths) > 1 and not depths[0]:
        raise ConfigError(f"--draft-tokens {text}: 0 stands alone; name the length instead")
    return depths


@command
def compare(first: File, second: File, *, seed: Count = 0) -> "ComparedDrafts":
    """Compare two evaluations by real decoding, prompt by prompt.

    Prints both acceptance lengths, the difference with its 95 % interval, and a p-value.

    Examples:
        spec-train eval --draft A --target MODEL --prompts prompts.jsonl --json a.json
        spec-train eval --draft B --target MODEL --prompts prompts.jsonl --json b.json
        spec-train compare a.json b.json

    Args:
        first: file of `eval --json`, of one draft.
        second: that of the other one, on equal prompts.
        seed: seed of the resamples.

    Raises:
        MissingError: a file does not exist.
        ConfigError: not evaluations with a target, or fewer than two prompts in common.
    """
    from spec_train.evaluation.compare import compare_files

    return compare_files(str(first), str(second), seed)
