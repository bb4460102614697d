"""Inline appends to real brokers: who sends and receives them, and their order."""

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
from gazette_sdk.errors import ReentrantCallError
from gazette_sdk.message.receipt import Receipt, ReceiptTimeoutError
from gazette_sdk.server.process import Server
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.append.appender import INLINE_BYTES_MAX
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.stream.blocking import StreamBlockingCall
from gazette_sdk.transport.wire import Tls
from integration.message.topics import Topic
from support.certificates import Authority
from support.inline_appends import (
    PAUSE_S,
    WAIT_S,
    are_done,
    found,
    inline_appends,
    leave_answers,
    publish_each,
    until,
    until_idle,
    until_inline,
    wait_for_each,
)

__all__ = ["inline_appends"]


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
    """A journal, and a transport that sends inline appends to it."""
    cluster, options = clusters(request.param)
    topic = Topic(cluster, f"inline-{uuid.uuid4().hex[:8]}")
    topic.create(0)
    wire = "auto" if request.param == "auto" else "stream"
    transport = connect(f"{cluster.address}?wire={wire}", **options)
    yield Wired(topic, transport)
    run(transport.aclose())


# --------------------------------------------------------------------- who sends


def test_messages_that_are_waited_for_one_by_one_are_sent_inline(wired: Wired, inline_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        for n in range(count, count + 200):
            publisher.publish({"n": n}).result(WAIT_S)
    assert len(inline_appends) > 150
    assert set(inline_appends) == {threading.current_thread().name}
    assert wired.numbers() == list(range(count + 200))


def test_messages_that_nobody_waits_for_are_sent_inline_one_by_one(wired: Wired, inline_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        receipts = publish_each(publisher, range(count, count + 200))
        until(lambda: are_done(receipts))
    assert len(inline_appends) > 50
    assert set(inline_appends) == {threading.current_thread().name}
    assert wired.numbers() == list(range(count + 200))
    assert not any(receipt.append.last_error for receipt in receipts)
    for receipt, following in itertools.pairwise(receipts):
        assert receipt.begin < receipt.end <= following.begin


def test_a_coroutine_of_another_loop_sends_inline(wired: Wired, inline_appends):
    async def publish(count: int) -> None:
        for n in range(count, count + 50):
            receipt = publisher.publish({"n": n})
            if n % 2:
                await receipt
            else:
                await asyncio.sleep(PAUSE_S)

    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        asyncio.run(publish(count))
    assert len(inline_appends) > 12
    assert wired.numbers() == list(range(count + 50))


def test_messages_of_which_some_are_waited_for_keep_their_order(wired: Wired, inline_appends):
    chance = random.Random(3)
    receipts = []
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        for n in range(count, count + 300):
            receipts.append(publisher.publish({"n": n}))
            match chance.randrange(5):
                case 0 | 1:
                    receipts[-1].result(WAIT_S)
                case 2:
                    time.sleep(PAUSE_S)
                case 3:
                    chance.choice(receipts).result(WAIT_S)
        until(lambda: are_done(receipts))
    assert wired.numbers() == list(range(count + 300))


def test_what_is_sent_is_acknowledged_though_nobody_waits(wired: Wired, inline_appends):
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        for n in range(count, count + 10):
            before = len(inline_appends)
            receipt = publisher.publish({"n": n})
            assert len(inline_appends) == before + 1
            until(lambda: are_done([receipt]))  # noqa: B023 - called before the next
            until_idle(publisher)
        assert wired.numbers() == list(range(count + 10))


_WAYS: dict[str, Callable[[Publisher, Receipt], object]] = {
    "result": lambda _, receipt: receipt.result(WAIT_S),
    "result at once": lambda _, receipt: until(lambda: _is_there(receipt)),
    "done": lambda _, receipt: until(receipt.done),
    "await": lambda _, receipt: asyncio.run(_await(receipt)),
    "flush": lambda publisher, _: publisher.flush(WAIT_S),
    "aflush": lambda publisher, _: asyncio.run(publisher.aflush(WAIT_S)),
    "close": lambda publisher, _: publisher.close(WAIT_S),
    "aclose": lambda publisher, _: asyncio.run(publisher.aclose(WAIT_S)),
    "publish": lambda publisher, _: publisher.publish({"n": -1}).result(WAIT_S),
    "publish a batch": lambda publisher, _: publisher.publish_batch([{"n": -1}]).result(WAIT_S),
}


def _is_there(receipt: Receipt) -> bool:
    try:
        receipt.result(timeout=0)
    except ReceiptTimeoutError:
        return False
    return True


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("wired", ["stream", "TLS"], indirect=True)
def test_an_inline_answer_is_received_in_each_way(wired: Wired, inline_appends, monkeypatch, way):
    leave_answers(monkeypatch)
    with Publisher(mapping.direct(wired.journal), transport=wired.transport) as publisher:
        count = until_inline(publisher, inline_appends)
        before = len(inline_appends)
        receipt = publisher.publish({"n": count})
        assert len(inline_appends) == before + 1
        time.sleep(0.02)
        assert not are_done([receipt])
        _WAYS[way](publisher, receipt)
        assert are_done([receipt])
    assert [n for n in wired.numbers() if n >= 0] == list(range(count + 1))


def test_a_handler_within_the_wait_for_an_inline_answer_does_not_wait_for_it(
    topic: Topic, inline_appends, monkeypatch
):
    """As a signal handler does which interrupts result(); what it publishes is sent."""
    topic.create(0)
    transport = connect(f"{topic.cluster.address}?wire=stream")
    publisher = Publisher(mapping.direct(topic.name(0)), transport=transport)
    until_inline(publisher, inline_appends)
    wait = StreamBlockingCall.wait
    refused: list[ReentrantCallError] = []
    published: list[Receipt] = []

    def interrupted(self, timeout_s):
        if timeout_s != 0 and not refused and threading.current_thread() is threading.main_thread():
            published.append(publisher.publish({"n": -2}))
            for call in (published[0].result, receipt.result, publisher.flush, publisher.close):
                with pytest.raises(ReentrantCallError) as caught:
                    call()
                refused.append(caught.value)
        return wait(self, timeout_s)

    monkeypatch.setattr(StreamBlockingCall, "wait", interrupted)
    for n in itertools.count():
        receipt = publisher.publish({"n": n})
        receipt.result(WAIT_S)
        if refused:
            break
    published[0].result(WAIT_S)
    publisher.close(WAIT_S)
    assert len(refused) == 4
    run(transport.aclose())


def test_over_grpc_nothing_is_sent_inline(topic: Topic, inline_appends):
    topic.create(0)
    transport = connect(f"{topic.cluster.address}?wire=grpc")
    with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
        wait_for_each(publisher, 20)
        publish_each(publisher, range(20, 40))
    run(transport.aclose())
    assert inline_appends == []
    assert [message["n"] for message in found(topic.name(0))] == list(range(40))


def test_to_an_embedded_cluster_nothing_is_sent_inline(topic: Topic, inline_appends):
    topic.create(0)
    with Publisher(mapping.direct(topic.name(0)), transport=topic.cluster.transport) as publisher:
        wait_for_each(publisher, 20)
    assert inline_appends == []
    assert len(found(topic.name(0))) == 20


def test_large_messages_and_batches_are_not_sent_inline(topic: Topic, inline_appends):
    topic.create(0)
    with Publisher(mapping.direct(topic.name(0))) as publisher:
        count = until_inline(publisher, inline_appends)
        sent = len(inline_appends)
        publisher.publish({"n": count, "large": "x" * INLINE_BYTES_MAX}).result(WAIT_S)
        until_idle(publisher)
        batch = [{"n": n, "some": "x" * 1000} for n in range(count + 1, count + 101)]
        publisher.publish_batch(batch).result(WAIT_S)
        assert len(inline_appends) == sent
    assert [message["n"] for message in found(topic.name(0))] == list(range(count + 101))


def test_threads_that_wait_and_threads_that_do_not(topic: Topic, inline_appends):
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
        for journal in journals:  # the primaries are found
            shared.publish({"by": -1, "n": -1, "to": journal}).result(WAIT_S)
        threads = [
            threading.Thread(target=work, args=(alone if name == 0 else shared, name))
            for name in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert inline_appends
    for number, journal in enumerate(journals):
        seen: dict[int, list[int]] = {}
        for message in found(journal)[1:]:
            seen.setdefault(message["by"], []).append(message["n"])
        assert seen == {name: list(range(150)) for name in range(6) if name % 2 == number}


async def _await(receipt):
    async with asyncio.timeout(WAIT_S):
        await receipt
