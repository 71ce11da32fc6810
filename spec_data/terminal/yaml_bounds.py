"""Bounds of a YAML text: its depth, and what it has after its aliases are written out.

Readers make each alias (*name) the value of its anchor (&name). Ten lines of ten aliases each are
ten thousand million values then; and readers of deep texts fail without a word.
"""

from typing import Any

_DEEPEST, _MOST = 50, 100_000


def check_yaml(text: bytes) -> None:
    """Raise ValueError for a YAML text whose values are too deep, or too many.

    The events of its parser are counted; nothing is built.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str, int] = {}  # values below each anchor
    open_: list[tuple[str | None, int]] = []  # anchors of what is not closed, and values before it
    count = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            anchor: Any = getattr(event, "anchor", None)
            if isinstance(event, yaml.AliasEvent):
                if any(name == anchor for name, _ in open_):
                    raise ValueError(f"*{anchor} stands inside of what it repeats")
                count += sizes.get(anchor, 0)
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                sizes |= {anchor: 1} if anchor else {}
            elif isinstance(event, yaml.CollectionStartEvent):
                open_.append((anchor, count))
                count += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                name, before = open_.pop()
                sizes |= {name: count - before} if name else {}
            if len(open_) > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} brackets in one another")
            if count > _MOST:
                raise ValueError(f"more than {_MOST:,} values, with its aliases (*) written out")
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
