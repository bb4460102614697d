"""Processor time of the tasks of a page, which other work on the machine hardly changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page

_CATEGORIES = ["disabled-by-default-devtools.timeline", "__metadata"]


@contextmanager
def tasks_of(page: Page) -> Iterator[list[float]]:
    """Yield a list that has afterwards the processor times of the page's tasks, in milliseconds."""
    browser = page.context.browser
    assert browser is not None
    found: list[float] = []
    browser.start_tracing(page=page, categories=_CATEGORIES)
    try:
        yield found
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    found += [
        event["tdur"] / 1000
        for event in events
        if event["name"] == "RunTask" and "tdur" in event and (event["pid"], event["tid"]) in main
    ]
