"""Golden recordings: what a replica answers to a primary of another implementation."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.transport.loop import run
from support.golden import (
    TIMEOUT_S,
    GoldenBroker,
    Outcome,
    hand_made_member,
    names,
    recorded,
    running,
    spec_of,
)
from support.golden_compare import Replay

RECORDING = "replicate_real_replica"
RECORDED_REVISION = 6
"""Revision at which the recorded journal was assigned."""

JOURNAL = "replica/one"


class HandMadePrimary:
    """A Replicate stream whose requests are sent one by one."""

    def __init__(self, broker: GoldenBroker, *, timeout_s: float = TIMEOUT_S) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = broker.client.channel.stream_stream(RPCS_BY_NAME["Replicate"].path)
        self._call = method(iter(self._requests.get, None), timeout=timeout_s)
        self.outcome = Outcome()

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def half_close(self) -> None:
        self._requests.put(None)

    def receive(self) -> bool:
        """Wait for a response, or for the end of the stream."""
        try:
            self.outcome.responses.append(next(self._call))
        except (StopIteration, grpc.RpcError):
            return False
        return True

    def finish(self) -> Outcome:
        while self.receive():
            pass
        self.outcome.code, self.outcome.message = self._call.code().name, self._call.details()
        self.half_close()
        return self.outcome


class Replicated(Replay):
    """Replay of the recorded streams, in their order."""

    def trace(self, case: dict[str, Any]) -> None:
        sends = [step for step in case["trace"] if step["event"] == "send"]
        requests = iter(self.requests("Replicate", {"requests": sends}))
        stream = HandMadePrimary(
            self.broker, timeout_s=1.0 if case["code"] == "DEADLINE_EXCEEDED" else TIMEOUT_S
        )
        for step in case["trace"]:
            match step["event"]:
                case "send":
                    stream.send(next(requests))
                case "recv":
                    stream.receive()
                case "half_close":
                    stream.half_close()
        responses = [step for step in case["trace"] if step["event"] == "recv"]
        self.judge("Replicate", case | {"responses": responses}, stream.finish())


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    with running(tmp_path_factory.mktemp("replica")) as broker:
        held = hand_made_member("http://127.0.0.1:28088") | {
            f"/assign/{JOURNAL}#zone-f#fake-1#0": b"",
            f"/assign/{JOURNAL}#zone-a#broker-1#1": b"",
            f"/items/{JOURNAL}": spec_of(JOURNAL, replication=2).SerializeToString(),
        }
        revision = broker.put(held)
        run(_served(broker), TIMEOUT_S)
        found = Replicated(broker)
        found.revisions.known[RECORDED_REVISION] = revision
        for case in recorded(RECORDING):
            if "trace" in case:
                found.trace(case)
            else:
                found.run("Read", case)
        yield found


async def _served(broker: GoldenBroker) -> None:
    while broker.served.broker.resolver.replica(JOURNAL) is None:
        await broker.keyspace.wait_for_update()


@pytest.mark.parametrize("name", names(RECORDING))
def test_a_replica_answers_as_recorded(replay: Replicated, name: str) -> None:
    replay.check(name)
