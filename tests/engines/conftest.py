"""Tests against other people's engines run when they are asked for: pytest -m engines."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them elsewhere: they take minutes, and say nothing about our own code's change."""
    if "engines" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="compares with real engines: run it with -m engines")
    for item in items:
        if item.get_closest_marker("engines"):
            item.add_marker(skip)
