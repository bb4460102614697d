"""The console and strangers: scripts in content, tokens, proxies, and servers that fail."""

from __future__ import annotations

import base64
import json
import re
import time

import pytest
from aiohttp import ClientSession, web
from playwright.sync_api import expect

from gazette_sdk.transport.loop import run
from support.console_stand_in import event, problem, sample_content, sample_events, sample_name

NAME = sample_name(0)
SCRIPT = '<img src=x onerror="window.RAN=1"><script>window.RAN=1</script>\'"><svg onload=RAN=1>'


def token_of(**claims):
    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256'})}.{part(claims)}.c2ln"


TOKEN = token_of(cap=10, sub="ada@example.com", exp=int(time.time()) + 3600)


def test_scripts_in_content_names_labels_and_errors_never_run(stand_in, visit):
    hostile = SCRIPT.replace("/", "%2F")
    content = json.dumps({"customer": SCRIPT, SCRIPT: 1}).encode() + b"\n"
    cluster = stand_in(
        names=[f"a/{SCRIPT}", NAME],
        content={NAME: content},
        content_type=f"application/x-ndjson;{SCRIPT}",
        problems=[problem("ERROR", "x", "journal", SCRIPT, SCRIPT, SCRIPT, 1)],
        events=[event(1, "log", SCRIPT, SCRIPT, "ERROR")],
        is_troubled=True,
        refused={"/v1/journals/heads": (500, SCRIPT)},
    )
    visit.expected = ("Failed to load resource",)
    endpoint = cluster.server.endpoint
    places = {
        "/": ".problems li",
        "/journals": ".rows .row",
        f"/journals?q={hostile}": ".foot",
        f"/journals/{NAME}": ".rows .row",
        f"/journals/{NAME}?tab=spec": "pre",
        f"/journals/{NAME}?tab=replicas": ".cards",
        f"/journals/{hostile}": ".failure",
        f"/shards/{hostile}/{hostile}": "h1",
        "/events": ".events li",
        f"/{hostile}": ".empty",
    }
    for place, shown in places.items():
        page = visit.open(endpoint, place)
        expect(page.locator(shown).first).to_be_visible()
        if shown == ".rows .row":
            page.locator(shown).first.click()
        assert page.evaluate("typeof RAN") == "undefined", place
        assert page.locator("main img, main script, main svg[onload]").count() == 0, place


def test_the_policy_stops_markup_that_a_fault_would_insert(stand_in, visit):
    visit.expected = ("TrustedHTML", "Content Security Policy", "Refused to")
    page = visit.open(stand_in().server.endpoint)
    expect(page.get_by_text("What needs you")).to_be_visible()
    assert page.evaluate(
        "try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (e) { e.name }"
    ) == ("TypeError")
    assert page.evaluate("fetch('https://example.com/').then(() => 'sent', () => 'refused')") == (
        "refused"
    )


def test_a_cluster_without_keys_asks_for_no_token(stand_in, visit):
    page = visit.open(stand_in().server.endpoint)
    expect(page.get_by_text("What needs you")).to_be_visible()
    expect(page.get_by_role("button", name="Sign in")).to_have_count(0)


def test_a_token_is_asked_for_and_kept_in_memory_alone(stand_in, visit):
    visit.expected = ("401",)
    cluster = stand_in(token=TOKEN)
    page = visit.open(cluster.server.endpoint)
    expect(page.get_by_text("A token is needed")).to_be_visible()
    page.locator(".failure").get_by_role("button", name="Sign in").click()
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_text("What needs you")).to_be_visible()
    expect(page.locator(".who")).to_have_text("ada@example.com · LIST READ")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
        0,
        0,
        "",
    ]
    assert TOKEN not in "".join(visit.requests)
    page.reload()
    expect(page.get_by_text("A token is needed")).to_be_visible()


def test_a_token_is_kept_in_the_tab_if_wanted(stand_in, visit):
    visit.expected = ("401",)
    cluster = stand_in(token=TOKEN)
    page = visit.open(cluster.server.endpoint)
    page.locator(".who").click()
    page.get_by_label("Token", exact=True).fill(f"Bearer {TOKEN}")
    page.get_by_label("Keep it in this tab").check()
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_text("What needs you")).to_be_visible()
    page.reload()
    expect(page.get_by_text("What needs you")).to_be_visible()
    page.locator(".who").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("A token is needed")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_token_of_the_address_is_used_and_removed_from_it(stand_in, visit):
    cluster = stand_in(token=TOKEN)
    page = visit.page
    page.goto("about:blank")
    page.goto(f"{cluster.server.endpoint}/console/#token={TOKEN}")
    expect(page.get_by_text("What needs you")).to_be_visible()
    assert page.url == f"{cluster.server.endpoint}/console/#/"
    assert TOKEN not in page.evaluate("location.href + JSON.stringify(history.state)")
    page.go_back()
    assert page.url == "about:blank", "no entry of the history has it"


def test_an_expired_token_is_named(stand_in, visit):
    visit.expected = ("401",)
    expired = token_of(cap=10, sub="ada", exp=1)
    cluster = stand_in(token=TOKEN)
    visit.page.goto(f"{cluster.server.endpoint}/console/#token={expired}")
    expect(visit.page.locator(".who")).to_have_text("token expired")


def test_what_the_token_does_not_allow_is_never_zero(stand_in, visit):
    visit.expected = ("403",)
    cluster = stand_in(readable=False, content={NAME: sample_content()})
    page = visit.open(cluster.server.endpoint, "/journals")
    row = page.locator(".rows .row").first
    expect(row).to_be_visible()
    for column in ("head", "rate", "size", "unstored"):
        text = row.locator(f".{column}").inner_text()
        assert "not permitted" in text
        assert not re.search(r"\d", text)
    page = visit.open(cluster.server.endpoint, f"/journals/{NAME}")
    expect(page.get_by_text("Not permitted").first).to_be_visible()
    expect(page.get_by_text("the token lacks the capability READ").first).to_be_visible()


def test_a_page_that_lacks_a_capability_says_which(stand_in, visit):
    visit.expected = ("401",)
    refused = {"/v1/cluster/members": (401, "token lacks the required capability LIST")}
    page = visit.open(stand_in(refused=refused).server.endpoint, "/brokers")
    expect(page.get_by_text("Not permitted")).to_be_visible()
    expect(page.get_by_text("capability LIST")).to_be_visible()


def test_a_call_that_the_server_lacks_is_named(stand_in, visit):
    visit.expected = ("501",)
    refused = {"/v1/cluster/report": (501, "Not Implemented")}
    page = visit.open(stand_in(refused=refused).server.endpoint)
    expect(page.get_by_text("Not offered here")).to_be_visible()


def test_it_works_below_the_prefix_of_a_proxy(stand_in, visit):
    cluster = stand_in(journals=8, content={NAME: sample_content()}, events=sample_events())

    async def start():
        async def forward(request):
            path = request.raw_path.removeprefix("/a/b")
            async with (
                ClientSession(auto_decompress=False) as client,
                client.request(
                    request.method,
                    cluster.server.endpoint + path,
                    data=await request.read(),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as answer,
            ):
                names = (
                    *("Content-Type", "Content-Encoding", "Content-Range", "Location"),
                    "Content-Security-Policy",
                )
                kept = {name: answer.headers[name] for name in names if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

        application = web.Application()
        application.router.add_route("*", "/a/b/{path:.*}", forward)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner

    runner = run(start(), 20)
    try:
        base = f"http://127.0.0.1:{runner.addresses[0][1]}/a/b"
        visit.page.goto(f"{base}/console")
        expect(visit.page.get_by_text("What needs you")).to_be_visible()
        assert visit.page.url.startswith(f"{base}/console/")
        visit.page.get_by_role("link", name="Journals", exact=True).click()
        visit.page.get_by_role("link", name=NAME).click()
        expect(visit.page.locator(".rows .row")).to_have_count(9)
        visit.page.get_by_role("link", name="Events").click()
        expect(visit.page.locator(".events li")).to_have_count(7)
        assert all(path.startswith("/a/b/") for path in visit.paths)
    finally:
        visit.page.goto("about:blank")
        run(runner.cleanup(), 20)


def test_nothing_is_called_but_public_calls_and_journals(stand_in, visit):
    cluster = stand_in(journals=8, content={NAME: sample_content()}, events=sample_events())
    places = ("/", "/journals", f"/journals/{NAME}?live=1", "/shards", "/brokers", "/events")
    for place in places:
        page = visit.open(cluster.server.endpoint, place)
        expect(page.locator("h1")).to_be_visible()
        if NAME in place:
            expect(page.locator(".rows .row")).to_have_count(9)
    assert {path.split("/")[1] for path in visit.paths} <= {"console", "v1", "acme"}
    assert {path for path in visit.paths if path.startswith("/acme")} == {f"/{NAME}"}


def test_old_data_is_marked_while_the_server_does_not_answer(stand_in, visit):
    visit.expected = ("Failed to load resource", "net::ERR")
    page = visit.open(stand_in(journals=8).server.endpoint)
    expect(page.get_by_text("What needs you")).to_be_visible()
    page.context.set_offline(True)
    expect(page.get_by_text("Not refreshed")).to_be_visible()
    expect(page.locator(".tile").first).to_contain_text("3")
    page.context.set_offline(False)
    expect(page.get_by_text("Not refreshed")).to_have_count(0)


@pytest.mark.parametrize("key", ["light", "dark"])
def test_the_theme_stays_as_chosen(stand_in, visits, key):
    visit = visits(color_scheme="light" if key == "dark" else "dark")
    page = visit.open(stand_in().server.endpoint)
    button = page.get_by_role("button", name=re.compile("Theme"))
    button.click()
    if key == "dark":
        button.click()
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == key
