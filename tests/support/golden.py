"""A broker as the recorded one was, and a client that sends recorded bytes as they are.

The recordings in ``tests/golden/broker`` were made of ``zone-a`` / ``broker-1``; :func:`running`
starts a broker of that name over an empty Etcd, behind a port. :class:`RawClient` speaks gRPC to
it in bytes, so that what is compared is what really stands on the wire.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from gazette_sdk.broker.api.served import ServedBroker
from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.process import BrokerConfig
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, is_consistent
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Put
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.protocol.rules import RPCS_BY_NAME, Rpc
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.vectors import golden

TIMEOUT_S = 20.0
"""What takes this long does not happen."""

PATTERN = b"".join(b"%07d\n" % number for number in range(20_000))
"""What large contents of the recordings are made of."""


def recorded(name: str) -> list[dict[str, Any]]:
    """The cases of a recording."""
    found = golden(f"broker/{name}.json")
    return list(found["cases"] if isinstance(found, dict) else found)


def names(name: str) -> list[str]:
    """The names of a recording's cases, all different."""
    found = [case["name"] for case in recorded(name)]
    assert len(set(found)) == len(found)
    return found


def wire_of(kind: type[Message], message: dict[str, Any]) -> bytes:
    """The bytes of a recorded message."""
    if "wire" in message:
        return base64.b64decode(message["wire"])
    return parsed(kind, message).SerializeToString()


def parsed(kind: type[Message], message: dict[str, Any]) -> Message:
    """A recorded message. Long content that is not recorded is left out."""
    if "wire" in message:
        return kind.FromString(base64.b64decode(message["wire"]))
    fields = {k: v for k, v in message["json"].items() if not k.startswith("content_")}
    return json_format.ParseDict(fields, kind())


# ------------------------------------------------------------------ a raw client


@dataclass
class Outcome:
    """What came of a call."""

    responses: list[bytes] = field(default_factory=list)
    code: str = ""
    message: str = ""
    seconds: float = 0.0


class Stream:
    """A call under way: its responses as they come.

    Args:
        client: carries it.
        rpc: name of the call.
        requests: bytes of the requests.
        half_close: whether the client says that no more come.
        timeout_s: the client's own deadline.
    """

    def __init__(
        self,
        client: RawClient,
        rpc: str,
        requests: Sequence[bytes],
        *,
        half_close: bool = True,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._begun_s = time.monotonic()

        def sending() -> Iterator[bytes]:
            yield from requests
            if not half_close:
                self._ended.wait(2 * timeout_s)

        # Every call has the same form on the wire, whether its sides are streams or not.
        method = client.channel.stream_stream(client.rpcs[rpc].path)
        metadata = () if token is None else (("authorization", token),)
        self._call = method(sending(), timeout=timeout_s, metadata=metadata, wait_for_ready=True)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        error: Any = None
        try:
            for response in self._call:
                with self._changed:
                    self.outcome.responses.append(response)
                    self._changed.notify_all()
        except grpc.RpcError as ended:
            error = ended
        with self._changed:
            source = self._call if error is None else error
            self.outcome.code = source.code().name
            self.outcome.message = source.details() or ""
            self.outcome.seconds = time.monotonic() - self._begun_s
            self._ended.set()
            self._changed.notify_all()

    def wait_for(self, count: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until so many responses have come."""
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: len(self.outcome.responses) >= count or self._ended.is_set(), timeout_s
            )
        assert has_come, f"{len(self.outcome.responses)} of {count} responses within {timeout_s} s"

    def cancel(self) -> Outcome:
        """Give the call up."""
        self._call.cancel()
        return self.finish()

    def finish(self) -> Outcome:
        """Wait for its end."""
        assert self._ended.wait(2 * TIMEOUT_S), "the call did not end"
        self._thread.join()
        return self.outcome


class RawClient:
    """Sends requests as bytes, and gives responses as bytes.

    Args:
        endpoint: of the process.
        rpcs: calls of its service, by default those of a broker.
    """

    def __init__(self, endpoint: str, rpcs: Mapping[str, Rpc] = RPCS_BY_NAME) -> None:
        self.rpcs = rpcs
        self.channel = grpc.insecure_channel(
            endpoint.removeprefix("http://"),
            options=(
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
            ),
        )

    def call(self, rpc: str, requests: Sequence[bytes], **how: Any) -> Outcome:
        """Make a call and wait for its end; arguments as for :class:`Stream`."""
        return Stream(self, rpc, requests, **how).finish()

    def close(self) -> None:
        self.channel.close()


# ------------------------------------------------------------------ a broker


class GoldenBroker:
    """A running broker, named as the recorded one.

    Attributes:
        served: the broker behind its port.
        etcd_server: its Etcd.
        root: where its ``file://`` stores are.
        client: a client of it.
    """

    def __init__(
        self, served: ServedBroker, etcd_server: EtcdServer, root: Path, client: RawClient
    ) -> None:
        self.served = served
        self.etcd_server = etcd_server
        self.root = root
        self.client = client

    @property
    def endpoint(self) -> str:
        return self.served.endpoint

    @property
    def keyspace(self) -> BrokerKeySpace:
        return self.served.broker.keyspace

    # -------------------------------------------------------- building a state

    def apply(self, *specs: pb.JournalSpec, delete: Sequence[str] = ()) -> int:
        """Create or change journals, in one transaction, and wait until they are served."""
        request = pb.ApplyRequest()
        for spec in specs:
            request.changes.add(expect_mod_revision=-1, upsert=spec)
        for journal in delete:
            request.changes.add(expect_mod_revision=-1, delete=journal)
        outcome = self.client.call("Apply", [request.SerializeToString()])
        assert outcome.code == "OK", outcome.message
        response = pb.ApplyResponse.FromString(outcome.responses[0])
        assert response.status == pb.OK
        self.wait_until_served(*(spec.name for spec in specs))
        return response.header.etcd.revision

    def put(self, values: Mapping[str, bytes]) -> int:
        """Write keys below the cluster's prefix at once, and return the revision.

        One after the other, the allocator would remove assignments of a journal to come.
        """
        return run(self._put(values), TIMEOUT_S)

    async def _put(self, values: Mapping[str, bytes]) -> int:
        root = self.keyspace.item_key("journal").removesuffix(b"/items/journal")
        etcd = await connected(self.etcd_server)
        puts = [Put(root + key.encode(), value) for key, value in values.items()]
        revision = (await etcd.txn((), puts)).revision
        await etcd.aclose()
        return revision

    def append(self, journal: str, *chunks: bytes, **fields: Any) -> pb.AppendResponse:
        """Append chunks to a journal."""
        requests = [pb.AppendRequest(journal=journal, **fields).SerializeToString()]
        requests += [pb.AppendRequest(content=chunk).SerializeToString() for chunk in chunks]
        outcome = self.client.call("Append", [*requests, b""])
        assert outcome.code == "OK", outcome.message
        return pb.AppendResponse.FromString(outcome.responses[0])

    def append_all(self, journal: str, *contents: bytes) -> None:
        """One append each; all must succeed."""
        for content in contents:
            response = self.append(journal, *([content] if content else []))
            assert response.status == pb.OK, response

    def index(self, journal: str) -> Index:
        """The index of a journal."""
        replica = self.served.broker.resolver.replica(journal)
        assert replica is not None, journal
        return replica.index

    def fragments(self, journal: str) -> list[pb.Fragment]:
        """What the index of a journal holds."""
        return list(self.index(journal).page(limit=1000).fragments)

    def wait_until_served(self, *journals: str) -> None:
        """Wait until journals are assigned, synchronised and listed (all of them if none given)."""

        def is_so() -> bool:
            known = journals or [item.id for item in self.keyspace.items()]
            return all(self._is_served(journal) for journal in known)

        run(self._keyspace_until(is_so), TIMEOUT_S)
        for journal in journals:
            run(self.index(journal).first_refresh.wait(), TIMEOUT_S)

    def wait_until_unassigned(self, journal: str) -> None:
        """Wait until nobody holds a journal."""
        run(
            self._keyspace_until(lambda: not self.keyspace.assignments(journal)),
            TIMEOUT_S,
        )

    def _is_served(self, journal: str) -> bool:
        assignments = self.keyspace.assignments(journal)
        return bool(assignments) and is_consistent(assignments)

    async def _keyspace_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.keyspace.wait_for_update()

    def wait_for_index(
        self, journal: str, is_so: Callable[[list[pb.Fragment]], bool]
    ) -> list[pb.Fragment]:
        """Wait until the fragments of a journal are as wanted."""

        async def until() -> None:
            while not is_so(self.fragments(journal)):
                await self.index(journal)._change()

        try:
            run(until(), TIMEOUT_S)
        except TimeoutError as error:
            raise AssertionError(f"{journal} has {self.fragments(journal)}") from error
        return self.fragments(journal)

    def wait_until_stored(self, journal: str, count: int) -> list[Path]:
        """Wait until so many fragments of a journal are in a store, and are known to be.

        Returns:
            Their files below :attr:`root`, in order, for stores which rewrite no paths.
        """
        stored = self.wait_for_index(
            journal, lambda found: sum(f.mod_time != 0 for f in found) == count
        )
        return [self.file_of(f) for f in stored if f.mod_time]

    def wait_for_refresh(self, journal: str) -> None:
        """Wait for the next listing of a journal's stores."""
        run(self.index(journal)._change(), TIMEOUT_S)

    def file_of(self, fragment: pb.Fragment) -> Path:
        """The file of a stored fragment."""
        return self.root / content_path(fragment)


def spec_of(journal: str, **fields: Any) -> pb.JournalSpec:
    """A spec as those of the recordings are: SNAPPY, 1 MiB, refreshed each second, no store."""
    spec = pb.JournalSpec(name=journal, replication=1)
    fragment = {"length": 1 << 20, "compression_codec": pb.SNAPPY} | fields.pop("fragment", {})
    spec.fragment.MergeFrom(pb.JournalSpec.Fragment(**fragment))
    spec.fragment.refresh_interval.CopyFrom(from_ns(1_000_000_000))
    spec.MergeFrom(pb.JournalSpec(**fields))
    return spec


def hand_made_member(endpoint: str) -> dict[str, bytes]:
    """Return the key and the value of the recordings' hand-made member."""
    process = pb.ProcessSpec(
        id=pb.ProcessSpec.ID(zone="zone-f", suffix="fake-1"), endpoint=endpoint
    )
    spec = pb.BrokerSpec(process_spec=process, journal_limit=100)
    return {"/members/zone-f#fake-1": spec.SerializeToString()}


@contextlib.contextmanager
def etcd_of(directory: Path) -> Iterator[EtcdServer]:
    """An empty Etcd."""
    etcd = EtcdServer(directory / "etcd", sync_writes=False)
    run(etcd.start(), 2 * TIMEOUT_S)
    try:
        yield etcd
    finally:
        run(etcd.stop(), 2 * TIMEOUT_S)


async def connected(etcd: EtcdServer) -> Etcd:
    """A client of that Etcd, on the SDK's loop."""
    return await Etcd.connect(etcd.endpoint)


@contextlib.contextmanager
def running(
    directory: Path, etcd: EtcdServer | None = None, **changes: Any
) -> Iterator[GoldenBroker]:
    """A broker as recorded: ``zone-a``, ``broker-1``, with a file root.

    Args:
        directory: of all its files.
        etcd: its Etcd; an empty one of its own by default.
        changes: of its configuration.
    """
    with contextlib.ExitStack() as stack:
        server = etcd or stack.enter_context(etcd_of(directory))
        root = directory / "fragments"
        root.mkdir(exist_ok=True)

        def configure(endpoint: str) -> BrokerConfig:
            fields: dict[str, Any] = {
                "zone": "zone-a",
                "suffix": "broker-1",
                "endpoint": endpoint,
                "spool_dir": directory / "spools",
                "etcd": EtcdConfig(endpoint=server.endpoint),
                "file_root": root,
            }
            return BrokerConfig(**(fields | changes))

        async def start() -> ServedBroker:
            served = ServedBroker(Server(host="127.0.0.1"), configure)
            try:
                await served.start()
            except BaseException:
                await served.stop(grace_s=0.0)
                raise
            return served

        served = run(start(), 2 * TIMEOUT_S)
        stack.callback(lambda: run(served.stop(grace_s=0.2), 2 * TIMEOUT_S))
        client = RawClient(served.endpoint)
        stack.callback(client.close)
        yield GoldenBroker(served, server, root, client)
