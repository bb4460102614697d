from __future__ import annotations

import gzip
import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gazette_sdk.errors import (
    ConfigurationError,
    CorruptFragmentError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
)
from gazette_sdk.fragment import open_url, registry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from support.vectors import cases

GOOD = b"XXXXXhello, world!!!"


def fragment(codec=pb.GZIP, end=120):
    content_sum = sum_of(hashlib.sha1(GOOD).digest()) if end == 120 else None
    return pb.Fragment(
        journal="a/journal", begin=100, end=end, compression_codec=codec, sum=content_sum
    )


@contextmanager
def serving(answer):
    """A host that gives ``answer(request) -> (status, headers, body)``, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append(self)
            status, headers, body = answer(self)
            self.send_response(status)
            if "Transfer-Encoding" not in headers:
                headers = {"Content-Length": str(len(body))} | headers
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/path/of/object?signature=secret", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("case", cases("broker", "fragment_reader"))
def test_reading_a_url_follows_the_vectors(case):
    status = 404 if case.get("url") == "missing" else 200
    with serving(lambda _: (status, {}, gzip.compress(GOOD, mtime=0))) as (url, _):
        asked_for = fragment(end=case.get("fragment_end", 120))
        if status != 200:
            with pytest.raises(FragmentNotFoundError, match="HTTP status 404"):
                open_url(url, asked_for, 100)
            return
        with open_url(url, asked_for, case["offset"]) as reader:
            assert reader.read(1000) == case["expect"].encode()
            if "error" in case:
                with pytest.raises(CorruptFragmentError, match="goes on after its end"):
                    reader.read(1)
            else:
                assert reader.read(1) == b""


@pytest.mark.parametrize(
    ("codec", "asks", "headers", "body"),
    [
        (pb.GZIP, "gzip", {}, gzip.compress(GOOD, mtime=0)),
        (pb.GZIP, "gzip", {"Content-Encoding": "gzip"}, gzip.compress(GOOD, mtime=0)),
        (pb.GZIP_OFFLOAD_DECOMPRESSION, "identity", {}, GOOD),
        (
            pb.GZIP_OFFLOAD_DECOMPRESSION,
            "identity",
            {"Content-Encoding": "gzip"},
            gzip.compress(GOOD, mtime=0),
        ),
        (pb.NONE, "identity", {}, GOOD),
    ],
)
def test_encodings_are_asked_for_and_taken_off_by_codec(codec, asks, headers, body):
    with serving(lambda _: (200, headers, body)) as (url, asked):
        with open_url(url, fragment(codec), 105) as reader:
            assert reader.read() == GOOD[5:]
        assert [request.headers["Accept-Encoding"] for request in asked] == [asks]
        assert asked[0].path == "/path/of/object?signature=secret"


@pytest.mark.parametrize(
    ("status", "error", "match"),
    [
        (404, FragmentNotFoundError, "read on through the broker"),
        (403, StoreAuthorizationError, "signature may have run out"),
        (401, StoreAuthorizationError, "signature may have run out"),
        (206, StoreError, "HTTP status 206, expected 200"),
        (503, StoreError, "HTTP status 503"),
    ],
)
def test_other_answers_are_errors_that_keep_the_signature_to_themselves(status, error, match):
    with (
        serving(lambda _: (status, {}, b"")) as (url, _),
        pytest.raises(error, match=match) as caught,
    ):
        open_url(url, fragment(), 100)
    assert "secret" not in str(caught.value)
    assert caught.value.journal == "a/journal"


def test_a_connection_that_breaks_is_no_damaged_fragment():
    with (
        serving(lambda _: (200, {"Content-Length": "20"}, GOOD[:7])) as (url, _),
        open_url(url, fragment(pb.NONE), 100) as reader,
    ):
        assert reader.read(7) == GOOD[:7]
        with pytest.raises(StoreError, match="13 bytes too early; try again") as caught:
            reader.read()
    assert not isinstance(caught.value, CorruptFragmentError)


def test_an_answer_of_unknown_length_is_read_to_its_end():
    def chunked(_):
        return 200, {"Transfer-Encoding": "chunked"}, b"14\r\n%s\r\n0\r\n\r\n" % GOOD

    with serving(chunked) as (url, _), open_url(url, fragment(pb.NONE), 100) as reader:
        assert reader.read() == GOOD


def test_a_host_that_cannot_be_reached_is_a_clear_error():
    with pytest.raises(StoreError, match="check that this host can reach the store"):
        open_url("http://127.0.0.1:1/x", fragment(), 100)


def test_files_are_read_below_the_root_that_is_named(tmp_path):
    path = tmp_path / "a b" / "c%d"
    path.parent.mkdir()
    path.write_bytes(GOOD)
    with open_url("file:///a%20b/c%25d", fragment(pb.NONE), 110, file_root=tmp_path) as reader:
        assert reader.read() == GOOD[10:]
    with pytest.raises(ConfigurationError, match="name the directory where that is mounted"):
        open_url("file:///a%20b/c%25d", fragment(pb.NONE), 110)
    with pytest.raises(FragmentNotFoundError, match="the brokers' file root"):
        open_url("file:///missing", fragment(), 100, file_root=tmp_path)
    with pytest.raises(StoreError, match="Is a directory"):
        open_url("file:///a%20b", fragment(), 100, file_root=tmp_path)


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", "link/secret", "link2"])
def test_a_file_url_does_not_lead_out_of_the_root(tmp_path, path):
    (tmp_path / "secret").write_bytes(GOOD)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "link2").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="leads out"):
        open_url(f"file:///{path}", fragment(pb.NONE), 100, file_root=root)


def test_other_schemes_are_refused():
    with pytest.raises(ConfigurationError, match="scheme is not"):
        open_url("ftp://host/x", fragment(), 100)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    with serving(lambda _: (200, {}, gzip.compress(GOOD, mtime=0))) as (elsewhere, asked):
        headers = {"Location": elsewhere}
        with serving(lambda _: (status, headers, b"")) as (url, _):
            with pytest.raises(StoreError, match=rf"status {status} .*read through the broker"):
                open_url(url, fragment(), 100)
            with pytest.raises(OSError, match=str(status)):
                registry._fetch_probe(url)
        assert not asked
