"""The console without a mouse."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from support.console_stand_in import sample_content, sample_events, sample_name

NAME = sample_name(0)


@pytest.fixture
def page(stand_in, visit):
    cluster = stand_in(journals=60, content={NAME: sample_content()}, events=sample_events())
    page = visit.open(cluster.server.endpoint)
    expect(page.get_by_text("What needs you")).to_be_visible()
    return page


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def test_a_journal_is_found_and_opened(page):
    press(page, "g", "j")
    expect(page.locator(".rows .row").first).to_be_visible()
    press(page, "/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("orders/part-00")
    expect(page.locator(".rows .row")).to_have_count(10)
    press(page, "Enter")
    expect(page.locator(".table")).to_be_focused()
    press(page, "j", "j", "k", "Enter")
    expect(page.locator("h1")).to_contain_text("acme/orders/part-000")
    expect(page.locator(".rows .row")).to_have_count(9)
    press(page, "j", "j")
    expect(page.locator(".detail")).to_contain_text("Message at")
    press(page, "Escape")
    expect(page.locator(".detail")).to_have_count(0)


def test_tabs_are_changed_by_arrows(page):
    page.goto(page.url.replace("#/", f"#/journals/{NAME}"))
    page.get_by_role("tab", name="Messages").focus()
    press(page, "ArrowRight")
    expect(page.get_by_role("tab", name="Fragments")).to_be_focused()
    expect(page.get_by_role("tab", name="Fragments")).to_have_attribute("aria-selected", "true")
    press(page, "ArrowLeft", "ArrowLeft")
    expect(page.get_by_role("tab", name="Readers")).to_be_focused()


def test_every_page_has_a_key(page):
    for key, title in {
        "s": "Shards",
        "b": "Brokers",
        "t": "Stores",
        "e": "Events",
        "o": "Overview",
    }.items():
        press(page, "g", key)
        expect(page.locator("h1")).to_have_text(title)


def test_the_keys_are_shown_and_the_dialog_is_left(page):
    press(page, "?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    press(page, "Escape")
    expect(dialog).not_to_be_visible()


def test_the_first_key_skips_to_the_content(page):
    press(page, "Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    press(page, "Enter")
    expect(page.locator("main")).to_be_focused()


def test_every_control_is_reached_by_tabs(page):
    press(page, "g", "j")
    expect(page.locator(".rows .row").first).to_be_visible()
    controls = page.evaluate(
        "[...document.querySelectorAll('header a, header button, .bar button, .bar input,"
        " .table, .head button')].length"
    )
    reached = set()
    for _ in range(controls + 10):
        press(page, "Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.outerHTML.slice(0, 80) + document.activeElement.innerText"
            )
        )
    assert len(reached) >= controls


def test_nothing_moves_for_those_who_want_it_so(page):
    page.goto(page.url.replace("#/", f"#/journals/{NAME}?live=1"))
    expect(page.locator(".pulse")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0
