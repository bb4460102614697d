"""Golden recordings: what a primary sends to a replica of another implementation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.transport.loop import run
from support.golden import (
    TIMEOUT_S,
    GoldenBroker,
    Outcome,
    hand_made_member,
    running,
    spec_of,
    wire_of,
)
from support.vectors import golden

CASES = {
    case["journal"].removeprefix("primary/"): case
    for case in golden("broker/replicate_real_primary.json")
}
KINDS = {"send": pb.ReplicateResponse, "recv": pb.ReplicateRequest}
LARGE = b"x" * 100_000


class HandMadeReplica(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Replica that keeps what it gets, and answers what the recorded one answered.

    Attributes:
        answers: of each stream, to the requests that want one; later ones are accepted.
        streams: requests of each stream.
        revision: Etcd revision that answers tell, if it is greater than the primary's.
    """

    def __init__(self) -> None:
        self.reset([])

    def reset(self, answers: Sequence[Sequence[bytes]]) -> None:
        self.answers = answers
        self.streams: list[list[pb.ReplicateRequest]] = []
        self.revision = 0
        self._ended = threading.Event()

    def wait_until_ended(self) -> None:
        """Wait until the primary has ended a stream."""
        assert self._ended.wait(TIMEOUT_S)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not details.method.endswith("/Replicate"):
            return None
        return grpc.stream_stream_rpc_method_handler(self._replicate)

    def _replicate(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        number = len(self.streams)
        answers = iter(self.answers[number] if number < len(self.answers) else ())
        seen: list[pb.ReplicateRequest] = []
        self.streams.append(seen)
        for wire in requests:
            request = pb.ReplicateRequest.FromString(wire)
            seen.append(request)
            if request.acknowledge:
                answer = pb.ReplicateResponse.FromString(next(answers, b""))
                if answer.HasField("header"):
                    answer.header.etcd.CopyFrom(request.header.etcd)
                    answer.header.etcd.revision = max(request.header.etcd.revision, self.revision)
                yield answer.SerializeToString()
        self._ended.set()


class Told(NamedTuple):
    """Proposal, and the content in front of it."""

    content: bytes
    begin: int
    end: int
    codec: int
    sum: bytes
    registers: bytes


def told(requests: Sequence[pb.ReplicateRequest]) -> list[Told]:
    """Return what a stream tells a replica. An equal proposal without content tells nothing."""
    found: list[Told] = []
    content = b""
    for request in requests:
        if not request.HasField("proposal"):
            assert request.content_delta == len(content)
            content += request.content
            continue
        fragment = request.proposal
        proposal = Told(
            content,
            fragment.begin,
            fragment.end,
            fragment.compression_codec,
            fragment.sum.SerializeToString(),
            request.registers.SerializeToString(),
        )
        if content or not found or found[-1]._replace(content=b"") != proposal:
            found.append(proposal)
        content = b""
    return found


@pytest.fixture(scope="module")
def peer() -> HandMadeReplica:
    return HandMadeReplica()


@pytest.fixture(scope="module")
def broker(
    peer: HandMadeReplica, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GoldenBroker]:
    """Yield a broker, of whose journals the peer holds the second replica."""
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((peer,))
        endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with running(tmp_path_factory.mktemp("primary")) as broker:
            broker.put(hand_made_member(endpoint))
            yield broker
        server.stop(None).wait()


async def _served(broker: GoldenBroker, journal: str) -> None:
    while broker.served.broker.resolver.replica(journal) is None:
        await broker.keyspace.wait_for_update()


class Primary:
    """The broker as primary of a recorded journal."""

    def __init__(self, broker: GoldenBroker, peer: HandMadeReplica, name: str) -> None:
        self.case = CASES[name]
        self.journal = self.case["journal"]
        self._broker = broker
        self._peer = peer
        peer.reset([list(_wires(stream, "send")) for stream in self.case["streams"]])
        held = {
            f"/assign/{self.journal}#zone-a#broker-1#0": b"",
            f"/assign/{self.journal}#zone-f#fake-1#1": b"",
            f"/items/{self.journal}": spec_of(self.journal, replication=2).SerializeToString(),
        }
        broker.put(held)
        run(_served(broker, self.journal), TIMEOUT_S)

    def append(self, *chunks: bytes, commit: bool = True, **fields: Any) -> Outcome:
        requests = [pb.AppendRequest(journal=self.journal, **fields)]
        requests += [pb.AppendRequest(content=chunk) for chunk in chunks]
        requests += [pb.AppendRequest()] if commit else []
        wires = [request.SerializeToString() for request in requests]
        return self._broker.client.call("Append", wires)

    def committed(self, *chunks: bytes, **fields: Any) -> tuple[int, int]:
        outcome = self.append(*chunks, **fields)
        assert outcome.code == "OK", outcome.message
        response = pb.AppendResponse.FromString(outcome.responses[0])
        assert response.status == pb.OK
        return response.commit.begin, response.commit.end

    def commits(self) -> list[tuple[int, int]]:
        """Begins and ends of the recorded appends."""
        return [
            (int(commit.get("begin", 0)), int(commit.get("end", 0)))
            for action in self.case["actions"]
            for response in action.get("responses", ())
            for commit in [response["json"]["commit"]]
        ]

    def recorded(self, stream: int) -> list[Told]:
        wires = _wires(self.case["streams"][stream], "recv")
        return told([pb.ReplicateRequest.FromString(wire) for wire in wires])

    def told(self, stream: int) -> list[Told]:
        return told(self._peer.streams[stream])

    def told_once_complete(self, stream: int, count: int) -> list[Told]:
        """Return the proposals of a stream, once there are so many: one may follow the answer."""
        ends_at = time.monotonic() + TIMEOUT_S
        while len(found := self.told(stream)) < count and time.monotonic() < ends_at:
            time.sleep(0.01)
        return found


def _wires(stream: dict[str, Any], event: str) -> Iterator[bytes]:
    for step in stream["trace"]:
        if step["event"] == event:
            yield wire_of(KINDS[event], step)


def test_a_replica_that_agrees_is_told_what_was_recorded(broker, peer):
    primary = Primary(broker, peer, "agree")
    made = [
        primary.committed(b"he", b"llo"),
        primary.committed(b" world"),
        primary.committed(b"!", union_registers=label_set(owner="me")),
    ]
    assert primary.append(b"lost", commit=False).code == "UNKNOWN"
    made.append(primary.committed())
    made.append(primary.committed(LARGE))
    assert made == primary.commits()

    *ours, large = primary.told(0)
    *recorded, _ = primary.recorded(0)  # whose content is not known
    assert ours == recorded
    assert (large.content, large.begin, large.end) == (LARGE, 5, made[-1][1])
    broker.apply(delete=[primary.journal])
    peer.wait_until_ended()


@pytest.mark.parametrize("name", ["peer-ahead", "peer-behind", "route-later", "route-same"])
def test_a_replica_that_corrects_the_primary_is_told_what_was_recorded(broker, peer, name):
    primary = Primary(broker, peer, name)
    if name == "route-later":
        peer.revision = broker.put({"/note": b""})
    commits = primary.commits()
    assert [primary.committed(content) for content in (b"x", b"y")[: len(commits)]] == commits
    assert len(peer.streams) == len(primary.case["streams"])
    for number in range(len(peer.streams)):
        recorded = primary.recorded(number)
        ours = primary.told_once_complete(number, len(recorded))
        assert ours[: len(recorded)] == recorded
        # Ours begins another spool when it has committed, and not with the next append.
        assert all(not each.content and each.begin == each.end for each in ours[len(recorded) :])


@pytest.mark.parametrize(
    ("name", "status"), [("not-broker", "NOT_JOURNAL_BROKER"), ("nack", "PROPOSAL_MISMATCH")]
)
def test_an_append_that_a_replica_refuses_fails_as_recorded(broker, peer, name, status):
    primary = Primary(broker, peer, name)
    recorded = primary.case["actions"][0]
    outcome = primary.append(b"abc")
    assert outcome.code == recorded["code"]
    assert status in outcome.message
    assert status in recorded["message"]
    ours = primary.told(0)
    assert ours == primary.recorded(0)[: len(ours)]
