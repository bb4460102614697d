"""Publishing by threads that send by themselves, to real brokers: order, once, and who looks."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from gazette_sdk import Publisher, Reader, connect, embedded, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message.publishing import direct
from gazette_sdk.message.publishing.receipt import Receipt, ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.process import Server
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.wires.stream import ChosenTransport, StreamTransport
from gazette_sdk.transport.wires.stream.dialing import NotStreamError
from gazette_sdk.transport.wires.tls import Tls
from integration.message.topics import Topic
from support.certificates import Authority
from support.direct_appends import (
    NEVER_S,
    PAUSE_S,
    WAIT_S,
    are_done,
    direct_appends,
    form_habit,
    found,
    publish_each,
    until,
    wait_for_each,
)

__all__ = ["direct_appends"]


@dataclass
class Wired:
    """A cluster, and how it is spoken to."""

    topic: Topic
    transport: Transport

    @property
    def journal(self) -> str:
        return self.topic.name(0)

    def numbers(self) -> list[int]:
        """All that was written, however often."""
        reader = Reader(
            dict,
            name=self.journal,
            isolation="uncommitted",
            transport=self.topic.cluster.transport,
        )
        return [envelope.message["n"] for envelope in reader]


@pytest.fixture(scope="module")
def clusters(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[EmbeddedCluster, dict[str, Tls]]]]:
    """Clusters by the way their port is spoken to, and what a client of them needs."""
    made: dict[str, tuple[EmbeddedCluster, dict[str, Tls]]] = {}

    def started(port: str, peer_tls: Tls | None, **options: object) -> EmbeddedCluster:
        def server(host: str, **_: object) -> Server:
            return Server(host=host, port=port, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedded, "Server", server)
            directory = tmp_path_factory.mktemp("cluster")
            return EmbeddedCluster(directory, sync_etcd=False, peer_tls=peer_tls).start()

    def of(way: str) -> tuple[EmbeddedCluster, dict[str, Tls]]:
        if way in {"auto", "stream"}:
            return cluster, {}
        if way not in made:
            directory = tmp_path_factory.mktemp("port")
            if way == "TLS":
                authority = Authority(directory)
                files = authority.issue()
                context = server_context(str(files.cert_file), str(files.key_file))
                tls = Tls(trusted_ca_file=str(authority.ca_file))
                made[way] = started("0", tls, tls=context), {"tls": tls}
            else:
                made[way] = started(f"unix://{directory}/socket", None), {}
        return made[way]

    yield of
    for each, _ in made.values():
        each.stop()


@pytest.fixture(params=["auto", "stream", "TLS", "a Unix socket"])
def wired(request: pytest.FixtureRequest, clusters) -> Iterator[Wired]:
    """A journal, and a transport that sends to it directly."""
    cluster, options = clusters(request.param)
    topic = Topic(cluster, f"direct-{uuid.uuid4().hex[:8]}")
    topic.create(0)
    wire = "auto" if request.param == "auto" else "stream"
    transport = connect(f"{cluster.address}?wire={wire}", **options)
    yield Wired(topic, transport)
    run(transport.aclose())


# --------------------------------------------------------------------- who sends


def test_who_waits_for_each_appends_by_itself(wired: Wired, direct_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        wait_for_each(publisher, 200)
    assert direct_appends.count(threading.current_thread().name) > 100
    assert set(direct_appends) == {threading.current_thread().name}
    assert wired.numbers() == list(range(200))


def test_who_waits_for_none_sends_by_itself(wired: Wired, direct_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        receipts = publish_each(publisher, range(200))
        until(lambda: are_done(receipts))
    assert direct_appends.count(threading.current_thread().name) > 50
    assert set(direct_appends) == {threading.current_thread().name}
    assert wired.numbers() == list(range(200))
    assert not any(receipt.batch.was_retried for receipt in receipts)
    for receipt, following in itertools.pairwise(receipts):
        assert receipt.begin < receipt.end <= following.begin


def test_a_coroutine_that_waits_for_none_sends_by_itself(wired: Wired, direct_appends):
    async def publish() -> list[Receipt]:
        receipts = []
        for n in range(100):
            receipts.append(publisher.publish({"n": n}))
            await asyncio.sleep(PAUSE_S)
        return receipts

    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        receipts = asyncio.run(publish())
        until(lambda: are_done(receipts))
    assert direct_appends.count(threading.current_thread().name) > 25
    assert wired.numbers() == list(range(100))


def test_who_waits_for_some_sends_by_itself(wired: Wired, direct_appends):
    chance = random.Random(3)
    receipts = []
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        for n in range(300):
            receipts.append(publisher.publish({"n": n}))
            match chance.randrange(5):
                case 0 | 1:
                    receipts[-1].result(WAIT_S)
                case 2:
                    time.sleep(PAUSE_S)
                case 3:
                    chance.choice(receipts).result(WAIT_S)
        until(lambda: are_done(receipts))
    assert direct_appends
    assert wired.numbers() == list(range(300))


def test_what_is_sent_is_done_though_nobody_ever_looks(wired: Wired, direct_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = form_habit(publisher, direct_appends)
        for n in range(count, count + 10):
            before = len(direct_appends)
            receipt = publisher.publish({"n": n})
            assert len(direct_appends) == before + 1  # before anybody looks for an answer
            until(lambda: are_done([receipt]))  # noqa: B023 - called before the next
        assert wired.numbers() == list(range(count + 10))


_LOOKS: dict[str, Callable[[Publisher, Receipt], object]] = {
    "result": lambda _, receipt: receipt.result(WAIT_S),
    "result at once": lambda _, receipt: until(lambda: _is_there(receipt)),
    "done": lambda _, receipt: until(receipt.done),
    "await": lambda _, receipt: asyncio.run(_await(receipt)),
    "flush": lambda publisher, _: publisher.flush(WAIT_S),
    "close": lambda publisher, _: publisher.close(WAIT_S),
    "publish": lambda publisher, _: publisher.publish({"n": -1}).result(WAIT_S),
    "publish a batch": lambda publisher, _: publisher.publish_batch([{"n": -1}]).result(WAIT_S),
}


def _is_there(receipt: Receipt) -> bool:
    try:
        receipt.result(timeout=0)
    except ReceiptTimeoutError:
        return False
    return True


@pytest.mark.parametrize("look", _LOOKS)
@pytest.mark.parametrize("wired", ["stream", "TLS"], indirect=True)
def test_whoever_looks_for_an_answer_finds_it(wired: Wired, direct_appends, monkeypatch, look):
    monkeypatch.setattr(direct, "AWAY_S", NEVER_S)
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = form_habit(publisher, direct_appends)
        before = len(direct_appends)
        receipt = publisher.publish({"n": count})
        assert len(direct_appends) == before + 1
        time.sleep(0.02)
        assert not are_done([receipt])
        _LOOKS[look](publisher, receipt)
        assert are_done([receipt])
    assert [n for n in wired.numbers() if n >= 0] == list(range(count + 1))


def test_over_grpc_nothing_changes(topic: Topic, direct_appends):
    topic.create(0)
    transport = connect(f"{topic.cluster.address}?wire=grpc")
    with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
        wait_for_each(publisher, 20)
    run(transport.aclose())
    assert direct_appends == []
    assert len(found(topic.name(0))) == 20


def test_embedded_clusters_have_no_direct_way(topic: Topic, direct_appends):
    topic.create(0)
    with Publisher(mapping.direct(topic.name(0)), transport=topic.cluster.transport) as publisher:
        wait_for_each(publisher, 20)
    assert direct_appends == []
    assert len(found(topic.name(0))) == 20


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
def test_a_way_is_there_once_a_primary_is_known_and_spoken_to(topic: Topic, kind):
    topic.create(0)
    journal = topic.name(0)
    transport = kind(topic.cluster.address)

    async def append():
        async def items():
            yield pb.AppendRequest(journal=journal)
            yield b"{}\n"
            yield pb.AppendRequest()

        return await transport.append(items())

    assert transport.direct(journal) is None
    response = run(append())
    if transport.direct(journal) is None:  # it went through the service address
        response = run(append())
    way = transport.direct(journal)
    assert way is not None
    assert transport.direct(journal) is way
    assert way.append(b"{}\n") is None
    way.prepare()
    call = way.append(b"{}\n")
    assert call.wait(WAIT_S)
    assert call.response().commit.begin == response.commit.end
    assert not way.check(call.response())
    way.failed(NotStreamError("it was replaced"))
    assert transport.direct(journal) is None
    run(transport.aclose())
    kind_without_memory = kind(topic.cluster.address, cache_size=0)
    assert kind_without_memory.direct(journal) is None


def test_threads_that_wait_and_threads_that_do_not(topic: Topic, direct_appends):
    topic.create(0, 1)
    journals = [topic.name(0), topic.name(1)]
    chance = random.Random(5)
    patterns = [[chance.choice("wwwwpppfta") for _ in range(150)] for _ in range(6)]

    def work(publisher: Publisher, name: int) -> None:
        for n, step in enumerate(patterns[name]):
            message = {"by": name, "n": n, "to": journals[name % 2]}
            if step == "t":
                with publisher.transaction() as txn:
                    txn.publish(message)
                continue
            receipt = publisher.publish(message)
            if step == "w":
                receipt.result(WAIT_S)
            elif step == "p":
                time.sleep(PAUSE_S)
            elif step == "a":
                asyncio.run(_await(receipt))

    with Publisher(lambda message: message["to"]) as shared, Publisher(shared._mapping) as alone:
        threads = [
            threading.Thread(target=work, args=(alone if name == 0 else shared, name))
            for name in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert direct_appends
    for number, journal in enumerate(journals):
        seen: dict[int, list[int]] = {}
        for message in found(journal):
            seen.setdefault(message["by"], []).append(message["n"])
        assert seen == {name: list(range(150)) for name in range(6) if name % 2 == number}


async def _await(receipt):
    async with asyncio.timeout(WAIT_S):
        await receipt
