"""`kill -9` of a broker with appends in flight: what it acknowledged is there, once, in order.

Three kinds of clients at once: bare connections which have many appends in flight, an
AppendService and a Publisher. ``GAZETTE_KILLS`` asks for more kills than usual.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.appends import History, append_over_http, make_content, read_over_http, take_apart
from crash.dev_cluster import DevCluster
from crash.pipelines import Pipeline, Sequence
from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.appender import AppendService, AsyncAppend

KILLS = int(os.environ.get("GAZETTE_KILLS", "5"))
CONNECTIONS = 4
SEED = 11
PROGRESS_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
REDIAL_MAX_S = 0.3

RAW = ("pipelined/one", "pipelined/two")
JOURNALS = """
name: pipelined/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment:
  length: 262144
  compression_codec: SNAPPY
  stores: ["file:///"]
  refresh_interval: 1s
children:
  - name: pipelined/one
  - name: pipelined/published
  - name: pipelined/service
  - name: pipelined/two
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DevCluster]:
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(JOURNALS)
        yield cluster


class Published(threading.Thread):
    """A publisher, which goes on over every kill."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._address = address

    def run(self) -> None:
        transport = connect(self._address, reconnect_backoff_max_s=REDIAL_MAX_S)
        try:
            by_name = mapping.direct("pipelined/published")
            with Publisher(mapping=by_name, transport=transport) as publisher:
                while not self.stopping.is_set():
                    receipts = [publisher.publish({"n": self.count + n}) for n in range(50)]
                    for receipt in receipts:
                        receipt.result(END_TIMEOUT_S)
                    self.count += 50
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error
        finally:
            sdk_loop.run(transport.aclose(), END_TIMEOUT_S)

    def check(self) -> None:
        """All messages are there, once, in order."""
        transport = connect(self._address)
        with Reader(dict, name="pipelined/published", transport=transport) as reader:
            assert [envelope.message["n"] for envelope in reader] == list(range(self.count))
        sdk_loop.run(transport.aclose(), END_TIMEOUT_S)


class Served:
    """An append service, whose appends are tried until they succeed."""

    def __init__(self, address: str) -> None:
        self.appends: list[tuple[bytes, AsyncAppend]] = []
        self.acknowledged = 0
        self._address = address
        self._stopping = asyncio.Event()
        self._chance = random.Random(SEED)

    async def run(self) -> None:
        """Append, with some in flight, until it is to stop."""
        request = pb.AppendRequest(journal="pipelined/service")
        async with connect(self._address, reconnect_backoff_max_s=REDIAL_MAX_S) as transport:
            service = AppendService(transport)
            while not self._stopping.is_set():
                for _ in range(self._chance.randint(1, 20)):
                    content = make_content(self._chance, self._chance.choice([1, 500, 20_000]))
                    self.appends.append((content, await service.append(request, content)))
                await self.appends[-1][1]
                self.acknowledged = len(self.appends)
            await service.flush()
            await service.aclose()

    async def stop(self) -> None:
        self._stopping.set()

    def check(self, content: bytes) -> int:
        """All are there, in order. One that was tried again may be there again.

        Returns:
            How many are there again.
        """
        pieces = list(take_apart(content).values())
        first: dict[bytes, int] = {}
        for place, piece in enumerate(pieces):
            first.setdefault(piece, place)
        sent = [piece for piece, _ in self.appends]
        assert list(first) == sent, "an append is missing, or out of order"
        tried_again = {piece for piece, append in self.appends if append.last_error is not None}
        for place, piece in enumerate(pieces):
            assert first[piece] == place or piece in tried_again, "it is there twice"
        return len(pieces) - len(first)


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * KILLS)
def test_appends_in_flight_survive_kills_whole_once_and_in_order(cluster: DevCluster):
    chance, lock = random.Random(SEED), threading.Lock()
    histories = {name: History() for name in RAW}
    sequences: list[Sequence] = []
    published, served = Published(cluster.address), Served(cluster.address)
    published.start()
    serving = sdk_loop.post(served.run())
    for _ in range(KILLS):
        _greet(cluster, histories, chance)
        now = [
            Sequence(RAW[number % len(RAW)], after_success=number >= CONNECTIONS // 2)
            for number in range(CONNECTIONS)
        ]
        pipelines = [
            Pipeline(
                cluster.address,
                sequence,
                histories[sequence.journal],
                lock,
                random.Random(chance.getrandbits(32)),
            )
            for sequence in now
        ]
        for pipeline in pipelines:
            pipeline.start()
        _await_progress(pipelines, chance.randint(1, 150), published, served)
        time.sleep(chance.random() * 0.05)  # the kill comes at no moment they could know
        cluster.kill()
        for pipeline in pipelines:
            pipeline.join(END_TIMEOUT_S)
            assert not pipeline.is_alive()
            assert pipeline.failure is None, repr(pipeline.failure)
        sequences += now
        cluster.start()
    published.stopping.set()
    sdk_loop.run(served.stop(), END_TIMEOUT_S)
    published.join(END_TIMEOUT_S)
    serving.result(END_TIMEOUT_S)
    assert published.failure is None, repr(published.failure)

    contents = {name: read_over_http(f"{cluster.address}/{name}") for name in RAW}
    for name, history in histories.items():
        history.check(contents[name])
    there = sum(sequence.check(contents[sequence.journal]) for sequence in sequences)
    published.check()
    again = served.check(read_over_http(f"{cluster.address}/pipelined/service"))
    print(
        f"{KILLS} kills: {sum(len(h.acknowledged) for h in histories.values())} acknowledged "
        f"appends of bare connections, {there} of {sum(len(s.contents) for s in sequences)} are "
        f"there; {published.count} messages; {len(served.appends)} appends of a service, "
        f"{again} of them twice"
    )


def _greet(cluster: DevCluster, histories: dict[str, History], chance: random.Random) -> None:
    """Append once to each journal, and check what it holds: the broker serves it by now."""
    for name, history in histories.items():
        content = make_content(chance, 100)
        history.acknowledged[append_over_http(f"{cluster.address}/{name}", content)] = content
        history.check(read_over_http(f"{cluster.address}/{name}"))


def _await_progress(
    pipelines: list[Pipeline], count: int, published: Published, served: Served
) -> None:
    """Wait until so many appends are acknowledged, and some of every client."""
    deadline = time.monotonic() + PROGRESS_TIMEOUT_S
    published_before, served_before = published.count, served.acknowledged
    while (
        sum(pipeline.acknowledged for pipeline in pipelines) < count
        or min(pipeline.acknowledged for pipeline in pipelines) == 0
        or published.count == published_before
        or served.acknowledged == served_before
    ):
        assert all(pipeline.is_alive() for pipeline in pipelines), "a connection broke by itself"
        assert published.failure is None, repr(published.failure)
        assert time.monotonic() < deadline, "appends make no progress"
        time.sleep(0.001)
