"""Names of sources: two files or datasets of one name are two.

A dataset stores the name of a source and not its path, which is one of this machine. Where several
sources have one name, as much of their folders stands before it as tells them apart.
"""

from collections.abc import Sequence
from pathlib import PurePath

from spec_data.shards.reader import HiddenStatesDataset

_FOLDERS = 3  # before a name, at most


def distinct(names: Sequence[str], places: Sequence[object], folders: Sequence[str]) -> list[str]:
    """Return a name for each source; a name that only one place has stays.

    Args:
        names: as they would be stored.
        places: what tells the sources apart: equal ones are one source.
        folders: the folder that each lies in, with "/"; "": it has none.
    """
    chosen = list(names)
    for name in dict.fromkeys(names):
        same = [i for i, other in enumerate(names) if other == name]
        if len({places[i] for i in same}) < 2:
            continue
        others = {chosen[i] for i in range(len(names)) if i not in same}
        for depth in range(1, _FOLDERS + 1):
            tried = {i: "/".join([*_last(folders[i], depth), name]) for i in same}
            if _tell_apart(tried, places) and not others & set(tried.values()):
                break
        else:
            tried = _numbered(name, same, places, others)
        for i in same:
            chosen[i] = tried[i]
    return chosen


def renamed_sources(datasets: Sequence[HiddenStatesDataset]) -> list[dict[str, str]]:
    """Return, for each of several datasets, the new names of its sources that others have, too.

    Sources of one name and one hash are the same one.
    """
    found = [(n, record) for n, d in enumerate(datasets) for record in d.manifest.corpus]
    names = distinct(
        [record.source for _, record in found],
        [record.sha256 for _, record in found],
        [str(datasets[n].location).rstrip("/") for n, _ in found],
    )
    renamed: list[dict[str, str]] = [{} for _ in datasets]
    for (number, record), name in zip(found, names, strict=True):
        if name != record.source:
            renamed[number][record.source] = name
    return renamed


def _last(folder: str, depth: int) -> list[str]:
    return [part for part in PurePath(folder).parts if part not in ("/", ".", "..")][-depth:]


def _tell_apart(tried: dict[int, str], places: Sequence[object]) -> bool:
    return len(set(tried.values())) == len({places[i] for i in tried})


def _numbered(
    name: str, same: Sequence[int], places: Sequence[object], others: set[str]
) -> dict[int, str]:
    """Return NAME, NAME#2, NAME#3 ... in the order of the places."""
    numbers: dict[object, str] = {}
    number = 1
    for i in same:
        if places[i] in numbers:
            continue
        tried = name if number == 1 else f"{name}#{number}"
        while tried in others:
            number += 1
            tried = f"{name}#{number}"
        numbers[places[i]] = tried
        number += 1
    return {i: numbers[places[i]] for i in same}
