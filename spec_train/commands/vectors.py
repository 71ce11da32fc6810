"""`spec-train vectors`: conformance vectors for engines, and a checker of their logs."""

from pathlib import Path
from typing import TYPE_CHECKING

from spec_data.shards.errors import ConfigError
from spec_data.terminal.command import command
from spec_data.terminal.rules import Excludes, Needs, ruled
from spec_data.terminal.types import Directory, File, Names, comma_list

if TYPE_CHECKING:
    from spec_train.conformance.check import CheckedLog
    from spec_train.conformance.write import WrittenVectors


@command
@ruled(
    Excludes(
        "only", "check", "--only {only} is about writing vectors; --check takes those of a log"
    ),
    Needs((), ("out", "check"), "--out: name the directory to write, or --check a log"),
)
def vectors(
    out: Directory | None = None, check: File | None = None, *, only: Names = ""
) -> "WrittenVectors | CheckedLog":
    """Write tiny drafts with what an engine must draft, or check an engine's log against them.

    For those who write an engine: for each published form of each draft a tiny target, a tiny
    draft, prompts, and the states, logits, drafted tokens, accept counts and output that must come
    out, computed in float64 by plain loops; and the numbers of common mistakes, so that a log names
    the one that was made. The README.md of the directory says how to run them.

    Examples:
        spec-train vectors --out vectors
        spec-train vectors --check engine.jsonl --out vectors
            exit code 1 if the engine failed a vector

    Args:
        out: new directory to write; with --check, the one with the vectors (not given: that of the
            log).
        check: log of an engine: one line of JSON per vector and prompt.
        only: write these vectors alone, such as eagle3,dspark.

    Returns:
        What was written, or the verdict on every vector.

    Raises:
        ConfigError: neither `out` nor `check`, a directory that is not empty, no such vector, or a
            log that cannot be read.
        MissingError: no vectors there.
    """
    if check is not None:
        from spec_train.conformance.check import check_log

        if not Path(check).is_file():
            raise ConfigError(f"--check {check}: no such file")
        return check_log(Path(check), Path(check).parent if out is None else Path(out))
    assert out is not None
    from spec_train.conformance.write import write_vectors

    return write_vectors(Path(out), [name for name in comma_list(only).split(",") if name])
