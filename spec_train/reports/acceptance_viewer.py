"""The viewer of drafted tokens: which were accepted, which the target rejected or corrected."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spec_data.pages.page_parts import Viewer
from spec_train.reports.stored_figures import Measured
from spec_train.simulation.sample_texts import with_characters

_HERE = Path(__file__).parent


def acceptance_viewer(found: Sequence[Measured]) -> Viewer | None:
    """Return the viewer of the responses that evaluations have kept; None if they kept none.

    Args:
        found: evaluations, in the order in which they are shown.

    Returns:
        Its data are `texts` (of token ids, by group) and `samples`, each with its `group` (an
        index), the `evaluation`, whether it is `real` decoding, and name, source and parts as in
        `simulation.samples`. A part may have `whole`: texts that differ from those of the tokens
        alone, by list ("tokens", "drafted", "emitted", "choice") and position.
    """
    texts: list[dict[str, str]] = []
    samples: list[dict[str, Any]] = []
    for one in found:
        kept = one.figures.get("samples") or ()
        if not kept:
            continue
        for sample in kept:
            samples.append(
                {
                    "group": len(texts),
                    "evaluation": one.name,
                    "real": one.real,
                    "tree": bool(one.figures.get("tree_tokens")),
                    "name": str(sample["name"]),
                    "source": str(sample.get("source") or ""),
                    "parts": with_characters(sample["parts"], one.texts),
                }
            )
        texts.append(one.texts)
    if not samples:
        return None
    data = {"texts": texts, "samples": samples}
    script, style = _asset("acceptance_viewer.js"), _asset("acceptance_viewer.css")
    return Viewer(name="acceptance", data=data, script=script, style=style)


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
