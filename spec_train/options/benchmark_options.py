"""Options of `spec-train eval` that make it a benchmark: sets of prompts, lengths, and costs."""

from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


def prompts_option(group: str) -> str | None:
    """Return the field of --prompts."""
    return option(
        None,
        help="what --target is asked: files, directories or datasets in any format of `spec-data "
        "generate --corpus`, with commas between them; answers are left out, and rows may also "
        "have prompt alone or turns. Named sets of the Hub: mt-bench, humaneval, mbpp, gsm8k, "
        "math-500, spec-bench, speculators, speed-bench. Every set, every part of one and every "
        "`category` of a file has figures of its own",
        group=group,
        metavar="PATH[,PATH]",
        holds=Kind.CORPUS,
    )


def draft_tokens_option(group: str) -> str:
    """Return the field of --draft-tokens."""
    return option(
        "0",
        help="tokens drafted per round; 0 = as many as the draft was trained for. Several, such as "
        "2,4,6,8, are compared with --target: the report names the fastest",
        group=group,
        metavar="N[,N]",
        numbers=True,
    )


def cost_ratio_option(group: str) -> float:
    """Return the field of --cost-ratio."""
    return option(
        0.0,
        help="time of one pass of the draft, divided by that of one pass of the target, where it "
        "will be served: the speed-up to expect there is modelled with it. 0 = the ratio measured "
        "here",
        group=group,
        metavar="C",
    )


def draft_depths(text: str | int) -> list[int]:
    """Return the numbers of --draft-tokens in ascending order; [0]: as the draft was trained.

    Raises:
        ConfigError: one is no whole number or negative, or 0 is beside others.
    """
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"--draft-tokens {text}: expected at least 0, or several numbers such as 2,4,6,8"
        )
    depths = sorted({int(part) for part in parts})
    if len(depths) > 1 and not depths[0]:
        raise ConfigError(f"--draft-tokens {text}: 0 stands alone; name the length instead")
    return depths


def check_benchmark(draft_tokens: str | int, cost_ratio: float, target: str | None) -> None:
    """Refuse values that contradict each other.

    Raises:
        ConfigError: several lengths or a cost ratio without a target; a ratio below 0.
    """
    if len(draft_depths(draft_tokens)) > 1 and target is None:
        raise ConfigError(
            f"--draft-tokens {draft_tokens}: several lengths are compared by real decoding; give "
            "--target and --prompts, or one length"
        )
    if not 0 <= cost_ratio < float("inf"):
        raise ConfigError(f"--cost-ratio {cost_ratio}: expected 0 (measured) or more")
    if cost_ratio and target is None:
        raise ConfigError("--cost-ratio models the speed of real decoding; it needs --target")
