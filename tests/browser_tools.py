"""Open a page of this project in an installed Chromium, without a network, and look at it.

`pip install '.[browser]'` has the Python side; the browser is the system's. Tests are skipped, with
the reason, where either is absent.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)


def find_browser() -> str:
    """Return the path of an installed Chromium (SPEC_CHROMIUM names another), or skip the test."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: '.[browser]'")
    found = os.environ.get("SPEC_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium is installed (or named by SPEC_CHROMIUM)")
    return found


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start the browser; it ends with the block."""
    executable = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        try:
            yield browser
        finally:
            browser.close()


def wait_until(tab: Any, expression: str, seconds: float = 20.0) -> None:
    """Wait until an expression is true. (The page's policy forbids `wait_for_function`'s eval.)"""
    until = time.monotonic() + seconds
    while not tab.evaluate(expression):
        assert time.monotonic() < until, expression
        time.sleep(0.05)


@contextmanager
def open_page(
    browser: Any, file: Path, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> Iterator[Any]:
    """Open a page and wait until it is built; afterwards fail on any error of its console.

    Every request but that of the file itself is refused and counts as an error.
    """
    errors: list[str] = []
    shape = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=shape, color_scheme="dark" if dark else "light")
    tab = context.new_page()
    tab.on("console", lambda line: line.type in ("error", "warning") and errors.append(line.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("dialog", lambda box: (errors.append(f"dialog: {box.message}"), box.dismiss()))
    url = file.resolve().as_uri()

    def only_the_file(route: Any) -> None:
        if route.request.url.split("#")[0] == url:
            route.continue_()
        else:
            errors.append(f"request of {route.request.url}")
            route.abort()

    context.route("**/*", only_the_file)
    tab.goto(url)
    tab.wait_for_selector("html[data-ready]", state="attached")
    try:
        yield tab
    finally:
        context.close()
    assert not errors, errors


def scrolls_sideways(tab: Any) -> bool:
    """Return whether the page is wider than its window."""
    return bool(tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"))
