"""Stored content that is a page with a script, in a real browser: the script does not run."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gazette_sdk.server.http import CONTENT_HEADERS
from gazette_sdk.transport.loop import run
from support.chromium import loaded_page
from support.raw_http import exchange
from support.served import local, served

SCRIPT = (
    "document.documentElement.append('R' + 'AN');"
    " fetch('/a/page', {method: 'PUT', body: 'written'});"
)
PAGES = {
    "text/html; charset=utf-8": f"<!DOCTYPE html><p>shown</p><script>{SCRIPT}</script>",
    "text/xml; charset=utf-8": (
        '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><p>shown</p>'
        f"<script>{SCRIPT}</script></html>"
    ),
}


@pytest.mark.parametrize(("media_type", "page"), PAGES.items(), ids=["html", "xml"])
def test_a_script_in_stored_content_does_not_run(etcd, tmp_path, media_type, page):
    async def scenario():
        async with served(etcd, tmp_path) as (broker, client):
            await client.apply(local("a/page"))
            await client.append_when_ready("a/page", page.encode())
            answer = await exchange(broker.endpoint, "GET", "/a/page")
            shown = await asyncio.to_thread(loaded_page, f"{broker.endpoint}/a/page")
            return answer, shown, await client.read("a/page")

    answer, shown, content = run(scenario(), 120)
    assert answer.header("content-type") == media_type
    assert {name: answer.header(name) for name in CONTENT_HEADERS} == dict(CONTENT_HEADERS)
    assert "shown" in shown
    assert "RAN" not in shown
    assert content == page.encode(), "nor has it written to the broker"


def test_the_browser_runs_the_script_where_nothing_keeps_it_from_that():
    """Otherwise the test above would show nothing."""

    async def scenario():
        async def handler(_request):
            return web.Response(text=PAGES["text/html; charset=utf-8"], content_type="text/html")

        application = web.Application()
        application.router.add_get("/", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            return await asyncio.to_thread(loaded_page, f"http://127.0.0.1:{port}/")
        finally:
            await runner.cleanup()

    assert "RAN" in run(scenario(), 120)
