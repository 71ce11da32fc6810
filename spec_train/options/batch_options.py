"""The option of `spec-train eval` that decodes several prompts at a time."""

from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import option


def batch_prompts_option(group: str) -> int:
    """Return the field of --batch-prompts."""
    return option(
        0,
        help="prompts that share a forward of the target and of the draft, after the first ones, "
        "which are timed one by one; changes no figure but times. 0 = 8 in float32, 1 in half "
        "precision, where another batch may decide ties otherwise. Trees (--tree-tokens) are "
        "decoded one by one",
        group=group,
        metavar="N",
    )


def check_batch_prompts(batch_prompts: int, tree_tokens: int) -> None:
    """Refuse values of --batch-prompts that cannot be used.

    Raises:
        ConfigError: it is negative, or above 1 with --tree-tokens.
    """
    if batch_prompts < 0:
        raise ConfigError(f"--batch-prompts {batch_prompts}: expected 0 (automatic) or more")
    if batch_prompts > 1 and tree_tokens:
        raise ConfigError(
            f"--batch-prompts {batch_prompts} with --tree-tokens {tree_tokens}: trees are decoded "
            "one by one; leave one of the two out"
        )
