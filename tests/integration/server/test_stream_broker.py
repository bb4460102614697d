"""A real broker over the stream transport, with a client that is a socket and the codec."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    Kind,
    Method,
    StatusLine,
    encode_call,
)
from gazette_sdk.transport.loop import run
from support.brokers import journal_spec
from support.raw_stream import RawStream, append_frames, head_of, read_call

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        yield cluster
        assert len(cluster.brokers[0].server.stream) == 0


@pytest.fixture
def client(cluster) -> Iterator[RawStream]:
    with RawStream(cluster.address) as client:
        yield client
    until(lambda: len(cluster.brokers[0].server.stream) == 0)


def until(holds: Any) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def make(client: RawStream, name: str, **changes: Any) -> str:
    """Create a journal, and wait until it takes appends."""
    change = pb.ApplyRequest.Change(upsert=journal_spec(name, **changes), expect_mod_revision=0)
    response = client.call(Method.APPLY, pb.ApplyRequest(changes=[change]))
    assert response.status == pb.OK
    appended = client.append(name)
    while appended.status != pb.OK:
        assert appended.status in (pb.NO_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS)
        appended = client.append(name, min_etcd_revision=appended.header.etcd.revision + 1)
    return name


def test_a_journal_lives_its_life(client):
    journal = make(client, "life/one", labels={"app.gazette.dev/team": "red"})
    assert client.append(journal, b"first line\n").commit.end == 11
    assert client.append(journal, b"second ", b"line\n").commit.end == 23
    assert client.read(journal) == b"first line\nsecond line\n"
    assert client.read(journal, 6) == b"line\nsecond line\n"

    selector = pb.LabelSelector(include=label_set(**{"app.gazette.dev/team": "red"}))
    client.send(encode_call(Method.LIST, pb.ListRequest(selector=selector).SerializeToString()))
    (frame,), status = client.answer()
    assert status == StatusLine(0)
    listed = pb.ListResponse.FromString(frame.payload)
    assert [entry.spec.name for entry in listed.journals] == [journal]

    fragments = client.call(Method.LIST_FRAGMENTS, pb.FragmentsRequest(journal=journal))
    assert fragments.fragments[-1].spec.end == 23
    health = client.call(
        Method.FRAGMENT_STORE_HEALTH, pb.FragmentStoreHealthRequest(fragment_store="file:///")
    )
    assert health.status in (pb.OK, pb.FRAGMENT_STORE_UNHEALTHY)

    change = pb.ApplyRequest.Change(delete=journal, expect_mod_revision=-1)
    assert client.call(Method.APPLY, pb.ApplyRequest(changes=[change])).status == pb.OK
    assert client.append("life/none", b"x").status == pb.JOURNAL_NOT_FOUND


def test_what_is_invalid_is_refused_as_over_grpc(client):
    client.send(*append_frames("not//clean", b"x"), read_call("/x"))
    for _ in range(2):
        status = client.status()
        assert status.code == 2
        assert "journal" in status.text.lower()


def test_a_watch_of_a_list_tells_changes(cluster, client):
    request = pb.ListRequest(
        selector=pb.LabelSelector(include=label_set(prefix="watched/")), watch=True
    )
    client.send(encode_call(Method.LIST, request.SerializeToString()))
    assert not pb.ListResponse.FromString(client.frame().payload).journals
    with RawStream(cluster.address) as other:
        make(other, "watched/one")
    seen: list[str] = []
    while not seen:
        seen = [e.spec.name for e in pb.ListResponse.FromString(client.frame().payload).journals]
    assert seen == ["watched/one"]
    client.send(ABORT_FRAME)
    assert client.status().code == 1


@pytest.mark.parametrize("codec", [pb.NONE, pb.SNAPPY])
def test_much_content_comes_back(client, codec):
    journal = make(
        client,
        f"much/{codec}",
        length=2 << 20,
        compression_codec=codec,
        stores=["file:///"],
        refresh_interval_s=1,
    )
    content = b"".join(b"%09d\n" % n for n in range(600_000))
    for begin in range(0, len(content), 1_000_000):
        response = client.append(journal, content[begin : begin + 1_000_000])
        assert response.status == pb.OK
    assert client.read(journal) == content
    assert client.read(journal, 2_999_990, end_offset=3_000_010) == content[2_999_990:3_000_010]
    whole = client.append(journal, content)  # one append, of several frames
    assert whole.commit.end - whole.commit.begin == len(content)
    assert client.read(journal, len(content)) == content


# ----------------------------------------------------------- nothing or everything


def test_an_aborted_append_leaves_nothing(client):
    journal = make(client, "abort/one")
    client.send(*append_frames(journal, b"lost")[:-1], ABORT_FRAME)
    assert client.status().code == 1
    assert client.append(journal, b"kept").commit.begin == 0
    assert client.read(journal) == b"kept"


def test_a_client_killed_at_any_frame_of_an_append_leaves_nothing_or_everything(cluster, client):
    journal = make(client, "kill/one")
    chunks = [b"a" * 100, b"b" * 70_000, b"c" * 5]
    frames = append_frames(journal, *chunks)
    end = 0
    for reset in (False, True):
        for count in range(len(frames) + 1):
            for extra in (b"", b"\4\0"):  # at the boundary, and within the next frame
                victim = RawStream(cluster.address)
                victim.send(*frames[:count], extra)
                if reset:
                    victim.socket.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                    )
                victim.close()
                until(lambda: len(cluster.brokers[0].server.stream) == 1)
                marker = client.append(journal, b"|")
                assert marker.status == pb.OK
                gained = marker.commit.begin - end
                assert gained in (0, 70_105), (count, extra, reset)
                assert gained == 0 or count == len(frames)
                end = marker.commit.end
    parts = client.read(journal).split(b"|")
    assert set(parts) <= {b"", b"".join(chunks)}


def test_an_early_refusal_of_an_append(client):
    journal = make(client, "refused/one")
    client.append(journal, b"12345")
    call, content, end = append_frames(journal, b"x" * CONTENT_BYTES_MAX, offset=3)
    client.send(call)
    response = client.response(Method.APPEND)
    assert response.status == pb.WRONG_APPEND_OFFSET
    client.send(content, content, end)
    assert client.append(journal, b"67").commit.end == 7


def test_pipelined_appends_after_success(client):
    journal = make(client, "pipelined/one")
    head = head_of(after_success=True)
    client.send(
        *(
            frame
            for number in range(50)
            for frame in append_frames(journal, b"%02d" % number, head=head)
        )
    )
    commits = [client.response(Method.APPEND).commit for _ in range(50)]
    assert [commit.begin for commit in commits] == list(range(0, 100, 2))

    client.send(
        *append_frames(journal, b"ok", head=head),
        *append_frames(journal, b"no", head=head, offset=5),
        *append_frames(journal, b"never", head=head),
        *append_frames(journal, b"never", head=head),
        *append_frames(journal, b"again"),
    )
    assert client.response(Method.APPEND).status == pb.OK
    assert client.response(Method.APPEND).status == pb.WRONG_APPEND_OFFSET
    for _ in range(2):
        status = client.status()
        assert (status.code, status.kind) == (10, NOT_RUN)
    assert client.response(Method.APPEND).status == pb.OK
    content = client.read(journal)
    assert content == b"".join(b"%02d" % n for n in range(50)) + b"okagain"


# ------------------------------------------------------------------- long reads


def test_a_read_follows_what_is_appended(cluster, client):
    journal = make(client, "follow/one")
    with RawStream(cluster.address) as reader:
        reader.send(read_call(journal, block=True))
        total = b""
        for number in range(20):
            line = b"line %d\n" % number
            client.append(journal, line)
            got = b""
            while len(got) < len(line):
                frame = reader.frame()
                if frame.kind == Kind.CONTENT:
                    got += frame.payload
                elif frame.kind == Kind.MESSAGE:
                    assert pb.ReadResponse.FromString(frame.payload).offset == len(total)
            assert got == line
            total += got
        reader.send(ABORT_FRAME)
        assert reader.status().code == 1
        assert reader.read(journal) == total


def test_two_hundred_connections(cluster, client):
    journal = make(client, "many/one")
    connections = [RawStream(cluster.address) for _ in range(200)]
    for number, connection in enumerate(connections):
        connection.send(*append_frames(journal, b"%03d" % number))
    for connection in connections:
        assert connection.response(Method.APPEND).status == pb.OK
    content = client.read(journal)
    assert sorted(content[n : n + 3] for n in range(0, 600, 3)) == [b"%03d" % n for n in range(200)]
    for connection in connections:
        connection.send(read_call(journal))
    for connection in connections:
        frames, status = connection.answer()
        assert status.code == 0
        assert b"".join(f.payload for f in frames if f.kind == Kind.CONTENT) == content
        connection.close()


def test_any_broker_of_a_cluster_serves(tmp_path):
    with EmbeddedCluster(tmp_path, sync_etcd=False, brokers=3) as cluster:
        clients = [RawStream(address) for address in cluster.addresses]
        journal = make(clients[0], "replicated/one", replication=3)
        head = head_of(after_success=True)
        for number, client in enumerate(clients):
            assert client.hello is not None
            assert client.hello.suffix == f"broker-{number}"
            client.send(
                *(f for _ in range(5) for f in append_frames(journal, b"%d" % number, head=head))
            )
            for _ in range(5):
                assert client.response(Method.APPEND).status == pb.OK
        for client in clients:
            assert client.read(journal) == b"000001111122222"
            client.send(read_call(journal, do_not_proxy=True), ABORT_FRAME)
            client.answer()
            client.close()


# --------------------------------------------------------------------- the end


def test_a_broker_that_stops_ends_reads_and_says_so(tmp_path):
    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        with RawStream(cluster.address) as client, RawStream(cluster.address) as reader:
            journal = make(client, "stop/one")
            reader.send(read_call(journal, block=True))
            client.append(journal, b"content")
            while reader.frame().kind != Kind.CONTENT:
                pass
            stopping = threading.Thread(target=cluster.stop)
            stopping.start()
            assert client.goaway() == "the server stops"
            kinds = {reader.frame().kind, reader.frame().kind}
            assert kinds == {Kind.STATUS, Kind.GOAWAY}
            for connection in (client, reader):
                assert connection.is_ended()
            stopping.join(LIMIT_S)
            assert not stopping.is_alive()

        async def left() -> list[str]:
            names = (task.get_name() for task in asyncio.all_tasks())
            return [name for name in names if name.startswith("stream")]

        assert run(left(), LIMIT_S) == []


def test_tokens_are_checked_for_every_call(tmp_path):
    keys = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I="
    with EmbeddedCluster(tmp_path, sync_etcd=False, auth_keys=keys) as cluster:
        authority = Authority(keys)

        def head(capability: int) -> bytes:
            token = authority.sign(capability, pb.LabelSelector(), 60, time.time())
            return head_of(token=f"Bearer {token}")

        with RawStream(cluster.address) as client:
            request = pb.ApplyRequest(
                changes=[pb.ApplyRequest.Change(upsert=journal_spec("auth/one"))]
            )
            client.send(encode_call(Method.APPLY, request.SerializeToString()))
            assert client.status().code == 16
            assert client.call(Method.APPLY, request, head(Capability.APPLY)).status == pb.OK
            client.send(*append_frames("auth/one", b"x", head=head(Capability.READ)))
            assert client.status().code == 16
            allowed = head(Capability.APPEND)
            revision = 0
            while True:
                client.send(
                    *append_frames("auth/one", b"x", head=allowed, min_etcd_revision=revision)
                )
                response = client.response(Method.APPEND)
                if response.status == pb.OK:
                    break
                revision = response.header.etcd.revision + 1
            client.send(read_call("auth/one"))
            assert client.status().code == 16
            client.send(read_call("auth/one", head=head(Capability.READ)))
            assert client.status().code == 0
