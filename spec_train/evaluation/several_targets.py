"""One draft over several targets: a fine-tune, a quantised copy, a later checkpoint.

Every target answers the same prompts, and each is compared with the first one, prompt by prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_train.evaluation.compare import prompt_counts
from spec_train.evaluation.on_target import Decoding
from spec_train.simulation.intervals import compare

_OF_EACH = (
    *("target", "acceptance_length", "interval", "accept_rate", "rounds"),
    *("responses", "identical", "speedup"),
)


def measured_over(
    decodings: Sequence[Decoding], measure_one: Callable[[Decoding, str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the metrics of the first target, and those of all as `targets` and `others`.

    `measure_one` takes how to decode, and what its warnings begin with. `targets` has a line for
    each; `others` are the whole metrics of all but the first.
    """
    reports = [measure_one(one, f"{one.target}: ") for one in decodings]
    first = reports[0]
    targets = [{name: report[name] for name in _OF_EACH} for report in reports]
    for line, report in zip(targets[1:], reports[1:], strict=True):
        line["against_first"] = against(first, report)
    warnings = [text for report in reports for text in report["warnings"]]
    return first | {"warnings": warnings, "targets": targets, "others": reports[1:]}


def against(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return `difference`, `interval`, `p_value` and `prompts` of another target against the first.

    None: fewer than two prompts have a verification with both, as where their chat templates
    differ.
    """
    counts = [prompt_counts(report["per_prompt"]) for report in (first, other)]
    common = [prompt for prompt in counts[0] if prompt in counts[1]]
    a, b = (np.array([c[p] for p in common], dtype=np.int64).reshape(-1, 2) for c in counts)
    try:
        found = compare(a, b)
    except ValueError:
        return None
    names = ("difference", "interval", "p_value", "prompts")
    figures = {name: getattr(found, name) for name in names}
    return figures | {"interval": list(found.interval)}
