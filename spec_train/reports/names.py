"""Short names of runs and files that a page tells apart."""

from collections.abc import Sequence
from pathlib import Path


def short_names(places: Sequence[Path]) -> list[str]:
    """Return a name for every path: its last parts, as many as tell it apart from the others.

    Args:
        places: runs and files; one that is there twice gets a number.
    """
    whole = [place.absolute().parts for place in places]
    names = []
    for i, parts in enumerate(whole):
        others = [other for k, other in enumerate(whole) if k != i and other != parts]
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        name = "/".join(part.strip("/") for part in parts[-count:])
        earlier = sum(other == parts for other in whole[:i])
        names.append(f"{name} ({earlier + 1})" if earlier else name)
    return names
