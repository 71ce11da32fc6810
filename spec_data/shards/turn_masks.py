"""Which tokens of a document are supervised, by its turns and a mask policy.

`generate` stores the mask and the turns; `fit --mask` applies another policy to these. Only what
may be supervised is a turn here, with its end-of-turn token.

    assistant      every turn (also those of plain text, and of given loss masks)
    last-turn      the last turn
    first-N        the first N turns
    roles=A,B      the turns of these roles: "assistant", "text" and "given" exist
    all            every token, also those outside turns
    without-reasoning   every turn, of a dataset that was generated so: its turns begin behind the
                        reasoning, of which no other dataset stores where it ends
"""

import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from spec_data.shards.errors import ConfigError

LAST_TURN, FIRST, ALL = "last-turn", "first-", "all"
WITHOUT_REASONING = "without-reasoning"
POLICIES = "assistant, last-turn, all, first-N (such as first-2), roles=A,B (such as roles=text)"
_FORM = re.compile(
    r"assistant|last-turn|all|without-reasoning|first-([1-9]\d{0,8})|roles=(\w+(?:,\w+)*)"
)

Turn = tuple[str, int, int]
"""Role, first token, and the token after the last one."""


def is_policy(policy: Any) -> TypeGuard[str]:
    """Return whether a value is a mask policy; a merge of several has the names of all."""
    return isinstance(policy, str) and _FORM.fullmatch(policy) is not None


def check_policy(policy: str) -> str:
    """Return a mask policy; ConfigError: there is no such policy."""
    if not is_policy(policy):
        raise ConfigError(f"mask = {policy!r}: choose from {POLICIES}")
    return policy


def roles_of(policy: str) -> tuple[str, ...]:
    """Return the roles that a policy names; none unless it is roles=A,B."""
    match = _FORM.fullmatch(policy)
    return tuple(match[2].split(",")) if match and match[2] else ()


def supervised_spans(length: int, turns: Sequence[Turn], policy: str) -> list[tuple[int, int]]:
    """Return the spans [start, end) of a document of `length` tokens that are supervised.

    Raises:
        ConfigError: the policy is unknown, or a turn lies outside the document.
    """
    check_policy(policy)
    for role, start, end in turns:
        if not 0 <= start < end <= length:
            raise ConfigError(
                f"turn {role} [{start}, {end}) is outside a document of {length} tokens"
            )
    if policy == ALL:
        return [(0, length)] if length else []
    chosen = turns
    if policy == LAST_TURN:
        chosen = turns[-1:]
    elif policy.startswith(FIRST):
        chosen = turns[: int(policy.removeprefix(FIRST))]
    elif roles := roles_of(policy):
        chosen = [turn for turn in turns if turn[0] in roles]
    return [(start, end) for _, start, end in chosen]
