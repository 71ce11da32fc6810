"""`spec-data verify`: is a dataset intact, and does its target still produce it?"""

from typing import TYPE_CHECKING

from spec_data.models.target_options import EngineOptions
from spec_data.terminal.command import command
from spec_data.terminal.types import Dataset, Positive, Target

if TYPE_CHECKING:
    from spec_data.verification.findings import VerifyReport


@command
def verify(
    data: Dataset,
    target: Target | None = None,
    *,
    samples: Positive = 16,
    running: EngineOptions = EngineOptions(),
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
        running: how the target runs, and the device that computes logits.

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
    from spec_data.pages.report import fit_words
    from spec_data.verification.run import examine

    running.check()
    with leading(running.spread):  # of the processes of --tp-plan, only the first comes here
        path = None if target is None else str(target)
        report = examine(str(data), path, samples=samples, running=running)
    if report.ok:
        report.next_command = fit_words(str(data))
    return report
