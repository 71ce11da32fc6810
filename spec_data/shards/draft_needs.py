"""Which drafts a dataset can train: one rule for `generate`, which warns, and `fit`."""

from spec_data.shards.schema import ALL, FINAL


def data_problem(draft: str, supervision: str, final: str) -> str | None:
    """Return why a draft cannot be fitted on a dataset, and what to do; None if it can.

    `supervision` and `final` are those of the manifest.
    """
    if draft == "eagle" and supervision != "final-hidden":
        return (
            f"--supervision {supervision} keeps no {FINAL}, and an eagle draft reads and predicts "
            "the final hidden states. Generate with --supervision final-hidden, or fit eagle3"
        )
    if draft == "eagle" and final != ALL:
        return (
            f"--final {final} keeps {FINAL} only where the next token is supervised; an eagle "
            "draft reads it at every token of the prompt too. Generate with --final all, or fit "
            "eagle3"
        )
    return None
