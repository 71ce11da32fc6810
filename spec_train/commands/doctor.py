"""`spec-train doctor`: why is a draft not accepted?"""

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from spec_data.terminal.command import command
from spec_data.terminal.types import WHOLE, Dataset, Draft, Target

if TYPE_CHECKING:
    from spec_train.diagnosis.checks import Diagnosis


@command
def doctor(
    draft: Draft,
    data: Dataset | None = None,
    target: Target | None = None,
    *,
    documents: Annotated[int, Meta(ge=12), WHOLE] = 64,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> "Diagnosis":
    """Find out why a draft, of this or another trainer, is not accepted.

    Checks its files, its target and its data, and tries the conventions beside the declared ones
    on a dataset: layer ids and their order, shifts, norms, rope, slots, mask token, vocabulary map.
    Findings come first, each with its evidence and what to do. The exit code is 1 with findings.

    Examples:
        spec-train doctor --draft RUN --data DATA
        spec-train doctor --draft PUBLISHED --data DATA --target MODEL

    Args:
        draft: a run (its best draft), a checkpoint or a draft directory, also of
            another trainer.
        data: a dataset of its target: its states decide which convention the draft was trained
            with, and its own damage is named.
        target: the target that serves: a directory, or a Hub id in the local cache. It is compared
            with the target of the draft and of the dataset, and with --data it computes the layers
            that the dataset lacks for a few documents.
        documents: documents of --data that the draft is tried on, 12 or more. More of them find
            smaller differences.
        device: of the draft: auto, cpu, cuda, cuda:1, ...
        trust_remote_code: run Python code that comes with the target; only for authors you trust.

    Returns:
        Every check with its evidence, the `findings` among them, and every convention tried.

    Raises:
        MissingError: draft, dataset or target do not exist.
        ConfigError: the device is not usable here.

    >>> found = spec_train.doctor("run")
    >>> found.kind, found.named("seal").state
    ('eagle3', 'ok')
    """
    from spec_train.diagnosis.examination import examine

    return examine(
        str(draft),
        None if data is None else str(data),
        None if target is None else str(target),
        documents=documents,
        device=device,
        trust=trust_remote_code,
    )
