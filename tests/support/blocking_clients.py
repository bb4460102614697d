"""Clients for plain code, and the scripted servers that they speak to, over each way.

Load the fixtures in a test module with ``from support.blocking_clients import nothing_leaks``.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.stream.blocking import BlockingClient, TlsContext
from gazette_sdk.transport.wire import Destination, Peer, Tls
from support.certificates import Authority
from support.open_files import leaves_no_file_open
from support.scripted_broker import append_ok
from support.scripted_stream import ScriptedStream

__all__ = [
    "OPENING",
    "WAIT_S",
    "Served",
    "certificates",
    "destination",
    "loses",
    "may_be_dialled",
    "nothing_leaks",
    "obliging",
    "over_each_way",
    "serve",
    "silent",
    "to_the_end",
]

OPENING = pb.AppendRequest(journal="a/journal").SerializeToString()
WAIT_S = 10.0
TRIES_MAX = 20
WAYS = ["TCP", "TLS", "a Unix socket"]


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No test leaves a file or a thread behind."""
    threads = threading.active_count()
    with leaves_no_file_open():
        yield
    assert threading.active_count() <= threads + 8  # of asyncio.to_thread


def destination(address, authorization=None):
    peer = Peer("zone", "member", address)
    return Destination(RPCS_BY_NAME["Append"], "a/journal", peer, "http://service", authorization)


def may_be_dialled(client, address):
    policy = client._policies.get(address)
    return not client.is_closed and (policy is None or policy.may_dial(time.monotonic()))


def to_the_end(call):
    assert call.wait(WAIT_S)
    return call.response()


class UnixStream(ScriptedStream):
    """A scripted server on a Unix socket."""

    def __init__(self, script, path):
        super().__init__(script)
        self.path = path

    @property
    def address(self):
        return f"unix://{self.path}"

    async def __aenter__(self):
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 22)
        return self


class Served:
    """A scripted server and a client of it, whose calls are made in threads."""

    def __init__(self, script, *, tls=None, client_tls=None, path=None, **options):
        self.server = UnixStream(script, path) if path else ScriptedStream(script, tls=tls)
        self.client = BlockingClient(TlsContext(client_tls or Tls()), **options)

    async def __aenter__(self):
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *error):
        self.client.close()
        await self.server.__aexit__(*error)

    @property
    def to(self):
        return destination(self.server.address)

    @property
    def is_connected(self):
        client, address = self.client, self.server.address
        return bool(client._idle.get(address)) or address in client._busy.values()

    @property
    def idle(self):
        return self.client._idle.get(self.server.address, [])

    async def prepare(self):
        await asyncio.to_thread(self.client.prepare, self.to)

    async def tried(self, content=b"content\n"):
        return await asyncio.to_thread(self.client.append, self.to, OPENING, content)

    async def begun(self, content=b"content\n", to=None):
        return await asyncio.to_thread(self._begin, content, to or self.to)

    async def append(self, content=b"content\n", to=None):
        def there():
            return to_the_end(self._begin(content, to or self.to))

        return await asyncio.to_thread(there)

    def _begin(self, content, to):
        for _ in range(TRIES_MAX):  # another thread may be quicker to what was prepared
            call = self.client.append(to, OPENING, content)
            if call is not None:
                return call
            self.client.prepare(to)
        raise AssertionError


@pytest.fixture
def serve(request, certificates, tmp_path):
    """Makes what is served over a way; indirectly parametrized by it."""
    tls, client_tls = certificates

    def made(script, **options):
        if request.param == "TLS":
            options |= {"tls": tls, "client_tls": client_tls}
        elif request.param != "TCP":
            options["path"] = tmp_path / "socket"
        return Served(script, **options)

    return made


over_each_way = pytest.mark.parametrize("serve", WAYS, indirect=True)


async def obliging(peer):
    await peer.greet()
    while True:
        began, content = await peer.whole_append()
        peer.answer(began.call, append_ok(end=len(content)))


async def silent(peer):
    await peer.greet()
    await peer.hang_up()


async def loses(peer):
    await peer.greet()
    await peer.whole_append()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file))
    return context, Tls(trusted_ca_file=str(authority.ca_file))
