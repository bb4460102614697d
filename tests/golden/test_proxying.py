"""Golden recordings: what a broker forwards to the broker of a journal, over gRPC."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.transport.loop import run
from support.golden import TIMEOUT_S, GoldenBroker, hand_made_member, running, spec_of
from support.vectors import golden

CASES = {case["name"]: case for case in golden("broker/proxying.json")["to_a_hand_made_peer"]}
RPCS = {"append": "Append", "read": "Read", "list": "ListFragments"}
"""Calls by the first word of a case's name."""

JOURNAL = "proxied/one"


class HandMadePeer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Broker that keeps the requests of one call, and answers what the recorded one answered."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.requests: list[bytes] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        reads_all = details.method.endswith("/Append")

        def answer(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
            self.requests = list(requests) if reads_all else [next(requests)]
            yield from self.answers

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def peer() -> HandMadePeer:
    return HandMadePeer()


@pytest.fixture(scope="module")
def broker(peer: HandMadePeer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBroker]:
    """Yield a broker that knows one journal, which is the peer's."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((peer,))
        endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with running(tmp_path_factory.mktemp("proxying")) as broker:
            held = hand_made_member(endpoint) | {
                f"/assign/{JOURNAL}#zone-f#fake-1#0": b"",
                f"/items/{JOURNAL}": spec_of(JOURNAL).SerializeToString(),
            }
            broker.put(held)
            run(_listed(broker), TIMEOUT_S)
            yield broker
        server.stop(None).wait()


async def _listed(broker: GoldenBroker) -> None:
    while not any(each.id == JOURNAL for each in broker.keyspace.items()):
        await broker.keyspace.wait_for_update()


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_forwarded_as_recorded(name: str, peer: HandMadePeer, broker: GoldenBroker):
    client, (seen,) = CASES[name]["client"], CASES[name]["what_the_peer_saw"]
    rpc = RPCS_BY_NAME[RPCS[name.replace(",", "").split()[0]]]
    peer.answers = _wires(step for step in seen["trace"] if step["event"] == "send")

    outcome = broker.client.call(rpc.name, _wires(client["requests"]))

    assert outcome.code == client["code"], outcome.message
    assert outcome.responses == _wires(client["responses"])
    recorded = _wires(step for step in seen["trace"] if step["event"] == "recv")
    assert len(peer.requests) == len(recorded)
    for ours, theirs in zip(peer.requests, recorded, strict=True):
        assert _comparable(rpc.request_type, ours) == _comparable(rpc.request_type, theirs)


def _wires(messages: Any) -> list[bytes]:
    return [base64.b64decode(message["wire"]) for message in messages]


def _comparable(kind: type[Message], wire: bytes) -> bytes:
    """Return a request without what varies from run to run."""
    request: Any = kind.FromString(wire)
    if request.HasField("header"):
        request.header.etcd.SetInParent()
        request.header.etcd.Clear()
        request.header.route.endpoints[:] = ["" for _ in request.header.route.endpoints]
    return bytes(request.SerializeToString())
