"""Count again, from the stored columns, how often supervised tokens are the target's first choice.

Arg max, token ids and masks are stored exactly, so the counts must equal those of the manifest. The
NLL is the one that generation measured.
"""

from collections import defaultdict

from spec_data.progress import progress
from spec_data.shards.likelihood import Agreement, read_agreement
from spec_data.shards.likelihood_text import figures_text, suspicions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.findings import Findings

_COLUMNS = ("input_ids", "loss_mask", "target_argmax")


def check_first_choices(dataset: HiddenStatesDataset, findings: Findings) -> None:
    """Compare first choices and supervised tokens of each source with the manifest.

    What generation found suspicious becomes a warning.
    """
    counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # first choices, tokens
    reader = HiddenStatesDataset(dataset.path, _COLUMNS)
    for index in progress(range(len(reader)), desc="first choices", unit="docs", leave=False):
        row = reader[index]
        asked = row["loss_mask"][1:] != 0
        hits = (row["target_argmax"][:-1] == row["input_ids"][1:]) & asked
        counted[row["source"]][0] += int(hits.sum())
        counted[row["source"]][1] += int(asked.sum())
    measured = read_agreement(dataset.manifest.raw)
    if measured is None:
        first, tokens = (sum(c[i] for c in counted.values()) for i in (0, 1))
        findings.passed(
            f"{first / max(tokens, 1):.1%} of {tokens:,} supervised tokens are the target's first "
            "choice; their NLL is not recorded (a view of a part of a source, or an older release)"
        )
        return
    for name, (first, tokens) in counted.items():
        _compare(name, first, tokens, measured.get(name), findings)
    for name in sorted(measured.keys() - counted.keys()):
        findings.fail(f"manifest.json, agreement: {name} is no source of this dataset")
    for message in suspicions(dataset.manifest.raw):
        findings.warn(message)


def _compare(
    name: str, first: int, tokens: int, measured: Agreement | None, findings: Findings
) -> None:
    """Compare the counts of one source with the manifest."""
    if measured is None or (first, tokens) != (measured.first_choice, measured.tokens):
        recorded = f"{measured.first_choice} of {measured.tokens}" if measured else "nothing"
        findings.fail(
            f"manifest.json, agreement of {name}: {recorded}, but the stored columns have {first} "
            f"first choices of {tokens} supervised tokens; generate the dataset again"
        )
        return
    findings.passed(f"{name}: {figures_text(measured)} (first choices counted again)")
