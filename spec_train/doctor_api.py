"""`spec_train.doctor` for Python: what the command does, without printing."""

from pathlib import Path
from typing import Any

from spec_data.terminal.keywords import from_keywords, takes_options
from spec_train.diagnosis.examination import examine_draft
from spec_train.diagnosis.outcome import Diagnosis
from spec_train.options.doctor_options import DoctorConfig


@takes_options(DoctorConfig)
def doctor(
    draft: str | Path,
    data: str | Path | None = None,
    target: str | Path | None = None,
    engine: str | None = None,
    **options: Any,
) -> Diagnosis:
    """Find out why a draft is not accepted.

    Args:
        draft: a run (its best draft), a checkpoint or a draft directory, of any trainer.
        data: a dataset of its target, to try the neighbouring conventions on.
        target: the target that serves: a model directory or name.
        engine: "vllm", "sglang" or "llama.cpp", whose rules are applied too.
        options: those of `spec-train doctor`, listed below.

    Returns:
        Every check with its evidence, the `findings` among them, and every convention tried.

    Raises:
        OptionError (a ConfigError and a TypeError): an unknown option.
        MissingError: draft, dataset or target do not exist.

    >>> found = spec_train.doctor("run")
    >>> found.kind, found.named("seal").state
    ('eagle3', 'ok')
    """
    given = {"draft": draft, "data": data, "target": target, "engine": engine, **options}
    return examine_draft(from_keywords(DoctorConfig, given, "doctor"))
