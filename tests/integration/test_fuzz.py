"""A broker and the SDK's parsers under hostile input: no death, no hang, no traceback, no leak.

``GAZETTE_FUZZ_CASES=1000000`` runs that many cases of all kinds together instead of some
thousands, ``GAZETTE_FUZZ_SEED=7`` others. A failure names the kind and the number of its case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.fragments import content_path, parse_content_path
from gazette_sdk.protocol.labels import format_selector, parse_selector
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.loop import run
from support.brokers import Client, journal_spec
from support.fuzzing import JOURNAL, KEYS, KINDS, NOW, case, grpc_call
from support.raw_http import exchange

SEED = int(os.environ.get("GAZETTE_FUZZ_SEED", "1"))
CASES = int(os.environ.get("GAZETTE_FUZZ_CASES", "0"))
SHARES = {
    "http": 30,
    "http2": 5,
    "stream": 30,
    "grpc": 35,
    "yaml": 100,
    "selector": 390,
    "fragment": 390,
    "token": 20,
}
"""Cases of each kind in a thousand of the long form: parsers are quick."""

SHORT = {"http": 600, "http2": 60, "stream": 600, "grpc": 600, "yaml": 400, "token": 300}
"""Cases of each kind in the short form; a thousand of others."""

COUNTS = {kind: CASES * SHARES[kind] // 1000 or SHORT.get(kind, 1000) for kind in KINDS}
PURE = [kind for kind in KINDS if kind not in {"http", "http2", "stream", "grpc"}]

CONCURRENT = 32
ANSWER_S = 0.1
"""How long a connection is kept for the answers to a case."""

CANARY_EVERY = 500
"""Number of cases after which an ordinary client appends and reads."""

LIVE_S = 15.0
"""How long a broker may take to answer the ordinary client."""

PARSE_S = 5.0
"""How long the parser of a small text may take, on a busy machine."""

MEMORY_GROWTH_BYTES = 48 << 20
DESCRIPTORS_GROWTH = 16
SETTLE_S = 30.0
"""How long the broker may take to close what a run has left."""

CANARY = "fuzz/canary"
OURS = {JOURNAL, CANARY}


# ------------------------------------------------------------------- parsers


def parse(kind: str, content: bytes) -> None:
    """Parse a case; what is valid survives its round trip."""
    text = content.decode(errors="surrogateescape")
    match kind:
        case "yaml":
            root = journalspace.parse(content)
            journalspace.push_down(root)
            journalspace.to_apply_request(root)
            dumped = journalspace.dump(root)
            assert journalspace.dump(journalspace.parse(dumped)) == dumped
        case "selector":
            selector = parse_selector(text)
            labels = (*selector.include.labels, *selector.exclude.labels)
            if not any(label.value.startswith("=") for label in labels):  # see format_selector
                assert parse_selector(format_selector(selector)) == selector
        case "fragment":
            fragment = parse_content_path("a/journal", text)
            assert parse_content_path("a/journal", content_path(fragment)[10:]) == fragment
        case "token":
            Authority(KEYS).verify(text, Capability.READ, NOW)


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.timeout(60 + COUNTS["selector"] / 100)
def test_parsers_refuse_what_they_do_not_accept(kind):
    accepted, slowest, slowest_number = 0, 0.0, 0
    memory = 0
    for number in range(COUNTS[kind]):
        _, content = case(SEED, kind, number)
        if number == COUNTS[kind] // 4:
            memory = resident_bytes(os.getpid())
        begun = time.perf_counter()
        try:
            parse(kind, content)
            accepted += 1
        except GazetteError:
            pass
        except Exception as error:
            raise AssertionError(f"{kind} {number} of seed {SEED}: {content!r}") from error
        took = time.perf_counter() - begun
        if took > slowest:
            slowest, slowest_number = took, number
    grown = resident_bytes(os.getpid()) - memory
    print(
        f"{kind}: {COUNTS[kind]} cases, {accepted} accepted, slowest {slowest * 1000:.1f} ms "
        f"(number {slowest_number}), memory {grown / 2**20:+.1f} MiB"
    )
    assert accepted, "no case is valid: the generator tests nothing"
    assert accepted < COUNTS[kind]
    assert slowest < PARSE_S, f"{kind} {slowest_number} of seed {SEED}"
    assert grown < MEMORY_GROWTH_BYTES


# -------------------------------------------------------------------- broker


class FuzzedBroker:
    """``gazette dev`` in a process of its own, with its log in a file."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gazette_sdk.cli.gazette", "dev", "--port=0"),
                    *("--data", str(directory / "data"), "--log.level=info"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
            )
        found = re.search(rb"http://localhost:(\d+)", self.process.stdout.readline())
        assert found, self.log.read_text()
        self.port = int(found[1])
        self.endpoint = f"http://localhost:{self.port}"

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def memory_bytes(self) -> int:
        return resident_bytes(self.process.pid)

    def check(self) -> None:
        """Check that it lives, and that its log has no traceback."""
        assert self.process.poll() is None, f"it died: {self.log.read_text()[-5000:]}"
        log = self.log.read_text(errors="replace")
        assert "Traceback" not in log, traceback_of(log)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


def traceback_of(log: str) -> str:
    """The first traceback, with what was logged before it."""
    begin = log.index("Traceback")
    return log[max(0, begin - 1000) : begin + 5000]


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[FuzzedBroker]:
    broker = FuzzedBroker(tmp_path_factory.mktemp("fuzz"))
    try:
        spec = {"stores": ["file:///"], "compression_codec": pb.GZIP, "length": 1 << 24}
        run(prepare(broker, [journal_spec(name, **spec) for name in sorted(OURS)]), 60)
        yield broker
        broker.check()
    except BaseException:
        broker.process.kill()
        broker.process.communicate()
        raise
    broker.stop()
    assert "Traceback" not in broker.log.read_text(errors="replace")


async def prepare(broker: FuzzedBroker, specs: list[pb.JournalSpec]) -> None:
    async with GrpcTransport(broker.endpoint) as transport:
        client = Client(transport)
        await client.apply(*specs)
        for spec in specs:
            assert (await client.append_when_ready(spec.name, b"first\n")).status == pb.OK


async def live(broker: FuzzedBroker) -> None:
    """Check that an ordinary client is served."""
    broker.check()
    async with asyncio.timeout(LIVE_S):
        answer = await exchange(
            broker.endpoint,
            "PUT",
            f"/{CANARY}",
            body=b"alive\n",
            timeout_s=LIVE_S,
        )
        assert answer.status == 204, answer
        end = int(answer.header("X-Commit-End"))
        async with GrpcTransport(broker.endpoint) as transport:
            assert await Client(transport).read(CANARY, end - 6) == b"alive\n"


async def tidy(broker: FuzzedBroker) -> None:
    """Delete the journals that mutated requests have made."""
    async with GrpcTransport(broker.endpoint) as transport:
        names = [
            journal.spec.name
            async for response in transport.list(pb.ListRequest())
            for journal in response.journals
        ]
        assert set(names) >= OURS
        for name in set(names) - OURS:
            await Client(transport).delete(name)


async def send_bytes(broker: FuzzedBroker, kind: str, number: int) -> None:
    """Send the bytes of a case over a connection, in one piece or in two."""
    chance, content = case(SEED, kind, number)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    except ConnectionError:
        return  # it is out of descriptors for a moment: the canary finds out if that stays so
    try:
        cut = chance.randrange(len(content) + 1) if chance.random() < 0.3 else 0
        for piece in (content[:cut], content[cut:]):
            writer.write(piece)
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            writer.write_eof()
        async with asyncio.timeout(ANSWER_S):
            while await reader.read(1 << 16):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def send_call(channel: grpc.aio.Channel, number: int) -> None:
    """Call a method with the messages of a case."""
    chance, _ = case(SEED, "grpc", number)
    name, messages = grpc_call(chance)
    rpc = RPCS_BY_NAME[name]
    shape = f"{_STREAMS[rpc.client_streams]}_{_STREAMS[rpc.server_streams]}"
    method = getattr(channel, shape)(rpc.path)
    sent = iterate(messages) if rpc.client_streams else messages[0]
    call = method(sent, timeout=10 * ANSWER_S)
    try:
        if rpc.server_streams:
            async with asyncio.timeout(ANSWER_S):
                async for _ in call:
                    pass
        else:
            await call
    except (grpc.aio.AioRpcError, TimeoutError):
        pass
    finally:
        call.cancel()


_STREAMS = {False: "unary", True: "stream"}


async def iterate(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def send_all(broker: FuzzedBroker, kind: str, begin: int, end: int) -> None:
    """Send cases, some at a time, and check now and then that ordinary clients are served."""
    numbers = iter(range(begin, end))
    async with contextlib.AsyncExitStack() as stack:
        channel = None
        if kind == "grpc":
            channel = grpc.aio.insecure_channel(f"localhost:{broker.port}")
            await stack.enter_async_context(channel)

        async def work() -> None:
            for number in numbers:
                if channel is not None:
                    await send_call(channel, number)
                else:
                    await send_bytes(broker, kind, number)
                if number % CANARY_EVERY == 0:
                    await live(broker)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(work())
    await tidy(broker)
    await live(broker)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PURE])
@pytest.mark.timeout(120 + COUNTS["grpc"] / 10)
def test_a_broker_survives(broker, kind):
    count = COUNTS[kind]
    limit_s = 100 + count / 10
    run(send_all(broker, kind, 0, count // 4), limit_s)
    memory, descriptors = broker.memory_bytes, settled_descriptors(broker, 0)
    begun = time.monotonic()
    run(send_all(broker, kind, count // 4, count), limit_s)
    took = time.monotonic() - begun
    left = settled_descriptors(broker, descriptors)
    grown = broker.memory_bytes - memory
    print(
        f"{kind}: {count} cases, {count * 3 / 4 / took:.0f} a second, descriptors "
        f"{descriptors} to {left}, memory {memory >> 20} MiB {grown / 2**20:+.1f} MiB"
    )
    assert left <= descriptors + DESCRIPTORS_GROWTH
    assert grown < MEMORY_GROWTH_BYTES


def settled_descriptors(broker: FuzzedBroker, expected: int) -> int:
    """The number of descriptors, once it is as expected or does not change any more."""
    until = time.monotonic() + (SETTLE_S if expected else 2.0)
    while time.monotonic() < until:
        if expected and broker.descriptors <= expected + DESCRIPTORS_GROWTH // 2:
            break
        time.sleep(0.2)
    return broker.descriptors
