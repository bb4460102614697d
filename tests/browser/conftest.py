"""Chromium, driven by Playwright, and stand-ins for clusters that it looks at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from gazette_sdk.transport.loop import run
from support.chromium import program
from support.console_stand_in import StandIn, World

TIMEOUT_MS = 10_000


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents and item.path.name != "test_decode.py":
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")  # Playwright runs an event loop in the thread until it ends
def browser() -> Iterator[Browser]:
    chromium = program()
    if chromium is None:
        missing = "Chromium is not installed; run scripts/setup dev"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


class Visit:
    """A page of the console, and everything that the browser has reported about it.

    Attributes:
        page: the page.
        expected: text of reports that a test causes on purpose.
    """

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.reports: list[str] = []
        self.requests: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.page.on("console", lambda message: self.reports.append(message.text))
        self.page.on("pageerror", lambda error: self.reports.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.reports.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, endpoint: str, place: str = "/") -> Page:
        self.page.goto(f"{endpoint}/console/#{place}")
        return self.page

    def be(self, *, hidden: bool) -> None:
        """Hide the tab, or show it, as far as its page knows."""
        self.page.evaluate(
            "(hidden) => { Object.defineProperty(document, 'hidden',"
            " {configurable: true, get: () => hidden});"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )

    @property
    def unexpected(self) -> list[str]:
        return [text for text in self.reports if not any(each in text for each in self.expected)]

    @property
    def paths(self) -> list[str]:
        return [urlsplit(url).path for url in self.requests]


@pytest.fixture
def visits(browser: Browser) -> Iterator[Any]:
    """Open visits; afterwards no console message, no error and no report of the policy is left."""
    opened: list[tuple[BrowserContext, Visit]] = []

    def visit(beside: Visit | None = None, **options: Any) -> Visit:
        if beside is not None:  # another tab of the same browser
            opened.append((beside.page.context, found := Visit(beside.page.context)))
            return found
        options = {
            "viewport": {"width": 1280, "height": 800},
            "reduced_motion": "reduce",
            **options,
        }
        context = browser.new_context(**options)
        found = Visit(context)
        opened.append((context, found))
        return found

    yield visit
    for context, _ in opened:
        context.close()
    assert [each.unexpected for _, each in opened] == [[] for _ in opened]


@pytest.fixture
def visit(visits: Any) -> Visit:
    return visits()


@pytest.fixture
def stand_in() -> Iterator[Any]:
    """Start stand-ins for clusters."""
    started: list[StandIn] = []

    def start(component: str = "cluster", **world: Any) -> StandIn:
        async def scenario() -> StandIn:
            return await StandIn(World(**world), component).__aenter__()

        found: StandIn = run(scenario(), 20)
        started.append(found)
        return found

    yield start
    for each in started:
        run(each.__aexit__(), 20)
