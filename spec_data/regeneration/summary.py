"""What `regenerate` prints: the counts, what needs attention, and the command that comes next."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.conversations import TRUNCATED
from spec_data.terminal.config import DOCUMENT_LENGTH

_SHOWN = 5  # failed conversations


def summary_text(record: Mapping[str, Any]) -> str:
    """Return the counts of a sampling record as text."""
    counts, settings = record["counts"], record["settings"]
    skipped = sum(counts["skipped"].values())
    lines = [
        f"rows      {counts['read']:,} read = {counts['written']:,} written + "
        f"{counts['failed']:,} failed + {skipped:,} skipped",
        f"answers   {counts['answers']:,}, {counts['tokens']:,} tokens; ended by "
        f"{_listed(counts['finish_reasons'])}",
        f"sampling  {_sampling(settings)}",
        f"by        {settings.get('target_name') or settings.get('server_model')}",
    ]
    if skipped:
        lines.append(f"skipped   {_listed(counts['skipped'])}")
    lines += [f"note      {number:,} {note}" for note, number in counts["notes"].items()]
    truncated = counts["finish_reasons"].get(TRUNCATED, 0)
    if truncated:
        lines.append(
            f"note      {truncated:,} answers reached {settings['max_new_tokens']:,} tokens; "
            "`generate` does not supervise their end. Raise --max-new-tokens, or --drop-truncated"
        )
    for failure in record["failed"][:_SHOWN]:
        lines.append(f"failed    {failure['where']}: {failure['reason']}")
    return "\n".join(lines)


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items()) or "none"


def _sampling(settings: Mapping[str, Any]) -> str:
    if settings["temperature"] == 0:
        return "greedy"
    top_k = settings["top_k"]
    parts = [f"temperature {settings['temperature']:g}", f"top-p {settings['top_p']:g}"]
    parts += [f"top-k {top_k}"] if top_k else []
    return ", ".join([*parts, f"seed {settings['seed']}"])


def next_command(config: RegenerateConfig, record: Mapping[str, Any]) -> list[str]:
    """Return the words of the `generate` that captures the answers.

    --on-policy takes the temperature from the sampling record.
    """
    out = Path(config.out)
    words = ["generate", "--target", config.target or record["settings"]["server_model"]]
    words += ["--corpus", config.out, "--out", str(out.with_suffix("")), "--on-policy"]
    if config.chat_template_kwargs != "{}":
        words += ["--chat-template-kwargs", config.chat_template_kwargs]
    if config.revision is not None:
        words += ["--revision", config.revision]
    if config.dtype != "auto":
        words += ["--dtype", config.dtype]
    if record["counts"]["longest"] > DOCUMENT_LENGTH:
        words += ["--max-length", str(record["counts"]["longest"])]
    return words
