"""The mount of the console: its paths, its headers, and what it leaves to journals."""

from __future__ import annotations

import gzip
import re

import pytest
from aiohttp import web

from gazette_sdk.console import mount
from gazette_sdk.console.mount import PAGE_HEADERS, PREFIX, console, load_files
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange


async def answers(*requests, headers=(), handler=None):
    """The answers of a server with the console, and with journals after it."""

    async def journal(request, target):
        return web.Response(text=f"journal {request.method} {target.path}")

    server = Server(host="127.0.0.1")
    server.http.mount(PREFIX, handler or console("broker"))
    server.http.mount("/", journal)
    endpoint = await server.start()
    try:
        return [
            await exchange(endpoint, method, path, headers=headers) for method, path in requests
        ]
    finally:
        await server.stop(0.2)


def test_the_page_and_its_files_are_served_with_headers_that_keep_scripts_out():
    [page] = run(answers(("GET", "/console/")), 20)
    digest, name = re.search(r'src="([0-9a-f]{64})/(app\.js)"', page.body.decode()).groups()
    assert digest == load_files().digest
    assert page.status == 200
    assert page.header("content-type") == "text/html; charset=utf-8"
    assert page.header("cache-control") == "no-cache"
    [file] = run(answers(("GET", f"/console/{digest}/{name}")), 20)
    assert file.status == 200
    assert file.header("content-type") == "text/javascript; charset=utf-8"
    assert "immutable" in file.header("cache-control")
    for answer in (page, file):
        assert {name: answer.header(name) for name in PAGE_HEADERS} == dict(PAGE_HEADERS)
    policy = page.header("content-security-policy")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy


def test_files_are_compressed_for_clients_that_want_it():
    digest = load_files().digest
    requests = (("GET", f"/console/{digest}/app.css"),)
    [plain] = run(answers(*requests), 20)
    [packed] = run(answers(*requests, headers=("Accept-Encoding: gzip",)), 20)
    assert packed.header("content-encoding") == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2


def test_the_address_without_a_slash_leads_to_the_page_below_any_prefix():
    [answer] = run(answers(("GET", "/console")), 20)
    assert answer.status == 307
    assert answer.header("location") == "console/", "it is relative"


def test_a_head_has_the_headers_of_the_page():
    [answer] = run(answers(("HEAD", "/console/")), 20)
    assert answer.status == 200
    assert answer.header("content-type") == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "/console/x",
        "/consoles",
        "/console/x/app.js",
        f"/console/{'0' * 64}/app.js",
        "/console/{digest}",
        "/console/{digest}/index.html",
        "/console/{digest}/libraries.sha256",
        "/console/{digest}/vendor/LICENSES.txt",
        "/console/{digest}/../mount.py",
        "/console/{digest}/%2e%2e/mount.py",
    ],
)
def test_any_other_path_is_a_journal(path):
    path = path.replace("{digest}", load_files().digest)
    [answer] = run(answers(("GET", path)), 20)
    assert answer.body.startswith(b"journal GET") or answer.status == 307
    assert not (answer.header("location") or "").startswith("console")


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_other_methods_are_left_to_journals(method):
    for answer in run(answers((method, "/console"), (method, "/console/")), 20):
        assert answer.body.startswith(b"journal")


def test_the_page_says_which_server_it_is_of():
    files = load_files()
    assert b'name="component" content="consumer"' in files.page_of("consumer").content
    assert b'name="changes" content="any"' in files.page_of("broker").content
    assert b'name="changes" content="token"' in files.page_of("broker", needs_token=True).content
    assert b"{c" not in files.page_of("broker").content


def test_without_its_libraries_the_page_says_how_to_get_them(tmp_path, monkeypatch):
    for name in ("index.html", "app.js", "libraries.sha256"):
        (tmp_path / name).write_bytes((mount.STATIC / name).read_bytes())
    with pytest.raises(ConfigurationError, match="scripts/console-libraries"):
        load_files(tmp_path)
    found = load_files
    monkeypatch.setattr(mount, "load_files", lambda: found(tmp_path))
    page, other = run(answers(("GET", "/console/"), ("GET", "/console/x")), 20)
    assert page.status == 503
    assert b"scripts/console-libraries" in page.body
    assert other.body == b"journal GET /console/x"


def test_the_digest_changes_with_any_file(tmp_path):
    for path in mount.STATIC.rglob("*"):
        target = tmp_path / path.relative_to(mount.STATIC)
        if path.is_dir():
            target.mkdir()
        else:
            target.write_bytes(path.read_bytes())
    assert load_files(tmp_path).digest == load_files().digest
    (tmp_path / "app.css").write_text("/* another */")
    assert load_files(tmp_path).digest != load_files().digest
