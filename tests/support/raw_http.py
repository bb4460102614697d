"""HTTP as bytes: what really stands on the wire, trailers and chunks included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gazette_sdk.server.http import CONTENT_HEADERS


@dataclass
class Answer:
    """One response, taken apart."""

    status_line: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    chunk_sizes: list[int] = field(default_factory=list)
    trailers: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = False
    interim: str = ""

    @property
    def status(self) -> int:
        return int(self.status_line.split(" ")[1]) if self.status_line else 0

    def headers_beside(self, recorded: list[list[str]]) -> list[tuple[str, str]]:
        """Headers to compare with recorded ones, without those that ours have for browsers.

        All answers forbid sniffing, and those with content keep scripts from running.
        """
        names = {name.lower() for name, _ in recorded}
        ours = {name.lower() for name in CONTENT_HEADERS} - names
        if "x-content-type-options" in ours:
            assert not self.headers or self.header("x-content-type-options") == "nosniff"
        return [(name, value) for name, value in self.headers if name.lower() not in ours]

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        return found[0] if found else None


async def exchange(
    endpoint: str,
    method: str,
    target: str,
    *,
    headers: tuple[str, ...] = (),
    body: bytes | None = None,
    http: str = "1.1",
    host: str = "",
    leave_after: bytes | None = None,
    leave_after_s: float | None = None,
    ssl: Any = None,
    timeout_s: float = 10.0,
) -> Answer:
    """Send one request and read its answer until the connection closes.

    Args:
        host: value of ``Host``; by default that of the endpoint.
        leave_after: leave as soon as these bytes have come.
        leave_after_s: leave after so many seconds.
    """
    url = urlsplit(endpoint)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=ssl)
    try:
        names = {line.partition(":")[0].lower() for line in headers}
        lines = [
            f"{method} {target} HTTP/{http}",
            f"Host: {host or url.netloc}",
            "Connection: close",
            *headers,
        ]
        chunked = "transfer-encoding" in names
        if body is not None and not chunked and "content-length" not in names:
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        interim = b""
        if "expect" in names:
            interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout_s)
        if body is not None:
            if chunked:
                chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
                body = chunk + b"0\r\n\r\n"
            writer.write(body)
        received = await _received(reader, leave_after, leave_after_s, timeout_s)
    finally:
        writer.transport.abort()
    answer = _taken_apart(received, method)
    answer.interim = interim.decode()
    return answer


async def _received(
    reader: asyncio.StreamReader,
    leave_after: bytes | None,
    leave_after_s: float | None,
    timeout_s: float,
) -> bytes:
    received = b""
    try:
        async with asyncio.timeout(leave_after_s or timeout_s):
            while data := await reader.read(1 << 16):
                received += data
                if leave_after is not None and leave_after in received:
                    break
    except ConnectionResetError:
        pass
    except TimeoutError:
        if leave_after_s is None:
            raise
    return received


def _taken_apart(received: bytes, method: str) -> Answer:
    head, _, rest = received.partition(b"\r\n\r\n")
    if not head:
        return Answer()
    status_line, *lines = head.decode().split("\r\n")
    answer = Answer(status_line, _pairs(lines))
    if method == "HEAD" or answer.status in {204, 304}:
        answer.complete = True
    elif answer.header("transfer-encoding") == "chunked":
        _chunked(answer, rest)
    else:
        answer.body = rest
        length = answer.header("content-length")
        answer.complete = length is None or int(length) == len(rest)
    return answer


def _chunked(answer: Answer, rest: bytes) -> None:
    while True:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            return
        length = int(size, 16)
        if length == 0:
            trailers, _, after = rest.rpartition(b"\r\n")
            assert not after, after
            answer.trailers = _pairs(trailers.decode().split("\r\n"))
            answer.complete = rest.endswith(b"\r\n")
            return
        if len(rest) < length + 2:
            answer.body += rest
            return
        answer.chunk_sizes.append(length)
        answer.body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    pairs = [line.partition(": ") for line in lines if line]
    return [(name, value) for name, _, value in pairs]
