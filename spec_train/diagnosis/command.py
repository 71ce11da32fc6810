"""The command: print the diagnosis, write its figures, and name what to run next."""

import json
from pathlib import Path

from spec_data.paths import check_file_to_write
from spec_data.shards.files import write_atomically
from spec_train.diagnosis.examination import examine_draft
from spec_train.diagnosis.outcome import UNDECIDED, Diagnosis
from spec_train.options.doctor_options import DoctorConfig


def run_doctor(config: DoctorConfig) -> tuple[Diagnosis, list[str]]:
    """Examine a draft, print the result and write --json; return it with the next command.

    Raises:
        As `examine_draft`, and ConfigError if --json cannot be written.
    """
    if config.json is not None:
        check_file_to_write("--json", config.json)
    found = examine_draft(config)
    print(found)
    if config.json is not None:
        text = json.dumps(found.to_json(), indent=2, ensure_ascii=False, default=str)
        write_atomically(Path(config.json), text + "\n")
    return found, next_command(found, config)


def next_command(found: Diagnosis, config: DoctorConfig) -> list[str]:
    """Return the command that decides more, or follows from a sound or a wrong draft."""
    target = ["--target", config.target] if config.target else []
    names = {check.name for check in found.findings}
    if names & {"data"} and config.data:
        return ["spec-data", "verify", config.data]
    if names:
        return ["spec-train", "export", "--draft", config.draft, "--check", *target]
    missing = any(check.state == UNDECIDED for check in found.checks)
    if missing and (config.data is None or config.target is None):
        data = ["--data", config.data or "DATA"]
        more = ["--target", config.target or "MODEL"]
        return ["spec-train", "doctor", "--draft", config.draft, *data, *more]
    if config.data:
        return ["spec-train", "eval", "--draft", config.draft, "--data", config.data]
    return ["spec-train", "export", "--draft", config.draft, "--check", *target]
