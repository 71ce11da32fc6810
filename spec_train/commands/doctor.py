"""`spec-train doctor`: why is a draft not accepted?"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spec_data.shards.errors import ConfigError
from spec_data.terminal.command import command
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.rules import Excludes, Needs, ruled
from spec_data.terminal.types import (
    Columns,
    Corpus,
    Count,
    Dataset,
    Draft,
    File,
    Targets,
    path_list,
)

if TYPE_CHECKING:
    from spec_train.diagnosis.checks import Diagnosis


@command
@ruled(
    Excludes("corpus", "data", "--corpus is answered by --target, without --data; give that"),
    Needs("corpus", "target", "--corpus is answered by --target, without --data; give that"),
    Needs("columns", "corpus", "--columns names columns of --corpus; give that, or leave it out"),
    Excludes(
        "corpus",
        "documents=0",
        "--corpus would change nothing with --documents 0: none is tried",
    ),
    Needs("trust_remote_code", "target", "--trust-remote-code is about --target; add that"),
)
def doctor(
    draft: Draft,
    data: Dataset | None = None,
    target: Targets | None = None,
    *,
    corpus: Corpus | None = None,
    columns: Columns = "",
    documents: Count = 64,
    junit: File | None = None,
    fail_on: Literal["finding", "untried", "never"] = "finding",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> "Diagnosis":
    """Find out why a draft, of this or another trainer, is not accepted.

    Checks its files, its target and its data, and tries the conventions beside the declared ones
    on stored or new answers: layer ids and their order, shifts, norms, rope, windows, slots, mask
    token, vocabulary map. Findings come first, each with its evidence and what to do;
    docs/doctor.md explains their codes. The exit code is 1 with findings, see --fail-on.

    Examples:
        spec-train doctor --draft RUN --data DATA
        spec-train doctor --draft PUBLISHED --target MODEL --junit doctor.xml
        spec-train doctor --draft RUN --target MODEL FINE-TUNE

    Args:
        draft: a run (its best draft), a checkpoint or a draft directory, also of
            another trainer.
        data: a dataset of its target: its states decide which convention the draft was trained
            with, and its own damage is named.
        target: the target that serves: a directory, or a Hub id in the local cache. It is compared
            with the target of the draft and of the dataset, and with --data it computes the layers
            that the dataset lacks for a few documents. Without --data it answers prompts, and the
            draft is tried on these answers. Several, the draft's own first: is a drift that of
            the other target, or the draft's?
        corpus: prompts that --target answers, as `spec-data generate` takes them; not given: 64
            that are built in.
        columns: columns of --corpus under other names, such as prompt=query.
        documents: how many the draft is tried on, 12 or more; 0: none, only files are checked. More
            of them find smaller differences.
        junit: write the checks to this file as JUnit XML, which CI systems show.
        fail_on: what makes the exit code 1: finding, or a draft that cannot be read; untried: also
            if no convention could be tried, of a target without a chat template, say; never.
        device: of the draft, and of a target that answers: auto, cpu, cuda, cuda:1, ...
        trust_remote_code: run Python code that comes with the target; only for authors you trust.

    Returns:
        Every check with its evidence, the `findings` among them, and every convention tried.

    Raises:
        MissingError: draft, dataset or target do not exist.
        ConfigError: the device is not usable here, or an option has no meaning beside others.

    >>> found = spec_train.doctor("run")
    >>> found.kind, found.named("seal").state
    ('eagle3', 'ok')
    """
    if junit is not None:
        check_file_to_write("--junit", str(junit))
    targets = [] if target is None else path_list(target)
    if len(targets) > 1 and (data is not None or not documents):
        raise ConfigError(
            "several --target are compared on their own answers: leave --data and --documents 0 out"
        )
    from spec_train.diagnosis.drift import examine_over
    from spec_train.diagnosis.examination import examine

    def examined(one: str | None) -> "Diagnosis":
        return examine(
            str(draft),
            None if data is None else str(data),
            one,
            corpus=() if corpus is None else path_list(corpus),
            columns=columns,
            documents=documents,
            device=device,
            trust=trust_remote_code,
        )

    if len(targets) > 1:
        diagnosis = examine_over(targets, examined)
    else:
        diagnosis = examined(targets[0] if targets else None)
    if junit is not None:
        from spec_data.shards.files import remove_dead_of, write_atomically
        from spec_train.diagnosis.checks import junit_xml

        remove_dead_of(Path(junit).absolute())
        write_atomically(Path(junit).absolute(), junit_xml(diagnosis))
    return replace(diagnosis, fail_on=fail_on)
