"""Messages of a journal in the console: transactions, tails, filters, and every kind of content."""

from __future__ import annotations

import json
import time

import pytest
from playwright.sync_api import expect

from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.transport.loop import run
from support.console_stand_in import (
    OTHER_PRODUCER,
    PRODUCER,
    line,
    sample_content,
    sample_name,
)
from support.page_tasks import tasks_of

NAME = sample_name(0)


def statuses(page):
    return page.locator(".rows .status").all_inner_texts()


def words(page):
    return [text.split("\n")[-1].lstrip("●▲✖○◐ ") for text in statuses(page)]


def append(cluster, content):
    async def scenario():
        cluster.world.append(NAME, content)

    run(scenario(), 10)


@pytest.fixture
def cluster(stand_in):
    return stand_in(content={NAME: sample_content()})


def test_transactions_are_shown_as_they_ended(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    expect(page.locator(".rows .row")).to_have_count(9)
    assert words(page) == [
        "committed",
        "committed",
        "committed",
        "committed",
        "acknowledges",
        "rolled back",
        "rolls back",
        "duplicate",
        "pending",
    ]
    page.get_by_label("committed only").check()
    expect(page.locator(".rows .row")).to_have_count(4)


def test_a_tail_shows_a_message_at_once_and_its_commit_with_the_acknowledgement(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?live=1")
    expect(page.locator(".rows .row")).to_have_count(9)
    began = time.monotonic()
    append(cluster, line(OTHER_PRODUCER, 6, CONTINUE_TXN, {"customer": "gus"}))
    expect(page.locator(".rows .row").last).to_contain_text("gus")
    shown_s = time.monotonic() - began
    expect(page.locator(".rows .row").last).to_contain_text("pending")
    append(cluster, line(OTHER_PRODUCER, 7, ACK_TXN, {}))
    expect(page.locator(".rows .row").nth(9)).to_contain_text("committed")
    append(cluster, line(OTHER_PRODUCER, 8, CONTINUE_TXN, {"customer": "hal"}))
    append(cluster, line(OTHER_PRODUCER, 7, ACK_TXN, {}))
    expect(page.locator(".rows .row").nth(11)).to_contain_text("rolled back")
    print(f"a message is shown after {shown_s * 1000:.0f} ms")


def test_a_tail_shows_the_last_two_thousand_messages_and_keeps_no_others(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?live=1")
    expect(page.locator(".rows .row")).to_have_count(9)
    for block in range(20):
        append(
            cluster,
            b"".join(
                line(PRODUCER, 10 + block * 1000 + number, 0, {"n": block * 1000 + number})
                for number in range(1000)
            ),
        )
    expect(page.locator(".rows .row").last).to_contain_text('"n":19999')
    expect(page.locator(".foot")).to_contain_text("the last 2\u202f000 are shown")
    assert page.locator(".rows .row").count() <= 60
    assert int(page.locator(".table").get_attribute("aria-rowcount")) <= 2501
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"]
    print(f"{heap / 1e6:.1f} MB after 20,000 messages")
    assert heap < 20e6, "it does not grow with the journal"


def test_the_page_answers_while_it_reads_much(stand_in, visit):
    most = 60_000
    content = b"".join(line(PRODUCER, 1 + n, 0, {"n": n, "pad": "x" * 60}) for n in range(most))
    cluster = stand_in(content={NAME: content})
    page = visit.open(cluster.server.endpoint)
    expect(page.get_by_text("What needs you")).to_be_visible()
    with tasks_of(page) as tasks:
        page.evaluate("(place) => { location.hash = place; }", f"#/journals/{NAME}?from=begin")
        whole = f"{len(content) / 1e6:.1f} MB read"
        expect(page.locator(".foot")).to_contain_text(whole, timeout=60_000)
    tasks.sort()
    print(f"{whole}: tasks of {tasks[-1]:.0f} ms of processor time at most")
    assert tasks[-3] < 50, "some are longer, when the collector of garbage runs"


def test_a_message_is_shown_in_full_with_what_copies_it(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    page.locator(".rows .row").nth(1).click()
    detail = page.locator(".detail")
    expect(detail).to_contain_text('"cents": 300')
    expect(detail).to_contain_text("01fd5e237790")
    for name in ("copy message", "copy link", "copy curl"):
        expect(detail.get_by_role("button", name=name)).to_be_visible()
    label = detail.get_by_role("button", name="copy curl").get_attribute("aria-label")
    begin = sample_content().index(b"\n") + 1
    assert f"?offset={begin}" in label
    page.set_viewport_size({"width": 320, "height": 700})
    detail_end, foot_begin = page.evaluate(
        "['.detail', '.foot'].map((each) => document.querySelector(each).getBoundingClientRect())"
        ".map((each, index) => index ? each.top : each.bottom)"
    )
    assert detail_end <= foot_begin, "nothing lies over it"
    page.keyboard.press("Escape")
    expect(detail).to_have_count(0)


def test_a_filter_scans_the_journal(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?from=begin")
    field = page.get_by_label("Filter: path, operator, value")
    field.fill("cents > 100")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".rows .row")).to_have_count(3)
    expect(page.locator(".foot")).to_contain_text("3 hits")
    field.fill("a b")
    expect(page.get_by_role("alert")).to_contain_text("path op value")
    field.fill("")
    expect(page.locator(".rows .row")).to_have_count(9)


def test_a_link_into_the_middle_begins_at_the_next_message(stand_in, visit):
    content = b"".join(line(PRODUCER, 1 + n, 0, {"n": n, "pad": "x" * 900}) for n in range(300))
    cluster = stand_in(content={NAME: content})
    offset = content.index(b'"n":200') + 5
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?offset={offset}")
    expect(page.locator(".rows .row").first).to_contain_text('"n":201')
    reads = [url for url in visit.requests if f"{NAME}?offset=" in url]
    begin = int(reads[0].partition("?offset=")[2])
    assert offset - 64 * 1024 <= begin < offset, "it reads before, to know open transactions"
    expect(page.locator(".foot code")).to_contain_text(f"?offset={offset}")


def test_the_last_hundred_messages_are_shown_first(stand_in, visit):
    content = b"".join(line(PRODUCER, 1 + n, 0, {"n": n, "pad": "x" * 900}) for n in range(1000))
    cluster = stand_in(content={NAME: content})
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    expect(page.locator(".table")).to_have_attribute("aria-rowcount", "101")
    expect(page.locator(".rows .row").last).to_contain_text('"n":999')
    reads = [url for url in visit.requests if f"{NAME}?offset=" in url]
    assert int(reads[0].partition("?offset=")[2]) > 0, "not all of it is read"


@pytest.mark.parametrize(
    ("content_type", "content", "shown"),
    [
        ("text/csv", b'a,"b ""c"""\nd,e\n', 'a,"b ""c"""'),
        ("application/x-ndjson", b"no json at all\n", "no json at all"),
        ("application/x-protobuf-fixed", b"f3\x93\x36\x05\0\0\0\x0a\x03ada", '1: "ada"'),
        ("application/x-gazette-recoverylog", b"f3\x93\x36\x02\0\0\0\x08\x07", "1: 7"),
        ("", b"\x00\x01some bytes", "00 01 73 6f 6d 65"),
    ],
)
def test_content_of_each_kind_is_decoded(stand_in, visit, content_type, content, shown):
    cluster = stand_in(content={NAME: content}, content_type=content_type)
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    expect(page.locator(".rows .message").first).to_contain_text(shown)


def test_a_journal_without_messages_waits_for_the_first(stand_in, visit):
    cluster = stand_in(content={NAME: b""})
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?live=1")
    expect(page.get_by_text("Waiting for messages")).to_be_visible()
    append(cluster, line(PRODUCER, 1, 0, {"customer": "ada"}))
    expect(page.locator(".rows .row")).to_contain_text("ada")


def test_a_tail_continues_after_its_connection_broke(cluster, visit):
    visit.expected = ("Failed to load resource", "net::ERR")
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?live=1")
    expect(page.locator(".rows .row")).to_have_count(9)
    page.context.set_offline(True)
    append(cluster, line(PRODUCER, 3, 0, {"customer": "meanwhile"}))
    page.context.set_offline(False)
    append(cluster, line(PRODUCER, 4, 0, {"customer": "afterwards"}))
    expect(page.locator(".rows .row").last).to_contain_text("afterwards")
    expect(page.locator(".rows .row")).to_have_count(11)


def test_a_hidden_tail_ends_and_continues_where_it_was(cluster, visit):
    visit.page.clock.install()
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}?live=1")
    expect(page.locator(".foot")).to_contain_text("live")

    with page.expect_event("requestfailed", lambda request: f"{NAME}?offset" in request.url):
        visit.be(hidden=True)
        page.clock.fast_forward(31_000)
    append(cluster, line(PRODUCER, 3, 0, {"customer": "meanwhile"}))
    expect(page.locator(".rows .row")).to_have_count(9)
    visit.be(hidden=False)
    expect(page.locator(".rows .row").last).to_contain_text("meanwhile")
    expect(page.locator(".rows .row")).to_have_count(10)
    begin = int(visit.requests[-1].partition("?offset=")[2].partition("&")[0])
    assert begin == len(sample_content()), "nothing is read again"


def test_what_is_shown_is_saved_as_lines_of_json(cluster, visit):
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    expect(page.locator(".rows .row")).to_have_count(9)
    with page.expect_download() as download:
        page.get_by_role("button", name="save as NDJSON").click()
    saved = download.value.path().read_bytes()
    assert saved == sample_content()
    assert json.loads(saved.splitlines()[0])["customer"] == "ada"
    assert download.value.suggested_filename == "acme_orders_part-000.ndjson"
