"""Publishing by threads that send by themselves, to real brokers: order, once, and what happens."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from crash.dev_cluster import DevCluster
from gazette_sdk import Publisher, Reader, connect, embedded, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message.publishing import direct
from gazette_sdk.message.publishing.handover import Holder
from gazette_sdk.message.publishing.receipt import Receipt, ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.process import Server
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.stream import ChosenTransport, StreamTransport
from gazette_sdk.transport.stream.blocking import REDIAL_AFTER_S, BlockingClient
from gazette_sdk.transport.stream.dialing import NotStreamError
from gazette_sdk.transport.tls import Tls
from integration.message.topics import Topic
from support.certificates import Authority

WAIT_S = 30.0

PAUSE_S = 0.003
"""Between messages that nobody waits for."""

NEVER_S = 600.0
"""By itself, the event loop looks for no answer."""


@pytest.fixture
def direct_appends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that appended by themselves."""
    names: list[str] = []
    append = BlockingClient.append

    def noting(self, *arguments):
        call = append(self, *arguments)
        if call is not None:
            names.append(threading.current_thread().name)
        return call

    monkeypatch.setattr(BlockingClient, "append", noting)
    return names


def wait_for_each(publisher: Publisher, count: int, **more: object) -> None:
    for n in range(count):
        receipt = publisher.publish({"n": n, **more}).result(WAIT_S)
        assert receipt.end > receipt.begin


def publish_each(publisher: Publisher, numbers: range, **more: object) -> list[Receipt]:
    """Waiting for none."""
    receipts = []
    for n in numbers:
        receipts.append(publisher.publish({"n": n, **more}))
        time.sleep(PAUSE_S)
    return receipts


def form_habit(publisher: Publisher, appends: list[str]) -> int:
    """Wait for each until its messages are sent by this thread; how many those were."""
    for n in range(200):
        before = len(appends)
        publisher.publish({"n": n}).result(WAIT_S)
        if len(appends) > before:
            return n + 1
    raise AssertionError


def are_done(receipts: list[Receipt]) -> bool:
    """Whether they are, without asking them: that would have them looked for."""
    return all(receipt.batch.is_done for receipt in receipts)


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def found(journal: str) -> list[dict]:
    return [envelope.message for envelope in Reader(dict, name=journal)]


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


# ------------------------------------------------------------------ ends of programs


_PROGRAM = """
    import gc, os, sys, threading, time
    from gazette_sdk import Publisher, mapping
    from gazette_sdk.message.publishing import direct
    from gazette_sdk.message.publishing.handover import Holder
    journal, ending, is_awaited = sys.argv[1], sys.argv[2], sys.argv[3] == "awaited"
    publisher = Publisher(mapping.direct(journal))
    for n in range(20):
        receipt = publisher.publish({"n": n})
        if is_awaited:
            receipt.result(30)
        else:
            time.sleep(0.02)
    outbox = publisher._sender.outboxes[journal]
    assert outbox.habit.is_formed
    direct.AWAY_S = 600.0  # nobody looks for an answer by itself

    def publish_one():
        # Others may have left something to the event loop.
        deadline = time.monotonic() + 30
        while outbox.holder != Holder.NOBODY and time.monotonic() < deadline:
            receipt.done()
            time.sleep(0.001)
        made = publisher.publish({"n": 20})
        assert outbox.holder == Holder.AWAY
        return made

    if ending == "exit":
        publish_one()
    elif ending == "exit of a thread":
        thread = threading.Thread(target=publish_one)
        thread.start()
        thread.join()
    elif ending == "exit with an error":
        publish_one()
        sys.exit(3)
    elif ending == "close":
        publish_one()
        publisher.close(30)
    elif ending == "block":
        with publisher:
            publish_one()
    elif ending == "abandon":
        publish_one()
        del publisher, outbox
        gc.collect()
    elif ending == "fork":
        receipt = publish_one()
        child = os.fork()
        if child == 0:
            for n in range(100, 120):
                publisher.publish({"n": n}).result(30)
            publisher.publish({"n": 120})
            publisher.close(30)
            os._exit(0)
        receipt.result(30)
        for n in range(21, 40):
            publisher.publish({"n": n}).result(30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

_ENDINGS = [
    "exit",
    "exit of a thread",
    "exit with an error",
    "close",
    "block",
    "abandon",
    "fork",
]


@pytest.mark.parametrize("habit", ["awaited", "paced"])
@pytest.mark.parametrize("ending", _ENDINGS)
def test_a_message_that_is_away_is_not_left_behind(topic: Topic, ending, habit):
    topic.create(0)
    # Who abandons a publisher is told of what was not closed.
    warnings = f"{'ignore' if ending == 'abandon' else 'error'}::ResourceWarning"
    done = subprocess.run(
        [
            *(sys.executable, "-W", warnings, "-c", textwrap.dedent(_PROGRAM)),
            *(topic.name(0), ending, habit),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3 if ending == "exit with an error" else 0, "")
    reader = Reader(dict, name=topic.name(0), isolation="uncommitted")
    numbers = [envelope.message["n"] for envelope in reader]
    parents = [n for n in numbers if n < 100]
    assert parents == list(range(40 if ending == "fork" else 21))
    children = [n for n in numbers if n >= 100]
    assert children == (list(range(100, 121)) if ending == "fork" else [])


def run_program(program: str, journal: str) -> None:
    """Runs it to its end, of which nothing is to be said."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), journal],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_before_the_end_of_a_program_are_not_left_behind(topic: Topic):
    topic.create(0)
    program = """
        import sys, time
        from gazette_sdk import Publisher, mapping
        publisher = Publisher(mapping.direct(sys.argv[1]))
        for n in range(150):
            publisher.publish({"n": n})
            time.sleep(0.003)
    """
    run_program(program, topic.name(0))
    assert [message["n"] for message in found(topic.name(0))] == list(range(150))


@pytest.mark.parametrize("count", range(1, 8))
def test_a_program_may_end_before_it_has_connections_of_its_own(topic: Topic, count):
    """The first one is asked for when the habit is formed, and there may be no time for it."""
    topic.create(0)
    program = f"""
        import atexit, sys
        from gazette_sdk import Publisher, mapping
        publisher = Publisher(mapping.direct(sys.argv[1]))

        def publish_last():
            publisher.publish({{"n": {count}}}).result(30)
            publisher.publish({{"n": {count} + 1}})

        atexit.register(publish_last)
        for n in range({count}):
            publisher.publish({{"n": n}}).result(30)
    """
    run_program(program, topic.name(0))
    assert [message["n"] for message in found(topic.name(0))] == list(range(count + 2))


# --------------------------------------------------------------- brokers that pause or end


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(
            """
            name: a/journal
            replication: 1
            labels: [{name: content-type, value: application/x-ndjson}]
            fragment:
              {length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
            """
        )
        monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        yield cluster


def test_a_caller_whose_time_runs_out_still_has_its_message_appended(
    dev: DevCluster, direct_appends
):
    with Publisher(mapping.direct("a/journal")) as publisher:
        wait_for_each(publisher, 20)
        count = len(direct_appends)
        assert count
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipt = publisher.publish({"n": 20})
            assert len(direct_appends) == count + 1
            began_at = time.monotonic()
            with pytest.raises(ReceiptTimeoutError):
                receipt.result(timeout=0.3)
            assert 0.29 < time.monotonic() - began_at < 5
            behind = publisher.publish({"n": 21})
            assert len(direct_appends) == count + 1
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        receipt.result(WAIT_S)
        behind.result(WAIT_S)
        assert not receipt.batch.was_retried
        wait_for_each(publisher, 10)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == [*range(22), *range(10)]


def test_who_waits_for_none_is_not_held_up_by_a_broker_that_pauses(dev: DevCluster, direct_appends):
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = form_habit(publisher, direct_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipts = []
            taken_s = []
            for n in range(count, count + 100):
                began_at = time.monotonic()
                receipts.append(publisher.publish({"n": n}))
                taken_s.append(time.monotonic() - began_at)
                time.sleep(PAUSE_S)
            assert sum(taken_s) < 1.0
            assert not any(receipt.done() for receipt in receipts)
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        until(lambda: are_done(receipts))
        assert not any(receipt.batch.was_retried for receipt in receipts)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == list(range(count + 100))


@pytest.mark.parametrize("who_looks", ["the loop", "whoever waits or publishes"])
def test_a_broker_that_is_killed_and_started_again(
    dev: DevCluster, direct_appends, monkeypatch, who_looks
):
    if who_looks != "the loop":
        monkeypatch.setattr(direct, "AWAY_S", NEVER_S)
    with Publisher(mapping.direct("a/journal")) as publisher:
        sent: list[tuple[int, int]] = []
        receipts: list[Receipt] = []

        def publish(round_: int, *, is_awaited: bool) -> Receipt:
            sent.append((round_, len(sent)))
            receipt = publisher.publish({"n": sent[-1][1], "round": round_})
            receipts.append(receipt)
            if is_awaited:
                receipt.result(WAIT_S)
            return receipt

        def publish_some(round_: int) -> None:
            for n in range(40):  # one half is waited for
                publish(round_, is_awaited=n % 2 == 0)
                time.sleep(PAUSE_S)

        for round_ in range(3):
            begun = len(direct_appends)
            publish_some(round_)
            if len(direct_appends) == begun:  # it could not be dialled a moment ago
                time.sleep(REDIAL_AFTER_S * 2)
                publish_some(round_)
            assert len(direct_appends) > begun
            publish(round_, is_awaited=False)  # it may be away
            dev.kill()
            starting = threading.Thread(target=dev.start)
            starting.start()
            for _ in range(20):
                publish(round_, is_awaited=False)
                time.sleep(PAUSE_S)
            publish(round_, is_awaited=round_ == 1)
            starting.join(WAIT_S)
        for receipt in receipts:
            receipt.result(WAIT_S)
        assert urlsplit(dev.address).port
    numbers = [(message["round"], message["n"]) for message in found("a/journal")]
    assert numbers == sent


def test_an_append_that_is_away_when_its_broker_is_killed_is_made_again(
    dev: DevCluster, direct_appends, monkeypatch
):
    monkeypatch.setattr(direct, "AWAY_S", NEVER_S)
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = form_habit(publisher, direct_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        lost = publisher.publish({"n": count})
        outbox = publisher._sender.outboxes["a/journal"]
        assert outbox.holder == Holder.AWAY
        dev.kill()
        dev.start()
        behind = publisher.publish({"n": count + 1})
        behind.result(WAIT_S)
        assert lost.batch.is_done
        assert lost.batch.was_retried
        assert lost.end <= behind.begin
    assert [message["n"] for message in found("a/journal")] == list(range(count + 2))
